"""R1-Searcher (arXiv 2503.05592): queries and documents between pipe tags, which are plain text, within one thought.

Released loops: `openrlhf/trainer/ppo_utils/experience_maker.py` (training), `evaluation/eval_search_loacl.py`. A turn
without a query ends the episode, and so does a query in the ninth turn; evaluation then predicts "I don't know.". In
training `</answer>` is no stop there: `stops=("search",)` does that, and the policy writes on to its end token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from parasearch_jax.protocol.base import Limits, Protocol

_TASK = (
    "A user asks a question and an assistant answers it. The assistant reasons first, inside <think> and </think>, and "
    "then gives the final answer, a few words, inside <answer> and </answer>. While it reasons it may search for what "
    "it does not know by writing <|begin_of_query|> keywords <|end_of_query|>; results come back between "
    "<|begin_of_documents|> and <|end_of_documents|>, and then it goes on reasoning."
)


@dataclasses.dataclass(frozen=True)
class R1Searcher(Protocol):
    def queries(self, content: str) -> tuple[str, ...]:
        """One query; double quotes are dropped and blanks squeezed, as the released loop does."""
        query = " ".join(content.replace('"', "").split())
        return (query,) if query else ()

    def document(self, number: int, title: str, text: str) -> str:
        return f"({number}){title}   {text}\n"

    def observation(self, blocks: Iterable[str]) -> str:
        opening, closing = self.docs
        documents = "".join(blocks).strip() or "None"
        return f"\n\n{opening}\n{documents}\n{closing}\n\n"


R1_SEARCHER = R1Searcher(
    name="r1_searcher",
    prompt=_TASK + "\n\nUser: {question}\nAssistant: <think>",
    user="{question}",
    system=_TASK,
    opening="<think>",
    search=("<|begin_of_query|>", "<|end_of_query|>"),
    docs=("<|begin_of_documents|>", "<|end_of_documents|>"),
    thought="episode",
    on_invalid="end",
    unanswered="I don't know.",
    limits=Limits(max_turns=8, max_turn_tokens=512, observation_tokens=1000, max_total_tokens=8192),
)
