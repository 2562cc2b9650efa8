"""Which rows of a batch go through the model together: micro-batches of one token budget, long rows apart from short.

Axes: B batch (rows), T tokens of the batch; R rows and t <= T tokens of a micro-batch.

The arrays of a batch are [B, T] with one T for all steps; what is small (rewards, masks, log-probs, advantages) is
computed on them whole. Only the model sees micro-batches, and each length t of them is one program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parasearch_jax.sharding import rules


class Micro(NamedTuple):
    """A micro-batch: the first `tokens` columns of rows [R] int32; a row of B or more is padding."""

    tokens: int
    rows: np.ndarray | jax.Array


class Portion(NamedTuple):
    """The rows of one optimizer step: members float32 [B], 1 for its rows, and how they are cut."""

    members: np.ndarray | jax.Array
    micros: list[Micro]


def micro_batches(
    lengths: np.ndarray, rows: np.ndarray, buckets: Sequence[int], micro_rows: int, multiple: int = 1
) -> list[Micro]:
    """The rows [n], longest first, in micro-batches; each has the smallest bucket that holds its longest row.

    `lengths` [B], of all rows; rows of length 0 are left out. A micro-batch of the largest bucket has `micro_rows`
    rows, one of another as many more as the token budget allows, always a multiple of `multiple`, filled up with
    padding.
    """
    order = sorted((row for row in rows.tolist() if lengths[row]), key=lambda row: -lengths[row])
    out = []
    while order:
        tokens = min(bucket for bucket in buckets if bucket >= lengths[order[0]])
        count = micro_rows * max(buckets) // tokens // multiple * multiple
        taken, order = order[:count], order[count:]
        out.append(Micro(tokens, np.array(taken + [len(lengths)] * (count - len(taken)), np.int32)))
    return out


def portions(lengths: np.ndarray, updates: int, *args) -> list[Portion]:
    """The batch in `updates` shares of rows, each cut by `micro_batches(lengths, rows, *args)`. Rows lie by question,
    so that few groups lie in two shares."""
    out = []
    for rows in np.array_split(np.flatnonzero(lengths), updates):
        members = np.zeros(len(lengths), np.float32)
        members[rows] = 1
        out.append(Portion(members, micro_batches(lengths, rows, *args)))
    return out


def put(tree: Any, mesh: jax.sharding.Mesh | None) -> Any:
    """The arrays of portions on the devices, whole on each."""
    sharding = None if mesh is None else NamedSharding(mesh, P())

    def leaf(x):
        if isinstance(x, int):
            return x
        return jax.device_put(x) if mesh is None else jax.make_array_from_callback(x.shape, sharding, x.__getitem__)

    return jax.tree.map(leaf, tree)


# ------------------------------------------------------------------------------------------- inside a jitted function


def take(tree: Any, rows: jax.Array, tokens: int) -> Any:
    """The micro-batch of arrays [B, T] and [B], as [R, t] and [R]; 0 in padding rows. Scalars stay."""

    def leaf(x):
        if not x.ndim:
            return x
        x = x[:, :tokens] if x.ndim > 1 else x
        return rules.rows(x.at[rows].get(mode="fill", fill_value=0))

    return jax.tree.map(leaf, tree)


def place(whole: Any, micro: Any, rows: jax.Array, tokens: int) -> Any:
    """Arrays [B, T] with those of a micro-batch [R, t] in their place."""

    def leaf(x, new):
        return rules.rows(x.at[rows, :tokens].set(new, mode="drop"))

    return jax.tree.map(leaf, whole, micro)
