"""Exact stops: a byte automaton over a protocol's tags, compiled to a table over the tokenizer's vocabulary.

On device a turn's state moves by one gather a token, `state = table[state, token]`, and the turn ends at `ACCEPT`. The
rules are the parser's (`protocol/base.py`): a closing tag counts only if its opening tag came before it in the turn. A
tag may spread over tokens, end inside one, or share one with another tag; the token that completes it is kept whole.

    states      node of the Aho-Corasick tree of the tags x which tags are open, e.g. "</sea" with <search> open
    table       int16 [states, V]; START is 0, ACCEPT the last row, absorbing
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from parasearch_jax.protocol import Protocol

START = 0


def token_bytes(tokenizer) -> list[bytes]:
    """The bytes each token of a byte-level BPE stands for; b"" for special tokens, which are no text."""
    decode = {char: byte for byte, char in _byte_chars().items()}
    special = set(tokenizer.all_special_ids)
    out = [b""] * len(tokenizer)
    for token, i in tokenizer.get_vocab().items():
        if i not in special:
            known = all(char in decode for char in token)  # an added token is plain text instead
            out[i] = bytes(decode[char] for char in token) if known else token.encode()
    return out


def _byte_chars() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def build_stops(protocol: Protocol | None, vocabulary: Sequence[bytes], end_ids: Sequence[int]) -> np.ndarray:
    """table int16 [states, V] of a protocol's tags; tokens in `end_ids` always stop. Without one only these do."""
    step = _byte_table(protocol)
    accept = len(step) - 1
    table = np.empty((len(step), len(vocabulary)), np.int16)
    for token, text in enumerate(vocabulary):
        state = np.arange(len(step))
        for byte in text:
            state = step[state, byte]
        table[:, token] = state
    table[:, list(end_ids)] = accept
    return table


def _byte_table(protocol: Protocol | None) -> np.ndarray:
    """next state [states, 256] on single bytes."""
    pairs = list(protocol.tags().values()) if protocol else []
    tags = {tag.encode(): (kind, closing) for kind, pair in enumerate(pairs) for closing, tag in enumerate(pair)}
    nodes = sorted({tag[:n] for tag in tags for n in range(len(tag))} | {b""}, key=lambda node: (len(node), node))
    masks = 1 << len(pairs)
    accept = len(nodes) * masks
    index = {node: i for i, node in enumerate(nodes)}
    step = np.full((accept + 1, 256), accept, np.int32)
    for node in nodes:
        for byte in range(256):
            text = node + bytes([byte])
            whole = tags.get(text)  # no tag is part of another, so a complete tag is the whole node
            rest = text if whole is None else b""
            while rest not in index:  # longest suffix that some tag starts with
                rest = rest[1:]
            for mask in range(masks):
                step[index[node] * masks + mask, byte] = _target(index[rest] * masks, mask, whole, accept)
    return step


def _target(base: int, mask: int, whole: tuple[int, int] | None, accept: int) -> int:
    if whole is None:
        return base + mask
    kind, closing = whole
    if not closing:
        return base + (mask | 1 << kind)
    return accept if mask >> kind & 1 else base + mask
