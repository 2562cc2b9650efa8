"""The one table of what is split over which axis of the mesh, for trainer, optimizer, critic, sampler and cache.

Axes: L layers, D model, N heads, K kv-heads, H head dim, F ffn, V vocab, S slots, C cells of a slot.

    trainer, moments    the spec of RULES
    where it is used    without 'fsdp' (`gathered`): every device of a column computes with whole matrices
    sampler             the same, and without the axis of layers (layout.py unstacks them)
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from parasearch_jax.errors import UserError
from parasearch_jax.sharding.mesh import AXES

# Pattern of the end of a path -> spec; the first that matches holds. "opt/1/0/mu/layers/attn/q" ends as its parameter.
RULES = (
    (r"embed|head", P("tp", "fsdp")),  # [V,D]
    (r"layers/attn/[qkv]", P(None, "fsdp", "tp", None)),  # [L,D,N|K,H]
    (r"layers/attn/[qkv]_bias", P(None, "tp", None)),  # [L,N|K,H]
    (r"layers/attn/o", P(None, "tp", None, "fsdp")),  # [L,N,H,D]
    (r"layers/mlp/(gate|up)", P(None, "fsdp", "tp")),  # [L,D,F]
    (r"layers/mlp/down", P(None, "tp", "fsdp")),  # [L,F,D]
    (r"(\w+_)?norm/scale", P()),
    (r"value/(kernel|bias)", P()),  # the critic's head
    (r"count|step|skipped", P()),
)
ROWS = P("fsdp")  # the first axis of batches, slots and what belongs to them
CACHE = P("fsdp", "tp", None, None)  # a layer's keys or values [S,K,C,H]
_LAYER = re.compile(r"layers/\d+/")  # the sampler's layers are a tuple


def spec_of(path: str, rules=RULES) -> P:
    """The trainer's spec of the leaf at `path` ("layers/attn/q"); UserError if no rule matches."""
    for pattern, spec in rules:
        if re.search(rf"(^|/)({pattern})$", path):
            return spec
    raise UserError(f"no rule says how the parameter {path!r} is split over the mesh: add one to sharding/rules.py")


def sampler_spec_of(path: str) -> P:
    """The sampler's spec of the leaf at `path` ("layers/3/attn/q")."""
    spec = gathered(spec_of(_LAYER.sub("layers/", path)))
    return P(*spec[1:]) if _LAYER.search(path) and len(spec) else spec


def gathered(spec: P) -> P:
    """`spec` without 'fsdp': where a parameter is used."""
    return P(*(None if axis == "fsdp" else axis for axis in spec))


def shardings(shapes: Any, mesh: Mesh, spec_of=spec_of) -> Any:
    """NamedShardings for a tree of arrays or ShapeDtypeStructs, by path: parameters, or a whole training state.

    Raises UserError naming a parameter without a rule, and a dimension that the mesh doesn't divide.
    """
    if mesh.axis_names != AXES:
        raise UserError(f"the mesh has the axes {mesh.axis_names}; make one with sharding.mesh.make_mesh")

    def one(path, leaf):
        name = _name(path)
        spec = spec_of(name)
        _check_divides(name, leaf.shape, spec, mesh)
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(one, shapes)


def placed(shapes: Any, mesh: Mesh) -> Any:
    """The tree as ShapeDtypeStructs with their `shardings`: for lowering, and for what restores into them."""
    return with_shardings(shapes, shardings(shapes, mesh))


def with_shardings(shapes: Any, places: Any) -> Any:
    """The tree as ShapeDtypeStructs that lie as the tree `places` says."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, places)


def sampler_shardings(shapes: Any, mesh: Mesh) -> Any:
    """`shardings` for the sampler's layout."""
    return shardings(shapes, mesh, sampler_spec_of)


def _check_divides(name: str, shape: tuple[int, ...], spec: P, mesh: Mesh) -> None:
    for size, axis in zip(shape, spec, strict=False):
        if axis is not None and size % mesh.shape[axis]:
            fitting = ", ".join(str(n) for n in range(1, mesh.size + 1) if size % n == 0)
            raise UserError(
                f"mesh.{axis} is {mesh.shape[axis]}, which does not divide {size}, an axis of {name} {list(shape)}: "
                f"give a mesh.{axis} that does ({fitting})"
            )


# --------------------------------------------------------------------------------------------- inside a jitted function
#
# These speak of the mesh of `jax.set_mesh`; without one, as in a notebook, they do nothing.


def constrain(x: jax.Array, spec: P) -> jax.Array:
    """x, laid out by `spec`; as it is where no axis is the compiler's to split, inside a shard_map over all of them."""
    if not jax.sharding.get_abstract_mesh().auto_axes:
        return x
    return jax.lax.with_sharding_constraint(x, spec)


def rows(x: jax.Array) -> jax.Array:
    """x [B, ...] with its rows over 'fsdp' and the rest whole."""
    return constrain(x, ROWS)


def constrain_tree(tree: Any) -> Any:
    """Parameters, gradients or moments, laid out where the rules say that they lie."""
    if jax.sharding.get_abstract_mesh().empty:
        return tree
    return jax.tree_util.tree_map_with_path(lambda path, x: constrain(x, spec_of(_name(path))), tree)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather(x: jax.Array, spec: P) -> jax.Array:
    """A parameter laid out by `spec`, gathered over 'fsdp' for its use. Its gradient goes back to where it lies: the
    transpose of a plain constraint would sum the whole gradient on every device."""
    return constrain(constrain(x, spec), gathered(spec))  # both, else the compiler gathers what a cast in front reads


gather.defvjp(lambda x, spec: (gather(x, spec), None), lambda spec, _, grad: (constrain(grad, spec),))


def gather_tree(params: Any, prefix: str = "", drop: int = 0) -> Any:
    """Every leaf of a tree of parameters gathered.

    `prefix` stands before the paths, and the first `drop` axes of the specs are left out: a layer inside a scan is
    `gather_tree(layer, "layers/", drop=1)`.
    """
    if jax.sharding.get_abstract_mesh().shape.get("fsdp", 1) == 1:  # else the backward pass would keep copies
        return params
    spec = lambda path: P(*spec_of(prefix + _name(path))[drop:])  # noqa: E731
    return jax.tree_util.tree_map_with_path(lambda path, x: gather(x, spec(path)), params)


def by_rows(function: Callable, path: str) -> Callable:
    """`function(parameter, *arrays)` of the parameter at `path` and arrays [B, ...], run by every device on its own
    rows with the parameter gathered over 'fsdp'; its results are [B, ...] too. What 'tp' splits stays split: the
    function has to sum over it. The parameter travels once before the call, and its gradient once behind it."""
    if jax.sharding.get_abstract_mesh().empty:
        return function
    spec = spec_of(path)

    def run(parameter, *arrays):
        if jax.sharding.get_abstract_mesh().shape["fsdp"] > 1:  # with one device XLA would still transpose it and back
            parameter = jax.lax.all_gather(parameter, "fsdp", axis=tuple(spec).index("fsdp"), tiled=True)
        return function(parameter, *arrays)

    def mapped(parameter, *arrays):
        specs = (spec, *(ROWS for _ in arrays))
        return jax.shard_map(run, in_specs=specs, out_specs=ROWS, check_vma=False)(parameter, *arrays)

    return mapped


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def bytes_per_device(tree: Any) -> int:
    """Of arrays or ShapeDtypeStructs with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * jnp.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(tree)
    )
