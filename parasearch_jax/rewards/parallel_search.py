"""The reward of ParallelSearch (arXiv 2508.09303, Eq. 3-7): outcome, decomposition, search count, format.

`paper` reads what was executed (`Episode.actions`) and the question's kind. `released` reads the text after the prompt
and the question's original type, as the authors' scorer does (`verl/utils/reward_score/qa_em_format.py`,
`verl/utils/dataset/rl_dataset.py`); what differs is listed in `QUIRKS`, which `Reward.describe` puts into the log of a
run, and each can be switched by its name.

Not kept from the released scorer: where a response has no answer block it takes the prompt's example ("Beijing") for
the answer, as it searches the prompt too. Here such a response has no answer.
"""

from __future__ import annotations

import re

from parasearch_jax.data.types import Question
from parasearch_jax.rewards import format as form
from parasearch_jax.rewards.base import register
from parasearch_jax.rollout.types import Episode

QUIRKS = {
    "offset": "search_count has the offset +lambda_s (its maximum is lambda_s, not 0)",
    "count_tags": "n counts the string '<search>' in policy, documents and notices, executed or not",
    "first_search": "only the first search decides on decomposition, not any",
    "raw_split": "a search is a '<search>..</search>' pair anywhere in the text, and any '##' in it splits: 'a ##' too",
    "last_answer": form.LAST_ANSWER,
    "squad_em": form.SQUAD_EM,
    "text_format": form.TEXT_FORMAT,
    "exact_type": "the comparison flag comes from the exact type: 'comparison' +1, 'na' -1, all else 0 "
    "('comparison_query' too); where a question has none, or one of our own names, from its kind",
}

_FLAG_OF_KIND = {"parallel": 1, "sequential": 0, "single": -1}
_FLAG_OF_TYPE = {"comparison": 1, "na": -1}
_OUR_TYPES = ("parallel", "sequential", "single", "single-hop", "", None)  # never in the authors' data


@register("parallel_search", needs_kind=True, quirks=QUIRKS)
def parallel_search(
    episode: Episode,
    question: Question,
    *,
    quirks: frozenset[str] = frozenset(),
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
    `released`: `QUIRKS`. The constants are those of the released experiment; the paper gives neither alpha (only
    alpha > 1) nor lambda_f, does not say whether the first search or any decides (`first_search`), and has no `offset`.
    The kind must be known; `make_reward` takes `unknown` to name one.
    """
    flag = _released_flag(question) if "exact_type" in quirks else _FLAG_OF_KIND[question.kind]
    correct, valid = form.is_correct(episode, question, quirks), form.is_well_formed(episode, quirks)
    n = _count(episode, quirks)
    excess = abs(min(n, 2) - 2) if flag == 0 else abs(n - 1)
    return {
        "outcome": float(correct),
        "decomposition": _decomposition(flag, _split(episode, quirks), lambda_d, alpha),
        "search_count": (lambda_s if "offset" in quirks else 0.0) - lambda_s * excess,
        "format": lambda_f * (valid - correct),
    }


def _decomposition(flag: int, split: bool, lambda_d: float, alpha: float) -> float:
    if flag > 0:
        return alpha * lambda_d if split else 0.0
    return 0.0 if split else lambda_d


def _count(episode: Episode, quirks: frozenset[str]) -> int:
    if "count_tags" in quirks:
        return form.released_text(episode).count(form.tags_of(form.protocol_of(episode)).search[0])
    return len(episode.searches)


def _split(episode: Episode, quirks: frozenset[str]) -> bool:
    """Whether the episode's searches (with `first_search` only the first) had several sub-queries."""
    if "raw_split" in quirks:
        protocol = form.protocol_of(episode)
        opening, closing = map(re.escape, form.tags_of(protocol).search)
        pairs = re.findall(f"{opening}(.*?){closing}", form.released_text(episode), re.DOTALL)
        splits = [(protocol.separator or "##") in pair for pair in pairs]
    else:
        splits = [len(search.queries) >= 2 for search in episode.searches]
    return any(splits[:1] if "first_search" in quirks else splits)


def _released_flag(question: Question) -> int:
    """The authors' comparison flag. Where our own data gives no type of theirs, the kind stands in."""
    original = question.meta.get("type")
    return _FLAG_OF_KIND[question.kind] if original in _OUR_TYPES else _FLAG_OF_TYPE.get(original, 0)
