"""The rewards of Search-R1 (arXiv 2503.09516): exact match, and exact match with a format term (arXiv 2505.15117).

Released code: `verl/utils/reward_score/qa_em.py` (v0.1, v0.2) and `qa_em_format.py` (v0.3).

Not kept from it: the extractor also reads the prompt, so that a response without an answer is judged on the prompt's
example ("Beijing"); and validity needs ChatML's assistant marker. See `format`.
"""

from __future__ import annotations

import re

from parasearch_jax.data.metrics import cover_em, golden_list, normalize_released
from parasearch_jax.data.types import Question
from parasearch_jax.rewards import format as form
from parasearch_jax.rewards.base import register
from parasearch_jax.rollout.types import Episode

EM_QUIRKS = {"last_answer": form.LAST_ANSWER, "squad_em": form.SQUAD_EM}
FORMAT_QUIRKS = EM_QUIRKS | {
    "text_format": form.TEXT_FORMAT,
    "final_without_answer": "`final` is paid without an answer too (the extractor always finds one, in the prompt)",
    "retrieval_by_substring": "a golden answer is retrieved if its letters stand in a pair of document tags, whoever "
    "wrote them; one that the normaliser empties ('A') always is",
}


@register("em", quirks=EM_QUIRKS)
def exact_match(episode: Episode, question: Question, *, quirks: frozenset[str] = frozenset()) -> dict[str, float]:
    """em: 1 if the answer matches a golden answer exactly, else 0. `released`: `EM_QUIRKS`."""
    return {"em": float(form.is_correct(episode, question, quirks))}


@register("em_format", quirks=FORMAT_QUIRKS)
def em_format(
    episode: Episode,
    question: Question,
    *,
    quirks: frozenset[str] = frozenset(),
    lambda_f: float = 0.2,
    final: float = 0.1,
    retrieval: float = 0.0,
) -> dict[str, float]:
    """Exact match with a format term, Search-R1 v0.3. With the constants of its scripts (the defaults):

                         well-formed    ill-formed
    correct                   1            0.8
    wrong                    0.2           0.1
    no answer                 -            0.0    (released: 0.1)

    outcome    1 if the answer matches exactly, else 0
    format     -lambda_f if correct but ill-formed, +lambda_f if wrong but well-formed, else 0
    final      `final` for a wrong answer in an ill-formed episode
    retrieval  `retrieval` for a wrong answer in a well-formed episode whose documents hold a golden answer; 0 in the
               scripts

    `paper`: executed actions, documents as the environment wrote them. `released`: `FORMAT_QUIRKS`.
    """
    correct, valid = form.is_correct(episode, question, quirks), form.is_well_formed(episode, quirks)
    answered = "final_without_answer" in quirks or form.answer_of(episode, quirks) is not None
    retrieved = valid and not correct and _retrieved(episode, question, quirks)
    return {
        "outcome": float(correct),
        "format": lambda_f * (valid - correct),
        "final": final if answered and not (correct or valid) else 0.0,
        "retrieval": retrieval if retrieved else 0.0,
    }


def _retrieved(episode: Episode, question: Question, quirks: frozenset[str]) -> bool:
    if "retrieval_by_substring" not in quirks:
        return any(cover_em(form.shown(episode, i), question.golden_answers) for i in range(len(episode.segments)))
    opening, closing = map(re.escape, form.tags_of(form.protocol_of(episode)).docs)
    blocks = re.findall(f"{opening}(.*?){closing}", form.released_text(episode), re.DOTALL)
    golds = [normalize_released(gold) for gold in golden_list(question.golden_answers)]
    return any(gold in normalize_released(block) for block in blocks for gold in golds)
