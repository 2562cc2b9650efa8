"""The interface of every retriever, and the one that searches in this process."""

from __future__ import annotations

import abc
import asyncio
import concurrent.futures
from collections.abc import Coroutine, Mapping, Sequence
from typing import Protocol

import numpy as np

from parasearch_jax.errors import UserError
from parasearch_jax.retrieval.batching import Batcher, Batching
from parasearch_jax.retrieval.corpus import Document

INDEX_HEADER = "x-retrieval-index"  # of a server's answers: the fingerprint of what it searches


class Encoder(Protocol):
    """What turns text into vectors: `hashed.HashedEncoder`, `models.load_encoder`."""

    def encode(self, texts: Sequence[str], kind: str | None = None) -> np.ndarray:
        """float32 [n, D], L2-normalised; kind is "query", "passage" or None."""


class Index(Protocol):
    """What finds the nearest vectors: `index.FlatIndex`."""

    def __len__(self) -> int: ...

    def search(self, queries: np.ndarray, k: int) -> list[list[tuple[int, float]]]:
        """For each query of [n, D] at most k (position, score), best first; the hits for k begin with those for k-1."""


class Retriever(abc.ABC):
    """Finds documents. `search` may be called any number of times at once, from any event loop or thread.

    `info` goes into results.json: "kind", "corpus_sha256" and "topk" where they are known.
    """

    info: Mapping[str, object] = {}

    @abc.abstractmethod
    async def search(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        """One list per query, in order, each with at most k documents, best first. `[]` gives `[]`."""

    async def search_scored(self, queries: Sequence[str], k: int) -> list[list[tuple[Document, float]]]:
        """`search` with the scores, which fall; what a server serves."""
        raise NotImplementedError(f"{type(self).__name__} gives no scores")

    def search_sync(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        """`search` for callers without a loop, and for those inside one (Jupyter)."""
        return _run_apart(self.search(queries, k))

    def pop_stats(self) -> dict[str, float]:
        """What was counted since the last call, "retriever/queries" and so on: sums, which add up over hosts."""
        return {}

    async def close(self) -> None:
        """Free threads and connections; calling it again does nothing. Searches under way are answered first."""
        return None

    def close_sync(self) -> None:
        """`close` for callers without a loop."""
        _run_apart(self.close())


class NoRetriever(Retriever):
    """For agents that never search."""

    info: Mapping[str, object] = {"kind": "none"}

    async def search(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        raise UserError("retriever.kind is 'none': nothing can be searched; give 'local' or 'remote'")


def _run_apart(coroutine: Coroutine):
    """Runs a coroutine to its end in a thread of its own, so that it works inside a running loop too."""
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="retriever") as pool:
        return pool.submit(asyncio.run, coroutine).result()


class LocalRetriever(Retriever):
    """An encoder and an index in this process, both owned by one worker thread (`batching.Batcher`).

    No event loop ever waits for FAISS, and no two threads are in the index.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        encoder: Encoder,
        index: Index,
        info: Mapping | None = None,
        batching: Batching | None = None,
    ):
        """`documents[i]` is what position i of `index` stands for."""
        if len(documents) != len(index):
            raise ValueError(f"{len(documents)} documents but {len(index)} vectors in the index; build it from these")
        self.info = {"kind": "local", **(info or {})}
        self._documents, self._encoder, self._index = documents, encoder, index
        self._batcher = Batcher(self._search, batching or Batching(), name="LocalRetriever")

    def __len__(self) -> int:
        return len(self._documents)

    async def search(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        return _unscored(await asyncio.wrap_future(self._submit(queries, k)))

    async def search_scored(self, queries: Sequence[str], k: int) -> list[list[tuple[Document, float]]]:
        return await asyncio.wrap_future(self._submit(queries, k))

    def search_sync(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        return _unscored(self._submit(queries, k).result())  # the worker needs no event loop, so neither does this

    async def close(self) -> None:
        await asyncio.to_thread(self._batcher.close)

    def pop_stats(self) -> dict[str, float]:
        return {f"retriever/{name}": value for name, value in self._batcher.pop_stats().items()}

    def _submit(self, queries: Sequence[str], k: int) -> concurrent.futures.Future:
        return self._batcher.submit(checked_queries(queries), checked_k(k))

    def _search(self, queries: list[str], k: int) -> list[list[tuple[Document, float]]]:
        hits = self._index.search(self._encoder.encode(queries, kind="query"), k)
        return [[(self._documents[position], score) for position, score in row] for row in hits]


def _unscored(rows: list[list[tuple[Document, float]]]) -> list[list[Document]]:
    return [[document for document, _ in row] for row in rows]


def checked_queries(queries: Sequence[str]) -> list[str]:
    if isinstance(queries, str):  # its characters would be searched one by one
        raise TypeError(f"search takes a list of queries, this is the string {queries[:40]!r}; wrap it in a list")
    queries = list(queries)
    for number, query in enumerate(queries):
        if not isinstance(query, str):
            raise TypeError(f"query {number} must be a string, it is {type(query).__name__} {query!r}")
    return queries


def checked_k(k: int) -> int:
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise UserError(f"documents per query (topk) must be a whole number above 0, it is {k!r}")
    return int(k)
