"""The kinds of FAISS index: their parameters, what they need, how they are built, kept and opened.

Parameters have two halves: those an index is made of, and those its searches use, which can be changed without making
it anew. Defaults follow FAISS's "Guidelines to choose an index". Axes: n vectors, D width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from parasearch_jax.errors import UserError
from parasearch_jax.retrieval.embeddings import Vectors
from parasearch_jax.retrieval.folder import REBUILD, damaged, inside, replacing
from parasearch_jax.retrieval.index import FaissIndex, FlatIndex, HnswIndex, use_threads

FILE = "index.faiss"
POINTS = 39  # training vectors a cluster needs, FAISS warns below
TRAINED_ON = 64  # vectors a cluster is trained on where there are as many; FAISS itself would take 256
CODES = 256  # values of a byte, so clusters of each product quantizer

THREADS_FROM = 2**20  # numbers in the vectors of an index that is built by all cores

IP = faiss.METRIC_INNER_PRODUCT


@dataclasses.dataclass(frozen=True)
class Parameters:
    """0: chosen by the size of the corpus."""

    nlist: int = 0  # ivf, ivfpq: clusters; 4 sqrt(n), at most n / 39
    nprobe: int = 0  # searched of them; nlist / 16, at least 64
    codes: int = 0  # ivfpq: bytes of a vector; D / 8
    links: int = 0  # hnsw: of a vector to others (M); 32
    build_ef: int = 0  # candidates when a vector is linked; 200
    ef: int = 0  # candidates of a search, the most documents it can give; 128

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise UserError(f"{_flag(name)} is {value!r}; it must be a whole number, 0 for the default")

    def resolved(self, kind: str, n: int, dim: int) -> dict[str, int]:
        """Those that `kind` has, with numbers for zeros. UserError for one that it has not, or that can't be."""
        names = KINDS[kind].made_of + KINDS[kind].searched_by
        given = {name: value for name, value in dataclasses.asdict(self).items() if value}
        if foreign := [_flag(name) for name in given if name not in names]:
            raise UserError(f"--index={kind} has no {', '.join(foreign)}")
        nlist = self.nlist or max(1, min(round(4 * math.sqrt(n)), n // POINTS))
        defaults = {
            "nlist": nlist,
            "nprobe": min(nlist, max(64, nlist // 16)),
            "codes": next(m for m in (dim // 8, *range(dim // 8, 0, -1), 1) if m and dim % m == 0),
            "links": 32,
            "build_ef": 200,
            "ef": 128,
        }
        found = {name: given.get(name, defaults[name]) for name in names}
        if found.get("nlist", 0) > n:
            raise UserError(f"--nlist is {nlist}, but there are {n} passages; give fewer, {n // POINTS} at most")
        if found.get("nprobe", 0) > nlist:
            raise UserError(f"--nprobe is {found['nprobe']}, more than the {nlist} clusters (--nlist)")
        if dim % found.get("codes", 1):
            raise UserError(f"--codes is {found['codes']}; it must divide the width of the vectors, {dim}")
        if kind == "ivfpq" and n < CODES:
            raise UserError(f"--index=ivfpq learns its codes from {CODES} passages, there are {n}; take --index=flat")
        return found


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@dataclasses.dataclass(frozen=True)
class Kind:
    made_of: tuple[str, ...]
    searched_by: tuple[str, ...]
    make: Callable[[Vectors, Mapping[str, int]], faiss.Index] | None  # None: nothing is kept but the vectors
    type: type[faiss.Index]
    bytes: Callable[[int, int, Mapping[str, int]], int]  # (n, D, parameters) -> memory of the finished index


def _flat(dim: int) -> faiss.Index:
    return faiss.IndexFlatIP(dim)


def make_ivf(vectors: Vectors, params: Mapping[str, int]) -> faiss.Index:
    return _filled(faiss.IndexIVFFlat(_flat(vectors.dim), vectors.dim, params["nlist"], IP), vectors, params["nlist"])


def make_ivfpq(vectors: Vectors, params: Mapping[str, int]) -> faiss.Index:
    dim, nlist = vectors.dim, params["nlist"]
    return _filled(faiss.IndexIVFPQ(_flat(dim), dim, nlist, params["codes"], 8, IP), vectors, max(nlist, CODES))


def _filled(index: faiss.Index, vectors: Vectors, clusters: int) -> faiss.Index:
    """Trained on rows drawn with a fixed seed, then given all."""
    index.train(vectors.take(TRAINED_ON * clusters))
    for _, chunk in vectors.chunks():
        index.add(chunk)
    return index


def make_hnsw(vectors: Vectors, params: Mapping[str, int]) -> faiss.Index:
    """Where several cores link at once, two builds differ in some links."""
    index = faiss.IndexHNSWFlat(vectors.dim, params["links"], IP)
    index.hnsw.efConstruction = params["build_ef"]
    for _, chunk in vectors.chunks():
        index.add(chunk)
    return index


KINDS = {
    "flat": Kind((), (), None, faiss.IndexFlatIP, lambda n, D, p: 4 * n * D),
    "ivf": Kind(
        ("nlist",), ("nprobe",), make_ivf, faiss.IndexIVFFlat, lambda n, D, p: n * (4 * D + 8) + 4 * D * p["nlist"]
    ),
    "ivfpq": Kind(
        ("nlist", "codes"),
        ("nprobe",),
        make_ivfpq,
        faiss.IndexIVFPQ,
        lambda n, D, p: n * (p["codes"] + 8) + 4 * D * (p["nlist"] + CODES) + 4 * CODES * p["codes"] * p["nlist"],
    ),
    "hnsw": Kind(
        ("links", "build_ef"),
        ("ef",),
        make_hnsw,
        faiss.IndexHNSWFlat,
        lambda n, D, p: n * (4 * D + 8 * p["links"] + 20),
    ),
}


def training_bytes(kind: str, n: int, dim: int, params: Mapping[str, int]) -> int:
    """Memory while an index is built, besides the index."""
    clusters = max(params.get("nlist", 0), CODES if kind == "ivfpq" else 0)
    return 4 * dim * min(n, TRAINED_ON * clusters)


def write_index(kind: str, folder: Path, vectors: Vectors, params: Mapping[str, int]) -> list[str]:
    """Builds an index into `folder`; the names of its files."""
    use_threads(len(vectors) * vectors.dim, THREADS_FROM)
    if KINDS[kind].make is None:
        return []
    index = KINDS[kind].make(vectors, params)
    with replacing(folder / FILE) as path:
        faiss.write_index(index, str(path))
    return [FILE]


def open_index(kind: str, folder: Path, vectors: Vectors, params: Mapping[str, Any]) -> FaissIndex:
    """The index of a folder whose files have been checked, for vectors of that number and width."""
    if KINDS[kind].make is None:
        return FlatIndex.of(vectors)
    path = inside(folder, FILE)
    try:
        # READ_ONLY: lists that lie in another file, which ours never do, would be opened for writing.
        index = faiss.read_index(str(path), faiss.IO_FLAG_READ_ONLY)
    except RuntimeError as error:
        raise UserError(f"{path} is no FAISS index ({error!s:.200}); {REBUILD}") from error
    lists = getattr(index, "invlists", None)
    elsewhere = lists is not None and type(faiss.downcast_InvertedLists(lists)) is not faiss.ArrayInvertedLists
    if type(index) is not KINDS[kind].type or elsewhere or index.metric_type != IP:
        raise UserError(f"{path} is another index than {kind}, or has its lists in another file; {REBUILD}")
    if (index.ntotal, index.d) != (len(vectors), vectors.dim):
        raise UserError(
            f"{path} holds {index.ntotal} vectors of width {index.d}, the passages have {len(vectors)} of width "
            f"{vectors.dim}; {REBUILD}"
        )
    with damaged(folder):
        if kind == "hnsw":
            index.hnsw.efSearch = int(params["ef"])
            return HnswIndex(index)
        index.nprobe = int(params["nprobe"])
    return FaissIndex(index)


# --------------------------------------------------------------------------------------------------------------- recall


def exact_hits(vectors: Vectors, queries: np.ndarray, k: int) -> np.ndarray:
    """int64 [queries, min(k, n)]: positions of the best inner products, equal ones in order; reads all vectors once."""
    k = min(k, len(vectors))
    best, where = np.zeros((len(queries), 0), np.float32), np.zeros((len(queries), 0), np.int64)
    for start, chunk in vectors.chunks():
        scores = np.concatenate([best, queries @ chunk.T], axis=1)
        new = np.broadcast_to(start + np.arange(len(chunk)), (len(queries), len(chunk)))
        positions = np.concatenate([where, new], axis=1)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        best, where = np.take_along_axis(scores, order, 1), np.take_along_axis(positions, order, 1)
    return where


def recall(found: list[list[int]], exact: np.ndarray, k: int) -> float:
    """Mean share of the k best (or all, where there are fewer) that are among the first k found."""
    pairs = zip(found, exact[:, :k].tolist(), strict=True)
    shares = [len(set(row[:k]) & set(best)) / len(best) for row, best in pairs]
    return float(np.mean(shares))
