"""Whether an episode is well-formed, and what it answers: by provenance (`paper`), or from the text as the released
scorers of Search-R1 and its heirs read it (`released`)."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from parasearch_jax.data.metrics import em, em_released
from parasearch_jax.data.types import Question
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
    """The tags of a protocol; those of documents are what it puts around them."""
    pairs = protocol.tags()
    before, after = protocol.observation(["\0"]).split("\0")
    think = f"<{protocol.think}>", f"</{protocol.think}>"
    return Tags(think, pairs[protocol.search], (before.strip(), after.strip()), pairs[protocol.answer])


def protocol_of(episode: Episode) -> Protocol:
    """The protocol whose tags the episode's text has; one made by hand without a protocol has those of `parallel`."""
    return episode.protocol or PROTOCOLS["parallel"]


def shown(episode: Episode, segment: int) -> str:
    """What an environment's reply shows, without its tags; "" if that segment is no documents, or not there."""
    found = episode.segments[segment : segment + 1]
    if not found or found[0].source != "docs":
        return ""
    opening, closing = tags_of(protocol_of(episode)).docs
    return found[0].text.replace(opening, "").replace(closing, "")


def valid_by_provenance(episode: Episode, protocol: str | Protocol | None = None) -> bool:
    """True if every turn is one thought, then one executed action, and the last action is an answer. Tags are those of
    `protocol`, by default the episode's own.

    A turn is `<think>..</think>` and a search or answer block, with nothing but blanks around and no tag inside a
    block. Documents and notices are not looked at: the environment wrote them.
    """
    if not episode.actions or not isinstance(episode.actions[-1], Answer):
        return False
    protocol = get_protocol(protocol or protocol_of(episode))
    turns = [_without_end_token(s.text) for s in episode.segments if s.source == "policy"]
    executed = {Search: protocol.search, Answer: protocol.answer}
    for turn, action in zip(turns, episode.actions, strict=True):
        match = _turn_pattern(protocol).fullmatch(turn)
        if match is None or match.group(1) != executed.get(type(action)):
            return False
    return True


@functools.cache
def _turn_pattern(protocol: Protocol) -> re.Pattern:
    tags = "|".join((protocol.think, protocol.search, protocol.answer, protocol.docs))
    content = rf"(?:(?!</?(?:{tags})>).)*"
    actions = f"{protocol.search}|{protocol.answer}"
    think = protocol.think
    return re.compile(rf"\s*<{think}>{content}</{think}>\s*<({actions})>{content}</\1>\s*", re.DOTALL)


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
