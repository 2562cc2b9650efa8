"""The rewards of OTC (arXiv 2504.14870 v2): exact match times a factor for few tool calls. No code was released.

    r = alpha * r_tool * r_correct

A factor is written as its effect, so that the parts add up to the reward: {"em": 1, "tool": alpha * r_tool - 1} for a
correct episode, zeros for a wrong one. A tool call is an executed search; with a protocol that splits, one search with
several sub-queries is one call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from parasearch_jax.data.metrics import em
from parasearch_jax.data.types import Question
from parasearch_jax.rewards.base import register
from parasearch_jax.rollout.types import Episode


@register("otc_ppo")
def otc_ppo(episode: Episode, question: Question, *, alpha: float = 1.0, c: float = 4.0) -> dict[str, float]:
    """OTC-PPO. `c` is the most calls that an episode may make (4 for search in the paper).

    em    1 if the answer matches exactly, else 0
    tool  what the factor `saving(m, c)` takes from a correct answer: 0 without a call, -0.5 with four of four
    """
    return _parts(episode, question, alpha, saving(len(episode.searches), c))


@register("otc_grpo", group=True)
def otc_grpo(
    episodes: Sequence[Episode], question: Question, memory: dict, *, alpha: float = 1.0, c: float = 4.0
) -> list[dict[str, float]]:
    """OTC-GRPO: as `otc_ppo`, the factor being `nearness(m, n, c)`, n the fewest calls with which this question was
    answered correctly, now or earlier in the run (`memory[question.id]`)."""
    for episode in episodes:
        if em(episode.answer, question.golden_answers):
            memory[question.id] = min(memory.get(question.id, math.inf), len(episode.searches))
    n = memory.get(question.id)  # None: no episode is correct, so no factor counts
    return [_parts(e, question, alpha, 1.0 if n is None else nearness(len(e.searches), n, c)) for e in episodes]


def saving(m: int, c: float) -> float:
    """r_tool of OTC-PPO for m calls: 1, .866, .707, .588, .5 for m = 0 .. 4 and c = 4."""
    return math.cos(m * math.pi / (2 * m + c))


def nearness(m: int, n: int, c: float) -> float:
    """r_tool of OTC-GRPO for m calls where n are known to do: 1 at m = n, less for fewer and for more."""
    if n == 0:
        return saving(m, c)
    return math.sin(2 * n * m / (m + n) * math.pi / (2 * n))


def _parts(episode: Episode, question: Question, alpha: float, factor: float) -> dict[str, float]:
    correct = em(episode.answer, question.golden_answers)
    return {"em": correct, "tool": correct * (alpha * factor - 1)}
