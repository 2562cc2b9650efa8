"""A deterministic text encoder without weights: hashed n-grams of words and characters, weighted by idf.

It stands where an E5 encoder stands in large runs, and costs microseconds a query. Axes: n texts, D dim.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from parasearch_jax.errors import UserError

KINDS = (None, "query", "passage")
WORD = re.compile(r"\w+")
CACHE_ENTRIES = 1 << 17  # a policy can invent words without end; the cache starts anew when it is full
CHUNK_FLOATS = 1 << 22  # accumulator of one chunk of texts, in float64: 32 MiB

Entry = tuple[np.ndarray, np.ndarray]  # columns int64 [m], signed weights float64 [m] of one word or word pair


@dataclasses.dataclass(frozen=True)
class HashedConfig:
    """`dim` sets the miss rate: the smaller, the more features share a column."""

    dim: int = 512  # D
    word_weight: float = 1.0  # single words
    pair_weight: float = 0.5  # two words in a row, which tell a full name from two people who share its halves
    char_weight: float = 0.4  # each character n-gram of "<word>", which forgives misspelling and inflection
    char_ngrams: tuple[int, ...] = (3,)  # lengths of the character n-grams, () for none

    def __post_init__(self):
        object.__setattr__(self, "char_ngrams", tuple(self.char_ngrams))  # a list, as configuration files give it
        for name, value in [("dim", self.dim), *(("char_ngrams", n) for n in self.char_ngrams)]:
            if not isinstance(value, int) or value < 1:
                raise UserError(f"hashed encoder: {name} must be a whole number above 0, it is {value!r}")
        for name in ("word_weight", "pair_weight", "char_weight"):
            if not getattr(self, name) >= 0:
                raise UserError(f"hashed encoder: {name} must be at least 0, it is {getattr(self, name)!r}")


class HashedEncoder:
    """Feature hashing with signs (Weinberger et al. 2009) of idf-weighted n-grams, L2-normalised.

    idf(f) = log((N + 1) / (df(f) + 0.5)) over the N texts of `corpus`. A feature that no text of the corpus has weighs
    nothing: it could only add noise by collision. A text without known features gets the zero vector.
    The vector of a text depends on nothing but the text, the corpus and the configuration: not on the batch around it,
    the process or PYTHONHASHSEED.
    """

    def __init__(self, corpus: Iterable[str], config: HashedConfig | None = None):
        self.config = config or HashedConfig()
        self._entries: dict[str, Entry] = {}
        self._idf = self._fit(corpus)

    @property
    def dim(self) -> int:
        return self.config.dim

    def encode(self, texts: Sequence[str], kind: str | None = None) -> np.ndarray:
        """float32 [n, D], rows of norm 1 (or 0). `kind` is the interface of E5's prefixes; here it changes nothing."""
        if isinstance(texts, str):
            raise TypeError(f"encode takes a list of texts, this is the string {texts[:40]!r}; wrap it in a list")
        if kind not in KINDS:
            raise ValueError(f"encode: kind {kind!r} is none of {', '.join(map(repr, KINDS))}")
        step = max(1, CHUNK_FLOATS // self.dim)
        chunks = [self._encode_chunk(texts[i : i + step]) for i in range(0, len(texts), step)]
        if len(chunks) == 1:
            return chunks[0]
        return np.concatenate(chunks) if chunks else np.zeros((0, self.dim), np.float32)

    def _encode_chunk(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [n, D]: one bincount over row * D + column adds up all features of all texts."""
        entries = [[self._entry(key) for key in _keys(text)] for text in texts]
        flat = list(itertools.chain.from_iterable(entries))
        if not flat:
            return np.zeros((len(texts), self.dim), np.float32)
        columns = np.concatenate([columns for columns, _ in flat])
        if len(texts) > 1:
            sizes = [sum(len(columns) for columns, _ in row) for row in entries]
            columns = columns + np.repeat(np.arange(len(texts)) * self.dim, sizes)
        sums = np.bincount(columns, np.concatenate([v for _, v in flat]), minlength=len(texts) * self.dim)
        sums = sums.reshape(len(texts), self.dim)
        norms = np.sqrt(np.square(sums).sum(axis=1, keepdims=True))
        return (sums / np.where(norms == 0, 1, norms)).astype(np.float32)

    def _entry(self, key: str) -> Entry:
        entry = self._entries.get(key)
        if entry is None:
            if len(self._entries) >= CACHE_ENTRIES:
                self._entries.clear()
            entry = self._entries[key] = self._make_entry(key)
        return entry

    def _make_entry(self, key: str) -> Entry:
        pairs = [(_hash(f), w * self._idf.get(f, 0.0)) for f, w in self._features(key)]
        pairs = [(h, value) for h, value in pairs if value]
        columns = np.array([(h >> 1) % self.dim for h, _ in pairs], np.int64)
        return columns, np.array([value if h & 1 else -value for h, value in pairs], np.float64)

    def _features(self, key: str) -> list[tuple[str, float]]:
        """Features of a word or of a pair of words, with their weights before idf.

        "voss" -> voss, #<vo, #vos, #oss, #ss>;  "mira voss" -> itself
        """
        config = self.config
        if " " in key:
            return [(key, config.pair_weight)]
        marked = f"<{key}>"
        ngrams = [f"#{marked[i : i + n]}" for n in config.char_ngrams for i in range(len(marked) - n + 1)]
        return [(key, config.word_weight), *((ngram, config.char_weight) for ngram in ngrams)]

    def _fit(self, corpus: Iterable[str]) -> dict[str, float]:
        """idf of every feature of the corpus."""
        df: Counter[str] = Counter()
        count = 0
        for text in corpus:
            count += 1
            df.update({feature for key in set(_keys(text)) for feature, _ in self._features(key)})
        return {feature: math.log((count + 1) / (n + 0.5)) for feature, n in df.items()}


def _keys(text: str) -> list[str]:
    """The words of a text and its pairs of neighbouring words, folded: "Mira Voss" -> mira, voss, "mira voss"."""
    words = WORD.findall(unicodedata.normalize("NFKC", text).casefold())
    return words + [f"{a} {b}" for a, b in itertools.pairwise(words)]


def _hash(feature: str) -> int:
    """64 bits, the same in every process (Python's own hash() is seeded anew in each)."""
    # surrogatepass: JSON can carry a lone surrogate, and a query must never raise for its characters.
    digest = hashlib.blake2b(feature.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
