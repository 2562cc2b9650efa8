"""sha256 of files, each read once in a process: corpora and weights are large and asked for in several places."""

from __future__ import annotations

import functools
import hashlib
import os
import time
from pathlib import Path

YOUNG = 2 * 10**9  # ns: a file written since may change again and keep its size and (coarse) time


def sha256_of(path: str | os.PathLike) -> str:
    """64 hex digits, as `sha256sum` prints them. OSError where the file can't be read."""
    path = Path(path).resolve()
    stat = path.stat()
    if time.time_ns() - stat.st_mtime_ns < YOUNG:
        return _read(path)
    return _kept(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=1024)
def _kept(path: Path, size: int, time_ns: int) -> str:
    return _read(path)


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
