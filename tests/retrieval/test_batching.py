"""Requests that share calls, and answers that are kept: what a request gets depends on neither."""

import concurrent.futures
import contextlib
import threading

import pytest

from parasearch_jax.retrieval.batching import Batcher, Batching


class Search:
    """Query "ab" -> ab0, ab1, ...; notes the calls, waits for `gate`, fails for what begins with "fail"."""

    def __init__(self):
        self.calls, self.gate, self.entered = [], threading.Event(), threading.Event()
        self.gate.set()

    def __call__(self, queries, k):
        self.calls.append((list(queries), k))
        self.entered.set()
        assert self.gate.wait(10)
        if any(query.startswith("fail") for query in queries):
            raise ZeroDivisionError(queries)
        return [[f"{query}{i}" for i in range(k)] for query in queries]


@pytest.fixture
def search():
    return Search()


@contextlib.contextmanager
def opened(search, **batching):
    batcher = Batcher(search, Batching(**batching), "test")
    try:
        yield batcher
    finally:
        search.gate.set()
        batcher.close()


def rows(queries, k):
    return [[f"{query}{i}" for i in range(k)] for query in queries]


def held(search, batcher, *requests):
    """Futures of requests that came while a call was under way."""
    search.gate.clear()
    search.entered.clear()
    first = batcher.submit(["first"], 1)
    assert search.entered.wait(10)
    futures = [batcher.submit(*request) for request in requests]
    search.gate.set()
    assert first.result(10) == [["first0"]]
    return futures


def test_mixed_k_share_a_call_and_each_gets_its_own(search):
    with opened(search, cache=0) as batcher:
        one, three, none = held(search, batcher, (["a", "b"], 1), (["a", "c"], 3), ([], 5))
        assert (one.result(10), three.result(10), none.result(10)) == (rows("ab", 1), rows("ac", 3), [])
        assert search.calls[1:] == [(["a", "b", "c"], 3)]  # "a" once, and with the largest k
        stats = batcher.pop_stats()
        assert (stats["queries"], stats["searched"], stats["batches"]) == (5, 4, 2) and not any(
            batcher.pop_stats().values()
        )


def test_with_batches_of_one_nothing_is_shared(search):
    with opened(search, most=1, cache=0) as batcher:
        futures = held(search, batcher, (["a", "b"], 1), (["c"], 3))
        assert [f.result(10) for f in futures] == [rows("ab", 1), rows("c", 3)]
        assert search.calls[1:] == [(["a"], 1), (["b"], 1), (["c"], 3)]


def test_a_long_request_is_searched_in_parts(search):
    queries = [f"q{i}-" for i in range(10)]
    with opened(search, most=4) as batcher:
        assert batcher.submit(queries, 2).result(10) == rows(queries, 2)
    assert [len(call) for call, _ in search.calls] == [4, 4, 2]


def test_a_batch_waits_for_company_no_longer_than_until_it_is_full(search):
    with opened(search, most=2, wait=60) as batcher:
        first = batcher.submit(["a"], 1)
        with pytest.raises(concurrent.futures.TimeoutError):
            first.result(0.05)
        assert batcher.submit(["b"], 2).result(10) == rows("b", 2)
        assert first.result(10) == rows("a", 1) and search.calls == [(["a", "b"], 2)]


def test_a_batch_that_gets_no_company_is_searched_all_the_same(search):
    with opened(search, wait=0.01) as batcher:
        assert batcher.submit(["a"], 1).result(10) == rows("a", 1)


def test_answers_are_kept_by_query_and_k(search):
    with opened(search) as batcher:
        for _ in range(2):
            assert batcher.submit(["a", "b"], 2).result(10) == rows("ab", 2)
        assert batcher.submit(["b", "c"], 2).result(10) == rows("bc", 2)
        assert batcher.submit(["a"], 3).result(10) == rows("a", 3)
        assert search.calls == [(["a", "b"], 2), (["c"], 2), (["a"], 3)]
        stats = batcher.pop_stats()
        assert (stats["queries"], stats["cache_hits"], stats["searched"]) == (7, 3, 4)


def test_a_cut_answer_is_kept_as_one_of_its_own_k(search):
    """The 1 of a call that was made with 3 must not be given to who asks for 3, nor the other way round."""
    with opened(search) as batcher:
        for future, k in zip(held(search, batcher, (["a"], 1), (["b"], 3)), (1, 3), strict=True):
            assert len(future.result(10)[0]) == k
        for query, k in (("a", 1), ("a", 3), ("b", 3), ("b", 1)):
            assert batcher.submit([query], k).result(10) == rows(query, k)
        assert search.calls[2:] == [(["a"], 3), (["b"], 1)]


def test_what_was_longest_unused_is_forgotten_first(search):
    with opened(search, cache=2) as batcher:
        for query in "abac":  # a is used again, so c takes the place of b
            batcher.submit([query], 1).result(10)
        search.calls.clear()
        for query in "acb":
            batcher.submit([query], 1).result(10)
        assert search.calls == [(["b"], 1)]


def test_callers_own_what_they_get(search):
    with opened(search) as batcher:
        for _ in range(2):  # from the search, from the cache
            found = batcher.submit(["a"], 2).result(10)
            found[0].clear()
        assert batcher.submit(["a"], 2).result(10) == rows("a", 2)


def test_a_failure_is_of_its_request_and_is_not_kept(search):
    with opened(search) as batcher:
        good, bad, last = held(search, batcher, (["a"], 1), (["b", "fail"], 1), (["c"], 1))
        assert (good.result(10), last.result(10)) == (rows("a", 1), rows("c", 1))
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                bad.result(10)
            bad = batcher.submit(["fail"], 1)
        bad.exception(10)
        assert [call for call in search.calls if call == (["fail"], 1)] == [(["fail"], 1)] * 2


@pytest.mark.parametrize("cache", [0, 7, 65536])
def test_eight_threads_of_fifty_queries_get_what_one_gets(search, cache):
    asks = [[([f"q{(n * 7 + i) % 40}-", f"r{i % 3}"], 1 + (n + i) % 4) for i in range(50)] for n in range(8)]
    with opened(search, cache=cache) as batcher, concurrent.futures.ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda mine: [batcher.submit(*ask).result(10) for ask in mine], asks))
        assert got == [[rows(*ask) for ask in mine] for mine in asks]
        stats = batcher.pop_stats()
        assert stats["queries"] == 800 and stats["searched"] <= 800 - stats["cache_hits"]


@pytest.mark.parametrize("wrong", [{"most": 0}, {"wait": -1.0}, {"cache": -1}])
def test_wrong_settings_are_told(wrong):
    with pytest.raises(ValueError, match="at least one query"):
        Batching(**wrong)
