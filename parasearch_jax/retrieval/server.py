r"""A corpus as an HTTP service, in the place of the servers of Search-R1, ParallelSearch, ZeroSearch and R1-Searcher.

    python -m parasearch_jax.retrieval.server --corpus=corpus.jsonl --encoder=models/e5-base-v2 --port=8000
    python -m parasearch_jax.retrieval.server --index=DIR

Answers their request forms (docs/retrieval.md), GET /health and GET /metrics. Listens at once and says 503 "loading"
until it can search.
"""

from __future__ import annotations

import argparse
import bisect
import hashlib
import json
import logging
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parasearch_jax.errors import UserError
from parasearch_jax.programs import keep_programs

if __name__ == "__main__":
    keep_programs()  # before an encoder imports JAX

from parasearch_jax.retrieval import Document, Retriever, named_settings, open_retriever
from parasearch_jax.retrieval.batching import Batching
from parasearch_jax.retrieval.retriever import INDEX_HEADER

try:
    from fastapi import FastAPI, Request, Response
    from starlette.exceptions import HTTPException

    from parasearch_jax.endpoint import Server, address, bound, json_response, read_json, unless_gone
except ImportError as error:
    if __name__ != "__main__":
        raise
    sys.exit(f"error: serving needs FastAPI and uvicorn ({error}): pip install -r requirements-serve.txt")

log = logging.getLogger("uvicorn.error")  # where the server's own lines go
# Limits of a request. Search-R1 sends the searches of all episodes of a step in one: 2,560 with its settings, and the
# policy may write 500 tokens into each.
MAX_BODY = 2**24  # bytes
MAX_QUERIES = 16384
MAX_QUERY = 16384  # characters
MAX_TOPK = 1000
SHUTDOWN = 30  # seconds for what is under way
KEPT = 75  # seconds of a connection without a request; clients should give it up earlier, as ours does
BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # seconds of an answer

Rows = list[list[tuple[Document, float]]]


class Service:
    """The retriever, which comes later than the server, and what was counted."""

    def __init__(self, topk: int):
        self.topk, self.began = topk, time.monotonic()
        self.retriever: Retriever | None = None
        self.error: Exception | None = None  # why there is none
        self.answers: Counter[tuple[str, int]] = Counter()  # (path, status)
        self.under_way = 0
        self.seconds, self.buckets = 0.0, [0] * (len(BUCKETS) + 1)  # of answers with status 200
        self.stats: Counter[str] = Counter()  # of the retriever

    def load(self, make: Callable[[], Retriever]) -> None:
        """`make()` becomes the retriever, or its error the service's. Runs in any thread."""
        try:
            retriever = make()
            self.about = {name: value for name, value in retriever.info.items() if name != "topk"}
            self.index = fingerprint(self.about)
            self.retriever = retriever  # last: from here on others read it
        except Exception as error:
            self.error = error

    def ready(self) -> Retriever:
        if self.retriever is None:
            raise HTTPException(503, "the index is loading; try again later", {"retry-after": "1"})
        return self.retriever

    def count(self, path: str, status: int, seconds: float) -> None:
        self.answers[path, status] += 1
        if status == 200:
            self.seconds += seconds
            self.buckets[bisect.bisect_left(BUCKETS, seconds)] += 1

    def state(self) -> dict[str, Any]:
        if self.error is not None:
            return {"status": "failed", "error": str(self.error)}
        if self.retriever is None:
            return {"status": "loading", "seconds": round(time.monotonic() - self.began, 1)}
        return {"status": "ok", "index": self.index, "topk": self.topk, "under_way": self.under_way, "info": self.about}


def fingerprint(info: Mapping[str, Any]) -> str:
    """16 hex digits of what a retriever says of itself: equal for the same corpus, encoder and settings."""
    return hashlib.sha256(json.dumps(info, sort_keys=True).encode()).hexdigest()[:16]


# ------------------------------------------------------------------------------------------------------------------ app


def create_app(service: Service) -> FastAPI:
    app = FastAPI(title="ParaSearch-JAX retrieval", docs_url=None, redoc_url=None, openapi_url=None)

    async def answered(request: Request) -> Response:
        path, began, status = request.url.path, time.perf_counter(), 500
        service.under_way += 1
        try:
            response = await _answer(service, path, request)
            status = response.status_code
            return response
        except HTTPException as error:
            status = error.status_code
            return json_response({"detail": error.detail}, status, error.headers)
        except UserError as error:  # more documents than the index can give
            status = 422
            return json_response({"detail": str(error)}, status)
        except Exception as error:
            log.exception("a search failed")
            return json_response({"detail": f"the search failed: {error!r:.200}"}, status)
        finally:
            service.under_way -= 1
            service.count(path, status, time.perf_counter() - began)

    @app.post("/retrieve")
    async def retrieve(request: Request) -> Response:
        return await answered(request)

    @app.post("/queries")
    async def queries(request: Request) -> Response:
        return await answered(request)

    @app.get("/health")
    async def health() -> Response:
        state = service.state()
        return json_response(state, 200 if state["status"] == "ok" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(prometheus(service), media_type="text/plain; version=0.0.4")

    return app


async def _answer(service: Service, path: str, request: Request) -> Response:
    queries, k, written = parse(path, await read_json(request, MAX_BODY), service.topk)
    rows = await unless_gone(request, service.ready().search_scored(queries, k))
    if rows is None:
        return Response(status_code=499)  # nobody is there to read it
    return json_response(written(rows), headers={INDEX_HEADER: service.index})


# ---------------------------------------------------------------------------------------------------------------- forms


def parse(path: str, body: Any, topk: int) -> tuple[list[str], int, Callable[[Rows], Any]]:
    """(queries, documents for each, how the answer is written) of a request; HTTPException 422 says what is wrong.

    POST /retrieve {"queries", "topk", "return_scores"}   Search-R1, ParallelSearch, our own client
    POST /retrieve {"query", "top_k"}                     ZeroSearch
    POST /queries  {"queries", "k"}                       R1-Searcher
    """
    if not isinstance(body, dict):
        raise _wrong(f"the body must be a JSON object, it is {body!r:.80}")
    if path == "/queries":
        fields = ("queries", "k")
    elif "query" in body and "queries" not in body:
        fields = ("query", "top_k")
    else:
        fields = ("queries", "topk", "return_scores")
    if unknown := sorted(set(body) - set(fields)):
        raise _wrong(f"unknown field {unknown[0]!r:.80}; known beside {fields[0]}: {', '.join(fields[1:])}")
    if fields[0] not in body:
        raise _wrong('give "queries", a list of strings' + (', or "query", a string' if path == "/retrieve" else ""))
    asked, k = body[fields[0]], _checked_k(fields[1], body.get(fields[1]), topk)
    if fields[0] == "query":
        return _checked([asked], "query"), k, _zerosearch
    queries = _checked(asked, "queries")
    if path == "/queries":
        return queries, k, lambda rows: _r1_searcher(queries, rows)
    scores = body.get("return_scores", False)
    if not isinstance(scores, bool):
        raise _wrong(f"return_scores must be true or false, it is {scores!r:.80}")
    return queries, k, lambda rows: _search_r1(rows, scores)


def _checked_k(name: str, k: Any, topk: int) -> int:
    k = topk if k is None else k
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MAX_TOPK:
        raise _wrong(f"{name} must be a whole number from 1 to {MAX_TOPK}, it is {k!r:.80}")
    return k


def _checked(queries: Any, name: str) -> list[str]:
    if not isinstance(queries, list):
        raise _wrong(f"{name} must be a list of strings, it is {queries!r:.80}")
    if len(queries) > MAX_QUERIES:
        raise _wrong(f"{name} holds {len(queries)} queries, a request at most {MAX_QUERIES}; send several")
    for i, query in enumerate(queries):
        if not isinstance(query, str):
            raise _wrong(f"{name}[{i}] must be a string, it is {query!r:.80}")
        if len(query) > MAX_QUERY:
            raise _wrong(f"{name}[{i}] has {len(query)} characters, a query at most {MAX_QUERY}: {query[:40]!r} ...")
    return queries


def _wrong(told: str) -> HTTPException:
    return HTTPException(422, told)


def _search_r1(rows: Rows, scores: bool) -> dict:
    if scores:
        return {"result": [[{"document": _document(doc), "score": score} for doc, score in row] for row in rows]}
    return {"result": [[_document(doc) for doc, _ in row] for row in rows]}


def _document(document: Document) -> dict:
    return {"id": document.id, "contents": document.contents}


def _zerosearch(rows: Rows) -> list[dict]:
    return [{"text": document.contents} for document, _ in rows[0]]


def _r1_searcher(queries: list[str], rows: Rows) -> dict:
    return {"queries": queries, "answers": [[_r1_text(document) for document, _ in row] for row in rows]}


def _r1_text(document: Document) -> str:
    r"""The contents, a title such as 1984 in quotes: R1-Searcher strips `^\d+\s+`, the line numbers of its corpus."""
    if not re.match(r"\d+\s", document.contents):
        return document.contents
    title, newline, text = document.contents.partition("\n")
    return f'"{title}"{newline}{text}'


# -------------------------------------------------------------------------------------------------------------- metrics


def prometheus(service: Service) -> str:
    """The counters in Prometheus' text form."""
    if service.retriever is not None:
        service.stats.update(service.retriever.pop_stats())
    lines = []

    def metric(name: str, kind: str, *samples: tuple[str, float]) -> None:
        lines.append(f"# TYPE parasearch_retrieval_{name} {kind}")
        lines.extend(f"parasearch_retrieval_{name}{labels} {value:.10g}" for labels, value in samples)

    metric("ready", "gauge", ("", service.state()["status"] == "ok"))
    metric("requests_under_way", "gauge", ("", service.under_way))
    labelled = [(f'{{path="{path}",status="{status}"}}', n) for (path, status), n in sorted(service.answers.items())]
    metric("requests_total", "counter", *labelled)
    counts = [sum(service.buckets[: i + 1]) for i in range(len(service.buckets))]
    buckets = zip([*map(str, BUCKETS), "+Inf"], counts, strict=True)
    labelled = [(f'_bucket{{le="{le}"}}', n) for le, n in buckets]
    metric("request_seconds", "histogram", *labelled, ("_sum", service.seconds), ("_count", counts[-1]))
    for name in ("queries", "cache_hits", "searched", "batches"):
        metric(f"{name}_total", "counter", ("", service.stats[f"retriever/{name}"]))
    metric("search_seconds_total", "counter", ("", service.stats["retriever/seconds"]))
    return "\n".join(lines) + "\n"


# --------------------------------------------------------------------------------------------------------------- server


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--index", help="a directory of python -m parasearch_jax.retrieval.build")
    source.add_argument("--corpus", help="a jsonl file, which is encoded at every start and held in memory")
    parser.add_argument("--encoder", help="of --corpus: a model directory, or hashed (default)")
    parser.add_argument(
        "--setting", action="append", default=[], metavar="NAME=VALUE", help="more of the retriever: dim=64, device=gpu"
    )
    parser.add_argument("--topk", type=int, default=3, help="documents for a query that does not say (default: 3)")
    parser.add_argument("--host", default="127.0.0.1", help="default: this machine only")
    parser.add_argument("--port", type=int, default=8000)
    defaults = Batching()
    parser.add_argument("--batch", type=int, default=defaults.most, help="queries searched together, at most")
    parser.add_argument("--wait-ms", type=float, default=0.0, help="that a batch waits for more queries (default: 0)")
    parser.add_argument("--cache", type=int, default=defaults.cache, help="answers kept, of (query, k); 0: none")
    return parser


def retriever_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What `open_retriever` takes, from the command line."""
    settings = {"kind": "local", "topk": args.topk, "index": args.index, "corpus": args.corpus, "encoder": args.encoder}
    if args.corpus and not args.encoder:
        settings["encoder"] = "hashed"
    settings = {name: value for name, value in settings.items() if value is not None}
    return settings | named_settings(args.setting, taken=settings)


def main(argv: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    settings = retriever_settings(args)
    _in_range("--topk", args.topk, 1, MAX_TOPK)
    _in_range("--batch", args.batch, 1, 2**20)
    _in_range("--wait-ms", args.wait_ms, 0, 10_000)
    _in_range("--cache", args.cache, 0, 2**30)
    batching = Batching(args.batch, args.wait_ms / 1000, args.cache)
    service = Service(args.topk)
    with bound(args.host, args.port) as listener:
        limits = {"timeout_keep_alive": KEPT, "timeout_graceful_shutdown": SHUTDOWN}
        server = Server(create_app(service), access_log=False, **limits)

        def load() -> None:
            service.load(lambda: open_retriever(settings, batching))
            if service.error is not None:
                server.should_exit = True
            else:
                print(f"ready after {time.monotonic() - service.began:.1f} s: {service.about}", flush=True)

        print(f"retrieval at {address(args.host, listener)}, loading {args.index or args.corpus}", flush=True)
        threading.Thread(target=load, name="load", daemon=True).start()
        server.run(sockets=[listener])
    if service.error is not None:
        raise service.error
    if service.retriever is not None:
        service.retriever.close_sync()


def _in_range(flag: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise UserError(f"{flag} is {value:g}; give {least:g} to {most:g}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
