"""The server: the request forms of the released code, limits, states, and its end, on real sockets."""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from parasearch_jax.endpoint import Server, bound
from parasearch_jax.errors import UserError
from parasearch_jax.retrieval import Document, LocalRetriever, open_retriever, remote, server
from parasearch_jax.retrieval.batching import Batching
from parasearch_jax.retrieval.corpus import load_corpus
from parasearch_jax.retrieval.hashed import HashedEncoder
from parasearch_jax.retrieval.index import FlatIndex
from parasearch_jax.retrieval.remote import Patience, RemoteRetriever
from parasearch_jax.toy import files

ROOT = Path(__file__).parents[2]
DOCUMENTS = [Document("a", '"Ann"\nAnn paints.'), Document("b", '"Bob"\nBob sings.'), Document("c", "1984\nA book.")]
ODD = ['Ann "the" painter\nborn', "北京", "O’Neill \\ année", "", "\ud800", "\x00\x1f\u2028", "x" * 5000]


def local(documents=DOCUMENTS, **batching):
    encoder, index = HashedEncoder([d.contents for d in documents]), FlatIndex(512)
    index.add(encoder.encode([d.contents for d in documents]))
    return LocalRetriever(documents, encoder, index, batching=Batching(**batching))


@contextlib.contextmanager
def listening(retriever=None, topk=3):
    """(url, service, server, its thread) of a real server; without a retriever it is loading."""
    service = server.Service(topk)
    if retriever is not None:
        service.load(lambda: retriever)
    ends = Server(server.create_app(service), log_level="critical")
    with bound("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=ends.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield url, service, ends, thread
        finally:
            ends.should_exit = True
            thread.join(30)
            assert not thread.is_alive()
            if retriever is not None:
                retriever.close_sync()


@pytest.fixture(scope="module")
def url():
    with listening(local()) as (url, *_):
        yield url


@pytest.fixture(scope="module")
def corpus():
    return files.DIRECTORY / "corpus.jsonl"


CLIENT = httpx.Client(timeout=30)  # one for all: each makes an SSL context


def post(url, path="/retrieve", **body):
    return CLIENT.post(url + path, content=json.dumps(body))


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)


class Gate(LocalRetriever):
    """Answers when it is open; `asked` are the queries so far, `gone` the searches that were cancelled."""

    def __init__(self):
        self.open, self.asked, self.gone = threading.Event(), [], 0

    async def search_scored(self, queries, k):
        self.asked += queries
        try:
            while not self.open.is_set():
                await asyncio.sleep(0.002)
        except asyncio.CancelledError:
            self.gone += 1
            raise
        return [[(DOCUMENTS[0], 1.0)] for _ in queries]

    async def close(self):
        pass

    def pop_stats(self):
        return {}


# ---------------------------------------------------------------------------------------------------------------- forms


def test_search_r1_with_scores(url):
    rows = post(url, queries=["Bob sings", "Ann"], topk=3, return_scores=True).json()["result"]
    assert [row[0]["document"]["id"] for row in rows] == ["b", "a"]
    for row in rows:
        assert [set(item) for item in row] == [{"document", "score"}] * 3
        scores = [item["score"] for item in row]
        assert scores == sorted(scores, reverse=True) and scores[0] > scores[1]
    assert rows[0][0]["document"] == {"id": "b", "contents": '"Bob"\nBob sings.'}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_search_r1_without_scores(url, count):
    """With exactly two queries too, where unpacking a list of lists into two names would pass."""
    queries = ["Ann", "Bob", "1984 book"][:count]
    for given in ({}, {"return_scores": False}):
        rows = post(url, queries=queries, topk=1, **given).json()
        assert rows == {"result": [[vars(document)] for document in DOCUMENTS[:count]]}


def test_as_the_released_code_of_search_r1_reads_it(url):
    """`_passages2string` of generation.py."""
    payload = {"queries": ["Bob sings"], "topk": 1, "return_scores": True}
    text = ""
    for result in httpx.post(f"{url}/retrieve", json=payload).json()["result"]:
        for i, item in enumerate(result):
            title, *rest = item["document"]["contents"].split("\n")
            text += f"Doc {i + 1}(Title: {title}) {chr(10).join(rest)}\n"
    assert text == 'Doc 1(Title: "Bob") Bob sings.\n'


def test_as_the_released_code_of_zerosearch_reads_it(url):
    found = httpx.post(f"{url}/retrieve", json={"query": "Bob sings", "top_k": 1}).json()
    assert found == [{"text": '"Bob"\nBob sings.'}]
    assert "\n".join(f"Doc {i + 1}: {doc['text']}" for i, doc in enumerate(found)) == 'Doc 1: "Bob"\nBob sings.'


def test_as_the_released_code_of_r1_searcher_reads_it(url):
    """It takes line numbers off, which must not be the title of a book."""
    found = httpx.post(f"{url}/queries", json={"queries": ["1984 book", "Ann"], "k": 1})
    assert found.status_code == 200
    assert found.json() == {"queries": ["1984 book", "Ann"], "answers": [['"1984"\nA book.'], ['"Ann"\nAnn paints.']]}
    read = [[re.sub(r"^\d+\s+", "", text) for text in row] for row in found.json()["answers"]]
    assert "1984" in read[0][0]


def test_no_topk_is_the_servers(url):
    with listening(local(), topk=2) as (two, *_):
        for path, body, documents in (
            ("/retrieve", {"queries": ["Ann"]}, lambda found: found["result"][0]),
            ("/retrieve", {"queries": ["Ann"], "topk": None}, lambda found: found["result"][0]),
            ("/retrieve", {"query": "Ann"}, lambda found: found),
            ("/queries", {"queries": ["Ann"]}, lambda found: found["answers"][0]),
        ):
            assert [len(documents(post(each, path, **body).json())) for each in (two, url)] == [2, 3]


def test_no_queries_fewer_documents_than_topk_and_an_empty_index(url):
    assert post(url, queries=[], topk=3).json() == {"result": []}
    assert post(url, "/queries", queries=[], k=3).json() == {"queries": [], "answers": []}
    assert [len(row) for row in post(url, queries=["Ann"] * 25, topk=10).json()["result"]] == [3] * 25
    with listening(local([])) as (empty, *_):
        assert post(empty, queries=["Ann"] * 25, return_scores=True).json() == {"result": [[]] * 25}
        assert post(empty, query="Ann").json() == []
        assert post(empty, "/queries", queries=["Ann"]).json() == {"queries": ["Ann"], "answers": [[]]}


def test_odd_characters_come_through_unchanged(url):
    assert post(url, "/queries", queries=ODD, k=1).json()["queries"] == ODD
    assert len(post(url, queries=ODD, topk=1).json()["result"]) == len(ODD)
    text = "“北京” \\ \u2028 \U0001f600 \ud800"
    with listening(local([Document("a", f"t\n{text}")])) as (odd, *_):
        assert post(odd, query="x", top_k=1).json() == [{"text": f"t\n{text}"}]


def test_topk_1_and_3_at_once_each_for_its_own_query(url):
    """Also from the cache, which must not give the 1 of one request to another that asks for 3."""
    asks = [({"Ann": "a", "Bob": "b"}[name], name, k) for name in ("Ann", "Bob") for k in (1, 3)] * 10
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(lambda ask: post(url, queries=[ask[1]], topk=ask[2]).json()["result"], asks))
    assert [(len(row), row[0]["id"]) for (row,) in rows] == [(k, best) for best, _, k in asks]


def test_eight_threads_of_fifty_queries_equal_the_serial_answers(corpus):
    """Client, server, cache, batches and index together, against the index alone."""
    documents = load_corpus(corpus)
    titles = [document.title for document in documents]
    serial = local(documents, most=1, cache=0)
    asks = [[([titles[(n * 31 + i * 7) % 60]], 1 + (n + i) % 3) for i in range(50)] for n in range(8)]
    with contextlib.closing(serial._batcher), listening(local(documents)) as (url, *_):
        client = RemoteRetriever(url, 30.0)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            got = list(pool.map(lambda mine: [client.search_sync(*ask) for ask in mine], asks))
        client.close_sync()
        assert got == [[serial.search_sync(*ask) for ask in mine] for mine in asks]
        metrics = httpx.get(f"{url}/metrics").text
    assert "parasearch_retrieval_queries_total 400\n" in metrics
    hits = int(re.search(r"cache_hits_total (\d+)", metrics)[1])
    searched = int(re.search(r"retrieval_searched_total (\d+)", metrics)[1])
    assert hits > 0 and 1 <= searched <= 400 - hits


# --------------------------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/retrieve", {}, 'give "queries", a list of strings, or "query"'),
        ("/queries", {"query": "a"}, "unknown field 'query'"),
        ("/queries", {}, 'give "queries", a list of strings'),
        ("/retrieve", {"queries": ["a"], "top_k": 3}, "unknown field 'top_k'; known beside queries: topk"),
        ("/retrieve", {"query": "a", "topk": 3}, "unknown field 'topk'; known beside query: top_k"),
        ("/retrieve", {"query": "a", "queries": ["a"]}, "unknown field 'query'"),
        ("/retrieve", {"queries": "Ann"}, "queries must be a list of strings, it is 'Ann'"),
        ("/retrieve", {"queries": None}, "queries must be a list of strings, it is None"),
        ("/retrieve", {"queries": ["a", 3]}, "queries[1] must be a string, it is 3"),
        ("/retrieve", {"query": ["a"]}, "query[0] must be a string, it is ['a']"),
        ("/retrieve", {"queries": ["a"], "topk": 0}, "topk must be a whole number from 1 to 1000, it is 0"),
        ("/retrieve", {"queries": ["a"], "topk": 2.0}, "it is 2.0"),
        ("/retrieve", {"queries": ["a"], "topk": True}, "it is True"),
        ("/retrieve", {"queries": ["a"], "topk": 10**9}, "it is 1000000000"),
        ("/queries", {"queries": ["a"], "k": "3"}, "k must be a whole number from 1 to 1000, it is '3'"),
        ("/retrieve", {"queries": ["a"], "return_scores": 1}, "return_scores must be true or false, it is 1"),
        ("/retrieve", {"queries": ["a"] * 16385}, "queries holds 16385 queries, a request at most 16384"),
        ("/retrieve", {"queries": ["a", "x" * 16385]}, "queries[1] has 16385 characters, a query at most 16384: 'xxx"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_wrong_request_is_told_in_a_sentence(url, path, body, words):
    answer = post(url, path, **body)
    assert answer.status_code == 422
    told = answer.json()["detail"]
    assert words in told and "\n" not in told and len(told) < 300


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 100_000, b""], ids=["broken", "no UTF-8", "deep", "empty"])
def test_a_body_that_is_no_json(url, content):
    answer = httpx.post(f"{url}/retrieve", content=content)
    assert answer.status_code == 400 and "not valid JSON" in answer.json()["detail"]


def test_a_body_that_is_no_object(url):
    answer = httpx.post(f"{url}/retrieve", content=b"[]")
    assert answer.status_code == 422 and "must be a JSON object" in answer.json()["detail"]


def test_a_body_of_more_than_16_mib_gets_413(url):
    """As docs/retrieval.md has it."""
    assert CLIENT.post(f"{url}/retrieve", content=b" " * (2**24 + 1)).status_code == 413


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_long(url, monkeypatch, chunked):
    monkeypatch.setattr(server, "MAX_BODY", 2**16)
    parts = [b" " * 2**12] * 17
    answer = httpx.post(f"{url}/retrieve", content=iter(parts) if chunked else b"".join(parts), timeout=30)
    assert answer.status_code == 413 and answer.json()["detail"] == f"the body has more than {2**16} bytes"
    fits = json.dumps({"queries": ["Ann"], "topk": 1}).encode().ljust(2**16)
    assert httpx.post(f"{url}/retrieve", content=fits).status_code == 200


def test_a_body_without_end_is_not_read_to_its_end(url, monkeypatch):
    monkeypatch.setattr(server, "MAX_BODY", 2**12)
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as client:
        client.sendall(b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % 2**40)
        answer = b""
        with contextlib.suppress(ConnectionError):  # it has hung up
            while not answer.startswith(b"HTTP/1.1 413") or not answer.endswith(b"}"):
                client.sendall(b" " * 2**14)
                client.settimeout(0.01)
                with contextlib.suppress(TimeoutError):
                    answer += client.recv(2**16)
                client.settimeout(30)
    assert b" 413 " in answer
    assert post(url, queries=["Ann"]).status_code == 200


def test_other_paths_and_methods(url):
    assert httpx.get(f"{url}/retrieve").status_code == 405
    assert httpx.post(f"{url}/search", json={}).status_code == 404


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [(ZeroDivisionError(), 500, "ZeroDivisionError"), (UserError("gives at most 64"), 422, "gives at most 64")],
)
def test_an_index_that_fails_is_told(monkeypatch, error, status, words):
    broken = local()

    def search(queries, k):
        raise error

    monkeypatch.setattr(broken._batcher, "_search", search)
    with listening(broken) as (url, *_):
        answer = post(url, queries=["Ann"])
        assert answer.status_code == status and words in answer.json()["detail"]
        assert httpx.get(f"{url}/health").status_code == 200


# --------------------------------------------------------------------------------------------------------------- states


def test_while_it_loads_it_says_so():
    with listening() as (url, service, *_):
        health = httpx.get(f"{url}/health")
        assert health.status_code == 503 and health.json()["status"] == "loading" and health.json()["seconds"] >= 0
        answer = post(url, queries=["Ann"])
        assert answer.status_code == 503 and "loading" in answer.json()["detail"] and answer.headers["retry-after"]
        assert "parasearch_retrieval_ready 0\n" in httpx.get(f"{url}/metrics").text

        with concurrent.futures.ThreadPoolExecutor(1) as pool:  # a trainer that starts too early
            trainer = RemoteRetriever(url, 30.0, Patience(start=0.0, pause=0.01))
            waiting = pool.submit(trainer.wait_until_ready)
            time.sleep(0.05)
            assert not waiting.done()
            service.load(local)
            waiting.result(30)
        health = httpx.get(f"{url}/health").json()
        assert (health["status"], health["topk"], health["info"]) == ("ok", 3, {"kind": "local"})
        assert trainer.info == {"kind": "remote", "url": f"{url}/retrieve"} and trainer.index == health["index"]
        trainer.close_sync()
        service.retriever.close_sync()


def test_fingerprints_are_of_what_is_served(corpus):
    settings = {"kind": "local", "corpus": corpus, "encoder": "hashed"}
    seen = []
    for change in ({}, {"topk": 5}, {"dim": 64}):
        service = server.Service(3)
        service.load(lambda change=change: open_retriever(settings | change))
        seen.append(service.index)
        service.retriever.close_sync()
    assert seen[0] == seen[1] != seen[2]  # topk is of a request


def test_metrics_count_what_was_answered():
    with listening(local()) as (url, *_):
        for _ in range(3):
            post(url, queries=["Ann", "Bob"], topk=1)
        post(url, "/queries", queries=["Ann"], k=1)
        post(url, queries="Ann")
        found = httpx.get(f"{url}/metrics")
        again = httpx.get(f"{url}/metrics").text
    assert found.headers["content-type"].startswith("text/plain")
    samples = dict(line.rsplit(" ", 1) for line in found.text.splitlines() if not line.startswith("#"))
    assert again == found.text  # asking changes nothing
    prefix = "parasearch_retrieval_"
    assert samples[prefix + 'requests_total{path="/retrieve",status="200"}'] == "3"
    assert samples[prefix + 'requests_total{path="/retrieve",status="422"}'] == "1"
    assert samples[prefix + 'requests_total{path="/queries",status="200"}'] == "1"
    counts = {name: samples[f"{prefix}{name}_total"] for name in ("queries", "cache_hits", "searched", "batches")}
    assert counts == {"queries": "7", "cache_hits": "5", "searched": "2", "batches": "1"}
    assert samples[prefix + "request_seconds_count"] == samples[prefix + 'request_seconds_bucket{le="+Inf"}'] == "4"
    assert float(samples[prefix + "request_seconds_sum"]) > 0 and samples[prefix + "ready"] == "1"
    assert samples[prefix + "requests_under_way"] == "0"


def test_the_histogram_counts_what_took_no_longer():
    service = server.Service(3)
    for seconds, status in ((0.001, 200), (0.0015, 200), (0.0015, 503), (60.0, 200)):
        service.count("/retrieve", status, seconds)
    lines = server.prometheus(service).splitlines()
    assert [line.split()[1] for line in lines if "_bucket" in line] == ["1", *["2"] * 12, "3"]
    assert "parasearch_retrieval_request_seconds_sum 60.0025" in lines


# ----------------------------------------------------------------------------------------------------- clients, its end


def test_our_client_gives_a_connection_up_before_our_server_does():
    assert remote.KEPT < server.KEPT


def test_a_client_that_hangs_up_has_its_search_cancelled():
    gate = Gate()
    with listening(gate) as (url, service, *_):
        host, port = url.removeprefix("http://").split(":")
        text = json.dumps({"queries": ["Ann"]}).encode()
        with socket.create_connection((host, int(port))) as client:
            client.sendall(b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(text) + text)
            wait_until(lambda: gate.asked)
        wait_until(lambda: gate.gone == 1 and not service.under_way)
        gate.open.set()
        assert post(url, queries=["Ann"]).status_code == 200
        assert service.answers["/retrieve", 499] == 1


def test_at_its_end_it_answers_what_is_under_way():
    gate = Gate()
    with listening(gate) as (url, _, ends, thread):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            search = pool.submit(post, url, queries=["Ann"], topk=1)
            wait_until(lambda: gate.asked)
            ends.handle_exit(signal.SIGTERM, None)
            time.sleep(0.2)
            with pytest.raises(httpx.TransportError):
                post(url, queries=["Bob"])
            gate.open.set()
            assert search.result(30).json() == {"result": [[vars(DOCUMENTS[0])]]}
        thread.join(30)
        assert not thread.is_alive() and gate.asked == ["Ann"]


# --------------------------------------------------------------------------------------------------------- as a program


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--corpus=c.jsonl", "--setting=dim"], "--setting=dim: give NAME=VALUE"),
        (["--corpus=c.jsonl", "--setting=topk=3"], "--setting=topk=3: give NAME=VALUE"),
        (["--corpus=c.jsonl", "--setting=encoder=e5"], "--setting=encoder=e5: give NAME=VALUE"),
        (["--corpus=c.jsonl", "--topk=0"], "--topk is 0; give 1 to 1000"),
        (["--corpus=c.jsonl", "--batch=0"], "--batch is 0"),
        (["--corpus=c.jsonl", "--wait-ms=-1"], "--wait-ms is -1"),
        (["--corpus=c.jsonl", "--cache=-1"], "--cache is -1"),
        (["--corpus=c.jsonl", "--port=70000"], "--port=70000"),
        (["--corpus=absent.jsonl"], "absent.jsonl is no file"),
        (["--index=absent"], "absent"),
    ],
)
def test_what_can_be_mended_is_told(args, words):
    with pytest.raises(UserError, match=re.escape(words)):
        server.main(["--port=0", *args])


def test_settings_of_the_command_line():
    args = server.make_parser().parse_args(
        ["--corpus=c", "--encoder=e5", "--setting=max_length=128", "--setting=pooling=cls", "--topk=5"]
    )
    settings = {"kind": "local", "corpus": "c", "encoder": "e5", "max_length": 128, "pooling": "cls", "topk": 5}
    assert server.retriever_settings(args) == settings
    of_index = server.make_parser().parse_args(["--index=DIR", "--setting=device=gpu"])
    assert server.retriever_settings(of_index) == {"kind": "local", "index": "DIR", "device": "gpu", "topk": 3}
    assert (args.host, args.port) == ("127.0.0.1", 8000)


@contextlib.contextmanager
def program(corpus, port=0, settings=("dim=32", "char_weight=0.7")):
    """(url, process) of the server as a program; killed at the end if it still runs."""
    flags = [f"--corpus={corpus}", f"--port={port}", *(f"--setting={given}" for given in settings)]
    command = [sys.executable, "-m", "parasearch_jax.retrieval.server", *flags]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, **pipes) as process:
        try:
            yield process.stdout.readline().split(" at ")[1].split(",")[0], process
        finally:
            process.kill()


def test_as_a_program(corpus):
    """It starts, serves this machine alone, and SIGTERM ends it in order; it needs no JAX."""
    with program(corpus) as (url, process):
        client = RemoteRetriever(url, 30.0)
        client.wait_until_ready()
        assert client.info["encoder"] == "hashed" and client.info["dim"] == 32
        document = load_corpus(corpus)[0]
        assert client.search_sync([document.title], 1) == [[document]]
        client.close_sync()
        maps = Path(f"/proc/{process.pid}/maps")
        assert not maps.exists() or "jaxlib" not in maps.read_text()
        process.send_signal(signal.SIGTERM)
        told = process.communicate(timeout=60)[0]
    assert process.returncode == 0 and "Traceback" not in told and "ready after" in told


class Killing(RemoteRetriever):
    """Has the server killed at its search `at`, and started again when one was tried again in vain."""

    def __init__(self, corpus, url, process, at, stack):
        super().__init__(url, 300.0)  # a machine with other work takes its time to start a server
        self._searches, self._at = 0, at
        self._kill = lambda: (process.kill(), process.wait())
        self._start = lambda: stack.enter_context(program(corpus, port=url.rsplit(":", 1)[1]))
        self.back = None

    async def search(self, queries, k):
        self._searches += 1
        if self._searches == self._at:
            self._kill()
            self.back = threading.Thread(target=self._wait_and_start)
            self.back.start()
        return await super().search(queries, k)

    def _wait_and_start(self):
        wait_until(lambda: self._stats["retries"], 120)
        self._start()


@pytest.mark.slow
def test_a_server_that_is_killed_under_a_training_run_changes_nothing(corpus, tmp_path, monkeypatch):
    """No episode is lost, no search fails, and the parameters are those of a run with the corpus in its process."""
    import parallel_tiny

    from parasearch_jax import train
    from parasearch_jax.writers import read_metrics

    config = parallel_tiny.get_config("smoke")
    config.train.steps, config.rollout.search_seconds = 1, 600.0
    config.data.test = str(tmp_path / "test.jsonl")
    Path(config.data.test).write_text("".join((files.DIRECTORY / "test.jsonl").open().readlines()[:16]))
    alone = train.train(config, workdir=tmp_path / "local")

    config.retriever.update(kind="remote", corpus="", encoder="")
    with contextlib.ExitStack() as stack, program(corpus) as (url, process):
        killing = Killing(corpus, url, process, at=60, stack=stack)
        killing.wait_until_ready()
        monkeypatch.setattr(train, "open_retriever", lambda settings: killing)
        config.retriever.url = url
        results = train.train(config, workdir=tmp_path / "remote")
        killing.back.join()
    (stats,) = read_metrics(tmp_path / "remote")
    assert killing._searches > 60 and stats["retriever/retries"] >= 1 and not stats["retriever/failures"]
    assert results["params_sha256"] == alone["params_sha256"]
    assert results["retriever"]["corpus_sha256"] == alone["retriever"]["corpus_sha256"]
    drop = {"seconds_per_question"}
    for name, subsets in alone["evals"].items():
        for subset, told in subsets.items():
            assert {k: v for k, v in results["evals"][name][subset].items() if k not in drop} == {
                k: v for k, v in told.items() if k not in drop
            }


@pytest.mark.slow
def test_the_benchmark_runs():
    command = [sys.executable, "benchmarks/retrieval.py", "server", "--seconds=0.3", "--rounds=2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[1:]] == [
        "| 1 client",
        "| 8 clients",
        "| 64 clients",
        "| 64 searches of RemoteRetriever",
    ]
