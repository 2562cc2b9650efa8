"""A protocol: the tags, the prompt, the parsing and the environment's replies of one agent family.

The parser and the stop automaton (`rollout/stops.py`) follow the same two rules and share one table of test cases:
a closing tag counts only if its opening tag came before it in the same turn, and the first that counts ends the turn.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

import jinja2

from parasearch_jax.errors import UserError
from parasearch_jax.rollout.types import Action, Answer, Invalid, Search

Tag = tuple[str, str]  # (opening, closing); an opening of "" is open from the turn's first character on

KINDS = ("search", "answer")
FORMS = ("auto", "raw", "chat")
DOCUMENTS = "\0documents\0"  # stands in a rendered prompt where documents are to come


@dataclasses.dataclass(frozen=True)
class Parsed:
    """The action of one turn. `end` is the character behind the closing tag (the text's length if there is none)."""

    action: Action
    end: int
    dropped_queries: int = 0


@dataclasses.dataclass(frozen=True)
class Turn:
    """Where in an episode a turn stands. The defaults are those of an episode that is read from stored text."""

    number: int = 1  # counted from 1
    last: bool = False  # no turn can follow it
    question: str = ""
    kind: str = "unknown"  # of the question
    earlier: tuple[Action, ...] = ()


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits that an agent was published with; `configs/common.use_protocol` puts them into a configuration. All
    lengths are in tokens."""

    max_turns: int = 4
    max_turn_tokens: int = 500
    observation_tokens: int = 500
    max_total_tokens: int = 4096
    topk: int = 3


@dataclasses.dataclass(frozen=True)
class Protocol:
    """Tags, prompt and limits of an agent family. Frozen, so that it can key a cache.

    The prompt is text with {question}, and for agents that get documents before their first turn {documents}. In the
    chat form it is the user's message, unless `user` stands for it, behind `system`.
    """

    name: str
    prompt: str
    user: str = ""  # of the chat form; empty: the prompt
    system: str = ""  # of the chat form; empty: what the template puts there by itself
    opening: str = ""  # of the chat form: what the model's first turn begins with
    form: str = "auto"  # "chat" (the tokenizer's template), "raw", "auto": chat where the tokenizer has a template
    search: Tag | None = ("<search>", "</search>")
    answer: Tag | None = ("<answer>", "</answer>")
    think: Tag | None = ("<think>", "</think>")
    plan: Tag | None = None  # a block that may stand before a thought
    docs: Tag = ("<information>", "</information>")
    stops: tuple[str, ...] = KINDS  # whose closing tag ends a turn; others are looked for when the turn has ended
    open_end: tuple[str, ...] = ()  # of which the end of a turn closes a block too
    thought: str = "turn"  # well-formed: a thought in every "turn", one around all searches ("episode"), or none ("")
    separator: str | None = None  # between sub-queries of one search; None: one query a search
    max_queries: int = 8  # sub-queries sent per search; the rest is counted and logged
    notice: str = "\nThat was no valid action. Search or answer.\n"  # shown, masked, after an invalid turn
    failed_notice: str = "The search failed. Search again or answer."  # masked, where documents would stand
    last_notice: str = ""  # shown, masked, before the last turn
    unanswered: str = ""  # closes, masked, an episode whose last turn has no answer
    on_invalid: str = "notice"  # or "end": an invalid turn ends the episode
    # An extra model call turns documents into what the policy sees; the template of its prompt, with {said} (by the
    # policy so far), {query} and {documents}; empty: the policy sees the documents.
    distil: str = ""
    limits: Limits = Limits()

    def __post_init__(self):
        if "{question}" not in self.prompt:
            raise UserError(f"the prompt of protocol {self.name!r} is {self.prompt!r:.200}; it must hold {{question}}")
        for name, value, known in (("form", self.form, FORMS), ("on_invalid", self.on_invalid, ("notice", "end"))):
            if value not in known:
                raise UserError(f"protocol.{name} is {value!r}; use one of: {', '.join(known)}")

    # ----------------------------------------------------------------------------------------------------------- prompt

    @property
    def documents_first(self) -> bool:
        """Whether the question is searched for before the first turn."""
        return "{documents}" in self.prompt

    @property
    def searches(self) -> bool:
        """Whether the agent has a use for a retriever."""
        return self.search is not None or self.documents_first

    def render_prompt(self, question: str) -> str:
        return _fill(self.prompt, question)

    def messages(self, question: str) -> list[dict[str, str]]:
        """The chat form's messages."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": _fill(self.user or self.prompt, question)}]

    def is_chat(self, tokenizer) -> bool:
        """Whether the model gets the chat form. Raises UserError if that is asked of a tokenizer without a template."""
        has = bool(getattr(tokenizer, "chat_template", None))
        if self.form == "chat" and not has:
            raise UserError("protocol.form is 'chat', but the model's tokenizer has no chat template; use 'raw'")
        return has and self.form != "raw"

    def describe(self, tokenizer) -> str:
        """A line for the log: the name, and the form of the prompt."""
        return f"protocol {self.name}, prompt {'in the chat template' if self.is_chat(tokenizer) else 'as it stands'}"

    def render(self, tokenizer, question: str, earlier: Sequence[Mapping[str, str]] = ()) -> str:
        """The text that the model gets for a question, behind `earlier` messages {"role", "content"} of a conversation.

        Raises UserError where earlier messages have no chat template to stand in, or it refuses them.
        """
        if self.is_chat(tokenizer):
            *system, user = self.messages(question)
            return _in_template(tokenizer, [*system, *map(dict, earlier), user]) + self.opening
        if earlier:
            raise UserError(
                f"there are {len(earlier) + 1} messages, but this model has no chat template, or protocol.form is "
                "'raw': send one user message"
            )
        return self.render_prompt(question)

    def render_extra(self, tokenizer, asked: str) -> str:
        """The text of an extra call's prompt."""
        return _in_template(tokenizer, [{"role": "user", "content": asked}]) if self.is_chat(tokenizer) else asked

    # ---------------------------------------------------------------------------------------------------------- parsing

    def tags(self) -> dict[str, Tag]:
        """Opening and closing string of each action that the agent has."""
        pairs = {"search": self.search, "answer": self.answer}
        return {kind: pair for kind, pair in pairs.items() if pair is not None}

    def parse(self, text: str, segment: int = 0, turn: Turn | None = None) -> Parsed:
        """The action of one turn's text: the first complete block decides.

        The content starts behind the last opening tag before the closing one; a content that still holds a tag of the
        protocol, or a search without a non-empty sub-query, is Invalid.
        """
        del turn
        tags = self.tags()
        stops = {kind: tags[kind] for kind in self.stops if kind in tags}
        block = first_block(text, stops) or first_block(text, tags) or self._open_block(text)
        if block is None:
            return Parsed(Invalid((segment, 0, len(text))), len(text))
        kind, start, content, end = block
        span = (segment, start, end)
        if any(tag and tag in content for pair in tags.values() for tag in pair):
            return Parsed(Invalid(span), end)
        if kind == "answer":
            return Parsed(Answer(content.strip(), span), end)
        queries = self.queries(content)
        if not queries:
            return Parsed(Invalid(span), end)
        dropped = max(0, len(queries) - self.max_queries)
        return Parsed(Search(queries[: self.max_queries], span), end, dropped)

    def queries(self, content: str) -> tuple[str, ...]:
        """The sub-queries of a search block: stripped, none of them empty."""
        parts = content.split(self.separator) if self.separator else [content]
        return tuple(query for query in (part.strip() for part in parts) if query)

    def _open_block(self, text: str) -> tuple[str, int, str, int] | None:
        """The block that is still open at the turn's end, of the kinds that may be; the last one that was opened."""
        openings = {kind: self.tags()[kind][0] for kind in self.open_end}
        opened = [(text.rfind(tag) if tag else 0, len(tag), kind) for kind, tag in openings.items() if tag in text]
        if not opened:
            return None
        start, length, kind = max(opened)
        return kind, start, text[start + length :], len(text)

    # -------------------------------------------------------------------------------------------------- the environment

    def refuse(self, action: Search, turn: Turn) -> str | None:
        """What stands where documents would if the search is not made; None: it is made."""
        del action, turn
        return None

    def document(self, number: int, title: str, text: str) -> str:
        """One result as the policy sees it (Search-R1's `Doc i(Title: T) text`)."""
        return f"Doc {number}(Title: {title}) {text}\n"

    def observation(self, blocks: Iterable[str]) -> str:
        """The environment's reply to a search: the blocks of all its sub-queries, in order, in one docs block."""
        opening, closing = self.docs
        return f"\n\n{opening}{''.join(blocks).strip()}{closing}\n\n"

    def failed(self) -> str:
        """The environment's reply to a search of which every sub-query failed. It stands in the block that documents
        stand in, so that a search is always followed by one, as the released scorer's validity asks."""
        return self.observation([self.failed_notice])

    def before_turn(self, turn: Turn) -> str:
        """What the environment says before a turn, behind documents or the notice of an invalid turn; "": nothing."""
        return self.last_notice if turn.last else ""

    def distil_prompt(self, said: str, query: str, documents: str) -> str:
        """What the extra call is asked."""
        values = {"{said}": said, "{query}": query, "{documents}": documents}
        return re.sub(r"\{(?:said|query|documents)\}", lambda match: values[match.group()], self.distil)

    def distilled(self, text: str) -> str:
        """What of the extra call's answer the policy sees."""
        return text

    # ------------------------------------------------------------------------------------------------------ stored text

    def split(self, response: str) -> list[tuple[str, str]]:
        """(source, text) pairs of a whole response that was stored as text: blocks of documents are the environment's,
        with the blanks around them, all else the policy's."""
        if not all(self.docs):
            raise UserError(f"protocol {self.name!r} puts no tags around documents: its text can't be taken apart")
        opening, closing = map(re.escape, self.docs)
        pieces = re.split(rf"(\s*{opening}.*?{closing}\s*)", response, flags=re.DOTALL)
        return [(("policy", "docs")[i % 2], piece) for i, piece in enumerate(pieces) if piece]


def _fill(template: str, question: str) -> str:
    """Other braces are text."""
    return template.replace("{documents}", DOCUMENTS).replace("{question}", question)


def _in_template(tokenizer, messages: Sequence[Mapping[str, str]]) -> str:
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except jinja2.TemplateError as error:
        raise UserError(f"the model's chat template refuses these messages: {error}") from error


def first_block(text: str, tags: Mapping[str, Tag]) -> tuple[str, int, str, int] | None:
    """(kind, start of the opening tag, content, end of the closing tag) of the first complete block. Where a closing
    tag closes several open kinds it is the one opened last."""
    pattern = "|".join(re.escape(tag) for pair in tags.values() for tag in pair if tag)
    opened = {kind: (0, 0) for kind, (opening, _) in tags.items() if not opening}
    for match in re.finditer(pattern, text) if pattern else ():
        closed = [kind for kind in opened if tags[kind][1] == match.group()]
        if closed:
            kind = max(closed, key=lambda kind: opened[kind])
            start, content = opened[kind]
            return kind, start, text[content : match.start()], match.end()
        opened |= {kind: match.span() for kind, (opening, _) in tags.items() if opening == match.group()}
    return None
