"""The interface of every retriever, and the one that searches in this process."""

from __future__ import annotations

import abc
import asyncio
import concurrent.futures
import dataclasses
import queue
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Protocol

import numpy as np

from parasearch_jax.errors import UserError
from parasearch_jax.retrieval.corpus import Document

MAX_BATCH = 1024  # queries in one encoder call: bounds the memory of a burst


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

    def search_sync(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        """`search` for callers without a loop, and for those inside one (Jupyter)."""
        return _run_apart(self.search(queries, k))

    async def close(self) -> None:
        """Free threads and connections; calling it again does nothing. Searches under way are answered first."""
        return None

    def close_sync(self) -> None:
        """`close` for callers without a loop."""
        _run_apart(self.close())


def _run_apart(coroutine: Coroutine):
    """Runs a coroutine to its end in a thread of its own, so that it works inside a running loop too."""
    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="retriever") as pool:
        return pool.submit(asyncio.run, coroutine).result()


@dataclasses.dataclass(frozen=True)
class _Request:
    queries: list[str]
    k: int
    future: concurrent.futures.Future  # of list[list[Document]]


class LocalRetriever(Retriever):
    """An encoder and an index in this process, both owned by one worker thread.

    No event loop ever waits for FAISS, and no two threads are in the index. Requests that arrive while the worker is
    busy are answered together, by one encoder call and one search; what a request gets doesn't depend on its company.
    """

    def __init__(self, documents: Sequence[Document], encoder: Encoder, index: Index, info: Mapping | None = None):
        """`documents[i]` is what position i of `index` stands for."""
        if len(documents) != len(index):
            raise ValueError(f"{len(documents)} documents but {len(index)} vectors in the index; build it from these")
        self.info = {"kind": "local", **(info or {})}
        self._documents, self._encoder, self._index = documents, encoder, index
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()  # nothing enters the queue after the None that ends the worker
        # A daemon, so that a program that forgets to close still ends.
        self._thread = threading.Thread(target=self._work, name="LocalRetriever", daemon=True)
        self._thread.start()

    async def search(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        return await asyncio.wrap_future(self._submit(queries, k))

    def search_sync(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        return self._submit(queries, k).result()  # the worker needs no event loop, so neither does this

    async def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._requests.put(None)
        await asyncio.to_thread(self._thread.join)

    def _submit(self, queries: Sequence[str], k: int) -> concurrent.futures.Future:
        request = _Request(_checked_queries(queries), _checked_k(k), concurrent.futures.Future())
        with self._lock:
            if self._closed:
                raise RuntimeError("search on a closed retriever; open another one with open_retriever")
            self._requests.put(request)
        return request.future

    def _work(self) -> None:
        """The worker: wait for a request, take what else has come, answer, until None."""
        last = False
        while not last:
            batch, last = self._next_batch()
            batch = [r for r in batch if r.future.set_running_or_notify_cancel()]  # callers may have gone
            if batch:
                self._answer(batch)

    def _next_batch(self) -> tuple[list[_Request], bool]:
        """At least one request unless closed; True when the worker shall end after them."""
        batch, request = [], self._requests.get()
        while request is not None:
            batch.append(request)
            if sum(len(r.queries) for r in batch) >= MAX_BATCH:
                return batch, False
            try:
                request = self._requests.get_nowait()
            except queue.Empty:
                return batch, False
        return batch, True

    def _answer(self, batch: list[_Request]) -> None:
        try:
            found = iter(self._search([q for r in batch for q in r.queries], max(r.k for r in batch)))
        except BaseException as error:  # whatever it is, it belongs to the caller, who would wait for ever otherwise
            if len(batch) == 1:
                batch[0].future.set_exception(error)
            else:  # one by one, so that a request fails for its own queries only
                for request in batch:
                    self._answer([request])
            return
        for request in batch:
            request.future.set_result([next(found)[: request.k] for _ in request.queries])

    def _search(self, queries: list[str], k: int) -> list[list[Document]]:
        if not queries:
            return []
        hits = self._index.search(self._encoder.encode(queries, kind="query"), k)
        if len(hits) != len(queries):
            raise RuntimeError(f"{type(self._index).__name__} gave {len(hits)} lists for {len(queries)} queries")
        return [[self._documents[position] for position, _ in row] for row in hits]


def _checked_queries(queries: Sequence[str]) -> list[str]:
    if isinstance(queries, str):  # its characters would be searched one by one
        raise TypeError(f"search takes a list of queries, this is the string {queries[:40]!r}; wrap it in a list")
    queries = list(queries)
    for number, query in enumerate(queries):
        if not isinstance(query, str):
            raise TypeError(f"query {number} must be a string, it is {type(query).__name__} {query!r}")
    return queries


def _checked_k(k: int) -> int:
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise UserError(f"documents per query (topk) must be a whole number above 0, it is {k!r}")
    return int(k)
