"""When is an episode well-formed? By provenance (`paper`), or from the text as the released scorers read it."""

from __future__ import annotations

import functools
import re

from parasearch_jax.protocol import Protocol, get_protocol
from parasearch_jax.rollout.types import Answer, Episode, Search

# An end token kept in a turn's text is no content. (The released loop loses it when it encodes the cut text anew; left
# in, it would make every text invalid.)
_END_TOKENS = re.compile(r"(?:<\|im_end\|>|<\|endoftext\|>|<\|eot_id\|>|<\|end_of_text\|>|</s>)+\s*\Z")

_TAG = re.compile(r"(</?(?:think|search|information|answer)>)")
_NEXT_STATE = {
    ("start", "<think>"): "in_think",
    ("in_think", "</think>"): "after_think",
    ("after_think", "<search>"): "in_search",
    ("in_search", "</search>"): "after_search",
    ("after_search", "<information>"): "in_information",
    ("in_information", "</information>"): "information",
    ("information", "<think>"): "in_think",
    ("after_think", "<answer>"): "in_answer",
    ("in_answer", "</answer>"): "end",
}


def valid_by_provenance(episode: Episode, protocol: str | Protocol = "parallel") -> bool:
    """True if every turn is one thought, then one executed action, and the last action is an answer.

    A turn is `<think>..</think>` and a search or answer block, with nothing but blanks around and no tag inside a
    block. Documents and notices are not looked at: the environment wrote them.
    """
    if not episode.actions or not isinstance(episode.actions[-1], Answer):
        return False
    protocol = get_protocol(protocol)
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


def valid_by_text(text: str) -> bool:
    """Validity of a response (the text after the prompt) by the state machine of Search-R1 v0.3 `qa_em_format.py`.

    think, search, information, think, ..., think, answer; only blanks between blocks and after the last. Read without
    ChatML's assistant marker, so that a Llama response can be valid too (the released function refuses all of those).
    """
    state = "start"
    for piece in _TAG.split(text):
        if _TAG.fullmatch(piece):
            state = _NEXT_STATE.get((state, piece), "invalid")
        elif piece.strip() and not state.startswith("in_"):
            return False
    return state == "end"
