"""Log-probs and entropies of given ids, without ever holding the logits of a whole batch.

Axes: B batch, T tokens, D model, V vocab.
"""

from __future__ import annotations

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
) -> tuple[jax.Array, jax.Array]:
    """log p of `targets` and the entropy of the distribution they come from, both float32 [B, T].

    `hidden` [B, T, D] is the state that predicts `targets` int32 [B, T]; `head` [V, D]. Logits are divided by
    `temperature` for both results. Peak extra memory is B * chunk * V * 4 bytes, in the backward pass as well; `chunk`
    need not divide T. The entropy carries a gradient only with `entropy_grad`. `vocab_used`: see DecoderConfig.
    Inside a shard_map over 'tp' `head` is this device's part of the vocabulary.
    """
    if temperature <= 0:
        raise ValueError(f"temperature {temperature} in a log-prob: give the temperature (> 0) that the ids came from")
    B, T = targets.shape
    chunk = min(chunk, T)
    first = jax.lax.axis_index("tp") * head.shape[0] if _split() else 0  # row of V that `head` begins with

    def split(x):  # [B, T, ...] -> [T / chunk, B, chunk, ...]; T is cut, never B, which may be sharded
        x = jnp.pad(x, [(0, 0), (0, -T % chunk)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(B, -1, chunk, *x.shape[2:]), 1, 0)

    def body(_, xs):
        h, y = xs
        # The head is cast here and not outside, so that the scan sums its gradient in the head's own precision.
        logits = decoder.project(h, head, vocab_used, first) / temperature
        logprob = _picked(logits, y - first) - _logsumexp(logits)
        return None, (logprob, _entropy(logits if entropy_grad else jax.lax.stop_gradient(logits)))

    # prevent_cse: only needed outside a scan, where it costs speed.
    _, out = jax.lax.scan(jax.checkpoint(body, prevent_cse=False), None, (split(hidden), split(targets)))
    logprobs, entropy = (jnp.moveaxis(x, 0, 1).reshape(B, -1)[:, :T] for x in out)
    return logprobs, entropy


# Over the last axis of logits [..., V], of which 'tp' may hold a part each.


def _split() -> bool:
    """Whether this is traced inside a shard_map over 'tp'."""
    return "tp" in jax.sharding.get_abstract_mesh().manual_axes


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
) -> tuple[jax.Array, jax.Array]:
    """log p(ids[b, t] | ids[b, :t]) and the entropy of that distribution, float32 [B, T]; both 0 at t = 0.

    `ids` and `positions` int32 [B, T]. Values at padding are meaningless and masked by the caller.
    """
    hidden = decoder.forward(params, cfg, ids, positions, remat=remat)
    # The state at t predicts token t + 1. Rolling keeps T, and thus the chunks, whole; the last column is thrown away.
    targets = jnp.roll(ids, -1, axis=1)

    # Each device scans over the chunks of its own rows; the head [V, D] travels once before, its gradient once behind.
    # Left to the compiler, the devices would sum the whole gradient in every chunk.
    def run(head, hidden, targets):
        return token_logprobs(hidden, head, targets, chunk, temperature, entropy_grad, cfg.vocab_used)

    out = rules.by_rows(run, "head")(decoder.head(params, cfg), hidden, targets)
    logprobs, entropy = (jnp.pad(x[:, :-1], [(0, 0), (1, 0)]) for x in out)
    return logprobs, entropy
