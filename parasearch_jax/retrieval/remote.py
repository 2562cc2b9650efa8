"""The client of a retrieval server: ours (`retrieval.server`), or another one with Search-R1's `POST /retrieve`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import json
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from parasearch_jax.errors import UserError
from parasearch_jax.retrieval.breaker import Breaker
from parasearch_jax.retrieval.corpus import Document, to_document
from parasearch_jax.retrieval.retriever import INDEX_HEADER, Retriever, checked_k, checked_queries

log = logging.getLogger(__name__)
KEPT = 30.0  # seconds of a connection without a request: less than a server keeps it, or both would meet at its end
COUNTS = ("queries", "searches", "seconds", "requests", "retries", "failures", "breaker_opens")
AWAY = (429, 502, 503, 504)  # statuses of a server that is busy, or of a proxy whose server is away: it may come back


@dataclasses.dataclass(frozen=True)
class Patience:
    """How a server that does not answer is dealt with. Times in seconds."""

    connect: float = 5.0  # for a connection
    connections: int = 8  # at once; searches that find none free share the next request
    together: int = 64  # queries of a request, unless a search has more
    backoff: float = 0.1  # before the second try, twice as long before each further one
    longest_backoff: float = 2.0
    faults: int = 3  # tries of a search that the server answers with 500: the fault may lie in the query
    failures: int = 8  # failed tries in a row, of all searches, that open the circuit breaker
    pause: float = 0.5  # for which it is open, doubled each time that the one try behind it fails
    longest_pause: float = 10.0
    start: float = 120.0  # for a server that is not there when the retriever is opened
    load: float = 3600.0  # for one that says that it is loading


class SearchFailed(UserError):
    """A search without an answer; the episode gets a notice. The message has the URL, the tries and the last reason."""


class RemoteRetriever(Retriever):
    """Searches over HTTP, by one connection pool in an event loop and thread of its own, for callers of any loop.

    A search ends within `deadline` seconds, all tries together. Tried again, with growing pauses: no connection, a lost
    one, half the deadline without an answer, 429 and 5xx. Not tried again: other statuses, and answers that are not
    what was asked for; a document without text is one of these. Searches that come while all connections are at work
    share a request, but what the server refuses is sent again one by one: a search fails for itself alone.
    A server that is away for no longer than `deadline` costs its searches time (they wait for the breaker to close);
    one that is away for longer costs none: they fail at once, and one try every `longest_pause` seconds asks whether
    it is back.

    More than k documents for a query, which Search-R1's online servers give, are cut to k. The environment's proxies
    are not used: a retrieval server stands in one's own network.
    """

    def __init__(self, url: str, deadline: float = 30.0, patience: Patience | None = None, retries: int = 100):
        """`url`: "http://host:8000", or its /retrieve. `retries`: of a search at most; the default is more than the
        deadline allows. Sends nothing; `wait_until_ready` does."""
        self.url, self._deadline = _retrieve_url(url), _checked_deadline(deadline)
        self._retries = _checked_retries(retries)
        self._patience = patience or Patience()
        self.info: Mapping[str, object] = {"kind": "remote", "url": self.url}
        self.index = ""  # the fingerprint of what it searches, if it has told one
        self._breaker = Breaker(self._patience.failures, self._patience.pause, self._patience.longest_pause)
        self._waiting: deque[_Search] = deque()
        self._free = self._patience.connections
        self._flights: set[asyncio.Task] = set()  # requests under way; a loop keeps only weak references
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=self._patience.connect),
            limits=httpx.Limits(keepalive_expiry=KEPT),
            trust_env=False,
        )
        self._stats = dict.fromkeys(COUNTS, 0.0)
        self._lock = threading.Lock()  # of _stats and _closed
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="RemoteRetriever", daemon=True)
        self._thread.start()

    def wait_until_ready(self) -> None:
        """Waits for the server, takes over what it tells of its index, and makes one search to see that it can.

        Raises UserError for a server that does not come, failed to load, or gives no documents that can be read.
        """
        ready = self._run(self._ready())
        try:
            told = ready.result()
        except BaseException:  # Ctrl-C: `close` would go on waiting
            ready.cancel()
            raise
        if isinstance(told.get("index"), str) and isinstance(told.get("info"), dict):  # it is ours
            self.index, self.info = told["index"], {**told["info"], **self.info}
        self.search_sync(["Where do the documents come from?"], 1)

    async def search(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        return await asyncio.wrap_future(self._submit(queries, k))

    def search_sync(self, queries: Sequence[str], k: int) -> list[list[Document]]:
        return self._submit(queries, k).result()

    def pop_stats(self) -> dict[str, float]:
        """Since the last call: queries, searches (a call of `search`) and their seconds, requests sent, retries among
        them, failures (searches without an answer), breaker_opens."""
        with self._lock:
            stats, self._stats = self._stats, dict.fromkeys(COUNTS, 0.0)
        return {f"retriever/{name}": value for name, value in stats.items()}

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    # ---------------------------------------------------------------------------------------------- callers' threads

    def _submit(self, queries: Sequence[str], k: int) -> concurrent.futures.Future[list[list[Document]]]:
        queries, k = checked_queries(queries), checked_k(k)
        with self._lock:
            if self._closed:
                raise RuntimeError("search on a closed retriever; open another one with open_retriever")
            return self._run(self._search(queries, k))

    def _run(self, coroutine) -> concurrent.futures.Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _close(self) -> None:
        with self._lock:
            first, self._closed = not self._closed, True
        if first:
            self._run(self._finish()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ------------------------------------------------------------------------------------------------- our own thread

    async def _finish(self) -> None:
        under_way = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*under_way, return_exceptions=True)  # each ends by its deadline
        await self._client.aclose()

    async def _search(self, queries: list[str], k: int) -> list[list[Document]]:
        """One search: its tries, within its deadline."""
        if not queries:
            return []
        search, began, tries, retries, last = _Search(queries, k), time.monotonic(), 0, 0, ""
        self._count("searches", 1)
        self._count("queries", len(queries))
        try:
            async with asyncio.timeout(self._deadline):
                faults = 0
                while True:
                    tries += 1
                    try:
                        return await self._sent(search)
                    except _Again as error:
                        last, after = str(error), error.after
                    except _Bad as error:
                        last, after = str(error), 0.0
                        if search.shared:  # what the server did not like may be another's query
                            search.alone = True
                            continue
                        faults += 1
                        if not error.fault or faults == self._patience.faults:
                            raise SearchFailed(last) from None
                    if retries == self._retries:
                        raise SearchFailed(f"{last}; retriever.retries={retries} are used up")
                    await asyncio.sleep(max(after, self._backoff(tries)))
                    retries += 1
                    self._count("retries", 1)
        except (SearchFailed, TimeoutError) as error:
            self._count("failures", 1)
            told = str(error)
            if isinstance(error, TimeoutError):
                told = f"no answer within retriever.deadline={self._deadline:g} s"
                told += f"; the last of {tries} tries: {last}" if last else ""
            raise SearchFailed(f"retriever at {self.url}: {told}") from None
        finally:
            self._count("seconds", time.monotonic() - began)

    async def _sent(self, search: _Search) -> list[list[Document]]:
        """What the search gets by its next try, which others may share."""
        search.found = asyncio.get_running_loop().create_future()
        self._waiting.append(search)
        self._depart()
        return await search.found

    def _depart(self) -> None:
        """Sends what is waiting while connections are free: a search for itself, or when there was none, together."""
        while self._waiting and self._free:
            first = self._waiting.popleft()
            group, size = [first], len(first.queries)
            while self._waiting and not (first.alone or self._waiting[0].alone) and self._waiting[0].k == first.k:
                size += len(self._waiting[0].queries)
                if size > self._patience.together:
                    break
                group.append(self._waiting.popleft())
            if group := [search for search in group if not search.found.done()]:  # callers may have gone
                self._free -= 1
                self._flights.add(flight := asyncio.create_task(self._fly(group)))
                flight.add_done_callback(self._flights.discard)

    async def _fly(self, group: list[_Search]) -> None:
        """One request, and what each of its searches gets or meets."""
        rows, error = [], None
        queries = [query for search in group for query in search.queries]
        try:
            rows = _lists(await self._try(queries, group[0].k), len(queries))
        except Exception as caught:
            error = caught
        self._free += 1
        self._depart()
        for search in group:
            mine, rows = rows[: len(search.queries)], rows[len(search.queries) :]
            if search.found.done():  # given up
                continue
            search.shared = error is not None and len(group) > 1
            try:
                if error is not None:
                    raise error
                search.found.set_result(_documents(mine, search.k))
            except Exception as own:
                search.found.set_exception(own)

    async def _try(self, queries: list[str], k: int) -> Any:
        """The JSON of the answer. _Again: a later try may do better; _Bad: the server does not like it."""
        probe = await self._admitted()
        try:
            response = await self._answer(queries, k)
        except (_Again, _Bad) as error:
            if error.down and self._breaker.failed(probe):
                self._count("breaker_opens", 1)
                log.warning("retriever at %s is away (%s): its searches wait", self.url, error)
            raise
        except BaseException:
            self._breaker.left(probe)
            raise
        if seconds := self._breaker.succeeded():
            log.warning("retriever at %s is back after %.1f s", self.url, seconds)
        if response.status_code != 200:
            raise _Bad(f"it answered {_status(response)}")
        index = response.headers.get(INDEX_HEADER)
        if self.index and index not in (None, self.index):
            raise _Bad(f"it serves the index {index}, at the start it was {self.index}; start it with the old one")
        try:
            return json.loads(response.content)
        except ValueError:
            raise _Bad(f"its answer is no JSON: {response.text!r:.80}") from None

    async def _admitted(self) -> bool:
        """When the breaker lets a try pass; True if it is the one that probes."""
        while True:
            seconds, probe = self._breaker.admit()
            if not seconds:
                return probe
            if (down := self._breaker.down()) > self._deadline:
                raise SearchFailed(f"it has been away for {down:.0f} s; is it running?")
            await asyncio.sleep(seconds)

    async def _answer(self, queries: list[str], k: int) -> httpx.Response:
        self._count("requests", 1)
        # Escaped to ASCII: a query may hold half of a surrogate pair, which UTF-8 can't.
        body = json.dumps({"queries": queries, "topk": k, "return_scores": True}).encode()
        try:
            async with asyncio.timeout(self._deadline / 2):
                headers = {"content-type": "application/json"}
                response = await self._client.post(self.url, content=body, headers=headers)
        except TimeoutError:
            raise _Again(f"no answer within {self._deadline / 2:g} s") from None
        except httpx.RequestError as error:  # no connection, a lost one, bytes that are no HTTP
            raise _Again(f"{type(error).__name__}: {error}".removesuffix(": ")) from None
        if response.status_code in AWAY:
            after = response.headers.get("retry-after", "")
            seconds = min(float(after), self._patience.longest_pause) if after.isdecimal() else 0.0
            raise _Again(f"it answered {_status(response)}", after=seconds, down=response.status_code != 429)
        if response.status_code >= 500:
            raise _Bad(f"it answered {_status(response)}", fault=True)
        return response

    def _backoff(self, tries: int) -> float:
        """Seconds before the next try, drawn, so that searches that failed together do not come back together."""
        longest = min(self._patience.backoff * 2 ** (tries - 1), self._patience.longest_backoff)
        return longest * random.uniform(0.5, 1.0)

    def _count(self, name: str, n: float) -> None:
        with self._lock:
            self._stats[name] += n

    async def _ready(self) -> dict:
        """What the server's /health tells when it is ready; {} of a server that has none."""
        health, began, told = self.url.removesuffix("/retrieve") + "/health", time.monotonic(), ""
        while True:
            most, now = self._patience.start, "no answer"
            try:
                async with asyncio.timeout(self._patience.connect):
                    response = await self._client.get(health)
                state = _object(response)
                now = state.get("status", _status(response))
                if now == "failed":
                    raise UserError(f"retriever at {health} has failed to load: {state.get('error')}; start it again")
                if now == "loading":
                    most = self._patience.load
                elif response.status_code not in AWAY:  # ours when it is ready, or another server without this route
                    return state if response.status_code == 200 else {}
            except TimeoutError:
                pass
            except httpx.RequestError as error:
                now = f"{type(error).__name__}: {error}"
            waited = time.monotonic() - began
            if waited > most:
                raise UserError(
                    f"retriever at {health}: not ready after {waited:.0f} s ({now}). Start the server, or set "
                    "retriever.url to where it listens (python -m parasearch_jax.retrieval.server)"
                )
            if now != told:
                told = now
                log.warning("waiting for the retriever at %s: %s", health, now)
            await asyncio.sleep(min(1.0, self._patience.pause))


@dataclasses.dataclass(eq=False)
class _Search:
    queries: list[str]
    k: int
    alone: bool = False  # it is not sent with others
    shared: bool = False  # its last try, which failed, was sent with others
    found: asyncio.Future[list[list[Document]]] | None = None  # of the try under way


def served_index(url: str) -> str:
    """The fingerprint of what the server at `url` searches, for which it waits; "" if it tells none."""
    client = RemoteRetriever(url)
    try:
        client.wait_until_ready()
        return client.index
    finally:
        client.close_sync()


class _Again(Exception):
    """A try that failed for a reason that may pass."""

    def __init__(self, text: str, after: float = 0.0, down: bool = True):
        super().__init__(text)
        self.after, self.down = after, down  # seconds to wait at least; whether the server is away


class _Bad(Exception):
    """An answer that is of no use, perhaps for what was asked; `fault`: the server's own, which may pass."""

    def __init__(self, text: str, fault: bool = False):
        super().__init__(text)
        self.fault = self.down = fault


# ------------------------------------------------------------------------------------------------------- the answer


def _lists(answer: Any, count: int) -> list[list]:
    """The lists of {"result": [[...]]}, one a query."""
    rows = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise _Bad(f'its answer has no list of lists "result": {json.dumps(answer):.80}')
    if len(rows) != count:
        raise _Bad(f"its result has {len(rows)} lists for {count} queries")
    return rows


def _documents(rows: list[list], k: int) -> list[list[Document]]:
    """{"document": {...}, "score": f} or {...} as documents; SearchFailed names the field."""
    return [
        [_parsed(item, f"result[{i}][{j}]", str(j)) for j, item in enumerate(row[:k])] for i, row in enumerate(rows)
    ]


def _parsed(item: Any, where: str, rank: str) -> Document:
    if isinstance(item, dict) and "document" in item:
        item, where = item["document"], where + ".document"
    try:
        return to_document({"id": rank} | item if isinstance(item, dict) else item)  # online servers give no id
    except ValueError as error:
        raise SearchFailed(f"{where}: {error}") from None


def _status(response: httpx.Response) -> str:
    """The status, and what our server, or FastAPI, says of it: "422: topk must be ..."."""
    detail = _object(response).get("detail") or response.text
    return f"{response.status_code}: {detail!s:.200}".removesuffix(": ")


def _object(response: httpx.Response) -> dict:
    try:
        found = json.loads(response.content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


# ---------------------------------------------------------------------------------------------------------- settings


def _retrieve_url(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise UserError(f"retriever.url is {url!r}: {error}; give one such as http://127.0.0.1:8000") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UserError(f"retriever.url is {url!r}; give one such as http://127.0.0.1:8000")
    return str(parsed).rstrip("/").removesuffix("/retrieve") + "/retrieve"


def _checked_retries(retries: int) -> int:
    if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
        raise UserError(f"retriever.retries must be a whole number, 0 for none, it is {retries!r}")
    return retries


def _checked_deadline(seconds: float) -> float:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise UserError(f"retriever.deadline must be seconds above 0, it is {seconds!r}")
    return float(seconds)
