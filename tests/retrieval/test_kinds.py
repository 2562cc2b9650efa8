"""The kinds of FAISS index against flat and numpy: what they find, what they refuse, what a crafted file can't do."""

import faiss
import numpy as np
import pytest

from parasearch_jax.errors import UserError
from parasearch_jax.retrieval import index as indexes
from parasearch_jax.retrieval import kinds
from parasearch_jax.retrieval.index import FlatIndex, GpuIndex
from parasearch_jax.retrieval.kinds import KINDS, Parameters, exact_hits, open_index, recall, write_index

N, D = 600, 16


class Rows:
    """Vectors in memory, in chunks as from a folder."""

    def __init__(self, rows):
        self.rows = np.ascontiguousarray(rows, np.float32)

    def __len__(self):
        return len(self.rows)

    @property
    def dim(self):
        return self.rows.shape[1]

    def chunks(self):
        for start in range(0, len(self.rows), 128):
            yield start, self.rows[start : start + 128]

    def take(self, most):
        return self.rows[:most]


def normalised(rows):
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    vectors = normalised(rng.standard_normal((N, D)))
    vectors[300:340] = vectors[:40]  # the same passage twice: equal scores
    return Rows(vectors), normalised(rng.standard_normal((50, D)))


def built(kind, folder, rows, **parameters):
    params = Parameters(**parameters).resolved(kind, len(rows), rows.dim)
    folder.mkdir(exist_ok=True)
    assert write_index(kind, folder, rows, params) == ([] if kind == "flat" else ["index.faiss"])
    return open_index(kind, folder, rows, params)


def positions(hits):
    return [[position for position, _ in row] for row in hits]


def brute_force(rows, queries, k):
    return np.argsort(-(queries.astype(float) @ rows.rows.T.astype(float)), axis=1, kind="stable")[:, :k]


EXACT = {"flat": {}, "ivf": {"nlist": 8, "nprobe": 8}, "hnsw": {"ef": N}}


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("k", [1, 3, 10])
def test_with_all_candidates_every_query_equals_brute_force(tmp_path, data, kind, k):
    rows, queries = data
    index = built(kind, tmp_path / kind, rows, **EXACT[kind])
    assert positions(index.search(queries, k)) == brute_force(rows, queries, k).tolist()
    assert (len(index), index.dim) == (N, D)


@pytest.mark.parametrize("kind", KINDS)
def test_hits_for_k_begin_with_those_for_fewer_and_the_company_changes_nothing(tmp_path, data, kind):
    rows, queries = data
    index = built(kind, tmp_path / kind, rows)
    most = index.search(queries, 60)
    for k in (1, 2, 7, 59):
        assert index.search(queries, k) == [row[:k] for row in most]
    assert [index.search(queries[i : i + 1], 7)[0] for i in range(len(queries))] == [row[:7] for row in most]
    for row in most:
        assert [score for _, score in row] == sorted((score for _, score in row), reverse=True)
        assert len({position for position, _ in row}) == len(row) and min(row)[0] >= 0


@pytest.mark.parametrize("k", [1, 2, 5, 17, 150, 200])
def test_equal_scores_come_in_order_whatever_k(tmp_path, k):
    rng = np.random.default_rng(1)
    rows, queries = Rows(rng.integers(0, 2, (200, 5))), rng.integers(0, 2, (30, 5)).astype(np.float32)
    index = built("ivf", tmp_path, rows, nlist=3, nprobe=3)
    assert positions(index.search(queries, k)) == brute_force(rows, queries, k).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_of_any_type_and_order(tmp_path, data, kind):
    rows, queries = data
    index = built(kind, tmp_path / kind, rows)
    want = index.search(queries, 3)
    for same in (queries.astype(np.float64), np.asfortranarray(queries), queries.tolist()):
        assert index.search(same, 3) == want
    assert index.search([], 3) == []
    for wrong in (np.zeros((2, D + 1)), queries.T):
        with pytest.raises(ValueError, match=f"width {D} .*width"):
            index.search(wrong, 3)


def test_fewer_hits_than_asked_for_never_a_filler(tmp_path, data):
    rows, queries = data
    index = built("ivf", tmp_path / "ivf", rows, nlist=15, nprobe=1)
    found = index.search(queries, 500)
    assert all(0 < len(row) < 500 and min(row)[0] >= 0 for row in found)
    few = Rows(rows.rows[:2])
    for kind in ("flat", "ivf", "hnsw"):
        assert [sorted(row) for row in positions(built(kind, tmp_path / kind, few).search(queries, 3))] == [[0, 1]] * 50


def test_hnsw_says_how_many_it_gives(tmp_path, data):
    rows, queries = data
    index = built("hnsw", tmp_path / "hnsw", rows, ef=20)
    assert len(index.search(queries, 20)[0]) == 20
    with pytest.raises(UserError, match=r"21 documents a query.* 20 at most; build it with a larger --ef"):
        index.search(queries, 21)


def test_product_codes_are_small_and_near(tmp_path, data):
    rows, queries = data
    built("ivf", tmp_path / "ivf", rows)
    index = built("ivfpq", tmp_path / "pq", rows, codes=8)
    exact = exact_hits(rows, queries, 10)
    assert 0.5 < recall(positions(index.search(queries, 10)), exact, 10) < 1
    assert index._index.code_size == 8


# --------------------------------------------------------------------------------------------------------------- recall


def test_exact_hits_are_numpys(data):
    rows, queries = data
    np.testing.assert_array_equal(exact_hits(rows, queries, 12), brute_force(rows, queries, 12))
    assert exact_hits(Rows(rows.rows[:5]), queries, 12).shape == (50, 5)


def test_recall_by_hand():
    exact = np.array([[1, 2, 3], [4, 5, 6]])
    assert recall([[1, 9, 3], [6, 5, 4]], exact, 3) == pytest.approx((2 / 3 + 1) / 2)
    assert recall([[1, 9, 3], [6, 5, 4]], exact, 1) == pytest.approx(1 / 2)
    assert recall([[2], []], exact, 3) == pytest.approx((1 / 3 + 0) / 2)
    assert recall([[3, 2, 1, 7], [4, 5, 6]], exact, 10) == 1  # there are but three


# ----------------------------------------------------------------------------------------------------------- parameters


def test_parameters_by_the_size_of_the_corpus():
    wiki = 21_015_324
    assert Parameters().resolved("ivf", wiki, 768) == {"nlist": 18337, "nprobe": 1146}
    assert Parameters(nprobe=64).resolved("ivfpq", wiki, 768) == {"nlist": 18337, "codes": 96, "nprobe": 64}
    assert Parameters().resolved("hnsw", wiki, 768) == {"links": 32, "build_ef": 200, "ef": 128}
    assert Parameters().resolved("flat", wiki, 768) == {}
    assert Parameters().resolved("ivf", 1, 768) == {"nlist": 1, "nprobe": 1}
    assert Parameters().resolved("ivfpq", 1000, 6)["codes"] == 1


@pytest.mark.parametrize(
    ("kind", "given", "told"),
    [
        ("flat", {"nlist": 3}, "--index=flat has no --nlist"),
        ("ivf", {"ef": 3, "build_ef": 4}, "--index=ivf has no --build-ef, --ef"),
        ("ivf", {"nlist": 101}, "--nlist is 101, but there are 100 passages; give fewer, 2 at most"),
        ("ivf", {"nlist": 2, "nprobe": 3}, "--nprobe is 3, more than the 2 clusters"),
        ("ivfpq", {}, "ivfpq learns its codes from 256 passages, there are 100; take --index=flat"),
        ("ivfpq", {"codes": 5}, "--codes is 5; it must divide the width of the vectors, 16"),
    ],
)
def test_parameters_that_cannot_be(kind, given, told):
    with pytest.raises(UserError, match=told):
        Parameters(**given).resolved(kind, 100, 16)
    with pytest.raises(UserError, match=r"--build-ef is -1; it must be a whole number"):
        Parameters(build_ef=-1)


# ------------------------------------------------------------------------------------------------------ crafted, or GPU


def test_a_file_of_another_kind_or_size_is_refused(tmp_path, data):
    rows, _ = data
    built("ivf", tmp_path / "ivf", rows)
    params = {"nprobe": 4}
    with pytest.raises(UserError, match=r"another index than hnsw"):
        open_index("hnsw", tmp_path / "ivf", rows, {"ef": 64})
    with pytest.raises(UserError, match=r"holds 600 vectors of width 16, the passages have 599 of width 16"):
        open_index("ivf", tmp_path / "ivf", Rows(rows.rows[:-1]), params)
    with pytest.raises(UserError, match=r"damaged"):
        open_index("ivf", tmp_path / "ivf", rows, {})
    (tmp_path / "ivf" / "index.faiss").write_bytes(b"\x80\x04cos\nsystem\n(S'touch /tmp/x'\ntR.")
    with pytest.raises(UserError, match=r"is no FAISS index"):
        open_index("ivf", tmp_path / "ivf", rows, params)


def test_lists_in_another_file_are_refused(tmp_path, data):
    rows, _ = data
    built("ivf", tmp_path / "ivf", rows, nlist=4)
    path = str(tmp_path / "ivf" / "index.faiss")
    index = faiss.read_index(path)
    outside = faiss.OnDiskInvertedLists(index.nlist, index.code_size, str(tmp_path / "elsewhere"))
    outside.merge_from(faiss.downcast_InvertedLists(index.invlists), 0) if hasattr(outside, "merge_from") else None
    index.replace_invlists(outside, False)
    faiss.write_index(index, path)
    with pytest.raises(UserError, match=r"has its lists in another file|is no FAISS index"):
        open_index("ivf", tmp_path / "ivf", rows, {"nprobe": 4})


def test_a_gpu_is_asked_for_where_there_is_none(tmp_path, data, monkeypatch):
    rows, _ = data
    flat, graph = built("flat", tmp_path / "flat", rows), built("hnsw", tmp_path / "hnsw", rows)
    monkeypatch.delattr(faiss, "GpuMultipleClonerOptions", raising=False)
    with pytest.raises(UserError, match=r"FAISS installed here is for CPUs.*requirements-cuda12.txt"):
        GpuIndex(flat)
    with pytest.raises(UserError, match=r"searches hnsw on CPUs only"):
        GpuIndex(graph)


def test_a_gpu_index_is_given_shares_and_asked_for_at_most_2048(tmp_path, data, monkeypatch):
    rows, queries = data

    class Options:
        shard = False

    def to_gpus(index, options):
        assert options.shard
        return index

    monkeypatch.setattr(faiss, "GpuMultipleClonerOptions", Options, raising=False)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 2, raising=False)
    monkeypatch.setattr(faiss, "index_cpu_to_all_gpus", to_gpus, raising=False)
    monkeypatch.setattr(GpuIndex, "most", 50)
    index = GpuIndex(built("flat", tmp_path / "flat", rows))
    assert positions(index.search(queries, 30)) == brute_force(rows, queries, 30).tolist()
    assert {len(row) for row in index.search(queries, 50)} == {50}
    with pytest.raises(UserError, match=r"51 documents .* 50 at most; search it with retriever.device=cpu"):
        index.search(queries, 51)

    def no_memory(index, options):
        raise RuntimeError("alloc of 61 GB failed")

    monkeypatch.setattr(faiss, "index_cpu_to_all_gpus", no_memory)
    with pytest.raises(UserError, match=r"alloc of 61 GB failed.*--index=ivfpq"):
        GpuIndex(built("flat", tmp_path / "flat", rows))


def test_large_indexes_use_all_cores(data, monkeypatch):
    rows, queries = data
    index = FlatIndex.of(rows)
    want = index.search(queries, 3)
    threads = []
    monkeypatch.setattr(indexes, "THREADS_FROM", N * D)
    monkeypatch.setattr(indexes.os, "cpu_count", lambda: 3)
    monkeypatch.setattr(faiss, "omp_set_num_threads", threads.append)
    assert index.search(queries, 3) == want and threads == [3]


def test_the_estimate_of_memory_is_near_what_faiss_writes(tmp_path, data):
    rows, _ = data
    for kind in ("ivf", "ivfpq", "hnsw"):
        params = Parameters().resolved(kind, N, D)
        write_index(kind, tmp_path, rows, params)
        size = (tmp_path / kinds.FILE).stat().st_size
        fixed = 4 * D * kinds.CODES  # does not grow with N
        assert 0.8 * size <= KINDS[kind].bytes(N, D, params) <= 1.5 * size + fixed + 4 * 256 * 2 * 15, kind
