"""Exact inner-product search over passage vectors. Axes: n vectors or queries, D width."""

from __future__ import annotations

import faiss
import numpy as np

Hit = tuple[int, float]  # position of the vector in the order added, score

# FAISS turns to a BLAS matrix product for larger batches, whose last bits depend on the batch. Which searches share a
# batch is a matter of timing here, so the score of a query must not: this keeps every query on its own.
faiss.cvar.distance_compute_blas_threshold = 2**31 - 1


class FlatIndex:
    """All vectors, compared one by one (`faiss.IndexFlatIP`): cosine for normalised vectors.

    Hits come by falling score, equal scores in the order added, whatever k is and whoever searches at the same time.
    Not to be called from several threads at once while `add` runs; `LocalRetriever` gives it one thread.
    """

    def __init__(self, dim: int):
        self._index = faiss.IndexFlatIP(dim)

    def __len__(self) -> int:
        return self._index.ntotal

    @property
    def dim(self) -> int:
        return self._index.d

    def add(self, vectors: np.ndarray) -> None:
        """Append vectors [n, D] of any float type or memory order."""
        self._index.add(self._checked(vectors))

    def search(self, queries: np.ndarray, k: int) -> list[list[Hit]]:
        """The min(k, len(self)) best hits of each of the queries [n, D]; never a filler, never a wrong one."""
        queries = self._checked(queries)
        wanted = min(k, len(self))
        if wanted < 1:
            return [[] for _ in queries]
        # One thread: FAISS and XLA would each start one per core and wait for one another. The setting is of the
        # calling thread only (OpenMP), so it is made where the search runs.
        faiss.omp_set_num_threads(1)
        scores, positions = self._index.search(queries, min(wanted + 1, len(self)))
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
            take = min(2 * take, len(self))
            scores, positions = self._index.search(query, take)
            if take == len(self) or scores[0, -1] < scores[0, wanted - 1]:
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


def _ordered(scores: np.ndarray, positions: np.ndarray) -> list[Hit]:
    """Hits by falling score, then position, without FAISS's filler -1 (which Python would read as the last one)."""
    order = np.lexsort((positions, -scores))
    pairs = zip(positions[order].tolist(), scores[order].tolist(), strict=True)
    return [(position, score) for position, score in pairs if position >= 0]
