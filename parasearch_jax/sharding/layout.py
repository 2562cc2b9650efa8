"""From the trainer's parameter layout (layers stacked on axis L) to the sampler's (a tuple of layers), and back.

Axes: L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]


def to_sampler(params: Params, dtype: str | None = None) -> Params:
    """Unstacks the layers and casts to `dtype` (None: as they are). Pure; jit it with `dtype` static.

    Norm scales stay fp32: the trainer multiplies by the fp32 master, and a rounded scale would open a gap between the
    sampler's log-probs and the trainer's. Matrices are cast by the trainer too, at the same values, where it uses them.
    """
    params = jax.tree_util.tree_map_with_path(lambda path, x: _cast(path, x, dtype), params)
    depth = jax.tree.leaves(params["layers"])[0].shape[0]
    return {**params, "layers": tuple(jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(depth))}


def _cast(path: tuple, x: jax.Array, dtype: str | None) -> jax.Array:
    return x if dtype is None or path[-1].key == "scale" else x.astype(dtype)


def stack_layers(layers: Sequence[Params]) -> Params:
    """L dicts of arrays [...] -> one dict of arrays [L, ...], the inverse of what `to_sampler` does to "layers"."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
