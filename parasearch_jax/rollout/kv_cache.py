"""The KV cache of the sampler: the only place that knows its layout.

Axes: L layers, S slots, C cells of a slot, K kv-heads, H head dim, R rows of a call, T new tokens, W cells read.

Left-aligned per slot: the key of token t lies in cell t. There are no holes, so roll-back is a shorter length,
documents are appended like prompts, and what lies right of the length is garbage that nothing reads. One array per
layer: a stacked cache would be copied at every step of a loop. Heads stand in front of cells, so that the cells of a
head are one matrix, as products want it. On a mesh slots lie over 'fsdp' and heads over 'tp' (rules.CACHE); the
functions here see the slots of one shard.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from parasearch_jax.models.attention import MASKED, cached_attention, causal_attention, product
from parasearch_jax.models.decoder import DecoderConfig
from parasearch_jax.sharding import rules

Cache = dict[str, tuple[jax.Array, ...]]  # {"k", "v"}: L arrays [S,K,C,H]
_SHARD = rules.gathered(rules.CACHE)
PAGE = 64  # cells


def init_cache(cfg: DecoderConfig, slots: int, cells: int) -> Cache:
    """At least so many cells of each slot: whole pages. Zeros, not uninitialised memory: garbage may be any number but
    costs less to reason about when it is 0."""
    shape = (slots, cfg.num_kv_heads, -(-cells // PAGE) * PAGE, cfg.head_dim)
    layer = lambda: tuple(jnp.zeros(shape, cfg.dtype) for _ in range(cfg.num_layers))  # noqa: E731
    return {"k": layer(), "v": layer()}


def write(cells: jax.Array, rows: jax.Array, positions: jax.Array, new: jax.Array) -> jax.Array:
    """cells [S,K,C,H] with new [R,T,K,H] at (rows[r], positions[r,t]); a position of -1 or beyond C is dropped."""
    positions = jnp.where(positions < 0, cells.shape[2], positions)
    return cells.at[rows[:, None], :, positions].set(new.astype(cells.dtype), mode="drop")


def copy(cache: Cache, source: jax.Array, target: jax.Array, n: int) -> Cache:
    """The first n cells of slots source [R] in slots target [R] too; a target of S or more is dropped."""

    def layer(cells: jax.Array) -> jax.Array:
        return rules.constrain(cells.at[target, :, :n].set(cells[source, :, :n], mode="drop"), _SHARD)

    return {name: tuple(map(layer, layers)) for name, layers in cache.items()}


class Attend:
    """The attention of one forward pass through the cache, as `decoder.forward_layers` calls it.

    rows int32 [R] are the slots (S or more: nothing is written), positions int32 [R,T] where the new tokens stand (-1:
    padding). After the pass `cache` holds the new keys and values. `window` cells of each slot are read; 0 for slots
    that are new: the tokens then see each other only, by the attention of training (`kind`: see attention.py).
    """

    def __init__(self, cache: Cache, rows: jax.Array | None, positions: jax.Array, window: int, kind: str = "auto"):
        self.cache, self.rows, self.positions, self.window, self.kind = dict(cache), rows, positions, window, kind

    def __call__(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        slots = self.cache["k"][layer].shape[0]
        rows = jnp.arange(slots) if self.rows is None else self.rows
        read = {}
        for name, new in (("k", k), ("v", v)):
            layers = list(self.cache[name])
            # Said once more: what comes out must lie as it went in, or the next call would move the whole cache.
            layers[layer] = rules.constrain(write(layers[layer], rows, self.positions, new), _SHARD)
            self.cache[name] = tuple(layers)
            if not self.window:
                continue
            cells = layers[layer][:, :, : self.window]
            read[name] = cells if self.rows is None else cells.at[rows].get(mode="fill", fill_value=0)
        if not self.window:
            return causal_attention(q, k, v, self.kind)
        return cached_attention(q, read["k"], read["v"], self.positions, self.kind)


# -------------------------------------------------------------------------------------------------- a chunk, in pages
#
# Axes: P pages, N steps of the chunk, G query heads of a kv-head.
#
# Slots differ in length by a factor of ten, and a decode step reads all that they hold. So on a CPU a chunk begins by
# laying out what its slots hold, page by page, each slot behind the other: its steps then read these cells and no
# others, as whole matrices that stand as products want them. What the chunk adds is kept apart, at one place for all
# slots, as each goes on by one token a step. A step of 32 slots of shape S (benchmarks/peers.py) with 1,050 cells on
# average and 2,400 at most takes 33 ms so, and 58 ms with `Attend` and one window for all.


def paged(cfg: DecoderConfig) -> bool:
    """Whether chunks are decoded in pages. GPUs, and plans for them, read windows: there `at[].add` has no fixed order,
    and the pages would be a second cache."""
    return jax.default_backend() == "cpu" and cfg.attention != "blocks"


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["k", "v", "slot", "filled", "new_k", "new_v"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Pages:
    """What the slots held when a chunk began, and what it has added; lists of L arrays."""

    k: list[jax.Array]  # [P,K,H,PAGE]
    v: list[jax.Array]  # [P,K,PAGE,H]
    slot: jax.Array  # int32 [P]; whose page it is; S: nobody's
    filled: jax.Array  # bool [P,PAGE]
    new_k: list[jax.Array]  # [S,K,H,N]
    new_v: list[jax.Array]  # [S,K,N,H]


def open_pages(cache: Cache, length: jax.Array, count: int, steps: int) -> Pages:
    """The first `length` [S] cells of each slot in `count` pages, at least the sum of ceil(length / PAGE)."""
    S, K, _, H = cache["k"][0].shape
    ends = jnp.cumsum(-(-length // PAGE))
    page = jnp.arange(count, dtype=jnp.int32)
    slot = jnp.searchsorted(ends, page, side="right", method="compare_all").astype(jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, ends.dtype), ends])
    first = (page - starts[slot]) * PAGE  # cell of the slot
    left = jnp.where(slot < S, length[slot] - first, 0)
    filled = jnp.arange(PAGE) < left[:, None]

    def cut(cells: jax.Array) -> jax.Array:
        one = lambda slot, first: jax.lax.dynamic_slice(cells, (slot, 0, first, 0), (1, K, PAGE, H))[0]  # noqa: E731
        return _split(jnp.where(filled[:, None, :, None], jax.vmap(one)(slot, first), 0))

    blank = _split(jnp.zeros((S, K, steps, H), cache["k"][0].dtype))
    k, v = [cut(cells).swapaxes(2, 3) for cells in cache["k"]], [cut(cells) for cells in cache["v"]]
    return Pages(k, v, slot, filled, [blank.swapaxes(2, 3)] * len(k), [blank] * len(v))


def close_pages(cache: Cache, pages: Pages, before: jax.Array, after: jax.Array) -> Cache:
    """The cache with what the chunk has added to slots of length `before` [S]: their cells up to `after` [S]."""
    rows, cells = jnp.arange(before.shape[0]), before[:, None] + jnp.arange(pages.new_v[0].shape[2])
    cells = jnp.where(cells < after[:, None], cells, -1)

    def put(layers: tuple[jax.Array, ...], new: list[jax.Array]) -> tuple[jax.Array, ...]:
        return tuple(_split(write(old, rows, cells, x.swapaxes(1, 2))) for old, x in zip(layers, new, strict=True))

    return {"k": put(cache["k"], [x.swapaxes(2, 3) for x in pages.new_k]), "v": put(cache["v"], pages.new_v)}


def _split(x: jax.Array) -> jax.Array:
    return rules.constrain(x, _SHARD)


class AttendPages:
    """The attention of a chunk's decode step number `step` (int32), as `decoder.forward_layers` calls it: the new token
    of each slot sees its pages, what the chunk has added, and itself. After the pass `cache` holds its key and value.
    """

    def __init__(self, pages: Pages, step: jax.Array):
        self.cache = dataclasses.replace(pages, new_k=list(pages.new_k), new_v=list(pages.new_v))
        self.step = step

    def __call__(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        pages, slot, (S, _, N, H), K = self.cache, self.cache.slot, q.shape, k.shape[2]
        keys = jax.lax.dynamic_update_slice(pages.new_k[layer], k[:, 0, :, :, None], (0, 0, 0, self.step))
        values = jax.lax.dynamic_update_slice(pages.new_v[layer], v[:, 0, :, None], (0, 0, self.step, 0))
        pages.new_k[layer], pages.new_v[layer] = keys, values

        q = (q * H**-0.5).reshape(S, K, N // K, H)
        held = jnp.where(pages.filled[:, None, None], product(q[slot], pages.k[layer]), MASKED)  # [P,K,G,PAGE]
        added = jnp.where(jnp.arange(keys.shape[3]) <= self.step, product(q, keys), MASKED)  # [S,K,G,N]
        top = added.max(-1).at[slot].max(held.max(-1), mode="drop")[..., None]
        held, added = jnp.exp(held - top[slot]), jnp.exp(added - top)
        total = added.sum(-1, keepdims=True).at[slot].add(held.sum(-1, keepdims=True), mode="drop")
        out = product(added.astype(v.dtype), values)
        out = out.at[slot].add(product(held.astype(v.dtype), pages.v[layer]), mode="drop")
        return (out / total).reshape(S, 1, N, H).astype(v.dtype)
