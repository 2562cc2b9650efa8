"""The client: right answers, and every way in which a server can fail, on real sockets."""

import asyncio
import concurrent.futures
import contextlib
import socket
import threading
import time

import pytest
from fake_server import HANG_UP, FakeServer, document, good

from parasearch_jax.errors import UserError
from parasearch_jax.retrieval import Document, open_retriever
from parasearch_jax.retrieval.breaker import Breaker
from parasearch_jax.retrieval.remote import Patience, RemoteRetriever, SearchFailed
from parasearch_jax.rollout.searches import search_all

ODD = ['Mira "Voss"\nborn', "北京", "O’Neill \\ année", "", "\ud800", "\x00\x1f\u2028", "x" * 5000]
QUICK = dict(backoff=0.005, longest_backoff=0.02, pause=0.02, longest_pause=0.05, start=0.3, load=5.0)


@pytest.fixture
def server():
    with FakeServer() as fake:
        yield fake


@pytest.fixture
def remote():
    """remote(server or url, deadline, **patience) -> client, closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(server, deadline=10.0, retries=100, **patience):
            url = getattr(server, "url", server)
            client = RemoteRetriever(url, deadline, Patience(**(QUICK | patience)), retries)
            stack.callback(client.close_sync)
            return client

        yield make


@pytest.fixture
def closed_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"  # bound but not listening: refused


def documents(query, k):
    return [Document(**document(query, i)) for i in range(k)]


def wait_until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)


# -------------------------------------------------------------------------------------------------------------- answers


def test_n_queries_give_n_lists_with_every_character(server, remote):
    client = remote(server)
    assert client.search_sync(ODD, 2) == [documents(q, 2) for q in ODD]
    assert server.asked == [{"queries": ODD, "topk": 2, "return_scores": True}]
    assert asyncio.run(client.search(["a"], 3)) == [documents("a", 3)]
    assert client.search_sync([], 1) == [] and len(server.asked) == 2  # nothing is asked for nothing


def test_plain_documents_titles_apart_and_more_or_fewer_than_k(server, remote):
    client = remote(server)
    server.script = [
        {"result": [[{"id": 7, "title": "T", "text": "x", "url": "u"}], [], [document("a", i) for i in range(5)]]},
        {"result": [[{"document": {"contents": "Snippet\nof a server without ids"}}]]},
    ]
    assert client.search_sync(["a", "b", "c"], 2) == [[Document("7", '"T"\nx')], [], documents("a", 2)]
    assert client.search_sync(["a"], 2) == [[Document("0", "Snippet\nof a server without ids")]]


def test_many_at_once_get_their_own_and_share_requests(server, remote):
    asks = [([f"q{i}", f"r{i}"], 1 + i // 30) for i in range(90)]
    client = remote(server, connections=2, together=16)

    async def together():
        return await asyncio.gather(*(client.search(*ask) for ask in asks))

    assert asyncio.run(together()) == [[documents(q, k) for q in queries] for queries, k in asks]
    sizes = [len(asked["queries"]) for asked in server.asked]
    assert sum(sizes) == 180 and max(sizes) == 16 and len(sizes) < 20
    assert server.connections <= 2
    stats = client.pop_stats()
    assert (stats["retriever/searches"], stats["retriever/queries"]) == (90, 180)
    assert stats["retriever/requests"] == len(sizes) and not stats["retriever/failures"]


def test_eight_threads_of_fifty_queries_get_what_one_gets(server, remote):
    client = remote(server)

    def worker(n):
        return [client.search_sync([f"{n}-{i}"], 1 + i % 3) for i in range(50)]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        got = list(pool.map(worker, range(8)))
    assert got == [[[documents(f"{n}-{i}", 1 + i % 3)] for i in range(50)] for n in range(8)]
    assert server.connections <= Patience().connections


# ------------------------------------------------------------------------------------------------------------- failures


def once(server, client):
    """A search's answer, and the counters behind it."""
    return client.search_sync(["a"], 1), client.pop_stats()


@pytest.mark.parametrize(
    "failure",
    [(500, b"oops"), (502, b""), (503, {"detail": "loading"}, {"Retry-After": "0"}), (504, b""), (429, {}), HANG_UP],
    ids=["500", "502", "503", "504", "429", "hang up"],
)
def test_what_may_pass_is_tried_again(server, remote, failure):
    server.script = [failure, failure]
    found, stats = once(server, remote(server))
    assert found == [documents("a", 1)]
    assert (stats["retriever/requests"], stats["retriever/retries"]) == (3, 2) and not stats["retriever/failures"]


def test_pauses_double_and_are_drawn(remote):
    """Between half of 0.1, 0.2, 0.4 ... 2 s and all of it, so that searches that failed together come back apart."""
    client = remote("http://127.0.0.1:1", backoff=0.1, longest_backoff=2.0)
    for tries, longest in enumerate((0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0), 1):
        drawn = [client._backoff(tries) for _ in range(200)]
        assert longest / 2 <= min(drawn) < 0.6 * longest and 0.9 * longest < max(drawn) <= longest


def test_a_server_says_when_to_come_again(server, remote):
    """But no later than the longest pause of the breaker."""
    server.script = [(503, b"", {"Retry-After": "9"})]
    began = time.monotonic()
    assert once(server, remote(server, longest_pause=0.3))[0] == [documents("a", 1)]
    assert 0.3 <= time.monotonic() - began < 9


def test_proxies_of_the_environment_are_not_used(server, remote, closed_port, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, closed_port)
    assert once(server, remote(server, deadline=2.0))[0] == [documents("a", 1)]


@pytest.mark.parametrize("retries", [0, 2])
def test_no_more_retries_than_asked_for(server, remote, retries):
    client = remote(server, retries=retries)
    server.script = [(503, b"")] * retries
    assert client.search_sync(["a"], 1) == [documents("a", 1)]
    server.script = [HANG_UP] + [(503, b"")] * retries
    with pytest.raises(SearchFailed, match=rf"(answered 503|disconnected).*; retriever.retries={retries} are used up"):
        client.search_sync(["a"], 1)
    assert len(server.asked) == 2 * (retries + 1) and client.pop_stats()["retriever/retries"] == 2 * retries


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((422, {"detail": "topk must be a whole number"}), "422: topk must be a whole number"),
        ((404, {"detail": "Not Found"}), "404: Not Found"),
        ((413, b"too large"), "413: too large"),
        ((301, b"", {"Location": "/elsewhere"}), "301"),
        (b"<html>a proxy</html>", "no JSON: '<html>a proxy"),
        ([], "no list of lists"),
        ({"results": []}, '"result": {"results'),
        ({"result": {"a": 1}}, "no list of lists"),
        ({"result": [{"id": 1}]}, "no list of lists"),
        ({"result": []}, "0 lists for 1 queries"),
        ({"result": [[], []]}, "2 lists for 1 queries"),
        ({"result": [[{"document": {"id": "1", "title": "T"}}]]}, r"result\[0\]\[0\].document: neither \"contents\""),
        ({"result": [[{"document": {"id": "1", "contents": ""}}]]}, r"result\[0\]\[0\].document: .*no text"),
        ({"result": [[document("a", 0), {"contents": "title\n \n"}]]}, r"result\[0\]\[1\]: .*no text"),
        ({"result": [[{"document": {"contents": None}}]]}, '"contents" must be a string, it is None'),
        ({"result": [[{"document": None}]]}, r"result\[0\]\[0\].document: .*NoneType"),
        ({"result": [["text"]]}, r"result\[0\]\[0\]: .*str 'text'"),
    ],
)
def test_what_will_not_pass_is_told_at_once(server, remote, answer, words):
    server.usual = answer
    client = remote(server)
    with pytest.raises(SearchFailed, match=f"(?s)retriever at {server.url}/retrieve: .*{words}"):
        client.search_sync(["a"], 2)
    assert len(server.asked) == 1
    server.usual = good
    assert client.search_sync(["a"], 1) == [documents("a", 1)]
    assert client.pop_stats()["retriever/failures"] == 1


def test_a_query_that_the_server_fails_for_is_sent_three_times(server, remote):
    server.usual = (500, {"detail": "the search failed"})
    client = remote(server)
    with pytest.raises(SearchFailed, match="500: the search failed"):
        client.search_sync(["a"], 1)
    assert len(server.asked) == 3


@pytest.mark.parametrize("refusal", [(422, {"detail": "a query is too long"}), (500, b"")], ids=["422", "500"])
def test_a_request_that_is_refused_is_sent_again_one_by_one(server, remote, refusal):
    """Searches that share a request have nothing else in common."""
    release = threading.Event()

    def first(asked):
        assert release.wait(10)
        return good(asked)

    server.script = [first]
    server.usual = lambda asked: refusal if "bad" in asked["queries"] else good(asked)
    client = remote(server, connections=1)

    async def run():
        opening = asyncio.ensure_future(client.search(["opening"], 1))
        await asyncio.to_thread(wait_until, lambda: server.asked)
        rest = [asyncio.ensure_future(client.search([q], 1)) for q in ("a", "bad", "b", "c")]
        await asyncio.to_thread(wait_until, lambda: len(client._waiting) == 4)
        release.set()
        await opening
        return await asyncio.gather(*rest, return_exceptions=True)

    a, bad, b, c = asyncio.run(run())
    assert [a, b, c] == [[documents(q, 1)] for q in "abc"]
    assert isinstance(bad, SearchFailed) and client.pop_stats()["retriever/failures"] == 1
    asked = [tuple(asked["queries"]) for asked in server.asked]
    assert asked[1] == ("a", "bad", "b", "c") and {("a",), ("bad",), ("b",), ("c",)} == set(asked[2:])


def test_a_bad_document_is_of_its_own_search(server, remote):
    """In a request that others share it is not even sent again."""
    client = remote(server, connections=1)

    def empty(asked):
        answer = good(asked)
        for query, row in zip(asked["queries"], answer["result"], strict=True):
            if query == "bad":
                row[0]["document"]["contents"] = ""
        return answer

    server.usual = empty

    async def run():
        return await asyncio.gather(*(client.search([q], 1) for q in ("a", "b", "bad", "c")), return_exceptions=True)

    a, b, bad, c = asyncio.run(run())
    assert [a, b, c] == [[documents(q, 1)] for q in "abc"] and "no text" in str(bad)
    assert sum(asked["queries"].count("bad") for asked in server.asked) == 1


def test_a_server_that_hangs_costs_half_the_deadline_and_a_late_answer_nobody_anything(server, remote):
    release = threading.Event()

    def late(asked):
        release.wait(10)
        return good(asked)

    server.script = [late]
    client = remote(server, deadline=2.0, connections=1)
    assert client.search_sync(["a"], 1) == [documents("a", 1)]
    release.set()  # the first answer comes now, on a connection that is not used any more
    assert [client.search_sync([q], 1) for q in "bcd"] == [[documents(q, 1)] for q in "bcd"]
    assert client.pop_stats()["retriever/retries"] == 1


def test_the_deadline_holds_against_a_server_that_never_answers(server, remote):
    server.usual = lambda asked: time.sleep(5) or good(asked)
    client = remote(server, deadline=0.3)
    began = time.monotonic()
    with pytest.raises(SearchFailed, match=r"retriever.deadline=0.3 s; the last of 2 tries: no answer within 0.15 s"):
        client.search_sync(["a"], 1)
    assert time.monotonic() - began < 4


def test_a_closed_port_is_told_within_the_deadline(closed_port, remote):
    with pytest.raises(SearchFailed, match=f"{closed_port}/retrieve: no answer within .*ConnectError"):
        remote(closed_port, deadline=0.6, failures=1000).search_sync(["a"], 1)


def test_searches_of_a_rollout_get_errors_as_values(server, closed_port, remote):
    """What the engine makes notices of; the search beside it has its documents."""
    server.usual = lambda asked: (422, {"detail": "no"}) if "bad" in asked["queries"] else good(asked)
    fine, bad = asyncio.run(search_all(remote(server), ["fine", "bad"], 1, seconds=10))
    assert fine == documents("fine", 1) and isinstance(bad, SearchFailed)
    (lost,) = asyncio.run(search_all(remote(closed_port, deadline=0.05), ["a"], 1, seconds=10))
    assert isinstance(lost, SearchFailed)


# -------------------------------------------------------------------------------------------------------------- breaker


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_the_breaker_lets_one_probe_pass_after_growing_pauses():
    clock = Clock()
    breaker = Breaker(3, 1.0, 3.0, clock)
    for _ in range(3):
        assert breaker.admit() == (0.0, False)
    assert [breaker.failed(False) for _ in range(3)] == [False, False, True]
    assert breaker.failed(False) is False  # was under way, and makes no pause longer
    for pause in (1.0, 2.0, 3.0, 3.0):  # doubled, at most 3
        assert breaker.admit() == (pause, False)
        clock.now += pause
        assert breaker.admit() == (0.0, True)
        seconds, probe = breaker.admit()
        assert seconds > 0 and not probe  # the others wait for the probe
        assert breaker.failed(True) is False
    assert breaker.down() == 9.0
    clock.now += 3.0
    assert breaker.admit() == (0.0, True)
    breaker.left(True)  # cancelled: another may probe
    assert breaker.admit() == (0.0, True)
    assert breaker.succeeded() == 12.0 and breaker.succeeded() == 0.0
    assert breaker.admit() == (0.0, False) and breaker.down() == 0.0
    assert [breaker.failed(False) for _ in range(3)] == [False, False, True]  # counts anew
    assert breaker.admit() == (1.0, False)


def test_a_short_outage_costs_time_and_no_search(server, remote):
    """While the breaker is open its searches wait, and few requests reach the server."""
    away = threading.Event()
    away.set()
    server.usual = lambda asked: (503, b"") if away.is_set() else good(asked)
    client = remote(server, deadline=20.0, failures=4)
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        searches = [pool.submit(client.search_sync, [f"q{i}"], 1) for i in range(40)]
        wait_until(lambda: client._breaker.down() > 0.3)
        away.clear()
        assert [s.result(20) for s in searches] == [[documents(f"q{i}", 1)] for i in range(40)]
    stats = client.pop_stats()
    assert stats["retriever/breaker_opens"] == 1 and not stats["retriever/failures"]


def test_behind_a_long_outage_searches_fail_at_once(server, remote):
    server.usual = (503, b"")
    client = remote(server, deadline=1.0, failures=2)
    with pytest.raises(SearchFailed, match="no answer within"):
        client.search_sync(["a"], 1)
    wait_until(lambda: client._breaker.down() > 1.0)
    client._breaker._until = time.monotonic() + 60  # no probe is due
    before = len(server.asked)
    for _ in range(50):
        with pytest.raises(SearchFailed, match=r"away for .* is it running"):
            client.search_sync(["a"], 1)
    assert len(server.asked) == before
    client._breaker._until = 0.0
    server.usual = good
    assert client.search_sync(["a"], 1) == [documents("a", 1)]  # was the probe


def test_refusals_do_not_open_it(server, remote):
    server.usual = (422, {"detail": "no"})
    client = remote(server, failures=2)
    for _ in range(5):
        with pytest.raises(SearchFailed, match="422"):
            client.search_sync(["a"], 1)
    server.usual, server.script = good, [(429, {})] * 5  # it is busy, not away
    assert client.search_sync(["a"], 1) == [documents("a", 1)]
    assert not client.pop_stats()["retriever/breaker_opens"]


# ---------------------------------------------------------------------------------------------------------- its own end


def test_close_waits_for_what_is_under_way(server, remote):
    release = threading.Event()
    server.script = [lambda asked: release.wait(10) and good(asked)]
    client = remote(server)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        search = pool.submit(client.search_sync, ["a"], 1)
        wait_until(lambda: server.asked)
        threading.Timer(0.05, release.set).start()
        client.close_sync()
        assert search.result(10) == [documents("a", 1)]
    assert not client._thread.is_alive()
    asyncio.run(client.close())
    with pytest.raises(RuntimeError, match="closed retriever"):
        client.search_sync(["a"], 1)


def test_a_cancelled_search_leaves_the_others_alone(server, remote):
    release = threading.Event()
    server.script = [lambda asked: release.wait(10) and good(asked)]
    client = remote(server, connections=1)

    async def run():
        first = asyncio.ensure_future(client.search(["first"], 1))
        await asyncio.to_thread(wait_until, lambda: server.asked)
        gone, stays = (asyncio.ensure_future(client.search([q], 1)) for q in ("gone", "stays"))
        await asyncio.to_thread(wait_until, lambda: len(client._waiting) == 2)
        gone.cancel()
        first.cancel()
        await asyncio.gather(gone, first, return_exceptions=True)
        release.set()
        return await stays

    assert asyncio.run(run()) == [documents("stays", 1)]
    assert [asked["queries"] for asked in server.asked] == [["first"], ["stays"]]


@pytest.mark.parametrize(
    ("queries", "k", "error"), [("Mira", 1, TypeError), ([None], 1, TypeError), (["a"], 0, UserError)]
)
def test_wrong_arguments_are_told_before_anything_is_sent(server, remote, queries, k, error):
    with pytest.raises(error):
        remote(server).search_sync(queries, k)
    assert not server.asked


# ------------------------------------------------------------------------------------------------------------ the start

ABOUT = {"status": "ok", "index": "abc", "topk": 5, "info": {"kind": "local", "corpus_sha256": "77", "encoder": "e5"}}
LOADING = (503, {"status": "loading", "seconds": 3})


def test_it_waits_for_a_server_that_loads_and_takes_over_what_it_tells(server, remote):
    server.health = [LOADING, LOADING, ABOUT]
    client = remote(server, start=0.0)
    client.wait_until_ready()
    assert client.info == ABOUT["info"] | {"kind": "remote", "url": f"{server.url}/retrieve"}
    assert server.health == [] and len(server.asked) == 1


def test_a_server_without_health_is_taken_as_it_is(server, remote):
    client = remote(server)
    client.wait_until_ready()
    assert client.info == {"kind": "remote", "url": f"{server.url}/retrieve"} and len(server.asked) == 1


@pytest.mark.parametrize(
    ("health", "usual", "words"),
    [
        ([(503, {"status": "failed", "error": "no corpus"})], good, "failed to load: no corpus"),
        ([(503, b"")] * 1000, good, "not ready after .*503.*Start the server"),
        ([ABOUT], {"result": [[{"document": {"id": "1"}}]]}, 'neither "contents" nor "text"'),
        ([], (404, {"detail": "Not Found"}), "404: Not Found"),
    ],
)
def test_a_server_that_can_not_search_is_told_before_the_run(server, remote, health, usual, words):
    server.health, server.usual = list(health), usual
    with pytest.raises(UserError, match=words):
        remote(server, start=0.05).wait_until_ready()


def test_a_server_that_does_not_come(closed_port, remote):
    with pytest.raises(UserError, match=f"{closed_port}/health: not ready after .*ConnectError.*retriever.url"):
        remote(closed_port, start=0.05).wait_until_ready()


def test_a_wait_that_is_interrupted_ends(server, remote, monkeypatch):
    """Ctrl-C; what closes the client then must not wait for the server either."""

    class Interrupted:
        def __init__(self, future):
            self.cancel = future.cancel

        def result(self):
            raise KeyboardInterrupt

    server.health = [LOADING] * 1000
    client = remote(server, load=60.0)
    with monkeypatch.context() as patched:
        patched.setattr(client, "_run", lambda coroutine: Interrupted(RemoteRetriever._run(client, coroutine)))
        with pytest.raises(KeyboardInterrupt):
            client.wait_until_ready()
    began = time.monotonic()
    client.close_sync()
    assert time.monotonic() - began < 30


def test_another_index_behind_the_same_url_is_refused(server, remote):
    server.health = [ABOUT]
    client = remote(server)
    client.wait_until_ready()
    for index, fine in (("abc", True), ("other", False)):
        server.usual = lambda asked, index=index: (200, good(asked), {"X-Retrieval-Index": index})
        with contextlib.nullcontext() if fine else pytest.raises(SearchFailed, match=r"index other, .* it was abc"):
            client.search_sync(["a"], 1)


def test_open_by_configuration(server):
    """The leaves of the local kind may stand beside, as they do in a configuration of which two leaves were changed."""
    server.health = [ABOUT]
    local = {"corpus": "absent.jsonl", "encoder": "hashed", "dim": 32, "char_weight": 0.7}
    for url in (server.url, f"{server.url}/", f"{server.url}/retrieve"):
        opened = open_retriever({"kind": "remote", "url": url, "deadline": 5.0, "retries": 3, "topk": 2, **local})
        assert opened.search_sync(["a"], 2) == [documents("a", 2)]
        assert (opened.info["topk"], opened.info["url"]) == (2, f"{server.url}/retrieve")
        opened.close_sync()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"url": ""}, "set retriever.url"),
        ({"url": "host:8000"}, "url is 'host:8000'; give one such as"),
        ({"url": "ftp://host"}, "give one such as"),
        ({"url": 8000}, "url is 8000"),
        ({"deadline": 0}, "deadline must be seconds above 0, it is 0"),
        ({"deadline": "soon"}, "deadline .* 'soon'"),
        ({"retries": -1}, "retries must be a whole number, 0 for none, it is -1"),
        ({"retries": 2.5}, "retries .* 2.5"),
        ({"topk": 0}, "topk.* 0"),
        ({"dedline": 3}, "unknown retriever setting 'dedline'; known: .*deadline"),
        ({"kind": "local", "corpus": "c", "encoder": "hashed"}, 'kind is "local"; set retriever.kind'),
    ],
)
def test_wrong_settings_are_named(change, words):
    with pytest.raises(UserError, match=words):
        open_retriever({"kind": "remote", "url": "http://127.0.0.1:1", **change})


def test_a_remote_retriever_asks_for_no_files(server):
    """Neither before a large run, nor for the fingerprints of its inputs, nor in its plan: they are its server's."""
    import parallel_base
    import parallel_tiny

    from parasearch_jax import resume
    from parasearch_jax.plan.run import read_corpus
    from parasearch_jax.preflight import preflight

    large, tiny = parallel_base.get_config(), parallel_tiny.get_config()
    before = resume.fingerprints(tiny)
    for config in (large, tiny):
        config.lock()
        config.update_from_flattened_dict({"retriever.kind": "remote", "retriever.url": server.url})
    with pytest.raises(UserError) as told:
        preflight(large)
    assert "model.path" in str(told.value) and "retriever" not in str(told.value) and "index" not in str(told.value)
    server.health = [ABOUT]
    after = resume.fingerprints(tiny)
    assert set(before) - set(after) == {"retriever.corpus"} and after["retriever.url"] == "abc"
    corpus = read_corpus(large.retriever)
    assert corpus.passages is corpus.index_bytes is None and server.url in corpus.source


def test_a_run_goes_on_with_a_server_elsewhere_but_not_with_another_index(server):
    import parallel_tiny

    from parasearch_jax import resume

    config = parallel_tiny.get_config()
    config.retriever.update(kind="remote", url="http://elsewhere:8000")
    old = resume.describe(config)
    config.retriever.update(url=server.url, deadline=5.0, retries=3)
    resume.check_same(old, resume.describe(config), "checkpoint 1")
    server.health = [ABOUT, ABOUT, ABOUT | {"index": "other"}]
    first, same, other = (resume.fingerprints(config) for _ in range(3))
    resume.check_inputs(first, same, "checkpoint 1")
    with pytest.raises(UserError, match=r"retriever.url: the content has changed"):
        resume.check_inputs(first, other, "checkpoint 1")
