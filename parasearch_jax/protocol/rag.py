"""Agents whose environment decides when to search: standard RAG, Iter-RetGen (arXiv 2305.15294), IRCoT (2212.10509).

The question is searched for first; its documents stand in the prompt. Iter-RetGen and IRCoT then get more behind each
turn. Their authors build a new prompt for every call, with the newest (Iter-RetGen) or all documents (IRCoT) in front;
here a call goes on where the last one ended, in one context, so that one cache serves the episode and it can be trained
on. What differs is the place of the documents.
"""

from __future__ import annotations

import dataclasses

from parasearch_jax.protocol.base import Limits, Parsed, Protocol, Turn
from parasearch_jax.rollout.types import Search

ANSWER_LINE = ("So the answer is:", "\n")


@dataclasses.dataclass(frozen=True)
class Rag(Protocol):
    """Documents as they are, without tags around them."""

    def observation(self, blocks) -> str:
        return "".join(blocks)


@dataclasses.dataclass(frozen=True)
class IterRetGen(Rag):
    def parse(self, text: str, segment: int = 0, turn: Turn | None = None) -> Parsed:
        """A turn answers from the documents so far; all but the last are a search too, for the question with what was
        said. Only the last turn's answer counts."""
        turn = turn or Turn()
        if turn.last:
            return super().parse(text, segment, turn)
        query = " ".join(f"{turn.question} {text}".split())
        return Parsed(Search((query,), (segment, 0, len(text))), len(text))

    def before_turn(self, turn: Turn) -> str:
        return f"\nAnswer again, with these documents too.\nQuestion: {turn.question}\n"


RAG = Rag(
    name="rag",
    prompt=(
        "Answer the question from the documents. Give only the answer.\n{documents}\nQuestion: {question}\nAnswer:"
    ),
    search=None,
    answer=("", "\n"),
    think=None,
    docs=("", ""),
    open_end=("answer",),
    thought="",
    limits=Limits(max_turns=0, max_turn_tokens=32, observation_tokens=1000),
)

ITER_RETGEN = IterRetGen(
    name="iter_retgen",
    prompt=(
        "Answer the question from the documents. Think in a few words, then end with one line: So the answer is: and "
        "the answer alone.\n{documents}\nQuestion: {question}\n"
    ),
    search=None,
    answer=ANSWER_LINE,
    think=None,
    docs=("", ""),
    open_end=("answer",),
    thought="",
    limits=Limits(max_turns=2, max_turn_tokens=256, observation_tokens=1000, topk=5),
)

IRCOT = Rag(
    name="ircot",
    prompt=(
        "Answer the question from the documents, one step of thought a line. Documents on each step follow it. When "
        "you know it, write: So the answer is: and the answer alone.\n{documents}\nQuestion: {question}\n"
    ),
    search=("", "\n"),
    answer=ANSWER_LINE,
    think=None,
    docs=("", ""),
    open_end=("search", "answer"),
    thought="",
    limits=Limits(max_turns=5, max_turn_tokens=128, observation_tokens=1000),
)
