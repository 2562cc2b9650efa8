"""Losses and divergences on [B, T] arrays with a mask. Masked slots may hold anything, NaN included.

A loss is a sum of token weight times token loss, the weights made once for the whole batch of an optimizer step:

    weights = token_weights(mask, "token-mean")                 [B, T], or row_weights(counts) [B] where T differs
    loss = policy_loss(..., weights=weights) + c * weighted_sum(kl(...), weights) - e * weighted_sum(entropy, weights)

So the losses of micro-batches, each with its rows of the weights, add up to that of the batch, however it is split.

Axes: B batch, T tokens. Values are selected before any arithmetic: NaN * 0 is NaN, and so is its gradient.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

LOG_RATIO_BOUND = 20.0  # exp(20) = 5e8 is still finite in every float type, and so is its gradient
KL_BOUND = 10.0  # of k3, as released


def token_count(mask: jax.Array) -> jax.Array:
    """Tokens in `mask`, at least 1: the denominator of a mean that is 0 for an all-masked batch."""
    return jnp.maximum(mask.sum(), 1.0)


def masked_sum(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Sum of `x` [B, T] where `mask` [B, T] is 1."""
    return jnp.where(mask > 0, x, 0.0).sum()


def masked_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean of `x` [B, T] where `mask` [B, T] is 1; 0 if it is so nowhere."""
    return masked_sum(x, mask) / token_count(mask)


def weighted_sum(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Sum of weight times `x` [B, T], where the weight [B, T] is not 0."""
    return (jnp.where(weights > 0, x, 0.0) * weights).sum()


# ---------------------------------------------------------------------------------------------------- aggregation


def row_weights(
    counts: jax.Array, kind: str = "token-mean", length: int | None = None, micro: jax.Array | None = None
) -> jax.Array:
    """float32 [B]: what each token of a row weighs in the loss of a batch with `counts` [B] unmasked tokens a row.

        token-mean      1 / N                 every token alike; N tokens in the batch
        sequence-mean   1 / (S n)             every row alike; S rows that have tokens, n tokens of the row
        dr_grpo         1 / (S length)        a sum over the row's tokens; `length` is a constant, the longest possible
        released        1 / (M m)             mean in each micro-batch, then over micro-batches: m tokens of the row's
                                              micro-batch, M micro-batches that have tokens

    `micro` int32 [B], for "released", is the number of each row's micro-batch, in [0, B): part of the definition, as
    16 rows in 2 micro-batches weigh otherwise than in 4. It need not be how the step is computed.
    Rows without tokens (padding, filtered) count nowhere. All 0 for a batch without tokens.
    Sources: token-mean, sequence-mean: verl `core_algos.agg_loss`, R1-Searcher `loss.py` (packed, one row each);
    arXiv 2503.20783; Search-R1 `dp_actor.update_policy`.
    """
    rows = jnp.maximum((counts > 0).sum(), 1)
    if kind == "token-mean":
        tokens = counts.sum()
    elif kind == "sequence-mean":
        tokens = rows * counts
    elif kind == "dr_grpo":
        if not length:
            raise ValueError(f"token weights dr_grpo: length is {length}; give the most tokens that a row can have")
        tokens = rows * length
    elif kind == "released":
        if micro is None:
            raise ValueError("token weights released: micro is None; give the number of each row's micro-batch")
        each = jax.ops.segment_sum(counts, micro, num_segments=counts.shape[0])
        tokens = jnp.maximum((each > 0).sum(), 1) * each[micro]
    else:
        raise ValueError(f"token weights {kind!r} are none of token-mean, sequence-mean, dr_grpo, released")
    return jnp.where(counts > 0, 1.0 / jnp.maximum(tokens, 1), 0.0).astype(jnp.float32)


def token_weights(
    mask: jax.Array, kind: str = "token-mean", length: int | None = None, micro: jax.Array | None = None
) -> jax.Array:
    """float32 [B, T]: what each token of `mask` [B, T] weighs in the loss, 0 elsewhere; arguments as `row_weights`."""
    return jnp.where(mask > 0, row_weights((mask > 0).sum(-1), kind, length, micro)[:, None], 0.0)


def overlong_filter(mask: jax.Array, truncated: jax.Array) -> jax.Array:
    """`mask` [B, T] without the rows of `truncated` [B] (bool): episodes that ended for want of budget.

    For the loss only. Advantages are made before it, as a truncated row's reward is part of its group's mean.
    Source: arXiv 2503.14476 (overlong filtering).
    """
    return jnp.where(truncated[:, None], 0, mask)


# --------------------------------------------------------------------------------------------------------- losses


def policy_loss(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    clip: tuple[float, float] = (0.2, 0.2),
    denominator: jax.Array | None = None,
    weights: jax.Array | None = None,
    dual_clip: float | None = None,
    importance: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Clipped policy loss of PPO: weighted sum of max(-A r, -A clip(r, 1 - low, 1 + high)), and its metrics.

    All arrays [B, T]; `clip` is (low, high), with high > low "clip-higher". `dual_clip` c > 1 bounds the loss of a
    token with A < 0 by -A c: without it a ratio that has run away has a gradient without bound. `importance` multiplies
    each token's loss (see `truncated_weights`).
    `weights` are of `token_weights`; None is token-mean, 1 / denominator. `denominator` is the token count of the whole
    batch when this is a micro-batch of it, of which the metrics are shares; None takes the mask's own.
    The log-ratio is bounded to +-20 before exp. An all-masked batch has loss 0 and gradient 0.
    Metrics (float32 scalars, over unmasked tokens, each alike): clip_fraction, the share where the clipped term counts;
    approx_kl, mean of old - new; ratio_mean; ratio_max; with `dual_clip` dual_clip_fraction, the share it bounds.
    Source: PPO (arXiv 1707.06347) Eq. 7; Search-R1 `core_algos.compute_policy_loss`; clip-higher arXiv 2503.14476;
    dual clip arXiv 1912.09729, with c = 3.
    """
    denominator = token_count(mask) if denominator is None else denominator
    keep = mask > 0
    log_ratio = jnp.where(keep, logprobs - old_logprobs, 0.0)
    log_ratio = jnp.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = jnp.exp(log_ratio)
    advantages = jnp.where(keep, advantages, 0.0)
    free = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1 - clip[0], 1 + clip[1])
    losses = jnp.maximum(free, clipped)
    metrics = {
        "clip_fraction": masked_sum(clipped > free, mask) / denominator,
        "approx_kl": masked_sum(-log_ratio, mask) / denominator,
        "ratio_mean": masked_sum(ratio, mask) / denominator,
        "ratio_max": jnp.where(keep, ratio, 0.0).max(),
    }
    if dual_clip is not None:
        bound = dual_clip * jnp.abs(advantages)  # with A >= 0 a loss is at most 0, which is within
        metrics["dual_clip_fraction"] = masked_sum(losses > bound, mask) / denominator
        losses = jnp.minimum(losses, bound)
    if importance is not None:
        losses *= importance
    return weighted_sum(losses, _or_token_mean(weights, mask, denominator)), metrics


def value_loss(
    values: jax.Array,
    old_values: jax.Array,
    returns: jax.Array,
    mask: jax.Array,
    clip: float = 0.5,
    denominator: jax.Array | None = None,
    weights: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Clipped value loss: weighted sum of max((v - R)^2, (v' - R)^2) / 2, v' the value kept within `clip` of old.

    All arrays [B, T]; `denominator` and `weights` as in `policy_loss`. Metrics (float32 scalars over unmasked tokens):
    value_clip_fraction, the share where the clipped term counts; value_mean.
    Source: Search-R1 `core_algos.compute_value_loss` (its cliprange_value is 0.5).
    """
    denominator = token_count(mask) if denominator is None else denominator
    keep = mask > 0
    values, old_values, returns = (jnp.where(keep, x, 0.0) for x in (values, old_values, returns))
    free = (values - returns) ** 2
    clipped = (jnp.clip(values, old_values - clip, old_values + clip) - returns) ** 2
    metrics = {
        "value_clip_fraction": masked_sum(clipped > free, mask) / denominator,
        "value_mean": masked_sum(values, mask) / denominator,
    }
    losses = 0.5 * jnp.maximum(free, clipped)
    return weighted_sum(losses, _or_token_mean(weights, mask, denominator)), metrics


def _or_token_mean(weights, mask, denominator) -> jax.Array:
    return jnp.where(mask > 0, 1.0, 0.0) / denominator if weights is None else weights


# ------------------------------------------------------------------------------------------------------------- KL


def kl(logprobs: jax.Array, ref_logprobs: jax.Array, kind: str = "k3", mask: jax.Array | None = None) -> jax.Array:
    """Per-token estimate of KL(policy || reference), float32 [B, T], from log-probs of the sampled ids.

    With d = logprobs - ref_logprobs, bounded to +-20 where it is squared or in an exponent:

        k1    d                   unbiased; for the reward. As a loss its gradient is 0 on average: refused by configs
        k2    d^2 / 2             its gradient is the KL's; beyond the bound it grows linearly, so that it still pulls
        k3    exp(-d) + d - 1     never negative, little variance, value within +-10; its gradient is not the KL's
        k3+                       the value of k3 with the gradient of k2

    With `mask`, slots outside it may hold NaN or infinity and give 0 and no gradient.
    Source: Search-R1 `core_algos.kl_penalty` (kl, mse, low_var_kl); k3+: verl's, straight-through.
    """
    difference = (logprobs - ref_logprobs).astype(jnp.float32)
    if mask is not None:
        difference = jnp.where(mask > 0, difference, 0.0)
    if kind == "k1":
        return difference
    d = jnp.clip(difference, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    k2 = d * difference - 0.5 * d**2  # d^2 / 2 within the bound
    k3 = jnp.clip(jnp.exp(-d) + d - 1, -KL_BOUND, KL_BOUND)
    if kind == "k2":
        return k2
    if kind == "k3":
        return k3
    if kind == "k3+":
        return jax.lax.stop_gradient(k3) + (k2 - jax.lax.stop_gradient(k2))
    raise ValueError(f"KL kind {kind!r} is none of k1, k2, k3, k3+")


def adaptive_kl(coef: jax.Array, measured: jax.Array, target: float, horizon: float, n: jax.Array) -> jax.Array:
    """The next KL coefficient, float32 scalar: coef (1 + e n / horizon), e = measured / target - 1 within +-0.2.

    `n` is what the batch adds to the `horizon`, both in episodes; a batch above the horizon counts as the horizon, so
    that the coefficient stays positive. A measurement that is not finite changes nothing.
    Source: arXiv 1909.08593; verl `core_algos.AdaptiveKLController`.
    """
    error = jnp.clip(measured / target - 1, -0.2, 0.2)
    factor = 1 + error * jnp.minimum(n / horizon, 1.0)
    return jnp.where(jnp.isfinite(measured), coef * factor, coef)


# ------------------------------------------------------------------------------------------- sampler against trainer


def sampler_gap(trainer_logprobs: jax.Array, sampler_logprobs: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
    """How far the trainer's log-probs [B, T] are from the sampler's on the tokens of `mask`, as float32 scalars.

    gap_mean, gap_max: of the absolute difference. ess: effective sample size of the weights w = exp(trainer - sampler)
    as a share of the tokens, (sum w)^2 / (n sum w^2): 1 when both agree, 0 for an all-masked batch.
    """
    difference = jnp.where(mask > 0, trainer_logprobs - sampler_logprobs, 0.0)
    weight = jnp.exp(jnp.clip(difference, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    total, squares = masked_sum(weight, mask), masked_sum(weight**2, mask)
    return {
        "gap_mean": masked_mean(jnp.abs(difference), mask),
        "gap_max": jnp.abs(difference).max(),
        "ess": total**2 / (token_count(mask) * jnp.maximum(squares, jnp.finfo(jnp.float32).tiny)),
    }


def truncated_weights(
    trainer_logprobs: jax.Array, sampler_logprobs: jax.Array, mask: jax.Array, cap: float = 2.0
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Importance weights min(exp(trainer - sampler), cap), float32 [B, T], 0 outside `mask`, and their metrics.

    For `policy_loss(importance=...)`: the ids came from the sampler's distribution, which differs from the trainer's by
    its precision and, when it lags, by its weights. They carry no gradient. The log-ratio is bounded to +-20.
    Metrics (float32 scalars over the tokens of `mask`, 0 without any): importance_mean of the weights as used;
    importance_max before the cap; importance_truncated, the share above it.
    Source: tunix `agentic_grpo_learner` (sampler_is="token", cap 2); verl `rollout_corr` (token level).
    """
    difference = jnp.where(mask > 0, trainer_logprobs - sampler_logprobs, 0.0).astype(jnp.float32)
    ratio = jnp.where(mask > 0, jnp.exp(jnp.clip(difference, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)), 0.0)
    weights = jax.lax.stop_gradient(jnp.minimum(ratio, cap))
    return weights, {
        "importance_mean": masked_mean(weights, mask),
        "importance_max": ratio.max(),
        "importance_truncated": masked_mean(ratio > cap, mask),
    }
