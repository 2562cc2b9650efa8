"""What a build will need, before it begins: memory, disk, time. Axes: n passages, D width."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from parasearch_jax.errors import UserError
from parasearch_jax.retrieval.corpus import Document
from parasearch_jax.retrieval.kinds import CODES, KINDS, Parameters, training_bytes
from parasearch_jax.retrieval.retriever import Encoder

GIB = 2**30
PASSAGE = 200  # bytes of a passage in memory beside its text: a Python object of two strings (measured)
PROGRAM = GIB  # JAX, FAISS and an encoder of base size with their buffers
BM25 = 12  # bytes of memory a byte of text, while the scores are computed
BM25_KEPT = 1.5  # bytes on disk a byte of text


def available_memory() -> int:
    """Bytes that processes can still take: what Linux says, elsewhere the whole memory."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def peak_memory() -> int:
    """Bytes this program has had at most; 0 where nothing tells. Not `ru_maxrss`, which begins with its parent's."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def memory_need(kind: str, n: int, dim: int, params: Mapping[str, int]) -> int:
    """Bytes at the worst moment of building or opening an index."""
    return PROGRAM + KINDS[kind].bytes(n, dim, params) + training_bytes(kind, n, dim, params)


def opened_bytes(kind: str, n: int, dim: int, params: Mapping[str, int] | None = None) -> int:
    """Memory of an index that is open: its passages, and all of bm25, stay on the disk. `params` as in its manifest;
    None: those a build would choose."""
    if kind == "bm25":
        return 0
    return KINDS[kind].bytes(n, dim, Parameters().resolved(kind, n, dim) if params is None else params)


def check_memory(kind: str, n: int, dim: int, parameters: Parameters) -> int:
    """The need of an index; UserError if it isn't there, naming the kinds that would fit."""
    needed, there = memory_need(kind, n, dim, parameters.resolved(kind, n, dim)), available_memory()
    if needed <= there:
        return needed
    raise UserError(
        f"--index={kind} of {n:,} vectors of width {dim} needs {gib(needed)} of memory, {gib(there)} are available; "
        f"{_instead(kind, n, dim, there)}"
    )


def _instead(kind: str, n: int, dim: int, there: int) -> str:
    possible = [other for other in KINDS if other != kind and (other != "ivfpq" or n >= CODES)]
    others = {other: memory_need(other, n, dim, Parameters().resolved(other, n, dim)) for other in possible}
    fitting = {other: size for other, size in others.items() if size <= there}
    if fitting:
        return "; ".join(f"--index={other} would need {gib(size)}" for other, size in fitting.items())
    least = min(others, key=others.__getitem__, default=kind)
    return f"no kind fits here: the least is --index={least} with {gib(others[least])}; --part only encodes"


def check_disk(what: str, needed: int, out: Path) -> None:
    """UserError if the disk of `out` lacks it."""
    place = next(path for path in (out, *out.absolute().parents) if path.exists())
    if (free := shutil.disk_usage(place).free) < needed:
        raise UserError(
            f"{what} needs {gib(needed)} on the disk of {out}, {gib(free)} are free; give --out on another disk"
        )


def seconds_to_encode(encoder: Encoder, passages: Sequence[Document], rows: int) -> float:
    """Estimated from some passages that are spread over the corpus, encoded twice: the first time compiles. They leave
    rows of their batches empty, more than all passages would; that is taken off."""
    some = min(len(passages), max(64, getattr(encoder, "window", 0) // 64))
    texts = [passages[i * len(passages) // some].contents for i in range(some)]
    encoder.encode(texts, kind="passage")
    began = time.perf_counter()
    encoder.encode(texts, kind="passage")
    seconds = time.perf_counter() - began
    return seconds * (encoder.filled(texts, "passage") if hasattr(encoder, "filled") else 1) / some * rows


def gib(size: float) -> str:
    return f"{size / GIB:.3g} GiB" if size >= GIB / 100 else f"{size / 2**20:.3g} MiB"


def duration(seconds: float) -> str:
    """As "1 h 05 min", "2 min 10 s" or "8 s"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
