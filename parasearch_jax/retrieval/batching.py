"""One worker in front of a search that takes lists: waiting requests share a call, repeated queries need none."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

COUNTS = ("queries", "cache_hits", "searched", "batches", "seconds")
T = TypeVar("T")  # a hit
Row = list[T]  # the hits of a query, best first


@dataclasses.dataclass(frozen=True)
class Batching:
    """How requests are put together."""

    most: int = 1024  # queries of one call, which bounds the memory of a burst; 1: no query shares a call
    wait: float = 0.0  # seconds that a call waits for more queries; 0: it takes those that came during the last call
    cache: int = 65536  # rows kept, those longest unused go first; 0: none

    def __post_init__(self):
        if self.most < 1 or self.wait < 0 or self.cache < 0:
            raise ValueError(f"a batch has at least one query, wait and cache are not negative: {self}")


class Batcher(Generic[T]):
    """Owns `search`: only its one thread ever calls it, so an index for a single thread can have many callers.

    `search(queries, k)` gives a row of at most k hits for each of its queries (no two alike), and its rows for k begin
    with those for k-1. So requests with other k share a call, made with the largest, and what a request gets does not
    depend on its company. The cache is of this one index and keyed by (query, k).
    """

    def __init__(self, search: Callable[[list[str], int], Sequence[Row[T]]], batching: Batching, name: str):
        self._search, self._batching = search, batching
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of all below
        self._cache: OrderedDict[tuple[str, int], tuple[T, ...]] = OrderedDict()
        self._stats = dict.fromkeys(COUNTS, 0.0)
        self._closed = False  # nothing enters the queue behind the None that ends the worker
        # A daemon, so that a program that forgets to close still ends.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, queries: Sequence[str], k: int) -> Future[list[Row[T]]]:
        """A row for each query, in order; an exception of `search` belongs to the requests that it fails for alone."""
        request = _Request(list(queries), k, Future())
        with self._lock:
            if self._closed:
                raise RuntimeError("search on a closed retriever; open another one with open_retriever")
            self._count("queries", len(request.queries))
            known = [self._known(query, k) for query in request.queries]
            if None in known:
                self._requests.put(request)
                return request.future
            self._count("cache_hits", len(known))
        request.future.set_result([list(row) for row in known])
        return request.future

    def pop_stats(self) -> dict[str, float]:
        """Since the last call: queries, those of them answered from the cache, those searched (a query that several
        requests of a batch share is searched once), calls of `search` and their seconds."""
        with self._lock:
            stats, self._stats = self._stats, dict.fromkeys(COUNTS, 0.0)
        return stats

    def close(self) -> None:
        """Answers what is under way, then ends the thread; calling it again does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._requests.put(None)
        self._thread.join()

    # --------------------------------------------------------------------------------------------------- the worker

    def _work(self) -> None:
        last = False
        while not last:
            batch, last = self._next_batch()
            batch = [r for r in batch if r.future.set_running_or_notify_cancel()]  # callers may have gone
            if batch:
                self._answer(batch)

    def _next_batch(self) -> tuple[list[_Request], bool]:
        """At least one request unless closed; True when the worker shall end behind them."""
        batch, request = [], self._requests.get()
        until = time.monotonic() + self._batching.wait
        while request is not None:
            batch.append(request)
            if sum(len(r.queries) for r in batch) >= self._batching.most:
                return batch, False
            try:
                left = until - time.monotonic()
                request = self._requests.get(timeout=left) if left > 0 else self._requests.get_nowait()
            except queue.Empty:
                return batch, False
        return batch, True

    def _answer(self, batch: list[_Request]) -> None:
        try:
            rows = self._rows(batch)
        except BaseException as error:  # whatever it is, it belongs to the caller, who would wait for ever otherwise
            if len(batch) == 1:
                batch[0].future.set_exception(error)
            else:  # one by one, so that a request fails for its own queries only
                for request in batch:
                    self._answer([request])
            return
        for request, found in zip(batch, rows, strict=True):
            request.future.set_result(found)

    def _rows(self, batch: list[_Request]) -> list[list[Row[T]]]:
        """What each request gets, from the cache or by a search."""
        with self._lock:
            keys = {(query, r.k) for r in batch for query in r.queries}
            known = {key: row for key in keys if (row := self._known(*key)) is not None}
            self._count("cache_hits", sum((query, r.k) in known for r in batch for query in r.queries))
        missing = list(dict.fromkeys(q for r in batch for q in r.queries if (q, r.k) not in known))
        k = max((k for query, k in keys - known.keys()), default=0)
        found: dict[str, Row[T]] = {}
        for start in range(0, len(missing), self._batching.most):
            part = missing[start : start + self._batching.most]
            began = time.perf_counter()
            rows = self._search(part, k)
            if len(rows) != len(part):
                raise RuntimeError(f"the index gave {len(rows)} lists for {len(part)} queries")
            found |= zip(part, rows, strict=True)
            with self._lock:
                self._count("batches", 1)
                self._count("searched", len(part))
                self._count("seconds", time.perf_counter() - began)
        new = {(query, k): tuple(found[query][:k]) for query, k in keys - known.keys()}
        with self._lock:
            self._keep(new)
        known |= new
        return [[list(known[query, r.k]) for query in r.queries] for r in batch]

    # -------------------------------------------------------------------------------------- under the lock, all three

    def _count(self, name: str, n: float) -> None:
        self._stats[name] += n

    def _known(self, query: str, k: int) -> tuple[T, ...] | None:
        row = self._cache.get((query, k))
        if row is not None:
            self._cache.move_to_end((query, k))
        return row

    def _keep(self, new: dict[tuple[str, int], tuple[T, ...]]) -> None:
        self._cache |= new
        while len(self._cache) > self._batching.cache:
            self._cache.popitem(last=False)


@dataclasses.dataclass(frozen=True)
class _Request:
    queries: list[str]
    k: int
    future: Future
