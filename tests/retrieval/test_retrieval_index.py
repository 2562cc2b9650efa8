import threading

import faiss
import numpy as np
import pytest

from parasearch_jax.retrieval.index import FlatIndex


def filled(vectors):
    index = FlatIndex(vectors.shape[1])
    index.add(vectors)
    return index


def brute_force(vectors, queries, k):
    """Positions by falling inner product, equal ones in order."""
    scores = queries.astype(np.float64) @ vectors.astype(np.float64).T
    return [np.argsort(-row, kind="stable")[:k].tolist() for row in scores]


def positions(hits):
    return [[position for position, _ in row] for row in hits]


@pytest.mark.parametrize("k", [1, 3, 40, 200, 300])
def test_every_query_equals_brute_force(k):
    rng = np.random.default_rng(0)
    vectors, queries = rng.standard_normal((300, 48)), rng.standard_normal((120, 48))
    hits = filled(vectors).search(queries, k)
    assert positions(hits) == brute_force(vectors, queries, k)
    scores = np.array([[score for _, score in row] for row in hits])
    np.testing.assert_allclose(scores, -np.sort(-(queries @ vectors.T), axis=1)[:, :k], atol=1e-4)


@pytest.mark.parametrize("k", [1, 2, 5, 17, 150, 200])
def test_equal_scores_come_in_the_order_added_whatever_k(k):
    rng = np.random.default_rng(1)
    vectors = rng.integers(0, 2, (200, 5))  # small integers: exact sums, many ties
    queries = np.concatenate([rng.integers(0, 2, (30, 5)), np.zeros((1, 5))])
    assert positions(filled(vectors).search(queries, k)) == brute_force(vectors, queries, k)


@pytest.mark.parametrize("dim", [64, 500, 512])
def test_scores_do_not_depend_on_the_batch(dim):
    rng = np.random.default_rng(2)
    index, queries = filled(rng.standard_normal((700, dim))), rng.standard_normal((300, dim))
    together = index.search(queries, 4)
    assert together == [index.search(queries[i : i + 1], 4)[0] for i in range(len(queries))]
    assert together[:50] == [row[:4] for row in index.search(queries[:50], 9)]


def test_fewer_vectors_than_k_and_none_at_all():
    index = filled(np.eye(2))
    assert positions(index.search(np.eye(2), 3)) == [[0, 1], [1, 0]]
    for queries in (1, 25):
        assert FlatIndex(2).search(np.ones((queries, 2)), 3) == [[]] * queries
    assert index.search([], 3) == [] and index.search(np.zeros((0, 2)), 3) == []
    index.add([])
    assert len(index) == 2


def test_filler_of_faiss_is_dropped(monkeypatch):
    index = filled(np.eye(2))

    class Short:
        ntotal, d = 2, 2

        def search(self, queries, k):
            return np.array([[1.0, -np.inf]], np.float32), np.array([[1, -1]])

    monkeypatch.setattr(index, "_index", Short())
    assert index.search(np.ones((1, 2)), 2) == [[(1, 1.0)]]


def test_float64_transposed_and_strided_arrays():
    rng = np.random.default_rng(3)
    vectors = rng.standard_normal((10, 6)).astype(np.float32)
    want = filled(vectors).search(vectors, 4)
    for same in (vectors.astype(np.float64), np.asfortranarray(vectors), vectors.T.copy().T, vectors.tolist()):
        index = FlatIndex(6)
        index.add(same)
        assert index.search(same, 4) == want
    assert filled(vectors).search(np.repeat(vectors, 2, axis=1)[:, ::2], 4) == want


def test_what_reaches_faiss_is_float32_in_rows(monkeypatch):
    """Not every version of FAISS's Python, nor its GPU indexes, convert what they are given."""
    index = filled(np.eye(2))

    class Strict:
        ntotal, d = 2, 2

        def search(self, queries, k):
            assert queries.dtype == np.float32 and queries.flags.c_contiguous
            return np.zeros((3, 1), np.float32), np.zeros((3, 1), int)

        def add(self, vectors):
            assert vectors.dtype == np.float32 and vectors.flags.c_contiguous

    monkeypatch.setattr(index, "_index", Strict())
    rows = np.arange(6.0).reshape(3, 2)
    for array in (rows, np.asfortranarray(rows, np.float32), np.repeat(rows, 2, axis=1)[:, ::2], rows.tolist()):
        index.add(array)
        assert index.search(array, 1) == [[(0, 0.0)]] * 3


def test_wrong_width_and_values_are_named():
    index = filled(np.eye(3))
    for call in (index.add, lambda x: index.search(x, 1)):
        for wrong in (np.zeros((2, 4)), np.zeros((0, 4))[:0].reshape(1, 0), np.zeros(4)):
            with pytest.raises(ValueError, match=f"width 3 .*width {wrong.shape[-1]}"):
                call(wrong)
        with pytest.raises(ValueError, match=r"vectors \[1\] hold NaN"):
            call(np.array([[0, 0, 0], [0, np.nan, 0]]))
    assert len(index) == 3


def test_search_uses_one_thread_in_whichever_thread_it_runs():
    index, seen = filled(np.eye(2)), []

    def run():
        faiss.omp_set_num_threads(2)
        index.search(np.eye(2), 1)
        seen.append(faiss.omp_get_max_threads())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [1]
