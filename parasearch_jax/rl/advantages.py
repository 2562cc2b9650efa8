"""Advantages from rewards: pure functions on [B, T] arrays under the index rule of the design.

Axes: B batch (rows), T tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

EPS = 1e-6  # added to the standard deviation by the released code


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
