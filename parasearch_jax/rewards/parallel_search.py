"""The reward of ParallelSearch (arXiv 2508.09303, Eq. 3-7): outcome, decomposition, search count, format.

Both variants share one formula (`parallel_search`) and differ in the facts it is fed. `paper` reads what was executed
(`Episode.actions`) and the question's kind. `released` reads the text after the prompt and the question's original
type, as the authors' scorer does (`verl/utils/reward_score/qa_em_format.py`, `verl/utils/dataset/rl_dataset.py`); what
differs is listed in `RELEASED_DIFFERS`, which `Reward.describe` puts into the log of a run.

Not kept from the released scorer: where a response has no answer block it takes the prompt's example ("Beijing") for
the answer, as it searches the prompt too. Here such a response has no answer.
"""

from __future__ import annotations

import dataclasses
import re

from parasearch_jax.data.metrics import em, em_released
from parasearch_jax.data.types import Question
from parasearch_jax.rewards.base import register
from parasearch_jax.rewards.format import released_text, valid_by_provenance, valid_by_text
from parasearch_jax.rollout.types import Episode

RELEASED_DIFFERS = (
    "released: search_count has the offset +lambda_s (its maximum is lambda_s, not 0)",
    "released: n counts the string '<search>' in policy, documents and notices, executed or not",
    "released: only the first '<search>..</search>' pair decides on decomposition; any '##' in it counts, 'a ##' too",
    "released: the answer is the last '<answer>..</answer>' pair, executed or not, in documents and notices too",
    "released: exact match by SQuAD's normaliser, under which an empty answer equals the golden answer 'A' or 'the'",
    "released: validity by a state machine over the whole text, so that a document with a tag in it, or one cut before "
    "its closing tag, makes the episode invalid; an invalid turn does so by its notice",
    "released: the comparison flag comes from the exact type: 'comparison' +1, 'na' -1, all else 0 ('comparison_query' "
    "too); where a question has none, or one of our own names, from its kind",
)

_FLAG_OF_KIND = {"parallel": 1, "sequential": 0, "single": -1}
_FLAG_OF_TYPE = {"comparison": 1, "na": -1}
_OUR_TYPES = ("parallel", "sequential", "single", "single-hop", "", None)  # never in the authors' data


@dataclasses.dataclass(frozen=True)
class _Facts:
    """What the formula needs to know of an episode."""

    flag: int  # +1 parallel, 0 sequential, -1 single
    correct: bool
    valid: bool
    n: int  # searches
    decomposed: bool


@register("parallel_search", needs_kind=True, variants=("paper", "released"), differs={"released": RELEASED_DIFFERS})
def parallel_search(
    episode: Episode,
    question: Question,
    *,
    variant: str = "paper",
    lambda_d: float = 0.15,
    lambda_s: float = 0.35,
    lambda_f: float = 0.1,
    alpha: float = 3.0,
) -> dict[str, float]:
    """The four parts of the ParallelSearch reward (Eq. 3-7); the reward is their sum, also for a wrong answer.

    outcome        1 if the answer matches exactly, else 0
    decomposition  alpha * lambda_d for a parallel question that was split, lambda_d for another that was not, else 0
    search_count   -lambda_s |n - 1| for parallel and single, -lambda_s |min(n, 2) - 2| for sequential
    format         -lambda_f if correct but ill-formed, +lambda_f if wrong but well-formed, else 0

    `paper`: the answer is the executed one, n the executed searches, split means that an executed search had two or
    more non-empty sub-queries, well-formed is `valid_by_provenance`. No answer is a wrong one, and never well-formed.
    A search that the retriever failed to answer counts like any other, in both variants (see `Search`).
    `released`: `RELEASED_DIFFERS`. The constants are those of the released experiment; the paper gives neither alpha
    (only alpha > 1) nor lambda_f. The kind must be known; `make_reward` takes `unknown` to name one.
    """
    facts = _executed(episode, question) if variant == "paper" else _as_released(episode, question)
    excess = abs(min(facts.n, 2) - 2) if facts.flag == 0 else abs(facts.n - 1)
    offset = lambda_s if variant == "released" else 0.0
    return {
        "outcome": float(facts.correct),
        "decomposition": _decomposition(facts, lambda_d, alpha),
        "search_count": offset - lambda_s * excess,
        "format": lambda_f * (facts.valid - facts.correct),
    }


def _decomposition(facts: _Facts, lambda_d: float, alpha: float) -> float:
    if facts.flag > 0:
        return alpha * lambda_d if facts.decomposed else 0.0
    return 0.0 if facts.decomposed else lambda_d


def _executed(episode: Episode, question: Question) -> _Facts:
    return _Facts(
        flag=_FLAG_OF_KIND[question.kind],
        correct=em(episode.answer, question.golden_answers) == 1.0,
        valid=valid_by_provenance(episode),
        n=len(episode.searches),
        decomposed=any(len(search.queries) >= 2 for search in episode.searches),
    )


def _as_released(episode: Episode, question: Question) -> _Facts:
    text = released_text(episode)
    answers = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    first_search = re.search(r"<search>(.*?)</search>", text, re.DOTALL)  # the third of prompt + response
    return _Facts(
        flag=_released_flag(question),
        correct=em_released(answers[-1] if answers else None, question.golden_answers) == 1.0,
        valid=valid_by_text(text),
        n=text.count("<search>"),
        decomposed=first_search is not None and "##" in first_search.group(1),
    )


def _released_flag(question: Question) -> int:
    """The authors' comparison flag. Where our own data gives no type of theirs, the kind stands in."""
    original = question.meta.get("type")
    return _FLAG_OF_KIND[question.kind] if original in _OUR_TYPES else _FLAG_OF_TYPE.get(original, 0)
