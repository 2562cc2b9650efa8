import asyncio
import concurrent.futures
import contextlib
import json
import threading
import time

import numpy as np
import pytest

from parasearch_jax.errors import UserError
from parasearch_jax.retrieval import Document, LocalRetriever, Retriever, open_retriever
from parasearch_jax.retrieval.batching import Batching
from parasearch_jax.retrieval.corpus import fingerprint
from parasearch_jax.retrieval.hashed import HashedConfig, HashedEncoder
from parasearch_jax.retrieval.index import FlatIndex
from parasearch_jax.toy import files, world

ODD = ['Mira "Voss"\nborn', "北京", "O’Neill \\ année", "", "\ud800", "x" * 5000]


@pytest.fixture(scope="module")
def corpus():
    return files.DIRECTORY / "corpus.jsonl"


@pytest.fixture
def retriever(corpus):
    opened = open_retriever({"kind": "local", "corpus": str(corpus), "encoder": "hashed", "dim": 64})
    yield opened
    asyncio.run(opened.close())


def titles():
    return [f"{name} birth year" for name in world.make_world(0).persons]


class Probe:
    """Encoder and index over `documents`: counts calls, may wait for `gate`, fails for queries that say so."""

    def __init__(self, documents=5):
        self.documents = [Document(str(i), f"t{i}\nx") for i in range(documents)]
        self.gate, self.entered, self.batches, self.threads = threading.Event(), threading.Event(), [], set()
        self.gate.set()

    def __len__(self):
        return len(self.documents)

    def encode(self, texts, kind=None):
        assert kind == "query"
        self.threads.add(threading.get_ident())
        self.batches.append(list(texts))
        self.entered.set()
        assert self.gate.wait(10)
        if "fail" in texts:
            raise ZeroDivisionError("encoder broke")
        return np.array([[len(t)] for t in texts])

    def search(self, vectors, k):
        """Query of length m -> documents m, m+1, ... (modulo), so that a mixed-up answer shows."""
        return [[((int(m) + i) % len(self), 0.0) for i in range(min(k, len(self)))] for (m,) in vectors]

    def retriever(self, **batching):
        return LocalRetriever(self.documents, self, self, batching=Batching(**batching))


@pytest.fixture
def probe():
    return Probe()


@pytest.fixture
def probed(probe):
    opened = probe.retriever()
    yield opened
    probe.gate.set()
    asyncio.run(opened.close())


def ids(found):
    return [[int(d.id) for d in row] for row in found]


def test_answers_equal_brute_force_on_every_query(corpus, retriever):
    rows = world.corpus_rows(world.make_world(0))
    encoder = HashedEncoder([r["contents"] for r in rows], HashedConfig(dim=64))
    queries = titles() + ODD
    scores = encoder.encode(queries).astype(float) @ encoder.encode([r["contents"] for r in rows]).astype(float).T
    found = retriever.search_sync(queries, 3)
    for got, row in zip(ids(found), scores, strict=True):
        best = np.argsort(-row, kind="stable")[:3]
        # two documents within rounding of one another may stand in either order
        np.testing.assert_allclose(row[got], row[best], atol=1e-6)
    assert found[0][0].contents == rows[0]["contents"] and found[0][0].text


def test_n_queries_give_n_lists(probed, retriever):
    for queries in ([], ["a"], ["a", "bb"], ["a", "bb", "ccc"], ("a", "bb")):
        want = [[len(q) % 5, (len(q) + 1) % 5] for q in queries]
        assert ids(probed.search_sync(queries, 2)) == want
        assert ids(asyncio.run(probed.search(queries, 2))) == want
    assert [len(row) for row in retriever.search_sync(ODD, 3)] == [3] * len(ODD)


def test_topk_above_the_corpus_and_empty_corpus():
    few = Probe(documents=2).retriever()
    assert ids(few.search_sync(["a"], 3)) == [[1, 0]]
    none = LocalRetriever([], Probe(), FlatIndex(1))
    assert none.search_sync(["a"] * 25, 3) == [[]] * 25


def test_fifty_searches_at_once_with_mixed_k(retriever):
    queries = titles()
    asks = [(queries[i : i + 1 + i % 3], 1 + i % 4) for i in range(50)]
    want = [retriever.search_sync(*ask) for ask in asks]

    async def together():
        return await asyncio.gather(*(retriever.search(*ask) for ask in asks))

    assert asyncio.run(together()) == want
    assert all(len(row) == k for found, (_, k) in zip(want, asks, strict=True) for row in found)


def test_eight_threads_equal_serial(retriever):
    queries = titles()[:160]
    want = [retriever.search_sync([q], 3) for q in queries]

    def worker(n):
        return [retriever.search_sync([q], 3) for q in queries[n::8]]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        got = list(pool.map(worker, range(8)))
    assert [got[i % 8][i // 8] for i in range(160)] == want


def test_requests_behind_a_busy_worker_become_one_batch(probe, probed):
    async def run():
        probe.gate.clear()
        first = asyncio.ensure_future(probed.search(["a"], 1))
        await asyncio.to_thread(probe.entered.wait, 10)
        rest = [asyncio.ensure_future(probed.search(["b" * n, "c"], 1 + n % 3)) for n in range(6)]
        empty = asyncio.ensure_future(probed.search([], 2))
        await asyncio.sleep(0.05)  # the loop is free while the worker waits
        assert not any(t.done() for t in [first, *rest])
        probe.gate.set()
        return ids(await first), await empty, [ids(await r) for r in rest]

    first, empty, rest = asyncio.run(run())
    assert first == [[1]] and empty == []
    assert rest == [[[(n + i) % 5 for i in range(1 + n % 3)], [1 + i for i in range(1 + n % 3)]] for n in range(6)]
    assert [len(b) for b in probe.batches] == [1, 7]  # "c", which all six ask for, goes in once
    assert probe.threads and threading.get_ident() not in probe.threads and len(probe.threads) == 1


def test_long_queues_are_cut_into_batches(probe):
    probed = probe.retriever(most=4)
    probe.gate.clear()
    with contextlib.closing(probed._batcher), concurrent.futures.ThreadPoolExecutor(9) as pool:
        first = pool.submit(probed.search_sync, ["a"], 1)
        assert probe.entered.wait(10)
        rest = [pool.submit(probed.search_sync, ["b" * n], 1) for n in range(8)]
        while probed._batcher._requests.qsize() < 8:
            time.sleep(0.001)
        probe.gate.set()
        assert ids(first.result()) == [[1]] and [ids(r.result()) for r in rest] == [[[n % 5]] for n in range(8)]
    assert [len(b) for b in probe.batches] == [1, 4, 4]


def test_search_sync_inside_a_running_loop(probed):
    class Plain(Retriever):  # only `search`: the private thread of the base class
        async def search(self, queries, k):
            await asyncio.sleep(0.001)
            return [[Document(q, "t\nx")] * k for q in queries]

    async def cell():
        return Plain().search_sync(["q"], 2), probed.search_sync(["a"], 2)

    plain, local = asyncio.run(cell())
    assert plain == Plain().search_sync(["q"], 2) == [[Document("q", "t\nx")] * 2]
    assert ids(local) == [[1, 2]]


def test_one_retriever_serves_several_event_loops(probed):
    def loop(n):
        return [ids(asyncio.run(probed.search(["a" * n], 1))) for _ in range(20)]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(loop, range(4))) == [[[[n]]] * 20 for n in range(4)]


def test_error_reaches_its_caller_only_and_the_worker_lives(probe, probed):
    with pytest.raises(ZeroDivisionError, match="encoder broke"):
        probed.search_sync(["fail"], 1)

    async def run():
        probe.gate.clear()
        probe.entered.clear()
        first = asyncio.ensure_future(probed.search(["a"], 1))
        await asyncio.to_thread(probe.entered.wait, 10)
        rest = [asyncio.ensure_future(probed.search(q, 1)) for q in (["bb"], ["fail", "a"], ["ccc"])]
        await asyncio.sleep(0)
        probe.gate.set()
        return await asyncio.gather(first, *rest, return_exceptions=True)

    first, good, bad, last = asyncio.run(run())
    assert (ids(first), ids(good), ids(last)) == ([[1]], [[2]], [[3]])
    assert isinstance(bad, ZeroDivisionError)
    assert ids(probed.search_sync(["a"], 1)) == [[1]]


def test_index_that_loses_a_query_is_an_error(probe, probed, monkeypatch):
    monkeypatch.setattr(Probe, "search", lambda self, vectors, k: [])
    with pytest.raises(RuntimeError, match="gave 0 lists for 2 queries"):
        probed.search_sync(["a", "b"], 1)


def test_cancelled_search_is_not_run(probe, probed):
    async def run():
        probe.gate.clear()
        first = asyncio.ensure_future(probed.search(["a"], 1))
        await asyncio.to_thread(probe.entered.wait, 10)
        gone = asyncio.ensure_future(probed.search(["gone"], 1))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        probe.gate.set()
        return await first

    assert ids(asyncio.run(run())) == [[1]]
    assert ids(probed.search_sync(["bb"], 1)) == [[2]]
    assert not any("gone" in batch for batch in probe.batches)


def test_loop_that_ended_early_does_not_harm_the_worker(probe, probed):
    async def leave():
        probe.gate.clear()
        asyncio.get_running_loop().create_task(probed.search(["a"], 1))
        await asyncio.to_thread(probe.entered.wait, 10)

    asyncio.run(leave())
    probe.gate.set()
    assert ids(probed.search_sync(["bb"], 1)) == [[2]]


def test_close_answers_what_is_under_way_and_ends_the_thread(probe):
    opened = probe.retriever()
    probe.gate.clear()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(opened.search_sync, ["a"], 1)
        assert probe.entered.wait(10)
        second = pool.submit(opened.search_sync, ["bb"], 1)
        while opened._batcher._requests.qsize() < 1:
            time.sleep(0.001)
        threading.Timer(0.05, probe.gate.set).start()
        asyncio.run(opened.close())
        assert ids(first.result()) == [[1]] and ids(second.result()) == [[2]]
    assert not opened._batcher._thread.is_alive()
    asyncio.run(opened.close())
    with pytest.raises(RuntimeError, match="closed retriever"):
        opened.search_sync(["a"], 1)


@pytest.mark.parametrize(
    ("queries", "k", "error", "words"),
    [
        ("Mira", 1, TypeError, "list of queries.*'Mira'"),
        (["a", None], 1, TypeError, "query 1 .*NoneType"),
        (["a"], 0, UserError, "topk.*0"),
        (["a"], 2.0, UserError, "topk.*2.0"),
        (["a"], None, UserError, "topk.*None"),
    ],
)
def test_wrong_arguments_are_named(probed, queries, k, error, words):
    with pytest.raises(error, match=words):
        probed.search_sync(queries, k)
    with pytest.raises(error, match=words):
        asyncio.run(probed.search(queries, k))


def test_documents_must_match_the_index(probe):
    with pytest.raises(ValueError, match="4 documents but 5 vectors"):
        LocalRetriever(probe.documents[:4], probe, probe)


def test_info_is_what_results_json_records(corpus):
    opened = open_retriever({"kind": "local", "corpus": corpus, "encoder": "hashed", "dim": 32, "topk": 3})
    assert opened.info["kind"] == "local" and opened.info["topk"] == 3 and opened.info["dim"] == 32
    assert opened.info["corpus_sha256"] == fingerprint(corpus)
    json.dumps(opened.info)
    asyncio.run(opened.close())


def test_open_takes_a_config_dict(corpus):
    ml_collections = pytest.importorskip("ml_collections")
    config = ml_collections.ConfigDict(
        {"kind": "local", "corpus": str(corpus), "encoder": "hashed", "char_ngrams": (3, 4)}
    )
    opened = open_retriever(config)
    assert opened.info["char_ngrams"] == (3, 4) and config.kind == "local"
    asyncio.run(opened.close())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "remot"}, "kind is 'remot'; known: local, none, remote"),
        ({"kind": None}, "kind is None; known: local"),
        ({"encoder": "e6"}, "encoder is 'e6'; known: hashed"),
        ({"dimm": 3}, "'dimm'; known: kind, corpus, encoder, topk, dim,"),
        ({"dim": 0}, "dim .* 0"),
        ({"topk": 0}, "topk.* 0"),
        ({"corpus": None}, "needs a corpus"),
        ({"corpus": "absent.jsonl"}, "absent.jsonl is no file"),
    ],
)
def test_wrong_configuration_is_named(corpus, change, words):
    with pytest.raises(UserError, match=words):
        open_retriever({"kind": "local", "corpus": str(corpus), "encoder": "hashed", **change})


def test_directory_form_says_what_to_do_now(tmp_path):
    with pytest.raises(UserError, match="must be the folder of an index: there is none; build it"):
        open_retriever(tmp_path)
