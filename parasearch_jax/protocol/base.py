"""A protocol: the tags, the prompt and the parsing of one agent family.

The parser and the stop automaton (`rollout/stops.py`) follow the same two rules and share one table of test cases:
a closing tag counts only if its opening tag came before it in the same turn, and the first that counts ends the turn.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from parasearch_jax.errors import UserError
from parasearch_jax.rollout.types import Action, Answer, Invalid, Search


@dataclasses.dataclass(frozen=True)
class Parsed:
    """The action of one turn. `end` is the character behind the closing tag (the text's length if there is none)."""

    action: Action
    end: int
    dropped_queries: int = 0


@dataclasses.dataclass(frozen=True)
class Protocol:
    """Tags, prompt and limits of an agent family. Frozen, so that it can key a cache."""

    name: str
    prompt: str  # template with {question}
    notice: str = "\nThat was no valid action. Search or answer.\n"  # shown, masked, after an invalid turn
    failed_notice: str = "The search failed. Search again or answer."  # masked, where documents would stand
    search: str = "search"
    answer: str = "answer"
    think: str = "think"
    docs: str = "information"
    separator: str | None = "##"  # between sub-queries of one search; None: one query a search
    max_queries: int = 8  # sub-queries sent per search; the rest is counted and logged

    def __post_init__(self):
        if "{question}" not in self.prompt:
            raise UserError(f"the prompt of protocol {self.name!r} is {self.prompt!r:.200}; it must hold {{question}}")

    def tags(self) -> dict[str, tuple[str, str]]:
        """Opening and closing string of each action."""
        return {kind: (f"<{kind}>", f"</{kind}>") for kind in (self.search, self.answer)}

    def render_prompt(self, question: str) -> str:
        return self.prompt.replace("{question}", question)  # other braces are text

    def parse(self, text: str, segment: int = 0) -> Parsed:
        """The action of one turn's text: the first complete block decides.

        The content starts behind the last opening tag before the closing one; a content that still holds a tag of the
        protocol, or a search without a non-empty sub-query, is Invalid.
        """
        block = self._first_block(text)
        if block is None:
            return Parsed(Invalid((segment, 0, len(text))), len(text))
        kind, start, content, end = block
        span = (segment, start, end)
        if any(tag in content for pair in self.tags().values() for tag in pair):
            return Parsed(Invalid(span), end)
        if kind == self.answer:
            return Parsed(Answer(content.strip(), span), end)
        parts = content.split(self.separator) if self.separator else [content]
        queries = tuple(q for q in (part.strip() for part in parts) if q)
        if not queries:
            return Parsed(Invalid(span), end)
        dropped = max(0, len(queries) - self.max_queries)
        return Parsed(Search(queries[: self.max_queries], span), end, dropped)

    def document(self, number: int, title: str, text: str) -> str:
        """One result as the policy sees it (Search-R1's `Doc i(Title: T) text`)."""
        return f"Doc {number}(Title: {title}) {text}\n"

    def observation(self, blocks: Iterable[str]) -> str:
        """The environment's reply to a search: the blocks of all its sub-queries, in order, in one docs block."""
        return f"\n\n<{self.docs}>{''.join(blocks).strip()}</{self.docs}>\n\n"

    def failed(self) -> str:
        """The environment's reply to a search of which every sub-query failed. It stands in the block that documents
        stand in, so that a search is always followed by one, as the released scorer's validity asks."""
        return self.observation([self.failed_notice])

    def _first_block(self, text: str) -> tuple[str, int, str, int] | None:
        """(kind, start of the opening tag, content, end of the closing tag) of the first complete block."""
        pattern = "|".join(re.escape(tag) for pair in self.tags().values() for tag in pair)
        opened: dict[str, re.Match] = {}
        for match in re.finditer(pattern, text):
            tag = match.group()
            kind = tag.strip("</>")
            if not tag.startswith("</"):
                opened[kind] = match
            elif kind in opened:
                start = opened[kind]
                return kind, start.start(), text[start.end() : match.start()], match.end()
        return None
