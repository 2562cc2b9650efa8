"""Episodes: what the policy, the retriever and the environment said, in order, with the sampled ids.

Masks and actions come from `Segment.source`, never from searching the text for tags.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parasearch_jax.protocol import Protocol

SOURCES = ("prompt", "policy", "docs", "notice")
STOP_REASONS = ("answer", "eos", "turns", "length", "cancelled", "error")

Span = tuple[int, int, int]  # (index of the policy segment, first character, end character) in that segment's text


@dataclasses.dataclass(frozen=True)
class Segment:
    """A stretch of the episode from one source.

    `ids` are the token ids as they stand in the model's context (policy ids exactly as sampled), None for an episode
    made from text. `logprobs` are the sampler's log p of each id at the sampling temperature, on policy segments only.
    """

    source: str
    text: str
    ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None

    def __post_init__(self):
        if self.source not in SOURCES:
            raise ValueError(f"segment source {self.source!r} is none of {', '.join(SOURCES)}")
        if self.logprobs is not None and len(self.logprobs) != len(self.ids or ()):
            found = f"{len(self.ids or ())} ids but {len(self.logprobs)} log-probs"
            raise ValueError(f"{self.source} segment {self.text[:40]!r} has {found}; keep them together")


@dataclasses.dataclass(frozen=True)
class Search:
    """An executed search: its sub-queries, stripped, non-empty, in order.

    Executed means sent. A search that the retriever failed to answer is one too: rewards judge what the policy did, so
    that an outage neither makes a well-formed turn ill-formed nor gives searches away.
    """

    queries: tuple[str, ...]
    span: Span


@dataclasses.dataclass(frozen=True)
class Answer:
    """An executed answer; `text` is stripped and may be empty."""

    text: str
    span: Span


@dataclasses.dataclass(frozen=True)
class Invalid:
    """A turn without a valid action (no complete block, no query, or a search where only an answer was possible)."""

    span: Span


Action = Search | Answer | Invalid


@dataclasses.dataclass
class Episode:
    """One trajectory. `actions` holds one entry per policy segment, in order."""

    segments: list[Segment] = dataclasses.field(default_factory=list)
    actions: list[Action] = dataclasses.field(default_factory=list)
    stop_reason: str = "error"
    question_id: str = ""
    sample: int = 0  # number of the sample within its question's group
    version: int = 0  # version of the weights that sampled it
    dropped_queries: int = 0  # sub-queries over the protocol's limit, not sent
    failed_searches: int = 0  # sub-queries whose retriever call failed or had no answer in time: no document shown
    protocol: Protocol | None = dataclasses.field(default=None, repr=False)  # whose tags its text has
    # Model calls beside its own turns, each with a prompt and what was said (Search-o1's reading of documents).
    extra: list[Episode] = dataclasses.field(default_factory=list, repr=False)

    @property
    def searches(self) -> list[Search]:
        return [a for a in self.actions if isinstance(a, Search)]

    @property
    def answer(self) -> str | None:
        """The executed answer, None if there is none."""
        return next((a.text for a in reversed(self.actions) if isinstance(a, Answer)), None)

    @property
    def turns(self) -> int:
        """Model calls."""
        return sum(s.source == "policy" for s in self.segments)

    @property
    def response(self) -> str:
        """The text after the prompt, all sources, as the authors' scorer reads it."""
        return "".join(s.text for s in self.segments if s.source != "prompt")

    def length(self) -> int:
        """Token ids in all segments."""
        return sum(len(s.ids or ()) for s in self.segments)

    @classmethod
    def from_text(cls, pairs: Iterable[Sequence[str]], protocol="parallel", question: str = "") -> Episode:
        """An episode from stored (source, text) pairs, so that it can be scored again. `question` is its text, for
        protocols that search for it (`iter_retgen`).

        A search counts as executed when a docs segment follows it directly, or the notice that it failed; otherwise its
        turn is Invalid, as the unexecuted search of a forced final generation is in a rollout.
        """
        from parasearch_jax.protocol import Turn, get_protocol

        protocol = get_protocol(protocol)
        segments = [Segment(source, text) for source, text in pairs]
        turns = [i for i, segment in enumerate(segments) if segment.source == "policy"]
        actions, dropped = [], 0
        for number, i in enumerate(turns, 1):
            reply = segments[i + 1] if i + 1 < len(segments) else Segment("notice", "")
            followed = reply.source == "docs" or (reply.source, reply.text) == ("notice", protocol.failed())
            turn = Turn(number, number == len(turns) and not followed, question, earlier=tuple(actions))
            parsed = protocol.parse(segments[i].text, i, turn)
            if isinstance(parsed.action, Search) and not followed:
                parsed = dataclasses.replace(parsed, action=Invalid(parsed.action.span))
            actions.append(parsed.action)
            dropped += parsed.dropped_queries
        answered = bool(actions) and isinstance(actions[-1], Answer)
        return cls(segments, actions, "answer" if answered else "turns", dropped_queries=dropped, protocol=protocol)
