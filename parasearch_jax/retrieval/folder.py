"""What is in a folder of indexes, and the files that say so.

    OUT/passages/     passages.jsonl, one {"id", "contents"} a line, and offsets.npy, where each line begins
    OUT/encoder/      the files of the encoder, for queries
    OUT/embeddings/   the passages' vectors: a zarr array for each part
    OUT/flat/, ivf/   and so on: an index each; what `open_retriever` takes

Each has a `manifest.json`, which is written last: what has one is complete. Files are named in it relative to its own
folder, with their sha256. Nothing here is a pickle, and nothing outside OUT is read.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from parasearch_jax.digests import sha256_of
from parasearch_jax.errors import UserError

MANIFEST = "manifest.json"
FORMAT = 1  # of all manifests; another number is another layout


def write_manifest(folder: Path, content: Mapping[str, Any], files: Iterable[str] = ()) -> None:
    """Writes it in one move, so that no reader sees half of it; `files` of the folder enter with their sha256."""
    content = {"format": FORMAT, **content, "files": {name: sha256_of(folder / name) for name in files}}
    with replacing(folder / MANIFEST) as path:
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises UserError for one that is absent, damaged or of another version."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} has no {MANIFEST}; build it with python -m parasearch_jax.retrieval.build") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read ({error}); {REBUILD}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("files"), dict):
        found = content.get("format") if isinstance(content, dict) else content
        raise UserError(f"{path} has format {found!r:.40}, this version reads {FORMAT}; {REBUILD}")
    return content


REBUILD = "remove the folder and build it again with python -m parasearch_jax.retrieval.build"


@contextlib.contextmanager
def damaged(folder: Path) -> Iterator[None]:
    """What fails inside for want of a field or by its kind is the manifest's fault."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{folder / MANIFEST} is damaged ({error!r:.200}); {REBUILD}") from error


def inside(folder: Path, name: str) -> Path:
    """The file that a manifest in `folder` names. Raises UserError for a name that leads out of the folder, by itself
    or by a link."""
    pure = PurePosixPath(name)
    path = folder / name
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or not path.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{folder / MANIFEST} names {name!r}, which lies outside its folder; {REBUILD}")
    return path


def check_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raises UserError naming the first file that is absent, lies outside, or is another than the manifest's."""
    files = {name: inside(folder, name) for name in manifest["files"]}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:  # hashing leaves Python alone
        for name, found in zip(files, pool.map(_digest, files.values()), strict=True):
            if found != manifest["files"][name]:
                what = "is absent" if found is None else "is not the file of its manifest (sha256)"
                raise UserError(f"{folder / name} {what}; {REBUILD}")


def _digest(path: Path) -> str | None:
    return sha256_of(path) if path.is_file() else None


def copy_files(source: Path, names: Iterable[str], into: Path) -> None:
    """Copies files with their folders; `into` is there whole or not at all."""
    half = into.with_name(f"{into.name}.{os.getpid()}.tmp")
    half.mkdir(parents=True)
    for name in names:
        (half / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, half / name)
    shutil.rmtree(into, ignore_errors=True)
    half.rename(into)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of `path` at the end; what was half written goes."""
    half = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield half
        with half.open("rb") as file:
            os.fsync(file.fileno())
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)


def once(folder: Path, description: Mapping[str, Any], make: Callable[[], None]) -> None:
    """Calls `make`, which ends with a manifest, unless `folder` has one. UserError if that describes something else."""
    if not (folder / MANIFEST).exists():
        make()
    manifest = read_manifest(folder)
    for name, value in description.items():
        if manifest.get(name) != value:
            raise UserError(
                f"{folder} was made with {name} {manifest.get(name)!r:.100}, this command has {value!r:.100}; give "
                "another --out"
            )
