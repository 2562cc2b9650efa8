"""Losses and divergences on [B, T] arrays with a mask. Masked slots may hold anything, NaN included.

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


def policy_loss(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    clip: tuple[float, float] = (0.2, 0.2),
    denominator: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Clipped policy loss of PPO: sum of max(-A r, -A clip(r, 1 - low, 1 + high)) / denominator, and its metrics.

    All arrays [B, T]; `clip` is (low, high). `denominator` is the token count of the whole batch when this is a
    micro-batch of it; None takes the mask's own. The log-ratio is bounded to +-20 before exp. An all-masked batch has
    loss 0 and gradient 0. Metrics (float32 scalars, over unmasked tokens): clip_fraction, the share where the clipped
    term counts; approx_kl, mean of old - new; ratio_mean; ratio_max.
    Source: PPO (arXiv 1707.06347) Eq. 7; Search-R1 `core_algos.compute_policy_loss`.
    """
    denominator = token_count(mask) if denominator is None else denominator
    keep = mask > 0
    log_ratio = jnp.where(keep, logprobs - old_logprobs, 0.0)
    log_ratio = jnp.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = jnp.exp(log_ratio)
    advantages = jnp.where(keep, advantages, 0.0)
    free = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1 - clip[0], 1 + clip[1])
    metrics = {
        "clip_fraction": masked_sum(clipped > free, mask) / denominator,
        "approx_kl": masked_sum(-log_ratio, mask) / denominator,
        "ratio_mean": masked_sum(ratio, mask) / denominator,
        "ratio_max": jnp.where(keep, ratio, 0.0).max(),
    }
    return masked_sum(jnp.maximum(free, clipped), mask) / denominator, metrics


def value_loss(
    values: jax.Array,
    old_values: jax.Array,
    returns: jax.Array,
    mask: jax.Array,
    clip: float = 0.5,
    denominator: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Clipped value loss: sum of max((v - R)^2, (v' - R)^2) / 2 / denominator, v' the value kept within `clip` of old.

    All arrays [B, T]; `denominator` as in `policy_loss`. Metrics (float32 scalars over unmasked tokens):
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
    return 0.5 * masked_sum(jnp.maximum(free, clipped), mask) / denominator, metrics


def kl(logprobs: jax.Array, ref_logprobs: jax.Array, kind: str = "k3", mask: jax.Array | None = None) -> jax.Array:
    """Per-token estimate of KL(policy || reference), float32 [B, T], from log-probs of the sampled ids.

    With d = logprobs - ref_logprobs: k1 is d, k2 is d^2 / 2, k3 is exp(-d) + d - 1 with d bounded to +-20 before exp
    and the value to +-10. With `mask`, slots outside it may hold NaN or infinity and give 0 and no gradient.
    Source: Search-R1 `core_algos.kl_penalty` (kl, mse, low_var_kl). As a loss take k3 or k2: k1 has no gradient on
    average; it belongs in the reward.
    """
    difference = (logprobs - ref_logprobs).astype(jnp.float32)
    if mask is not None:
        difference = jnp.where(mask > 0, difference, 0.0)
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference**2
    if kind == "k3":
        d = jnp.clip(difference, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        return jnp.clip(jnp.exp(-d) + d - 1, -KL_BOUND, KL_BOUND)
    raise ValueError(f"KL kind {kind!r} is none of k1, k2, k3")


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
