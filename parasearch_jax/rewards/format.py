"""Whether an episode is well-formed, and what it answers: by provenance (`paper`), or from the text as the released
scorers of Search-R1 and its heirs read it (`released`)."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from parasearch_jax.data.metrics import em, em_released
from parasearch_jax.data.types import Question
from parasearch_jax.errors import UserError
from parasearch_jax.protocol import PROTOCOLS, Protocol, get_protocol
from parasearch_jax.rollout.types import Answer, Episode, Search

# An end token kept in a turn's text is no content. (The released loop loses it when it encodes the cut text anew; left
# in, it would make every text invalid.)
_END_TOKENS = re.compile(r"(?:<\|im_end\|>|<\|endoftext\|>|<\|eot_id\|>|<\|end_of_text\|>|</s>)+\s*\Z")

_NEXT_STATE = {  # (state, role of the tag, closing) -> state
    ("start", "think", False): "in_think",
    ("in_think", "think", True): "after_think",
    ("after_think", "search", False): "in_search",
    ("in_search", "search", True): "after_search",
    ("after_search", "docs", False): "in_docs",
    ("in_docs", "docs", True): "docs",
    ("docs", "think", False): "in_think",
    ("after_think", "answer", False): "in_answer",
    ("in_answer", "answer", True): "end",
}


class Tags(NamedTuple):
    """(opening, closing) string of each role."""

    think: tuple[str, str]
    search: tuple[str, str]
    docs: tuple[str, str]
    answer: tuple[str, str]


@functools.cache
def tags_of(protocol: Protocol) -> Tags:
    """The tags of a protocol. Raises UserError for one that has not all of them."""
    pairs = {role: getattr(protocol, role) for role in Tags._fields}
    if missing := [role for role, pair in pairs.items() if pair is None or not all(pair)]:
        raise UserError(
            f"protocol {protocol.name!r} has no {missing[0]} tags, which this reward reads in the text: take the "
            "variant 'paper', which reads actions, or another reward"
        )
    return Tags(**pairs)


def protocol_of(episode: Episode) -> Protocol:
    """The protocol whose tags the episode's text has; one made by hand without a protocol has those of `parallel`."""
    return episode.protocol or PROTOCOLS["parallel"]


def shown(episode: Episode, segment: int) -> str:
    """What an environment's reply shows, without its tags; "" if that segment is no documents, or not there."""
    found = episode.segments[segment : segment + 1]
    if not found or found[0].source != "docs":
        return ""
    opening, closing = protocol_of(episode).docs
    return found[0].text.replace(opening, "").replace(closing, "")


def valid_by_provenance(episode: Episode, protocol: str | Protocol | None = None) -> bool:
    """True if every action was executed, the last of them is an answer, and thoughts are where the protocol
    (`protocol`, by default the episode's own) has them:

    thought "turn"      a turn is `<think>..</think>` and a search or answer block, in that order, perhaps behind a plan
    thought "episode"   one thought, which the prompt may open, around all searches; then the answer
    thought ""          anywhere

    Nothing but blanks may stand around these blocks, and no tag inside of one. Documents and notices are not looked at:
    the environment wrote them.
    """
    if not episode.actions or not isinstance(episode.actions[-1], Answer):
        return False
    if not all(isinstance(action, Search) for action in episode.actions[:-1]):
        return False
    protocol = get_protocol(protocol or protocol_of(episode))
    turns = [_without_end_token(s.text) for s in episode.segments if s.source == "policy"]
    if protocol.thought == "episode":
        opened = protocol.think[0] if opened_by_prompt(episode, protocol) else ""
        turns[0] = opened + turns[0]
    patterns = [_turn_pattern(protocol, type(a), i == 0) for i, a in enumerate(episode.actions)]
    return all(pattern.fullmatch(turn) for pattern, turn in zip(patterns, turns, strict=True))


def opened_by_prompt(episode: Episode, protocol: Protocol) -> bool:
    """Whether the prompt ends with the tag that opens the thought."""
    prompts = [s.text for s in episode.segments if s.source == "prompt"]
    return bool(prompts) and prompts[-1].rstrip().endswith(protocol.think[0])


@functools.cache
def _turn_pattern(protocol: Protocol, action: type, first: bool) -> re.Pattern:
    """What a well-formed turn with this action looks like; `first`: it is the episode's first."""
    if not protocol.thought:
        return re.compile(".*", re.DOTALL)
    known = [tag for role in Tags._fields for tag in getattr(protocol, role) or ()]
    said = rf"(?:(?!{'|'.join(map(re.escape, known))}).)*"
    opening, closing = map(re.escape, protocol.think)
    block = said.join(map(re.escape, {Search: protocol.search, Answer: protocol.answer}[action]))
    if protocol.thought == "turn":
        plan = rf"(?:\s*{said.join(map(re.escape, protocol.plan))})?" if protocol.plan else ""
        return re.compile(rf"{plan}\s*{opening}{said}{closing}\s*{block}\s*", re.DOTALL)
    start, end = rf"\s*{opening}" if first else "", closing if action is Answer else ""
    return re.compile(rf"{start}{said}{end}\s*{block}\s*", re.DOTALL)


def released_text(episode: Episode) -> str:
    """The text after the prompt, all sources, as the authors' scorer gets it: without the end tokens of turns."""
    segments = [s for s in episode.segments if s.source != "prompt"]
    return "".join(_without_end_token(s.text) if s.source == "policy" else s.text for s in segments)


def _without_end_token(text: str) -> str:
    return _END_TOKENS.sub("", text)


def valid_by_text(text: str, tags: Tags | None = None) -> bool:
    """Validity of a response (the text after the prompt) by the state machine of Search-R1 v0.3 `qa_em_format.py`.

    think, search, information, think, ..., think, answer; only blanks between blocks and after the last. Read without
    ChatML's assistant marker, so that a Llama response can be valid too (the released function refuses all of those).
    """
    tags = tags or tags_of(PROTOCOLS["parallel"])
    meaning = {tag: (role, tag == pair[1]) for role, pair in tags._asdict().items() for tag in pair}
    state = "start"
    for piece in re.split(f"({'|'.join(map(re.escape, meaning))})", text):
        if piece in meaning:
            state = _NEXT_STATE.get((state, *meaning[piece]), "invalid")
        elif piece.strip() and not state.startswith("in_"):
            return False
    return state == "end"


def last_answer(text: str, tags: Tags) -> str | None:
    """The content of the last answer block of a text, None without one."""
    blocks = re.findall(f"{re.escape(tags.answer[0])}(.*?){re.escape(tags.answer[1])}", text, re.DOTALL)
    return blocks[-1].strip() if blocks else None


# Quirks that several rewards share (see `base`): their lines for the log, and what they change.
LAST_ANSWER = "the answer is the last '<answer>..</answer>' pair, executed or not, in documents and notices too"
SQUAD_EM = "exact match by SQuAD's normaliser, under which an empty answer equals the golden answer 'A' or 'the'"
TEXT_FORMAT = (
    "validity by a state machine over the whole text, so that a document with a tag in it, or one cut before its "
    "closing tag, makes the episode invalid; an invalid turn does so by its notice"
)


def answer_of(episode: Episode, quirks: frozenset[str]) -> str | None:
    """The executed answer, or with `last_answer` the last block in the text."""
    if "last_answer" in quirks:
        return last_answer(released_text(episode), tags_of(protocol_of(episode)))
    return episode.answer


def is_correct(episode: Episode, question: Question, quirks: frozenset[str]) -> bool:
    """Whether the answer matches exactly, under the normaliser that `squad_em` says."""
    match = em_released if "squad_em" in quirks else em
    return match(answer_of(episode, quirks), question.golden_answers) == 1.0


def is_well_formed(episode: Episode, quirks: frozenset[str]) -> bool:
    """`valid_by_provenance`, or with `text_format` `valid_by_text`."""
    if "text_format" in quirks:
        return valid_by_text(released_text(episode), tags_of(protocol_of(episode)))
    return valid_by_provenance(episode)
