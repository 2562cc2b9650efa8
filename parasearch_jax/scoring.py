"""From the episodes of a step to rewards and rows of its batch, group by group."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from parasearch_jax import hosts, rl
from parasearch_jax.data import Question
from parasearch_jax.rewards import Reward
from parasearch_jax.rollout import Episode

Scored = tuple[dict[str, float], list[tuple[int, float]]]  # (parts, steps) of an episode


class Scorer:
    """The rewards and rows of a step, question by question in their order, as `Engine.rollout` hands its groups over.

    `memory` belongs to group rewards, over the whole run; it gets what the step adds when all of it is scored, so that
    a step that is broken off leaves no trace.
    """

    def __init__(self, reward: Reward, questions: Sequence[Question], samples: int, memory: dict):
        self._reward, self._questions, self._samples = reward, questions, samples
        self._memory, self._new_memory = memory, copy.deepcopy(memory)
        self._scored: list[Scored] = []
        self._rows: list[rl.Row] = []

    def __call__(self, i: int, episodes: Sequence[Episode]) -> None:
        scored = self._reward.score_group(episodes, self._questions[i], self._new_memory)
        self._rows += map(rl.make_row, episodes, scored)
        self._scored += scored

    def finish(self, episodes: Sequence[Episode]) -> tuple[list[Scored], list[rl.Row]]:
        """((parts, steps) of every episode, their rows). With several hosts the first scores all, here."""

        def score():
            for i in range(len(self._scored) // self._samples, len(self._questions)):
                self(i, episodes[i * self._samples : (i + 1) * self._samples])
            self._memory.clear()
            self._memory.update(self._new_memory)
            return self._scored

        scored = hosts.from_first(score)
        return scored, self._rows or list(map(rl.make_row, episodes, scored))


def reward_metrics(scored: Sequence[Scored], batch: rl.Batch) -> dict[str, float]:
    """Means of the parts, of the sum of an episode's step rewards ("reward/steps", where there are any) and of the
    total, the share of groups in which all totals are equal (no gradient), and the sampler's mean log-prob a token of
    the episodes that earned more than the mean, where some did."""
    names = list(dict.fromkeys(name for parts, _ in scored for name in parts))
    out = {f"reward/{name}": float(np.mean([parts.get(name, 0.0) for parts, _ in scored])) for name in names}
    if any(steps for _, steps in scored):
        out["reward/steps"] = float(np.mean([sum(value for _, value in steps) for _, steps in scored]))
    n = len(scored)
    totals, groups = np.asarray(batch.rewards).sum(-1)[:n], np.asarray(batch.group)[:n]
    flat = [np.ptp(totals[groups == g]) == 0 for g in np.unique(groups)]
    out |= {"reward/total": float(totals.mean()), "rollout/groups_without_spread": float(np.mean(flat))}
    mask = np.asarray(batch.policy_mask)[:n] * (totals > totals.mean() + 1e-6)[:, None]
    if mask.any():
        out["rollout/rewarded_logprob"] = float((np.asarray(batch.logprobs)[:n] * mask).sum() / mask.sum())
    return out
