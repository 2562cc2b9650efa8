"""Search by words: BM25 (Lucene's form, k1 1.5, b 0.75) over a sparse matrix of scores, by the package bm25s.

Words are those of bm25s: lower case, two characters or more, without English stop words. Axes: n passages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from parasearch_jax.errors import UserError
from parasearch_jax.retrieval.folder import REBUILD, damaged
from parasearch_jax.retrieval.index import Hit

try:
    import bm25s
except ImportError:
    bm25s = None

# Of bm25s's own `save`; arrays as .npy and the words as JSON.
FILES = ("data.csc.index.npy", "indices.csc.index.npy", "indptr.csc.index.npy", "params.index.json", "vocab.index.json")


def check_installed() -> None:
    if bm25s is None:
        raise UserError("BM25 needs the package bm25s: pip install -r requirements-bm25.txt")


def words(texts: Sequence[str]) -> list[list[str]]:
    """The words of each text that count."""
    return bm25s.tokenize(list(texts), stopwords="en", return_ids=False, show_progress=False)


class Words:
    """In the place of an encoder: texts to words."""

    def encode(self, texts: Sequence[str], kind: str | None = None) -> list[list[str]]:
        return words(texts) if len(texts) else []


def write_bm25(folder: Path, texts: Iterable[str]) -> list[str]:
    """Builds the scores of all passages into `folder`; the names of its files."""
    check_installed()
    index = bm25s.BM25(backend="numpy", csc_backend="numpy")
    index.index(bm25s.tokenize(list(texts), stopwords="en", show_progress=False), show_progress=False)
    index.save(folder, show_progress=False)
    return list(FILES)


class Bm25Index:
    """Scores every passage that has a word of the query. Hits come by falling score, equal scores in order."""

    def __init__(self, folder: Path, count: int):
        """UserError for files that aren't there or fit no `count` passages. Reads no pickle."""
        check_installed()
        with damaged(folder):
            self._index = bm25s.BM25.load(folder, mmap=True, allow_pickle=False, backend="numpy", csc_backend="numpy")
            self._count = int(self._index.scores["num_docs"])
        if self._count != count:
            raise UserError(f"{folder} holds scores of {self._count} passages, there are {count}; {REBUILD}")

    def __len__(self) -> int:
        return self._count

    def search(self, queries: Sequence[Sequence[str]], k: int) -> list[list[Hit]]:
        """At most k hits for the words of each query; a passage without any of them is none."""
        return [self._search(query, k) for query in queries]

    def _search(self, query: Sequence[str], k: int) -> list[Hit]:
        ids = np.array(self._index.get_tokens_ids(query), np.int64)
        if not len(ids):
            return []
        scores = self._index.get_scores_from_ids(ids)
        found = np.flatnonzero(scores > 0)
        if len(found) > k:  # everything that ties with the last one stays, so that the order decides
            found = found[scores[found] >= np.partition(scores[found], -k)[-k]]
        best = found[np.lexsort((found, -scores[found]))][:k]
        return list(zip(best.tolist(), scores[best].tolist(), strict=True))
