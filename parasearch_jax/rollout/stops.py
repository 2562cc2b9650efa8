"""Exact stops: a byte automaton over a protocol's tags, compiled to a table over the tokenizer's vocabulary.

On device a turn's state moves by a look-up a token, and the turn ends in the state `accept`. The rules are the parser's
(`protocol/base.py`): a closing tag counts only if its opening tag came before it in the turn. A tag may spread over
tokens, end inside one, or share one with another tag; the token that completes it is kept whole.

    states      node of the Aho-Corasick tree of the tags x which tags are open, e.g. "</sea" with <search> open
    kinds       tokens that move every state alike: most hold no part of a tag. Qwen2.5's 151,643 tokens are 45 kinds,
                so that 109 states take 0.6 MB, and not the 33 MB of a table [states, V]
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from parasearch_jax.errors import UserError
from parasearch_jax.protocol import Protocol

START = 0


class Stops(NamedTuple):
    """kind int32 [V]; table int16 [states, kinds]. State 0 is START, the last one `accept`, which is never left."""

    kind: np.ndarray | jax.Array
    table: np.ndarray | jax.Array

    @property
    def accept(self) -> int:
        return self.table.shape[0] - 1

    def next(self, state, token):
        """The state behind `token`; both of any shape."""
        return self.table[state, self.kind[token]]


def token_bytes(tokenizer) -> list[bytes]:
    """The bytes each token stands for; b"" for special tokens, which are no text.

    Of a byte-level BPE (Qwen, Llama 3), or in SentencePiece's manner (Llama 2, Mistral: "▁" for a space, "<0x0A>" for a
    byte). Raises UserError for a tokenizer that decodes in another way.
    """
    special, added = set(tokenizer.all_special_ids), tokenizer.get_added_vocab()
    read = _reader(tokenizer)
    out = [b""] * (max(tokenizer.get_vocab().values()) + 1)
    for token, i in tokenizer.get_vocab().items():
        if i not in special:
            out[i] = token.encode() if token in added else read(token)  # an added token is plain text
    return out


def _reader(tokenizer):
    """token -> its bytes, by the way the tokenizer decodes."""
    ways = _types(json.loads(tokenizer.backend_tokenizer.to_str())["decoder"])
    if "ByteLevel" in ways:
        bytes_of = {char: bytes([byte]) for byte, char in _byte_chars().items()}
        # A character that stands for no byte: an entry that was put into the vocabulary by hand.
        return lambda token: b"".join(bytes_of.get(char) or char.encode() for char in token)
    if ways & {"ByteFallback", "Metaspace"}:

        def read(token: str) -> bytes:
            byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
            return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()

        return read
    raise UserError(
        f"The tokenizer decodes by {', '.join(sorted(ways)) or 'nothing'}; known are ByteLevel (Qwen, Llama 3) and "
        "ByteFallback or Metaspace (SentencePiece). Take another model."
    )


def _types(decoder: Any) -> set[str]:
    """{"Sequence", "Replace", "ByteFallback"} of a decoder in tokenizer.json."""
    if isinstance(decoder, list):
        return set().union(*map(_types, decoder))
    if not isinstance(decoder, dict):
        return set()
    return {decoder["type"]} | _types(decoder.get("decoders"))


def _byte_chars() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def build_stops(
    protocol: Protocol | None, vocabulary: Sequence[bytes], end_ids: Sequence[int], size: int | None = None
) -> Stops:
    """The stops of a protocol's tags. Tokens in `end_ids` always stop, without a protocol they alone, and so do those
    past the vocabulary up to `size` (the model's V; None: there are none), which stand for nothing."""
    step = _byte_table(protocol).T.copy()  # [256, states]
    states = step.shape[1]
    kinds = {np.full(states, states - 1, step.dtype).tobytes(): 0}  # what a token does to each state -> its kind
    kind = np.zeros(size or len(vocabulary), np.int32)
    for token, text in enumerate(vocabulary):
        state = np.arange(states, dtype=step.dtype)
        for byte in text:
            state = step[byte][state]
        kind[token] = kinds.setdefault(state.tobytes(), len(kinds))
    kind[list(end_ids)] = 0
    columns = np.frombuffer(b"".join(kinds), step.dtype).reshape(-1, states)
    return Stops(kind, columns.T.astype(np.int16))


def _byte_table(protocol: Protocol | None) -> np.ndarray:
    """next state [states, 256] on single bytes."""
    tags, opened, kinds = _bits(protocol)
    nodes = _nodes(tags)
    masks = 1 << kinds
    accept = len(nodes) * masks
    index = {node: i for i, node in enumerate(nodes)}
    step = np.full((accept + 1, 256), accept, np.int32)
    for node in nodes:
        for byte in range(256):
            text = node + bytes([byte])
            # The longest end of it that is a tag; behind a tag the search for others begins anew.
            tag = next((text[n:] for n in range(len(text)) if text[n:] in tags), None)
            opens, closes = tags.get(tag, (0, 0))
            rest = text if tag is None else b""
            while rest not in index:  # longest suffix that some tag starts with
                rest = rest[1:]
            for mask in range(masks):
                closed = closes & (mask | opened)
                step[index[node] * masks + mask, byte] = accept if closed else index[rest] * masks + (mask | opens)
    return step


def _nodes(tags: Iterable[bytes]) -> list[bytes]:
    """Every proper start of a tag, the empty one first."""
    return sorted({tag[:n] for tag in tags for n in range(len(tag))} | {b""}, key=lambda node: (len(node), node))


def state_names(protocol: Protocol) -> list[str]:
    """What each state of `build_stops(protocol, ...)` has seen, for people: `within "</sea", open: search`."""
    tags, opened, _ = _bits(protocol)
    kinds = [kind for kind in protocol.stops if kind in protocol.tags()]
    names = []
    for node in _nodes(tags):
        for mask in range(1 << len(kinds)):
            within = [f'within "{node.decode(errors="replace")}"'] if node else []
            held = [kind for bit, kind in enumerate(kinds) if (mask | opened) >> bit & 1]
            names.append(", ".join([*within, f"open: {' and '.join(held) or 'nothing'}"]))
    return [*names, "end of the turn"]


def _bits(protocol: Protocol | None) -> tuple[dict[bytes, tuple[int, int]], int, int]:
    """({tag: (kinds that it opens, kinds that it closes)}, kinds that are open from the start, number of kinds).

    Sets of kinds are bits. A tag may close several.
    """
    tags: dict[bytes, tuple[int, int]] = {}
    pairs = protocol.tags() if protocol else {}
    stopping = [pairs[kind] for kind in protocol.stops if kind in pairs] if protocol else []
    opened = 0
    for bit, (opening, closing) in enumerate(stopping):
        opens, closes = tags.get(closing.encode(), (0, 0))
        tags[closing.encode()] = opens, closes | 1 << bit
        if opening:
            tags[opening.encode()] = 1 << bit, 0
        else:
            opened |= 1 << bit
    return tags, opened, len(stopping)
