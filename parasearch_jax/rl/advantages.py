"""Advantages from rewards: pure functions on [B, T] arrays under the index rule of the design.

Axes: B batch (rows), T tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from parasearch_jax.rl.losses import masked_mean

EPS = 1e-6  # added to the standard deviation by the released code


def gae(
    rewards: jax.Array, values: jax.Array, mask: jax.Array, gamma: float = 1.0, lam: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Generalised advantage estimates and returns, both float32 [B, T], 0 outside `mask`; not whitened.

    The tokens of `mask` [B, T] are the time steps; what lies between them does not exist: no discount, no value. With
    d_t = r_t + gamma V_t' - V_t and t' the next time step (V = 0 behind the last): A_t = d_t + gamma lam A_t', and the
    return is A_t + V_t. `values[b, t]` is the value before token t is chosen. Values outside `mask` may be anything.

        tokens  policy policy docs docs policy        the value of the second policy token is bootstrapped from the
        steps     0      1     -    -     2           last one's, with one gamma

    Source: arXiv 1506.02438 Eq. 16; `mask` = policy tokens is the design's `strict`. Search-R1's
    `core_algos.compute_gae_advantage_return` is the same with the attention mask: documents are steps.
    """
    keep = mask > 0
    rewards, values = (jnp.where(keep, x, 0.0).astype(jnp.float32) for x in (rewards, values))

    def step(carry, column):
        advantage, following = carry
        r, v, here = column
        new = r + gamma * following - v + gamma * lam * advantage
        return (jnp.where(here, new, advantage), jnp.where(here, v, following)), jnp.where(here, new, 0.0)

    zero = jnp.zeros(rewards.shape[0], jnp.float32)
    _, advantages = jax.lax.scan(step, (zero, zero), (rewards.T, values.T, keep.T), reverse=True)
    return advantages.T, jnp.where(keep, advantages.T + values, 0.0)


def whiten(x: jax.Array, mask: jax.Array) -> jax.Array:
    """(x - mean) / sqrt(var + 1e-8) over the tokens of `mask` [B, T], 0 elsewhere; one or no token gives 0.

    The variance divides by n - 1. Source: Search-R1 `torch_functional.masked_whiten`.
    """
    n = mask.sum()
    deviation = jnp.where(mask > 0, x - masked_mean(x, mask), 0.0)
    variance = (deviation**2).sum() / jnp.maximum(n - 1, 1)
    return deviation * jax.lax.rsqrt(variance + 1e-8)


def grpo(rewards: jax.Array, mask: jax.Array, group: jax.Array, std: str = "sample", floor: float = 1e-4) -> jax.Array:
    """Group-relative advantages, float32 [B, T]: (r - mean) / (std + 1e-6) of the row's group, on the tokens of `mask`.

    `rewards` [B, T] is summed over T; `mask` [B, T]; `group` int32 [B] with values in [0, B), in any order. `std` is
    "sample" (divides by n - 1, as released) or "population" (by n). Rows of mask 0 take part in no group. Equal rewards
    give exactly 0; a group of one keeps its reward (mean 0, std 1, as released). `floor` bounds the standard deviation
    from below: seven times 0.35, summed from different parts, differ in the last bit only and must not be amplified.
    Source: Search-R1 `core_algos.compute_grpo_outcome_advantage` (there on the attention mask; pass that to match it).
    """
    if std not in ("sample", "population"):
        raise ValueError(f"std {std!r} is none of sample, population")
    B = group.shape[0]
    score = rewards.astype(jnp.float32).sum(-1)
    live = (mask > 0).any(-1)

    def group_sum(x):
        return jax.ops.segment_sum(jnp.where(live, x, 0.0), group, num_segments=B)[group]

    n = group_sum(jnp.ones(B))
    deviation = score - group_sum(score) / jnp.maximum(n, 1)
    variance = group_sum(deviation**2) / jnp.maximum(n - (std == "sample"), 1)
    advantage = deviation / (jnp.maximum(jnp.sqrt(variance), floor) + EPS)
    highest = jax.ops.segment_max(jnp.where(live, score, -jnp.inf), group, num_segments=B)[group]
    lowest = jax.ops.segment_min(jnp.where(live, score, jnp.inf), group, num_segments=B)[group]
    advantage = jnp.where(highest == lowest, 0.0, advantage)
    advantage = jnp.where(n == 1, score / (1 + EPS), advantage)
    return jnp.where(mask > 0, advantage[:, None], 0.0)
