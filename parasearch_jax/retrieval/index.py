"""Inner-product search over passage vectors, exact and approximate. Axes: n vectors or queries, D width."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import faiss
import numpy as np

from parasearch_jax.errors import UserError

if TYPE_CHECKING:
    from parasearch_jax.retrieval.embeddings import Vectors

Hit = tuple[int, float]  # position of the vector in the order added, score

# FAISS turns to a BLAS matrix product for larger batches, whose last bits depend on the batch. Which searches share a
# batch is a matter of timing here, so the score of a query must not: this keeps every query on its own.
faiss.cvar.distance_compute_blas_threshold = 2**31 - 1


# Below so many numbers in an index a search takes one thread: FAISS and XLA would each start one per core and wait for
# one another. Above (1 GiB, some 20 ms a query on one core) the queries of a call are spread over the cores.
THREADS_FROM = 2**28


def use_threads(work: int, least: int) -> None:
    """All cores for work of at least `least`, else one. The setting is of the calling thread only (OpenMP), so it is
    made where the work is done."""
    faiss.omp_set_num_threads(1 if work < least else os.cpu_count() or 1)


class FaissIndex:
    """Any FAISS index by inner product: cosine for normalised vectors.

    Hits come by falling score, equal scores in the order added, whatever k is and whoever searches at the same time.
    Not to be called from several threads at once (FAISS's GPU indexes break, `add` is never safe); `LocalRetriever`
    gives it one thread.
    """

    most = 2**31  # hits of a query
    remedy = ""  # where that is less than all

    def __init__(self, index: faiss.Index):
        self._index = index

    def __len__(self) -> int:
        return self._index.ntotal

    @property
    def dim(self) -> int:
        return self._index.d

    def add(self, vectors: np.ndarray) -> None:
        """Append vectors [n, D] of any float type or memory order."""
        self._index.add(self._checked(vectors))

    def search(self, queries: np.ndarray, k: int) -> list[list[Hit]]:
        """The min(k, len(self)) best hits of each of the queries [n, D], fewer where an approximate index finds no
        more; never a filler, never a wrong one."""
        queries = self._checked(queries)
        wanted = min(k, len(self))
        if wanted < 1:
            return [[] for _ in queries]
        if wanted > self.most:
            raise UserError(
                f"{wanted} documents a query are asked, this index gives {self.most} at most; {self.remedy}"
            )
        use_threads(len(self) * self.dim, THREADS_FROM)
        return self._hits(queries, wanted)

    def _hits(self, queries: np.ndarray, wanted: int) -> list[list[Hit]]:
        scores, positions = self._index.search(queries, min(wanted + 1, len(self), self.most))
        hits = []
        for row in range(len(queries)):
            found = scores[row], positions[row]
            if scores.shape[1] > wanted and scores[row, wanted - 1] == scores[row, wanted]:
                found = self._with_whole_tie(queries[row : row + 1], wanted)
            hits.append(_ordered(*found)[:wanted])
        return hits

    def _with_whole_tie(self, query: np.ndarray, wanted: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores and positions [m], m > wanted, with every vector that ties with the last wanted one.

        FAISS keeps some of them, which ones depends on k; with all at hand the order added decides.
        """
        take = wanted + 1
        while True:
            take = min(2 * take, len(self), self.most)
            scores, positions = self._index.search(query, take)
            if take in (len(self), self.most) or scores[0, -1] < scores[0, wanted - 1]:
                return scores[0], positions[0]

    def _checked(self, vectors: np.ndarray) -> np.ndarray:
        """float32, C-contiguous [n, D]: FAISS reads the memory as that, whatever it is."""
        vectors = np.ascontiguousarray(vectors, dtype=np.float32)
        if vectors.size == 0 and len(vectors) == 0:
            return vectors.reshape(0, self.dim)
        if vectors.ndim != 2 or vectors.shape[1] != self.dim:
            raise ValueError(
                f"index of width {self.dim} got vectors of shape {vectors.shape}, width {vectors.shape[-1]}; "
                "queries and passages must come from the encoder that the index was built with"
            )
        if not np.isfinite(vectors).all():  # FAISS would answer with no hits at all, as if nothing had matched
            bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
            raise ValueError(f"vectors {bad[:5].tolist()} hold NaN or infinity ({len(bad)} in all); check the encoder")
        return vectors


class FlatIndex(FaissIndex):
    """All vectors, compared one by one (`faiss.IndexFlatIP`)."""

    def __init__(self, dim: int):
        super().__init__(faiss.IndexFlatIP(dim))

    @classmethod
    def of(cls, vectors: Vectors) -> FlatIndex:
        """Filled in place: adding chunk by chunk would let FAISS double its memory again and again."""
        index = cls(vectors.dim)
        faiss_index = index._index
        faiss_index.codes.resize(len(vectors) * faiss_index.code_size)
        rows = faiss.rev_swig_ptr(faiss_index.get_xb(), len(vectors) * vectors.dim).reshape(len(vectors), vectors.dim)
        for start, chunk in vectors.chunks():
            rows[start : start + len(chunk)] = index._checked(chunk)
        faiss_index.ntotal = len(vectors)
        return index


class HnswIndex(FaissIndex):
    """A graph in which a search keeps its `ef` best. All of them are taken whatever k is, so that k changes nothing but
    how many come back."""

    remedy = "build it with a larger --ef"

    @property
    def most(self) -> int:
        return self._index.hnsw.efSearch

    def _hits(self, queries: np.ndarray, wanted: int) -> list[list[Hit]]:
        scores, positions = self._index.search(queries, min(self.most, len(self)))
        return [_ordered(scores[row], positions[row])[:wanted] for row in range(len(queries))]


class GpuIndex(FaissIndex):
    """On the GPUs, each with a share of the vectors. Scores may differ from a CPU's in their last bits, and with the
    company that a query has."""

    most = 2048  # FAISS's own limit
    remedy = "search it with retriever.device=cpu"

    def __init__(self, index: FaissIndex):
        """UserError without GPUs or FAISS for them, and for an index that FAISS has no GPU form of."""
        if isinstance(index, HnswIndex):
            raise UserError("retriever.device is 'gpu', but FAISS searches hnsw on CPUs only; set it to 'cpu'")
        if not hasattr(faiss, "GpuMultipleClonerOptions"):
            raise UserError(
                "retriever.device is 'gpu', but the FAISS installed here is for CPUs; in an environment of its own: "
                "pip install -r requirements-cuda12.txt"
            )
        if not faiss.get_num_gpus():
            raise UserError("retriever.device is 'gpu', but FAISS sees no GPU here; set it to 'cpu'")
        options = faiss.GpuMultipleClonerOptions()
        options.shard = True
        try:
            super().__init__(faiss.index_cpu_to_all_gpus(index._index, options))
        except RuntimeError as error:  # no memory, or a code length of ivfpq that the GPU kernels lack
            raise UserError(
                f"FAISS can't move this index to {faiss.get_num_gpus()} GPUs ({error!s:.300}); set retriever.device to "
                "'cpu', leave it more memory (XLA_CLIENT_MEM_FRACTION of JAX), or build one with --index=ivfpq"
            ) from error


def _ordered(scores: np.ndarray, positions: np.ndarray) -> list[Hit]:
    """Hits by falling score, then position, without FAISS's filler -1 (which Python would read as the last one)."""
    order = np.lexsort((positions, -scores))
    pairs = zip(positions[order].tolist(), scores[order].tolist(), strict=True)
    return [(position, score) for position, score in pairs if position >= 0]
