"""Attention over a whole sequence (training) and over a cache (sampling).

Axes: B batch, R cache rows, T query, S cache cells, N query heads, K kv-heads, G query heads of one kv-head (N = K G,
query head n reads kv-head n // G: repeated, not tiled), H head dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_MASKED = -1e30  # finite, so that a query which sees no cell gives a finite result instead of 0 / 0


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Every position attends to itself and to what stands left of it; softmax in fp32.

    Args: q [B,T,N,H], k and v [B,T,K,H]. Returns [B,T,N,H] in q's dtype.
    Right-padded rows need no further mask: a valid query never sees the padding, which stands right of it.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    # One [G T, H] x [H, T] product for each row and kv-head. On two CPU cores forward and backward take a third of the
    # time that jax.nn.dot_product_attention's XLA path takes (B 36, T 136, N 4, K 2, H 32: 11.5 ms against 35 ms).
    q_rows = (q * H**-0.5).reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(B, K, -1, H)
    k_rows, v_rows = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)  # [B,K,H,T], [B,K,T,H]
    scores = jnp.matmul(q_rows, k_rows, preferred_element_type=jnp.float32)
    seen = jnp.tile(jnp.tril(jnp.ones((T, T), bool)), (N // K, 1))
    scores = jnp.where(seen, scores, _MASKED)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    out = jnp.matmul(weights.astype(v.dtype), v_rows, preferred_element_type=jnp.float32)
    out = (out / weights.sum(-1, keepdims=True)).astype(q.dtype)
    return out.reshape(B, K, N // K, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def cached_attention(q: jax.Array, k: jax.Array, v: jax.Array, q_positions: jax.Array) -> jax.Array:
    """A query at position p attends to the cells 0..p of its row; softmax in fp32.

    Args: q [R,T,N,H]; k, v [R,S,K,H] (the cache, the new cells already written); q_positions int32 [R,T].
    Returns [R,T,N,H] in q's dtype.

    What the cells right of p hold does not matter, not even NaN. Give padding queries and idle rows position -1: they
    see nothing and their output, though meaningless, is finite. (A padding query placed at p would declare 0..p used.)
    `is_causal` of `jax.nn.dot_product_attention` is no help here: it aligns query 0 with cell 0.
    """
    seen = jnp.arange(k.shape[1]) <= q_positions[..., None]  # [R,T,S]
    # A weight of 0 does not silence a NaN (0 * NaN = NaN), so values of cells that nobody sees become 0.
    v = jnp.where(seen.any(axis=1)[:, :, None, None], v, 0)
    attend = _attend_one if q.shape[1] == 1 else _attend_many
    return attend(q, k, v, seen)


def _attend_many(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
    R, T, N, H = q.shape
    q_grouped = q.reshape(R, T, k.shape[2], -1, H)
    scores = jnp.einsum("rtkgh,rskh->rkgts", q_grouped, k, preferred_element_type=jnp.float32) * H**-0.5
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, _MASKED), axis=-1).astype(v.dtype)
    return jnp.einsum("rkgts,rskh->rtkgh", weights, v).reshape(R, T, N, H)


def _attend_one(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
    """T == 1 as multiply-and-reduce: XLA fuses it into one pass over the cache, where a batched dot of G rows pays more
    for its set-up than for its arithmetic (two cores, R 128, S 192, N 4, K 2, H 32, in a scan with the cache update:
    0.70 ms a step against 0.96 for the dots and for jax.nn.dot_product_attention)."""
    R, _, N, H = q.shape
    q_grouped = q.reshape(R, 1, k.shape[2], -1, H).astype(jnp.float32)
    scores = (q_grouped * k[:, :, :, None]).sum(axis=-1) * H**-0.5  # [R,S,K,G]
    weights = jax.nn.softmax(jnp.where(seen[:, 0, :, None, None], scores, _MASKED), axis=1)
    return (weights[..., None] * v[:, :, :, None]).sum(axis=1).reshape(R, 1, N, H).astype(q.dtype)
