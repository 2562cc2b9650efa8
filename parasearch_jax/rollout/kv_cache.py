"""The KV cache of the sampler: the only place that knows its layout.

Axes: L layers, S slots, C cells of a slot, K kv-heads, H head dim, R rows of a call, T new tokens, W cells read.

Left-aligned per slot: the key of token t lies in cell t. There are no holes, so roll-back is a shorter length,
documents are appended like prompts, and what lies right of the length is garbage that nothing reads. One array per
layer: a stacked cache would be copied at every step of a loop. Heads stand in front of cells, so that the cells of a
head are one matrix, as products want it. On a mesh slots lie over 'fsdp' and heads over 'tp' (rules.CACHE); the
functions here see the slots of one shard.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from parasearch_jax.models.attention import cached_attention, causal_attention
from parasearch_jax.models.decoder import DecoderConfig
from parasearch_jax.sharding import rules

Cache = dict[str, tuple[jax.Array, ...]]  # {"k", "v"}: L arrays [S,K,C,H]
_SHARD = rules.gathered(rules.CACHE)


def init_cache(cfg: DecoderConfig, slots: int, cells: int) -> Cache:
    """Zeros, not uninitialised memory: garbage may be any number but costs less to reason about when it is 0."""
    shape = (slots, cfg.num_kv_heads, cells, cfg.head_dim)
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
