"""PPO's critic: its own copy of the policy's backbone with a linear head that starts at zero.

Axes: B batch, T tokens, D model. Parameters: {"backbone": the decoder's without "head", "value": {"kernel": [D],
"bias": []}}.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from parasearch_jax.models import decoder
from parasearch_jax.models.decoder import DecoderConfig, Params
from parasearch_jax.rl.batch import Batch
from parasearch_jax.rl.losses import token_count, value_loss
from parasearch_jax.rl.update import UpdateConfig, accumulate, apply_gradients, join, split


def init_critic(params: Params) -> Params:
    """The critic of a policy with trainer parameters `params`; every value is 0 at first."""
    backbone = {name: leaf for name, leaf in params.items() if name != "head"}
    width = params["norm"]["scale"].shape[0]
    return {"backbone": backbone, "value": {"kernel": jnp.zeros(width), "bias": jnp.zeros(())}}


def values(params: Params, cfg: DecoderConfig, ids: jax.Array, positions: jax.Array, remat: str = "none") -> jax.Array:
    """float32 [B, T]; [b, t] is the value before token t is chosen, read from the state behind token t - 1; 0 at t = 0.

    `ids`, `positions` int32 [B, T]. Values at padding are meaningless and masked by the caller.
    """
    cfg = dataclasses.replace(cfg, tie_word_embeddings=True)  # there is no output matrix
    hidden = decoder.forward(params["backbone"], cfg, ids, positions, remat=remat).astype(jnp.float32)
    out = jnp.einsum("btd,d->bt", hidden, params["value"]["kernel"]) + params["value"]["bias"]
    return jnp.pad(out[:, :-1], [(0, 0), (1, 0)])


def make_values(cfg: DecoderConfig, ucfg: UpdateConfig) -> Callable:
    """Jitted `score(params, batch, mask) -> values`, float32 [B, T], 0 where `mask` [B, T] is 0."""

    @jax.jit
    @jax.named_scope("score")
    def score(params, batch: Batch, mask):
        def micro(data):
            batch, mask = data
            return jnp.where(mask > 0, values(params, cfg, batch.ids, batch.positions, ucfg.remat), 0.0)

        return join(jax.lax.map(micro, split((batch, mask), ucfg.micro_rows)))

    return score


def make_critic_update(
    cfg: DecoderConfig, ucfg: UpdateConfig, tx: optax.GradientTransformation, clip: float
) -> Callable:
    """Jitted `update(state, batch, mask, old_values, returns) -> (state, metrics)`; donates `state`.

    Arrays float32 [B, T]; `mask` says where the critic is trained. The step is `rl.update.make_update`'s: micro-batches
    under one denominator, refused when not finite. Metrics: loss, value_clip_fraction, value_mean, explained_variance
    (1 - var(R - v) / var(R), of the values before the update), grad_norm, update_norm, param_norm, skipped.
    """

    @jax.named_scope("update")
    def update(state, batch: Batch, mask, old_values, returns):
        denominator = token_count(mask)

        def micro_loss(params, micro):
            batch, mask, old, target = micro
            new = values(params, cfg, batch.ids, batch.positions, ucfg.remat)
            return value_loss(new, old, target, mask, clip, denominator)[0], new

        data = (batch, mask, old_values, returns)
        grads, new = accumulate(micro_loss, state["params"], data, ucfg.micro_rows)
        loss, metrics = value_loss(new, old_values, returns, mask, clip, denominator)
        state, norms = apply_gradients(tx, state, grads, loss)
        metrics |= {"loss": loss, "explained_variance": explained_variance(new, returns, mask)}
        return state, metrics | norms

    return jax.jit(update, donate_argnums=0)


def explained_variance(values: jax.Array, returns: jax.Array, mask: jax.Array) -> jax.Array:
    """1 - var(returns - values) / var(returns) over the tokens of `mask` [B, T]; 0 where the returns are all alike."""

    def variance(x):
        mean = jnp.where(mask > 0, x, 0.0).sum() / token_count(mask)
        return jnp.where(mask > 0, (x - mean) ** 2, 0.0).sum() / token_count(mask)

    spread = variance(returns)
    return jnp.where(spread > 0, 1 - variance(returns - values) / jnp.where(spread > 0, spread, 1.0), 0.0)
