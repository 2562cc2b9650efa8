"""Attention over a whole sequence (training) and over a cache (sampling).

Axes: B batch, R cache rows, T query, S cache cells, N query heads, K kv-heads, G query heads of one kv-head (N = K G,
query head n reads kv-head n // G: repeated, not tiled), H head dim.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite, so that a query which sees no cell gives a finite result instead of 0 / 0


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array, kind: str = "auto") -> jax.Array:
    """Every position attends to itself and to what stands left of it; softmax in fp32.

    Args: q [B,T,N,H], k and v [B,T,K,H]; kind "xla", "blocks", "cudnn" or "auto": cuDNN's flash attention on GPUs in
    half precision, which never holds the [T,T] scores, else XLA. "blocks" is slow and holds about as little as cuDNN:
    for plans, which compile for GPUs on a CPU. Returns [B,T,N,H] in q's dtype.
    Right-padded rows need no further mask: a valid query never sees the padding, which stands right of it.
    """
    if kind == "auto":
        kind = "cudnn" if jax.default_backend() == "gpu" and q.dtype in (jnp.bfloat16, jnp.float16) else "xla"
    if kind == "cudnn":
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    return (_causal_blocks if kind == "blocks" else _causal_xla)(q, k, v)


_FEW = 16  # queries of a block in `_causal_blocks`


def _causal_blocks(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Keeps q, k, v and the output, as cuDNN does, and the scores of one block of queries: fp32 [B,N,_FEW,T]."""
    positions = jnp.broadcast_to(jnp.arange(q.shape[1]), q.shape[:2])
    return _attend_many(q, k.swapaxes(1, 2), v.swapaxes(1, 2), positions, _FEW)


# --------------------------------------------------------------------------------------------------- XLA, by blocks
#
# Blocks of queries, each against the keys up to its own end: half the products of the full square, the scores of a
# block stay in the processor's cache, and none are kept for the backward pass, which makes them again from `lse`. The
# backward pass is written out since XLA on CPU spends as long on the derivative of the slices (sums of padded blocks)
# as on the products: 8 layers of shape S (benchmarks/train_step.py), forward and backward, take 1,980 ms this way and
# 2,370 ms with the blocks differentiated by JAX.
#
# Rows stand by (position, query head of the group): [B,K,T G,H], so that a block of positions is one slice.


def _block(T: int) -> int:
    return max(64, -(-T // 8))


def _rows(x: jax.Array, K: int) -> jax.Array:
    """[B,T,N,H] -> [B,K,T G,H]"""
    B, T, N, H = x.shape
    return x.reshape(B, T, K, N // K, H).transpose(0, 2, 1, 3, 4).reshape(B, K, -1, H)


def _unrows(x: jax.Array, T: int) -> jax.Array:
    """[B,K,T G,H] -> [B,T,N,H]"""
    B, K, _, H = x.shape
    return x.reshape(B, K, T, -1, H).transpose(0, 2, 1, 3, 4).reshape(B, T, -1, H)


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Matrix products over the last two axes, in fp32."""
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _scores(q: jax.Array, k: jax.Array, start: int, G: int) -> jax.Array:
    """fp32 [B,K,t G,s] of the rows q [B,K,t G,H] of positions start, start + 1, ... with the keys k [B,K,s,H]."""
    positions = start + jnp.arange(q.shape[2]) // G
    return jnp.where(jnp.arange(k.shape[2]) <= positions[:, None], product(q, k.swapaxes(-1, -2)), MASKED)


@jax.custom_vjp
def _causal_xla(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return _causal_forward(q, k, v)[0]


def _causal_forward(q: jax.Array, k: jax.Array, v: jax.Array):
    """The output [B,T,N,H], and what the backward pass needs: with `lse` fp32 [B,K,T G,1], the log of the sum."""
    T, K, G = q.shape[1], k.shape[2], q.shape[2] // k.shape[2]
    q_rows, k_rows, v_rows = _rows(q * q.shape[-1] ** -0.5, K), k.swapaxes(1, 2), v.swapaxes(1, 2)
    outs, lses = [], []
    for start in range(0, T, _block(T)):
        end = min(start + _block(T), T)
        scores = _scores(q_rows[:, :, start * G : end * G], k_rows[:, :, :end], start, G)
        top = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        outs.append(product(weights.astype(v.dtype), v_rows[:, :, :end]) / total)
        lses.append(top + jnp.log(total))
    out = _unrows(jnp.concatenate(outs, axis=2).astype(q.dtype), T)
    return out, (q, k, v, out, jnp.concatenate(lses, axis=2))


def _causal_backward(saved, d_out: jax.Array):
    """dS = P (dP - sum(dO O)), block by block; the gradients of keys and values grow in place."""
    q, k, v, out, lse = saved
    T, K, G, scale = q.shape[1], k.shape[2], q.shape[2] // k.shape[2], q.shape[-1] ** -0.5
    q_rows, k_rows, v_rows = _rows(q * scale, K), k.swapaxes(1, 2), v.swapaxes(1, 2)
    d_rows = _rows(d_out, K)
    along = _rows((d_out.astype(jnp.float32) * out).sum(-1, keepdims=True), K)
    dk = dv = jnp.zeros(k_rows.shape, jnp.float32)
    dq = []
    for start in range(0, T, _block(T)):
        end = min(start + _block(T), T)
        here = slice(start * G, end * G)
        keys, values = k_rows[:, :, :end], v_rows[:, :, :end]
        weights = jnp.exp(_scores(q_rows[:, :, here], keys, start, G) - lse[:, :, here])
        d_scores = weights * (product(d_rows[:, :, here], values.swapaxes(-1, -2)) - along[:, :, here])
        d_scores = d_scores.astype(q.dtype)
        dq.append(product(d_scores, keys))
        dk = _added(dk, product(d_scores.swapaxes(-1, -2), q_rows[:, :, here]))
        dv = _added(dv, product(weights.astype(v.dtype).swapaxes(-1, -2), d_rows[:, :, here]))
    dq = _unrows(jnp.concatenate(dq, axis=2), T) * scale
    return dq.astype(q.dtype), dk.swapaxes(1, 2).astype(k.dtype), dv.swapaxes(1, 2).astype(v.dtype)


def _added(total: jax.Array, part: jax.Array) -> jax.Array:
    """total [B,K,T,H] with part [B,K,t,H] added to its first t positions."""
    return jax.lax.dynamic_update_slice(total, total[:, :, : part.shape[2]] + part, (0, 0, 0, 0))


_causal_xla.defvjp(_causal_forward, _causal_backward)


# ------------------------------------------------------------------------------------------------------ over a cache

# Queries of a block on a CPU: their scores stay in its cache. A layer of shape S (benchmarks/peers.py) with 512 tokens
# against 1,024 cells takes 7 ms on one core so, and 38 ms with all scores at one time, most of it for new pages.
_FED = 32


def cached_attention(q: jax.Array, k: jax.Array, v: jax.Array, q_positions: jax.Array, kind: str = "auto") -> jax.Array:
    """A query at position p attends to the cells 0..p of its row; softmax in fp32.

    Args: q [R,T,N,H]; k, v [R,K,S,H] (the cache, the new cells already written); q_positions int32 [R,T]; `kind` as in
    `causal_attention`: "blocks", as GPUs do it. Returns [R,T,N,H] in q's dtype.

    What the cells right of p hold does not matter, not even NaN. Give padding queries and idle rows position -1: they
    see nothing and their output, though meaningless, is finite. (A padding query placed at p would declare 0..p used.)
    `is_causal` of `jax.nn.dot_product_attention` is no help here: it aligns query 0 with cell 0.
    """
    # A weight of 0 does not silence a NaN (0 * NaN = NaN), so values of cells that nobody sees become 0.
    used = jnp.arange(k.shape[2]) <= q_positions.max(axis=1)[:, None]  # [R,S]
    v = jnp.where(used[:, None, :, None], v, 0)
    if q.shape[1] == 1:
        return _attend_one(q, k, v, used)
    cpu = jax.default_backend() == "cpu" and kind != "blocks"
    return _attend_many(q, k, v, q_positions, _FED if cpu else q.shape[1])


def _attend_many(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, block: int) -> jax.Array:
    """A scan over blocks of queries, each against all cells: the scores of one block exist, fp32 [R,K,block G,S]."""
    T, K, G = q.shape[1], k.shape[1], q.shape[2] // k.shape[1]
    blocks = lambda x: jnp.moveaxis(x.reshape(x.shape[0], -1, block, *x.shape[2:]), 1, 0)  # noqa: E731
    short = -T % block
    q = jnp.pad(q, ((0, 0), (0, short), (0, 0), (0, 0)))
    positions = jnp.pad(positions, ((0, 0), (0, short)), constant_values=-1)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(_, block):
        q, positions = block
        seen = jnp.arange(k.shape[2]) <= jnp.repeat(positions, G, axis=1)[:, None, :, None]
        scores = product(_rows(q, K), k.swapaxes(-1, -2)) * q.shape[-1] ** -0.5
        scores = jnp.where(seen, scores, MASKED)
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        out = product(weights.astype(v.dtype), v) / weights.sum(-1, keepdims=True)
        return None, _unrows(out, q.shape[1]).astype(q.dtype)

    _, out = jax.lax.scan(step, None, (blocks(q), blocks(positions)))
    return jnp.moveaxis(out, 0, 1).reshape(q.shape)[:, :T]


def _attend_one(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
    """T == 1 as multiply-and-reduce, which XLA on CPU shares out among its threads; a batched dot runs matrix by matrix
    on one, and gains nothing for it (32 rows of shape S, 384 cells, one core: a decode step of 29 ms against 30)."""
    R, _, N, H = q.shape
    q_grouped = q.reshape(R, k.shape[1], -1, 1, H).astype(jnp.float32)
    scores = (q_grouped * k[:, :, None]).sum(axis=-1) * H**-0.5  # [R,K,G,S]
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, MASKED), axis=-1)
    return (weights[..., None] * v[:, :, None]).sum(axis=3).reshape(R, 1, N, H).astype(q.dtype)
