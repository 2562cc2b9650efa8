"""The rewards of R1-Searcher (arXiv 2503.05592).

    stage 1   0.5 for a search + 0.5 for the format                                       r1_searcher_stage1
    stage 2   F1, less 2 for a wrong format (Qwen), in code less 1 for Llama              r1_searcher_stage2, .._llama
    Table 5   exact match or cover-EM, +1 or -1                                           r1_searcher_em, .._cover_em

Released code: `train/reward_server_{llama_stage1,qwen_zero,llama_stage2}.py`. It counts tags in the text behind the
prompt, documents and notices with it, and wants one thought in the whole episode, which the prompt opens. So
`released` fits protocols that think so; where every turn has a thought of its own, each episode with a search is
ill-formed under it. The tags are those of the episode's protocol.

EM, F1 and cover-EM are R1-Searcher's own (`data/r1_searcher_metrics.py`), the best over the golden answers (the servers
know one). Not kept from the servers: stage 1 returns pairs that the released trainer refuses, and the question is
cut out of the prompt to look up its answer.
"""

from __future__ import annotations

import re

from parasearch_jax.data import r1_searcher_metrics as metrics
from parasearch_jax.data.types import Question
from parasearch_jax.rewards import format as form
from parasearch_jax.rewards.base import register
from parasearch_jax.rollout.types import Episode

MOST_ANSWER_WORDS = 10
_CHINESE = re.compile("[\u4e00-\u9fff]")

_LAST_ANSWER = (
    "the answer is what follows the last '<answer>', up to '</answer>', in documents and notices too; none if one of "
    "the two tags stands nowhere"
)
_COUNT_TAGS = (
    "searches and document blocks are counted as strings, in documents and notices too: opening and closing tags, "
    "with and without what the environment puts behind them, must be equally many"
)
_TEXT_FORMAT = "the format is right if the text has one thought (which the prompt may open) and one answer, anywhere"

STAGE1_QUIRKS = {
    "pays_answer": "+1 for an answer that holds the golden one (cover-EM), -1 for another or none: not in the paper",
    "last_answer": _LAST_ANSWER,
    "count_tags": f"the search is paid only where {_COUNT_TAGS}, and not 0",
    "text_format": _TEXT_FORMAT,
}
LLAMA_QUIRKS = {
    "last_answer": _LAST_ANSWER,
    "count_tags": _COUNT_TAGS,
    "text_format": _TEXT_FORMAT,
    "chinese": "a Chinese character outside of document blocks is a fault",
}
QWEN_QUIRKS = LLAMA_QUIRKS | {
    "assistant": "'Assistant' or 'assistant' anywhere is a fault, in documents too",
    "tags_in_answer": "a search or document tag within the answer is a fault",
    "long_answer": f"an answer of more than {MOST_ANSWER_WORDS} words is a fault",
}


@register("r1_searcher_stage1", quirks=STAGE1_QUIRKS)
def stage1(
    episode: Episode,
    question: Question,
    *,
    quirks: frozenset[str] = frozenset(),
    search: float = 0.5,
    well_formed: float = 0.5,
) -> dict[str, float]:
    """Stage 1, in which the policy learns to search.

    search  `search` if some search was executed, else 0
    format  `well_formed` if the episode is (`valid_by_provenance`), else 0
    answer  0 in `paper`, which does not look at the answer; see `pays_answer`

    `released` (the Llama server, between -1 and 2): `STAGE1_QUIRKS`.
    """
    counted = _tag_counts(episode)
    searched = len(set(counted)) == 1 and counted[0] >= 1 if "count_tags" in quirks else bool(episode.searches)
    answer = 2 * metrics.cover_em_bag(_answer(episode, quirks), question.golden_answers) - 1
    return {
        "search": search if searched else 0.0,
        "format": well_formed if _right_format(episode, quirks) else 0.0,
        "answer": answer if "pays_answer" in quirks else 0.0,
    }


@register("r1_searcher_stage2", quirks=QWEN_QUIRKS)
def stage2(
    episode: Episode, question: Question, *, quirks: frozenset[str] = frozenset(), penalty: float = 2.0
) -> dict[str, float]:
    """Stage 2, F1 - 2.

    f1      F1 of the answer, 0 without one
    format  -penalty, once, if the episode is not well-formed (`valid_by_provenance`)

    `released` (the Qwen server): `QWEN_QUIRKS`; an episode has the penalty for any of these faults.
    """
    return {
        "f1": metrics.f1(_answer(episode, quirks), question.golden_answers),
        "format": -penalty if _faulty(episode, quirks) else 0.0,
    }


@register("r1_searcher_stage2_llama", quirks=LLAMA_QUIRKS)
def stage2_llama(
    episode: Episode, question: Question, *, quirks: frozenset[str] = frozenset(), penalty: float = 1.0
) -> dict[str, float]:
    """Stage 2 as the Llama server has it, F1 - 1: as `stage2`, with fewer faults (`LLAMA_QUIRKS`) in `released`. The
    paper gives -2 for both models."""
    return stage2(episode, question, quirks=quirks, penalty=penalty)


@register("r1_searcher_em")
def signed_em(episode: Episode, question: Question) -> dict[str, float]:
    """em: +1 if the executed answer matches exactly, else -1 (Table 5). No server for it was released."""
    return {"em": 2 * metrics.em(episode.answer, question.golden_answers) - 1}


@register("r1_searcher_cover_em")
def signed_cover_em(episode: Episode, question: Question) -> dict[str, float]:
    """cover_em: +1 if the executed answer has every word of a golden one, in any order, else -1 (Table 5)."""
    return {"cover_em": 2 * metrics.cover_em_bag(episode.answer, question.golden_answers) - 1}


def _answer(episode: Episode, quirks: frozenset[str]) -> str | None:
    if "last_answer" not in quirks:
        return episode.answer
    text, (opening, closing) = form.released_text(episode), form.tags_of(form.protocol_of(episode)).answer
    if opening not in text or closing not in text:
        return None
    return text.split(opening)[-1].split(closing)[0].strip()


def _faulty(episode: Episode, quirks: frozenset[str]) -> bool:
    """Whether the episode has a fault that these quirks, or without them the paper, punish."""
    if not _right_format(episode, quirks):
        return True
    if not quirks:
        return False
    text, tags = form.released_text(episode), form.tags_of(form.protocol_of(episode))
    answer = _answer(episode, quirks) or ""
    named = [tag.removeprefix("<|").removesuffix("|>") for tag in (tags.search[0], tags.docs[0])]  # "begin_of_query"
    own = re.sub(f"{re.escape(tags.docs[0])}.*?{re.escape(tags.docs[1])}", "", text, flags=re.DOTALL)
    faults = {
        "count_tags": len(set(_tag_counts(episode))) > 1,
        "chinese": bool(_CHINESE.search(own)),
        "assistant": "Assistant" in text or "assistant" in text,
        "tags_in_answer": any(name in answer for name in named),
        "long_answer": len(answer.split()) > MOST_ANSWER_WORDS,
    }
    return any(faults[quirk] for quirk in quirks & set(faults))


def _right_format(episode: Episode, quirks: frozenset[str]) -> bool:
    if "text_format" not in quirks:
        return form.valid_by_provenance(episode)
    text, tags = form.released_text(episode), form.tags_of(form.protocol_of(episode))
    counts = [text.count(tag) for tag in (*tags.think, *tags.answer)]
    return counts == [0 if form.opened_by_prompt(episode, form.protocol_of(episode)) else 1, 1, 1, 1]


def _tag_counts(episode: Episode) -> list[int]:
    """How often the text has each of the seven strings: document tags alone, as the environment writes them with the
    blanks behind, with the head of the first document, and query tags.

    For R1-Searcher's protocol: "<|begin_of_documents|>", that with "\\n", that with "\\n(1)", "<|end_of_documents|>",
    that with "\\n\\n", "<|begin_of_query|>", "<|end_of_query|>".
    """
    protocol = form.protocol_of(episode)
    text, tags = form.released_text(episode), form.tags_of(protocol)
    block = protocol.observation([protocol.document(1, "\0", "\0")])
    head = block[block.index(tags.docs[0]) : block.index("\0")]
    blanks = re.match(r"\s*", head[len(tags.docs[0]) :]).group()
    tail = block[block.rindex(tags.docs[1]) :]
    return [text.count(s) for s in (tags.docs[0], tags.docs[0] + blanks, head, tags.docs[1], tail, *tags.search)]
