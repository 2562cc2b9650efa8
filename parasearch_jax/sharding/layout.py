"""From the trainer's parameter layout (layers stacked on axis L) to the sampler's (a tuple of layers), and back.

Axes: L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

Params = dict[str, Any]


def to_sampler(params: Params, dtype: str | None = None) -> Params:
    """Unstacks the layers and casts to `dtype` (None: as they are). Pure; jit it with `dtype` static."""
    params = cast(params, dtype)
    depth = jax.tree.leaves(params["layers"])[0].shape[0]
    return {**params, "layers": tuple(jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(depth))}


def cast(params: Params, dtype: str | None) -> Params:
    """Matrices and biases in the compute dtype, as trainer, sampler and reference multiply by them; None: as they are.

    Norm scales stay fp32: the trainer multiplies by the fp32 master, and a rounded scale would open a gap between the
    sampler's log-probs and the trainer's.
    """

    def one(path, x):
        return x if dtype is None or path[-1].key == "scale" else x.astype(dtype)

    return jax.tree_util.tree_map_with_path(one, params)


def stack_layers(layers: Sequence[Params]) -> Params:
    """L dicts of arrays [...] -> one dict of arrays [L, ...], the inverse of what `to_sampler` does to "layers"."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def place(tree: Any, shardings: Any) -> Any:
    """The tree laid out by a tree of NamedShardings. Arrays that lie so already are handed on, under whatever name."""

    def one(x, sharding):
        here = isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim)
        return x if here else jax.device_put(x, sharding)

    return jax.tree.map(one, tree, shardings)


def local_part(tree: Any, mesh: Mesh) -> Any:
    """Arrays on the mesh of all hosts as arrays on `mesh`, this host's rows of it; for what is replicated over 'fsdp',
    so that every host has it whole. Nothing is copied."""

    def one(x):
        shards = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, NamedSharding(mesh, x.sharding.spec), shards)

    return jax.tree.map(one, tree)
