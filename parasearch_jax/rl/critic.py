"""PPO's critic: its own copy of the policy's backbone with a linear head that starts at zero.

Axes: B batch, T tokens, D model. Parameters: {"backbone": the decoder's without "head", "value": {"kernel": [D],
"bias": []}}.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

from parasearch_jax.models import decoder
from parasearch_jax.models.decoder import DecoderConfig, Params
from parasearch_jax.rl.losses import token_count, value_loss
from parasearch_jax.rl.update import Scoring, Step, UpdateConfig, scoring, stepping


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


def make_values(cfg: DecoderConfig, ucfg: UpdateConfig) -> Scoring:
    """`score(params, data, micros) -> values`, float32 [B, T]; data: {"batch": Batch, "steps": [B, T]}, 0 where steps
    are 0."""

    def of_micro(params, micro):
        new = values(params, cfg, micro["batch"].ids, micro["batch"].positions, ucfg.remat)
        return jnp.where(micro["steps"] > 0, new, 0.0)

    return scoring(of_micro)


def make_critic_update(cfg: DecoderConfig, ucfg: UpdateConfig, tx: optax.GradientTransformation, clip: float) -> Step:
    """`update(state, data, micros) -> (state, metrics)`; donates `state`.

    data: {"batch": Batch, "steps", "values", "returns"}: float32 [B, T]; `steps` says where the critic is trained,
    `values` are those before the update. The step is `rl.update.stepping`'s: micro-batches under one denominator,
    refused when not finite. Metrics: loss, value_clip_fraction, value_mean, explained_variance (1 - var(R - v) /
    var(R), of the values before the update), grad_norm, update_norm, param_norm, skipped.
    """

    def of_micro(params, micro):
        return {"values": values(params, cfg, micro["batch"].ids, micro["batch"].positions, ucfg.remat)}

    def loss_of(data, out, tokens):
        new, returns, steps = out["values"], data["returns"], data["steps"]
        loss, metrics = value_loss(new, data["values"], returns, steps, clip, tokens)
        explained = explained_variance(new, returns, steps)
        return loss, metrics | {"loss": loss, "explained_variance": explained}

    return stepping(of_micro, loss_of, lambda data: token_count(data["steps"]), tx)


def explained_variance(values: jax.Array, returns: jax.Array, mask: jax.Array) -> jax.Array:
    """1 - var(returns - values) / var(returns) over the tokens of `mask` [B, T]; 0 where the returns are all alike."""

    def variance(x):
        mean = jnp.where(mask > 0, x, 0.0).sum() / token_count(mask)
        return jnp.where(mask > 0, (x - mean) ** 2, 0.0).sum() / token_count(mask)

    spread = variance(returns)
    return jnp.where(spread > 0, 1 - variance(returns - values) / jnp.where(spread > 0, spread, 1.0), 0.0)
