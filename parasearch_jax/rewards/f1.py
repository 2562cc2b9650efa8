"""Token F1 as the reward: `f1`, and `zero_search` with what ZeroSearch's released scorer does besides.

ZeroSearch (arXiv 2505.04588) pays F1 in place of exact match, at the last token, with no format term. Released code:
`verl/utils/reward_score/qa_em.py`.
"""

from __future__ import annotations

from parasearch_jax.data import metrics
from parasearch_jax.data.types import Question
from parasearch_jax.rewards import format as form
from parasearch_jax.rewards.base import register
from parasearch_jax.rollout.types import Episode

QUIRKS = {
    "last_answer": form.LAST_ANSWER,
    "squad_f1": "tokens by SQuAD's normaliser, which leaves none of the golden answer 'A': nothing earns it",
}


@register("f1")
def f1(episode: Episode, question: Question) -> dict[str, float]:
    """f1: the best F1 of the executed answer's tokens over the golden answers; 0 without an answer."""
    return {"f1": metrics.f1(episode.answer, question.golden_answers)}


@register("zero_search", quirks=QUIRKS)
def zero_search(episode: Episode, question: Question, *, quirks: frozenset[str] = frozenset()) -> dict[str, float]:
    """f1 as in `f1`. `released`: `QUIRKS`.

    Not kept from the released scorer: a response without an answer is judged on the prompt's example. What that scorer
    calls EM, a substring test, is a metric of its logs and no part of the reward.
    """
    measure = metrics.f1_released if "squad_f1" in quirks else metrics.f1
    return {"f1": measure(form.answer_of(episode, quirks), question.golden_answers)}
