"""Advantages from rewards: pure functions on [B, T] arrays under the index rule of the design.

    gae                          a critic's values as the baseline, credit by time step
    reinforce                    the rewards still to come at each token; no baseline, or the group's mean
    grpo, dr_grpo, rloo          the reward of the whole episode against its group's, the same at every token
    reinforce_pp                 the same, with the KL penalty still to come, normalised over the batch

Rules that hold for all. Only the tokens of `mask` exist: what lies outside may be anything, NaN included, and gets 0.
A group is the rows with one number in `group`, int32 [B] with values in [0, B), in any order; rows without a token in
`mask` take part in none. Rewards that are equal give exactly 0 against their group, also when they were summed from
different parts (see `TIE`). A group of one has nothing to compare with and keeps its reward, as released.

Axes: B batch (rows), T tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from parasearch_jax.rl.losses import masked_mean, token_count

EPS = 1e-6  # added to the standard deviation by the released code
TIE = 1e-6  # numbers as near as this (relative to the largest, or to 1) are equal: they differ by rounding only


def gae(
    rewards: jax.Array, values: jax.Array, mask: jax.Array, gamma: float = 1.0, lam: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Generalised advantage estimates and returns, both float32 [B, T], 0 outside `mask`; not whitened.

    The tokens of `mask` [B, T] are the time steps; what lies between them does not exist: no discount, no value. With
    d_t = r_t + gamma V_t' - V_t and t' the next time step (V = 0 behind the last): A_t = d_t + gamma lam A_t', and the
    return is A_t + V_t. `values[b, t]` is the value before token t is chosen. Rewards count where they lie.

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


def whiten(x: jax.Array, mask: jax.Array, std: str = "sample") -> jax.Array:
    """(x - mean) / sqrt(var + 1e-8) over the tokens of `mask` [B, T], 0 elsewhere; one or no token gives 0, and so do
    tokens that are all equal.

    The variance divides by n - 1 ("sample") or by n ("population"). Source: Search-R1 `torch_functional.masked_whiten`
    (sample); R1-Searcher's `replay_buffer.normalize` (population).
    """
    unbiased = _is_sample(std)
    deviation = jnp.where(mask > 0, x - masked_mean(x, mask), 0.0)
    variance = (deviation**2).sum() / jnp.maximum(token_count(mask) - unbiased, 1)
    highest = jnp.where(mask > 0, x, -jnp.inf).max()
    lowest = jnp.where(mask > 0, x, jnp.inf).min()
    return jnp.where(_tied(highest, lowest), 0.0, deviation * jax.lax.rsqrt(variance + 1e-8))


def grpo(rewards: jax.Array, mask: jax.Array, group: jax.Array, std: str = "sample", floor: float = 1e-4) -> jax.Array:
    """Group-relative advantages, float32 [B, T]: (r - mean) / (std + 1e-6) of the row's group, on the tokens of `mask`.

    `rewards` [B, T] is summed over the tokens of `mask` [B, T]; `group` int32 [B]. `std` is "sample" (divides by n - 1,
    as released) or "population" (by n); `floor` bounds it from below, so that a spread of little more than rounding is
    not amplified. A group of one has mean 0 and std 1.
    Source: arXiv 2402.03300; Search-R1 `core_algos.compute_grpo_outcome_advantage` (on the attention mask; pass that to
    match it).
    """
    unbiased = _is_sample(std)
    score, mean, n = _group_means(rewards, mask, group)
    variance = _group_sum((score - mean) ** 2, mask, group) / jnp.maximum(n - unbiased, 1)
    spread = jnp.where(n == 1, 1.0, jnp.maximum(jnp.sqrt(variance), floor))
    return _on_tokens((score - mean) / (spread + EPS), mask)


def dr_grpo(rewards: jax.Array, mask: jax.Array, group: jax.Array) -> jax.Array:
    """r - mean of the row's group, float32 [B, T]: `grpo` without the division, arguments as there.

    Source: arXiv 2503.20783. Its other half is the loss: `token_weights(mask, "dr_grpo", length=...)`.
    """
    score, mean, _ = _group_means(rewards, mask, group)
    return _on_tokens(score - mean, mask)


def rloo(rewards: jax.Array, mask: jax.Array, group: jax.Array) -> jax.Array:
    """r - mean of the others of the row's group (leave one out), float32 [B, T]; arguments as in `grpo`.

    Source: arXiv 2402.14740. With n rows this is n / (n - 1) times `dr_grpo`.
    """
    score, mean, n = _group_means(rewards, mask, group)
    return _on_tokens((score - mean) * n / jnp.maximum(n - 1, 1), mask)


def reinforce(
    rewards: jax.Array, mask: jax.Array, group: jax.Array, baseline: str = "none", gamma: float = 1.0
) -> jax.Array:
    """The rewards still to come, float32 [B, T]: sum over k >= t of gamma^(k - t) r_k over the tokens of `mask`.

    Rewards count where they lie: that of an action, on its closing token, is none of the later tokens' doing. With
    `baseline` "group" the mean of the group's whole rewards (sum over a row, without discount) is taken off every
    token, which leaves exactly 0 where each row of a group got the same on its last token and gamma is 1; "none" leaves
    the returns raw.

        tokens  policy policy docs policy        reward 0.5 for the search that the second token closes, 1 at the end:
        raw      1.5    1.5    0     1           with a group mean of 1.2 it is 0.3, 0.3, 0, -0.2

    Source: Williams 1992; ZeroSearch trains with it, raw.
    """
    grouped = _is_grouped(baseline)
    to_come = _returns_to_go(rewards, mask, gamma)
    if not grouped:
        return to_come
    _, mean, _ = _group_means(rewards, mask, group)
    return jnp.where(mask > 0, to_come - mean[:, None], 0.0)


def reinforce_pp(
    rewards: jax.Array,
    mask: jax.Array,
    group: jax.Array,
    penalty: jax.Array | None = None,
    baseline: str = "group",
    gamma: float = 1.0,
) -> jax.Array:
    """REINFORCE++, float32 [B, T]: the sequence term minus the penalty still to come, normalised over the batch.

    The sequence term is the row's reward, summed over the tokens of `mask`, minus the mean of its group (`baseline`
    "group") or as it is ("none"). `penalty` [B, T] is beta kl_t (k1); sum over k >= t of gamma^(k - t) penalty_k is
    taken off. Then `whiten` with mean and population variance over all tokens of `mask`. For credit by step take
    `reinforce` or `gae`.
    Source: arXiv 2501.03262; R1-Searcher `replay_buffer.py` (reinforce_baseline). There documents hold 0 when the
    statistics are summed, which are divided by the number of policy tokens, and -mean / std after; as the loss masks
    them, its result is this one.
    """
    grouped = _is_grouped(baseline)
    score, mean, _ = _group_means(rewards, mask, group)
    advantages = _on_tokens(score - mean if grouped else score, mask)
    if penalty is not None:
        advantages -= _returns_to_go(penalty, mask, gamma)
    return whiten(advantages, mask, "population")


def tied_groups(rewards: jax.Array, mask: jax.Array, group: jax.Array) -> jax.Array:
    """Share of the groups of two rows and more whose rewards are all equal, float32 scalar: they teach nothing.

    0 without such a group. Arguments as in `grpo`.
    """
    score, mean, n = _group_means(rewards, mask, group)
    compared = (mask > 0).any(-1) & (n > 1)
    tied = compared & (_group_sum(jnp.abs(score - mean), mask, group) == 0)
    each = jnp.where(compared, 1 / jnp.maximum(n, 1), 0.0)  # the rows of a group add up to one
    return jnp.where(tied, each, 0.0).sum() / jnp.maximum(each.sum(), 1)


def _returns_to_go(x, mask, gamma) -> jax.Array:
    """float32 [B, T]: sum over k >= t of gamma^(k - t) x_k over the tokens of `mask`."""
    return gae(x, jnp.zeros_like(x), mask, gamma)[0]


def _group_means(rewards, mask, group) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of each row, float32 [B]: its reward, its group's mean (its own reward if all are equal; 0 in a group of one),
    and the rows in its group."""
    live, B = (mask > 0).any(-1), group.shape[0]
    score = jnp.where(mask > 0, rewards, 0.0).astype(jnp.float32).sum(-1)
    highest = jax.ops.segment_max(jnp.where(live, score, -jnp.inf), group, num_segments=B)[group]
    lowest = jax.ops.segment_min(jnp.where(live, score, jnp.inf), group, num_segments=B)[group]
    n = _group_sum(jnp.ones(B), mask, group)
    mean = jnp.where(_tied(highest, lowest), score, _group_sum(score, mask, group) / jnp.maximum(n, 1))
    return score, jnp.where(n == 1, 0.0, mean), n


def _group_sum(x, mask, group) -> jax.Array:
    """[B]: for each row the sum of `x` [B] over the rows of its group that have a token in `mask`."""
    x = jnp.where((mask > 0).any(-1), x, 0.0)
    return jax.ops.segment_sum(x, group, num_segments=group.shape[0])[group]


def _tied(highest, lowest) -> jax.Array:
    return highest - lowest <= TIE * jnp.maximum(jnp.abs(highest), 1.0)


def _on_tokens(advantage, mask) -> jax.Array:
    """A number a row [B] at each of its tokens [B, T], 0 elsewhere."""
    return jnp.where(mask > 0, advantage[:, None], 0.0)


def _is_sample(std: str) -> bool:
    if std not in ("sample", "population"):
        raise ValueError(f"std {std!r} is none of sample, population")
    return std == "sample"


def _is_grouped(baseline: str) -> bool:
    if baseline not in ("none", "group"):
        raise ValueError(f"baseline {baseline!r} is none of none, group")
    return baseline == "group"
