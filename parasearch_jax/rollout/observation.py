"""The text and ids of an observation: what all sub-queries of one search brought, within a budget of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from parasearch_jax.errors import UserError
from parasearch_jax.protocol import Protocol
from parasearch_jax.retrieval import Document


def document_blocks(protocol: Protocol, results: Sequence[Sequence[Document]]) -> list[str]:
    """The documents of each sub-query as text, in query order."""
    return [
        "".join(protocol.document(i, doc.title, doc.text) for i, doc in enumerate(documents, 1))
        for documents in results
    ]


def build_observation(
    protocol: Protocol, tokenizer, blocks: Sequence[str], budget: int, variant: str = "paper"
) -> tuple[str, list[int], int]:
    """(text, ids, number of blocks cut) for the block of each sub-query, in query order; at most `budget` ids.

    `paper`: the budget is shared equally among the sub-queries, what one does not use goes to the others, and documents
    are cut before the closing tag is added, so that every sub-query shows text and the block is always closed.
    `released`: one right cut through the whole, closing tag included (Search-R1, generation.py).
    """
    text = protocol.observation(blocks)
    ids = _encode(tokenizer, text)
    if len(ids) <= budget:
        return text, ids, 0
    if variant == "released":
        return tokenizer.decode(ids[:budget]), ids[:budget], 1
    room = budget - len(_encode(tokenizer, protocol.observation([])))
    while True:
        if room <= 0:
            raise UserError(
                f"rollout.observation_tokens is {budget}: too small for {' '.join(protocol.docs)} and "
                f"{len(blocks)} sub-queries; raise it"
            )
        lengths = [len(_encode(tokenizer, block)) for block in blocks]
        allowed = shares(lengths, room)
        text = protocol.observation([_cut(tokenizer, b, n) for b, n in zip(blocks, allowed, strict=True)])
        ids = _encode(tokenizer, text)
        if len(ids) <= budget:
            return text, ids, sum(n < length for n, length in zip(allowed, lengths, strict=True))
        room -= len(ids) - budget  # tokens that the joins cost


def shares(lengths: Sequence[int], budget: int) -> list[int]:
    """Equal shares of a budget, unused parts passed on: ([10, 50, 90], 120) -> [10, 50, 60]."""
    out, left = [0] * len(lengths), budget
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    for done, i in enumerate(order):
        out[i] = min(lengths[i], left // (len(order) - done))
        left -= out[i]
    return out


def _encode(tokenizer, text: str) -> list[int]:
    return _tokens(tokenizer, text)["input_ids"]


def _cut(tokenizer, text: str, tokens: int) -> str:
    """The longest start of a block that ends at one of its token borders and has at most that many tokens; it still
    ends its line, so that the next sub-query's documents begin a new one."""
    offsets = _tokens(tokenizer, text)["offset_mapping"]
    if len(offsets) <= tokens:
        return text
    kept = text[: offsets[tokens][0]].rstrip()
    return kept and kept + "\n"


def _tokens(tokenizer, text: str):
    # A document that writes out the end token shows its letters: it can't end or steer the context by the token itself.
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True)
