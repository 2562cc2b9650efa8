"""Models for the engine's tests: one that says what a script tells it to, one with random weights, and retrievers.

The scripted model is a real Qwen2 decoder with weights set by hand, so that scripted episodes run through the real
engine, cache and sampler; nothing is patched. Its one attention layer attends evenly to the whole context, so that its
output is the bag of tokens so far. A vocabulary entry holds any piece of text, and no piece occurs twice:

    within a turn      the next piece follows from the one before it
    a turn's start     piece 1 of turn j+1 is due when piece 1 of turn j is in the bag and its own is not; the prompt's
                       marker (a capital letter that documents and notices do not hold) counts as turn 0
"""

import asyncio
import dataclasses
import itertools
import random
import threading
import time

import jax
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from parasearch_jax.models import Model, decoder
from parasearch_jax.models.decoder import DecoderConfig
from parasearch_jax.protocol import get_protocol
from parasearch_jax.retrieval import Document, Retriever
from parasearch_jax.toy import questions, trajectories, world
from parasearch_jax.toy.tokenizer import END, train_tokenizer

PROTOCOL = get_protocol("parallel", prompt="{question}\n")
LOOP = object()  # as a turn's last piece: the piece before it follows itself for ever


def byte_char(byte):
    """GPT-2's stand-in for a byte, from the tokenizers library."""
    return _CHARS[byte]


def _chars():
    """byte -> character, read off the library's own pre-tokenizer; bytes that UTF-8 never has are left out."""
    level, out = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), {}
    for char in map(chr, [*range(0x800), *range(0x800, 0xD800, 64), *range(0xE000, 0x110000, 64)]):
        out |= dict(zip(char.encode(), level.pre_tokenize_str(char)[0][0], strict=True))
    return out


_CHARS = _chars()


def byte_tokenizer(pieces=()):
    """A byte-level tokenizer without merges: text encodes to single bytes, `pieces` can only be sampled."""
    names = ["".join(map(byte_char, p.encode() if isinstance(p, str) else p)) for p in pieces]
    assert len(set(names)) == len(names) and all(len(name) > 1 for name in names), "pieces must differ from one another"
    words = [END, *sorted(pre_tokenizers.ByteLevel.alphabet()), *names]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def scripted_model(scripts, size=0, width=0):
    """scripts {marker: [turn: [piece, ..]]}; a piece is str, bytes, END or LOOP.

    At least `size` rows and `width` units, so that models of several scripts share their programs.
    """
    turns = [turn for script in scripts.values() for turn in script]
    pieces = [p for turn in turns for p in turn if p is not LOOP and p != END]
    tokenizer = byte_tokenizer(pieces)
    known = {piece: 257 + i for i, piece in enumerate(pieces)} | {END: 0}
    V, H = max(size, len(tokenizer)), max(width, 2 * (len(turns) + len(scripts)))
    cfg = DecoderConfig(
        vocab_size=V,
        hidden_size=V + H,  # the token itself, then the bag of markers
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=H,
        intermediate_size=2,
        eos_token_ids=(0,),
    )
    params = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), decoder.param_shapes(cfg))
    params["embed"][:, :V] = np.eye(V)
    layer = params["layers"]
    for norm in (layer["attn_norm"], layer["mlp_norm"], params["norm"]):
        norm["scale"][:] = 1
    attn, head, marks = layer["attn"], params["head"], iter(range(H))
    attn["o"][0, 0, :, V:] = np.eye(H)

    def mark(token):
        m = next(marks)
        attn["v"][0, token, 0, m] = 1
        return V + m

    for marker, script in scripts.items():
        seen = mark(tokenizer(marker)["input_ids"][0])
        for turn in script:
            start, own = known[turn[0]], mark(known[turn[0]])
            head[start, seen], head[start, own] = 1e6, -1e8
            for piece, after in itertools.pairwise(turn):
                head[known[piece] if after is LOOP else known[after], known[piece]] = 1e11
            seen = own
    return Model(cfg, jax.tree.map(jax.numpy.asarray, params), tokenizer)


def toy_tokenizer(size=420):
    drawn = world.make_world("test tokenizer")
    texts = [text for name in list(drawn.persons)[:40] for text in (name, trajectories.document(drawn, name))]
    return train_tokenizer([*texts, *("<search> a ## b</search><answer> c</answer>",) * 9], size)


def random_model(seed=0, boost=(1.5, 1.5, 1.2, 1.2), size=420, **changes):
    """Random weights over the toy tokenizer; `boost` makes tags frequent, so that episodes search and answer.

    `changes` are fields of the configuration.
    """
    tokenizer = toy_tokenizer(size)
    cfg = DecoderConfig(
        vocab_size=len(tokenizer) + 5,  # more rows than tokens, as padded checkpoints have
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=24,
        eos_token_ids=(tokenizer.eos_token_id,),
    )
    cfg = dataclasses.replace(cfg, **changes)
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda x: rng.normal(0.1, 0.3, x.shape).astype(np.float32), decoder.param_shapes(cfg))
    params["head"] = params["head"].reshape(16, -1).T.copy()
    params["embed"][:, 0] = 2.0  # a hidden unit that is always on
    params["norm"]["scale"][0] = 1.0
    tags = [i for i in map(tokenizer.convert_tokens_to_ids, ["<search>", "</search>", "<answer>", "</answer>"])]
    params["head"][:, 0] = 0
    params["head"][tags, 0] = boost
    params["head"][len(tokenizer) :] = -5 * np.eye(1, 16)  # padding rows are unlikely, as in a trained model
    return Model(cfg, jax.tree.map(jax.numpy.asarray, params), tokenizer)


class Fake(Retriever):
    """Documents that are a function of the query. `calls` holds the queries of every call; `before(query)` is awaited
    first and may wait or raise."""

    def __init__(self, before=None, words=1):
        self.calls, self.before, self.words, self.lock = [], before, words, threading.Lock()

    async def search(self, queries, k):
        with self.lock:
            self.calls.append(list(queries))
        for query in queries:
            if self.before:
                await self.before(query)
        return [[self.document(query, i) for i in range(k)] for query in queries]

    def document(self, query, i):
        return Document(f"{query}{i}", f'"t{i}"\n' + " ".join([f"{query}."] * self.words))

    @property
    def asked(self):
        return [query for call in self.calls for query in call]


async def until(condition, seconds=30):
    """Waits, and fails its search (which the episode counts) when the engine never gets there."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        await asyncio.sleep(0.002)


def drawn_questions(kinds=("single", "parallel", "sequential"), count=2, seed="test questions"):
    rng, drawn = random.Random(seed), world.make_world(seed)
    return [questions.draw_task(rng, drawn, kind).text for kind in kinds for _ in range(count)]
