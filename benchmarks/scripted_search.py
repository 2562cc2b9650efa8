"""What rollout.py runs: episodes of a scripted length on random weights, and the small world.

A model with random weights never closes a tag, so its episodes are scripted: a turn ends when its budget of tokens is
used up, and the budget is drawn up front for (question, sample, turn). `follow_script` puts it into the rows that
`Shards.extend` takes, in place of `max_turn_tokens`: data that both loops send to the device anyway, so that nothing of
what is measured changes, nor gets cheaper. The stop automaton runs all the same, over a vocabulary of words, in which
no tag can be sampled; and `Scripted.parse` does the protocol's own parsing before it says which turn it is.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import random
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from peers import S
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from parasearch_jax.data import Question, load_questions
from parasearch_jax.models import Model, decoder, load_model
from parasearch_jax.models.decoder import DecoderConfig
from parasearch_jax.protocol import Parsed, Protocol, Turn, get_protocol
from parasearch_jax.retrieval import Document, Retriever, open_retriever
from parasearch_jax.rollout import Answer, RolloutConfig, Search
from parasearch_jax.rollout.engine import _run_number
from parasearch_jax.rollout.shards import Shards

END = "<|endoftext|>"
LETTERS = "bcdfghjklmnprstv"
DELAY = 0.05  # seconds that every call of the retriever takes


@dataclasses.dataclass(frozen=True)
class Script:
    """Episodes in tokens: `turns` turns, a search at the end of each but the last. A turn's length is log-normal."""

    prompt: int = 200
    documents: int = 450
    turns: int = 3
    median: float = 100
    p95: float = 300
    limit: int = 500

    def draw(self, episodes: int, seed: int = 0) -> np.ndarray:
        """Lengths int [episodes, turns]."""
        sigma = math.log(self.p95 / self.median) / 1.645
        lengths = np.random.default_rng(seed).lognormal(math.log(self.median), sigma, (episodes, self.turns))
        return np.clip(np.rint(lengths), 1, self.limit).astype(int)

    def starts(self, lengths: np.ndarray) -> np.ndarray:
        """Tokens in front of each turn, int [episodes, turns]."""
        return np.cumsum(lengths, 1) - lengths + self.prompt + self.documents * np.arange(self.turns)

    def typical(self, episodes: int, batch: int, draws: int = 300) -> np.ndarray:
        """Of many draws the one whose first `batch` episodes are the most usual ones: in tokens sampled, tokens in
        front of turns, and steps that they take in lock step; and all of its episodes in tokens sampled."""
        drawn = [self.draw(episodes, seed) for seed in range(draws)]

        def figures(lengths: np.ndarray) -> tuple:
            first = lengths[:batch]
            return lengths.sum() / episodes, first.sum() / batch, self.starts(first).sum(), first.max(0).sum()

        numbers = np.array([figures(lengths) for lengths in drawn])
        return drawn[np.abs(numbers / numbers.mean(0) - 1).max(1).argmin()]

    @property
    def longest(self) -> int:
        return self.prompt + self.turns * self.limit + (self.turns - 1) * self.documents


@dataclasses.dataclass
class Workload:
    """A rollout to measure; `lengths` int [episodes, turns] where they are scripted."""

    name: str
    model: Model
    config: RolloutConfig
    protocol: Protocol
    retriever: Retriever
    questions: list[Question]
    samples: int
    script: Script | None = None
    lengths: np.ndarray | None = None

    def prepare(self, loop) -> None:
        """Has an Engine or a LockStep follow the script, if there is one."""
        if self.lengths is not None:
            pairs = itertools.product(self.questions, range(self.samples))
            numbers = [_run_number(question.id, sample) for question, sample in pairs]
            follow_script(loop.shards, dict(zip(numbers, self.lengths.tolist(), strict=True)))


def follow_script(shards: Shards, lengths: dict[int, Sequence[int]]) -> None:
    """The n-th turn of the episode with this number gets lengths[number][n] tokens; behind the last turn begins the
    next episode of that number."""
    extend, turns = shards.extend, {number: itertools.cycle(each) for number, each in lengths.items()}
    shards.extend = lambda rows, key: extend([row._replace(left=next(turns[row.number])) for row in rows], key)


# ------------------------------------------------------------------------------------------------------------ shape S


def scripted(questions: int, samples: int = 8, script: Script | None = None, shape: dict = S, **limits) -> Workload:
    """Scripted episodes on random weights of `shape`; `limits` are fields of RolloutConfig."""
    script = script or Script()
    tokenizer, words = words_tokenizer(shape["vocab_size"])
    # The bytes and the end token stand behind the words and are never sampled, as padded rows of a vocabulary.
    cfg = DecoderConfig(**shape, vocab_used=words, eos_token_ids=(shape["vocab_size"] - 1,))
    config = RolloutConfig(
        max_turn_tokens=script.limit,
        max_total_tokens=-(-(script.longest + 1) // 64) * 64,
        observation_tokens=script.documents,
        topk=1,
        **({"deterministic": False} | limits),
    )
    protocol = Scripted(name="scripted", prompt=" {question}", turns=script.turns)
    names, rng = word_list(words), random.Random(0)
    asked = [Question(str(i), " ".join(rng.choices(names, k=script.prompt)), ("",)) for i in range(questions)]
    return Workload(
        name="scripted episodes",
        model=Model(cfg, decoder.init(cfg, jax.random.key(0)), tokenizer),
        config=config,
        protocol=protocol,
        retriever=Drawn(names, protocol, tokenizer, script.documents),
        questions=asked,
        samples=samples,
        script=script,
        lengths=script.draw(questions * samples),
    )


def word_list(n: int) -> list[str]:
    """n different words of four letters."""
    return list(map("".join, itertools.islice(itertools.product(LETTERS, repeat=4), n)))


def words_tokenizer(size: int) -> tuple[PreTrainedTokenizerFast, int]:
    """A tokenizer whose first tokens are words with their leading space, and how many they are; bytes and END follow.

    Text of words encodes to just the ids that it came from, so that encoding it anew, as the released loop does, leaves
    the scripted lengths as they are. Anything else encodes byte by byte.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = size - len(alphabet) - 1
    tokens = [*("Ġ" + word for word in word_list(words)), *alphabet, END]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], ignore_merges=True))
    split = pre_tokenizers.Split(Regex(r" [a-z]+|[^ ]| "), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END), words


@dataclasses.dataclass(frozen=True)
class Scripted(Protocol):
    """Every turn but the last ends with a search, whatever its text."""

    turns: int = 3

    def parse(self, text: str, segment: int = 0, turn: Turn | None = None) -> Parsed:
        super().parse(text, segment, turn)  # its time belongs to a turn
        span = (segment, 0, len(text))
        if segment // 2 == self.turns - 1:  # prompt, policy, docs, policy, docs, policy
            return Parsed(Answer(text.strip(), span), len(text))
        return Parsed(Search((text[-40:].strip(),), span), len(text))


class Drawn(Retriever):
    """One document for each query, drawn from it; its observation has exactly `tokens` tokens."""

    def __init__(self, names: Sequence[str], protocol: Protocol, tokenizer, tokens: int, delay: float = DELAY):
        self._names, self._delay = names, delay
        around = protocol.observation([protocol.document(1, "t", "")])
        self._words = tokens - len(tokenizer(around, add_special_tokens=False)["input_ids"])

    async def search(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        await asyncio.sleep(self._delay)
        return [[self._document(query)] for query in queries]

    def _document(self, query: str) -> Document:
        words = random.Random(zlib.crc32(query.encode())).choices(self._names, k=self._words)
        return Document("0", '"t"\n' + " ".join(words))


# ------------------------------------------------------------------------------------------------------- small world


def small_world(questions: int, samples: int = 8, **limits) -> Workload:
    """Training questions of configs/parallel_tiny.py of every kind, with its base model, limits and index; `limits` are
    fields of RolloutConfig."""
    config = tiny_config()
    rollout = dict(config.rollout) | {"topk": config.retriever.topk, "deterministic": False} | limits
    asked = load_questions(config.data.train)  # by kind
    return Workload(
        name="small world",
        model=load_model(config.model.path),
        config=RolloutConfig(**rollout),
        protocol=get_protocol(config.protocol.name, prompt=config.protocol.prompt),
        retriever=Delayed(open_retriever(config.retriever), DELAY),
        questions=asked[:: len(asked) // questions][:questions],
        samples=samples,
    )


def tiny_config():
    sys.path.insert(0, str(Path(__file__).parents[1] / "configs"))
    import parallel_tiny

    return parallel_tiny.get_config()


class Delayed(Retriever):
    """Another retriever, some seconds later."""

    def __init__(self, retriever: Retriever, seconds: float):
        self._retriever, self._seconds = retriever, seconds

    async def search(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        await asyncio.sleep(self._seconds)
        return await self._retriever.search(queries, k)
