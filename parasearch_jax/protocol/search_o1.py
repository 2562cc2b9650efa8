r"""Search-o1 (arXiv 2501.05366): searches within free reasoning, an answer in \boxed{}, and an extra model call that
reads the documents of a search (Reason-in-Documents).

Released code: `scripts/run_search_o1.py`. There Bing's pages are cut around the snippet; here documents come from
`config.retriever`, as in the row of Search-R1's paper. A query that was made before and one behind the last permitted
search get a notice and no documents. The extra call samples like the policy, at most `rollout.max_turn_tokens` tokens.
"""

from __future__ import annotations

import dataclasses

from parasearch_jax.protocol.base import Limits, Parsed, Protocol, Turn, first_block
from parasearch_jax.rollout.types import Answer, Invalid, Search

MARKER = "Final Information"
NO_INFORMATION = "No helpful information found."


@dataclasses.dataclass(frozen=True)
class SearchO1(Protocol):
    max_searches: int = 10
    max_searches_single: int = 5  # of questions of the kind "single"

    def parse(self, text: str, segment: int = 0, turn: Turn | None = None) -> Parsed:
        r"""The first complete search, else the last \boxed{} of the turn, braces balanced."""
        del turn
        block = first_block(text, {"search": self.search})
        if block is not None:
            _, start, content, end = block
            queries = self.queries(content)
            action = Search(queries, (segment, start, end)) if queries else Invalid((segment, start, end))
            return Parsed(action, end)
        boxed = _last_boxed(text, self.answer[0])
        if boxed is None:
            return Parsed(Invalid((segment, 0, len(text))), len(text))
        start, content, end = boxed
        return Parsed(Answer(content.strip(), (segment, start, end)), len(text))

    def refuse(self, action: Search, turn: Turn) -> str | None:
        searches = [earlier for earlier in turn.earlier if isinstance(earlier, Search)]
        if any(earlier.queries == action.queries for earlier in searches):
            return "This query was searched before; see its results above."
        most = self.max_searches_single if turn.kind == "single" else self.max_searches
        if len(searches) >= most:
            return f"All {most} searches are used up; go on without."
        return None

    def distil_prompt(self, said: str, query: str, documents: str) -> str:
        return super().distil_prompt(shortened(said, self.search), query, documents)

    def distilled(self, text: str) -> str:
        """What stands behind the marker; all of it where the marker is missing."""
        return text.rpartition(MARKER)[2].lstrip("*:").strip() or NO_INFORMATION


def shortened(said: str, search: tuple[str, str], recent: int = 4) -> str:
    """The first paragraph, the last four, and those with a search in them; others are three dots."""
    steps = [step for step in said.split("\n\n") if step.strip()]
    out: list[str] = []
    for i, step in enumerate(steps):
        if i == 0 or i >= len(steps) - recent or any(tag in step for tag in search):
            out.append(step)
        elif out[-1] != "...":
            out.append("...")
    return "\n\n".join(out)


def _last_boxed(text: str, opening: str) -> tuple[int, str, int] | None:
    r"""(start, content, end) of the last complete \boxed{...}."""
    start = text.rfind(opening)
    while start >= 0:
        depth, at = 1, start + len(opening)
        while at < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            at += 1
        if not depth:
            return start, text[start + len(opening) : at - 1], at
        start = text.rfind(opening, 0, start)
    return None


SEARCH_O1 = SearchO1(
    name="search_o1",
    prompt=(
        "Answer the question below step by step. When you are not sure of a fact, search for it by writing "
        "<|begin_search_query|> query <|end_search_query|>; what was found comes back between <|begin_search_result|> "
        "and <|end_search_result|>. Search as often as you need, then go on reasoning. Give the final answer, a few "
        "words, inside \\boxed{}. Question: {question}\n"
    ),
    search=("<|begin_search_query|>", "<|end_search_query|>"),
    answer=("\\boxed{", "}"),
    think=None,
    docs=("<|begin_search_result|>", "<|end_search_result|>"),
    stops=("search",),
    thought="",
    on_invalid="end",
    distil=(
        "Someone reasons about a question and has searched for: {query}\n\nTheir reasoning so far:\n{said}\n\nThe "
        "documents found:\n{documents}\nRead the documents and say what in them helps the reasoning on, and nothing "
        f"else. End with a line that begins with {MARKER}: and gives it in a few sentences, or says: "
        f"{NO_INFORMATION}\n"
    ),
    limits=Limits(max_turns=14, max_turn_tokens=2048, observation_tokens=1000, max_total_tokens=16384, topk=10),
)
