"""Log-probs and entropies of given ids, without ever holding the logits of a whole batch.

Axes: B batch, T tokens, D model, V vocab.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from parasearch_jax.models import decoder
from parasearch_jax.sharding import rules


def token_logprobs(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    chunk: int,
    temperature: float = 1.0,
    entropy_grad: bool = False,
    vocab_used: int | None = None,
    mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """log p of `targets` and the entropy of the distribution they come from, both float32 [B, T].

    `hidden` [B, T, D] is the state that predicts `targets` int32 [B, T]; `head` [V, D]. Logits are divided by
    `temperature` for both results. Peak extra memory is B * chunk * V * 4 bytes, in the backward pass as well; `chunk`
    need not divide T. The entropy carries a gradient only with `entropy_grad`. `vocab_used`: see DecoderConfig.
    With `mask` [B, T] only its tokens are computed, in as many chunks as hold them; the others get 0.
    Inside a shard_map over 'tp' `head` is this device's part of the vocabulary.
    """
    if temperature <= 0:
        raise ValueError(f"temperature {temperature} in a log-prob: give the temperature (> 0) that the ids came from")
    B, T = targets.shape
    chunk = min(chunk, T)
    tokens = jnp.arange(B * T) if mask is None else jnp.flatnonzero(mask > 0, size=B * T, fill_value=B * T)
    chunks = jnp.pad(tokens, (0, -B * T % (B * chunk)), constant_values=B * T).reshape(-1, B, chunk)
    n = len(chunks) if mask is None else -(-(mask > 0).sum() // (B * chunk))

    def of_chunk(h, head, y):  # [B, chunk, D], [V, D], [B, chunk] -> two of [B, chunk]
        first = jax.lax.axis_index("tp") * head.shape[0] if _split() else 0  # row of V that `head` begins with
        # The head is cast here and not outside, so that its gradient is summed in the head's own precision.
        logits = decoder.project(h, head, vocab_used, first) / temperature
        logprob = _picked(logits, y - first) - _logsumexp(logits)
        return logprob, _entropy(logits if entropy_grad else jax.lax.stop_gradient(logits))

    out = _by_chunks(of_chunk, chunks, n, hidden.reshape(B * T, -1), head, targets.reshape(-1))
    logprobs, entropy = (x.reshape(B, T) for x in out)
    return logprobs, entropy


# A loop with its derivative, and not a scan with JAX's: that one can't end before its last chunk.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_chunks(of_chunk, chunks, n, hidden, head, targets) -> tuple[jax.Array, jax.Array]:
    """`of_chunk` for the tokens of the first n of `chunks` int32 [., B, chunk], which has their numbers in `hidden`
    [B T, D] and `targets` [B T], B T for none. Two arrays [B T]; 0 for the tokens of the other chunks."""

    def step(i, out):
        new = of_chunk(_take(hidden, chunks[i]), head, _take(targets, chunks[i]))
        return tuple(x.at[chunks[i]].set(y, mode="drop") for x, y in zip(out, new, strict=True))

    zeros = jnp.zeros(targets.shape, jnp.float32)
    return jax.lax.fori_loop(0, n, step, (zeros, zeros))


def _forward(of_chunk, *args):
    return _by_chunks(of_chunk, *args), args


def _backward(of_chunk, saved, d_out):
    """Makes the logits of a chunk again."""
    chunks, n, hidden, head, targets = saved

    def step(i, grads):
        of = lambda h, head: of_chunk(h, head, _take(targets, chunks[i]))  # noqa: E731
        d_h, d_head = jax.vjp(of, _take(hidden, chunks[i]), head)[1](tuple(_take(d, chunks[i]) for d in d_out))
        return grads[0].at[chunks[i]].set(d_h, mode="drop"), grads[1] + d_head

    d_hidden, d_head = jax.lax.fori_loop(0, n, step, (jnp.zeros_like(hidden), jnp.zeros_like(head)))
    return None, None, d_hidden, d_head, None


_by_chunks.defvjp(_forward, _backward)


def _take(x: jax.Array, numbers: jax.Array) -> jax.Array:
    return x.at[numbers].get(mode="fill", fill_value=0)


# Over the last axis of logits [..., V], of which 'tp' may hold a part each.


def _split() -> bool:
    """Whether this is traced inside a shard_map over 'tp', with more than one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return "tp" in mesh.manual_axes and mesh.shape["tp"] > 1


def _sum(x: jax.Array) -> jax.Array:
    return jax.lax.psum(x.sum(-1), "tp") if _split() else x.sum(-1)


def _logsumexp(logits: jax.Array) -> jax.Array:
    if not _split():
        return jax.nn.logsumexp(logits, -1)
    top = jax.lax.pmax(jax.lax.stop_gradient(logits.max(-1)), "tp")
    return top + jnp.log(_sum(jnp.exp(logits - top[..., None])))


def _picked(logits: jax.Array, index: jax.Array) -> jax.Array:
    """logits[..., index]; an index outside of this device's part is another's."""
    # A gather: on two CPU cores a masked sum over V costs a third more, forward and backward (1.60 s against 1.17).
    own = (index >= 0) & (index < logits.shape[-1])
    picked = jnp.take_along_axis(logits, jnp.where(own, index, 0)[..., None], -1)
    return _sum(jnp.where(own[..., None], picked, 0.0))


def _entropy(logits: jax.Array) -> jax.Array:
    lse = _logsumexp(logits)
    return lse - _sum(jnp.exp(logits - lse[..., None]) * logits)


def sequence_logprobs(
    params,
    cfg: decoder.DecoderConfig,
    ids: jax.Array,
    positions: jax.Array,
    temperature: float,
    chunk: int,
    remat: str = "none",
    entropy_grad: bool = False,
    mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """log p(ids[b, t] | ids[b, :t]) and the entropy of that distribution, float32 [B, T]; both 0 at t = 0.

    `ids` and `positions` int32 [B, T]. With `mask` [B, T] only its tokens are computed, and both are 0 elsewhere;
    without it values at padding are meaningless and masked by the caller.
    """
    hidden = decoder.forward(params, cfg, ids, positions, remat=remat)
    # The state at t predicts token t + 1. Rolling keeps T, and thus the chunks, whole; the last column is thrown away.
    targets = jnp.roll(ids, -1, axis=1)

    wanted = jnp.ones(ids.shape) if mask is None else mask
    wanted = jnp.pad(wanted[:, 1:], [(0, 0), (0, 1)])

    # Each device goes through the chunks of its own rows; the head [V, D] travels once before, its gradient once
    # behind. Left to the compiler, the devices would sum the whole gradient in every chunk.
    def run(head, hidden, targets, wanted):
        args = chunk, temperature, entropy_grad, cfg.vocab_used
        return token_logprobs(hidden, head, targets, *args, None if mask is None else wanted)

    out = rules.by_rows(run, "head")(decoder.head(params, cfg), hidden, targets, wanted)
    logprobs, entropy = (jnp.pad(x[:, :-1], [(0, 0), (1, 0)]) for x in out)
    return logprobs, entropy
