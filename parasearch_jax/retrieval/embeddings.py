"""The vectors of a folder's passages: encoded part by part, kept in zarr, read chunk by chunk.

A chunk is ROWS rows and the unit of everything: a part has whole chunks, a chunk that is written is noted with the
sha256 of its vectors, a build that was killed encodes what is not noted. The vector of a passage depends on nothing but
the passage, so neither parts nor interruptions change a bit. Axes: n passages, D width.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from parasearch_jax.errors import UserError
from parasearch_jax.retrieval.corpus import Document
from parasearch_jax.retrieval.folder import REBUILD, damaged, inside, read_manifest, replacing, write_manifest
from parasearch_jax.retrieval.retriever import Encoder

ROWS = 4096
DESCRIPTION, NOTES, VECTORS = "part.json", "done.jsonl", "vectors"
AHEAD = 4  # chunks that are read while one is worked on


@dataclasses.dataclass(frozen=True)
class Part:
    """Part `number` (from 1) of `of`: what one machine encodes."""

    number: int = 1
    of: int = 1

    @classmethod
    def parse(cls, text: str) -> Part:
        """The second of four for "2/4"; UserError for what isn't of this form."""
        number, slash, of = text.partition("/")
        if not (slash and number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
            raise UserError(f"--part is {text!r}; give the number of the part and how many there are, such as 1/4")
        return cls(int(number), int(of))

    @property
    def name(self) -> str:
        return f"{self.number}-of-{self.of}"

    def chunks(self, count: int, rows: int) -> range:
        """The chunks of this part, of all those of `count` passages."""
        chunks = -(-count // rows)
        return range(chunks * (self.number - 1) // self.of, chunks * self.number // self.of)


# ------------------------------------------------------------------------------------------------------------ encoding


def encode_part(
    folder: Path,
    part: Part,
    passages: Sequence[Document],
    encoder: Encoder,
    dim: int,
    about: Mapping[str, Any],
    window: int = ROWS,
    told: Callable[[int, int], None] = lambda done, rows: None,
) -> None:
    """Encodes what `folder` lacks of a part of the passages.

    about    what the vectors depend on, compared with that of an earlier start; UserError if it was another
    window   passages given to the encoder at once
    told     called with (passages of the part that are done, passages of the part) at the start and behind each window
    """
    if strange := [other.name for other in parts_in(folder) if other.of != part.of]:
        raise UserError(
            f"{folder} holds {', '.join(strange)}: give parts of that number, --merge, or another --out; to begin "
            f"anew remove the folder"
        )
    count = len(passages)
    chunks, place = part.chunks(count, ROWS), folder / part.name
    _describe(place, {**about, "count": count, "dim": dim, "rows": ROWS})
    first = chunks.start * ROWS
    rows = min(chunks.stop * ROWS, count) - first
    store = _open(place / VECTORS, (rows, dim), create=True)
    done = _done(place, store, chunks, first)
    missing = [chunk for chunk in chunks if chunk not in done]
    written = rows - sum(len(_rows(chunk, count)) for chunk in missing)
    told(written, rows)
    step = max(1, window // ROWS)
    with (place / NOTES).open("a") as notes:
        for start in range(0, len(missing), step):
            some = missing[start : start + step]
            texts = [passages[i].contents for chunk in some for i in _rows(chunk, count)]
            vectors = np.ascontiguousarray(encoder.encode(texts, kind="passage"), np.float32)
            _check(vectors, (len(texts), dim), some)
            for chunk in some:
                mine, vectors = np.split(vectors, [len(_rows(chunk, count))])
                at = chunk * ROWS - first
                store[at : at + len(mine)].write(mine).result()
                notes.write(json.dumps({"chunk": chunk, "sha256": digest(mine)}) + "\n")
                notes.flush()
            written += len(texts)
            told(written, rows)


def _rows(chunk: int, count: int) -> range:
    return range(chunk * ROWS, min((chunk + 1) * ROWS, count))


def _check(vectors: np.ndarray, shape: tuple[int, int], chunks: list[int]) -> None:
    if vectors.shape != shape:
        raise ValueError(f"the encoder gave vectors of shape {vectors.shape} for texts that need {shape}")
    if not np.isfinite(vectors).all():
        raise UserError(f"the encoder gives NaN or infinity for passages of chunks {chunks}; check its weights")


def digest(vectors: np.ndarray) -> str:
    """sha256 of float32 vectors [rows, D] in little-endian, row by row."""
    return hashlib.sha256(np.ascontiguousarray(vectors, "<f4")).hexdigest()


def _describe(place: Path, description: dict[str, Any]) -> None:
    """Notes what the part is; UserError if an earlier start noted something else."""
    file = place / DESCRIPTION
    if not file.exists():
        with replacing(file) as path:
            path.write_text(json.dumps(description, indent=1) + "\n")
    known = _description(place)
    if changed := [name for name, value in description.items() if known.get(name) != value]:
        lines = [f"\n  {name}: {known.get(name)!r:.100} there, {description[name]!r:.100} now" for name in changed]
        raise UserError(f"{place} was begun with other inputs; give its own, or another --out:{''.join(lines)}")


def _description(place: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((place / DESCRIPTION).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{place / DESCRIPTION} can't be read ({error}); remove {place} and encode it again") from error


def _open(path: Path, shape: tuple[int, int], create: bool = False) -> ts.TensorStore:
    """One file a chunk, uncompressed: vectors of unit length have nothing to squeeze."""
    metadata = {"shape": shape, "chunks": [ROWS if create else None, shape[1]], "dtype": "<f4"}
    if not create:
        del metadata["chunks"]
    else:
        metadata["compressor"] = None
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{path}/"}, "metadata": metadata}
    try:
        return ts.open(spec, open=True, create=create).result()
    except ValueError as error:
        raise UserError(f"{path} holds other vectors than its part says ({error!s:.200}); {REBUILD}") from error


def _done(place: Path, store: ts.TensorStore, chunks: range, first: int) -> dict[int, str]:
    """{chunk: sha256} of those that are noted and lie there as they were: a machine may have lost its power."""
    done = {}
    for chunk, noted in _notes(place).items():
        at = chunk * ROWS - first
        if chunk in chunks and digest(store[at : min(at + ROWS, store.shape[0])].read().result()) == noted:
            done[chunk] = noted
    return done


def _notes(place: Path) -> dict[int, str]:
    """What is noted; a line that a kill cut off is none."""
    notes = {}
    path = place / NOTES
    whole = path.read_text().split("\n")[:-1] if path.exists() else []
    for line in whole:
        try:
            note = json.loads(line)
            notes[int(note["chunk"])] = str(note["sha256"])
        except (ValueError, KeyError, TypeError):
            continue  # then that chunk is encoded again
    return notes


# ------------------------------------------------------------------------------------------------------------- together


def parts_in(folder: Path) -> list[Part]:
    """The parts that were begun, in order."""
    found = [path.name.split("-of-") for path in folder.glob("*-of-*") if (path / DESCRIPTION).exists()]
    return sorted((Part(int(i), int(n)) for i, n in found if i.isdecimal() and n.isdecimal()), key=lambda p: p.number)


def join(folder: Path, of: int | None = None) -> None:
    """Writes the manifest over all parts, once they are complete and of the same inputs. Raises UserError naming the
    parts that are absent, incomplete or different. Moves no vector."""
    found = parts_in(folder)
    of = of or (found[0].of if found else 1)
    if strange := [part.name for part in found if part.of != of]:
        raise UserError(f"{folder} has parts of {of} and also {', '.join(strange)}; remove the folders of one kind")
    parts = [Part(number, of) for number in range(1, of + 1)]
    if absent := [f"--part={part.number}/{of}" for part in parts if part not in found]:
        raise UserError(f"{folder} lacks parts; run the build with {', '.join(absent)}, or copy their folders there")
    descriptions = [_description(folder / part.name) for part in parts]
    for part, description in zip(parts, descriptions, strict=True):
        if description != descriptions[0]:
            raise UserError(f"{folder}: {part.name} is of other inputs than {parts[0].name}; encode it again")
    chunks: list[str] = []
    for part in parts:
        notes, mine = _notes(folder / part.name), part.chunks(descriptions[0]["count"], descriptions[0]["rows"])
        if lacking := [chunk for chunk in mine if chunk not in notes]:
            raise UserError(
                f"{folder / part.name} lacks {len(lacking)} of {len(mine)} chunks; run the build with "
                f"--part={part.number}/{of} again, which continues it"
            )
        chunks += [notes[chunk] for chunk in mine]
    whole = hashlib.sha256("".join(chunks).encode()).hexdigest()
    names = [part.name for part in parts]
    write_manifest(folder, {**descriptions[0], "parts": names, "chunks": chunks, "sha256": whole})


class Vectors:
    """All vectors of a folder. Every chunk that is read is compared with its sha256: UserError if it is another."""

    def __init__(self, folder: Path):
        self.manifest = manifest = read_manifest(folder)
        self._folder = folder
        with damaged(folder):
            self.count, self.dim, self._digests = int(manifest["count"]), int(manifest["dim"]), list(manifest["chunks"])
            self.sha256, self.rows = str(manifest["sha256"]), int(manifest["rows"])
            places = {name: inside(folder, f"{name}/{VECTORS}") for name in manifest["parts"]}
            parts = [Part.parse(name.replace("-of-", "/")) for name in places]
            if self.rows < 1 or self.count < 1 or len(self._digests) != -(-self.count // self.rows):
                raise ValueError(f"{len(self._digests)} chunks for {self.count} rows")
            if [part.number for part in parts] != list(range(1, parts[0].of + 1)):
                raise ValueError(f"parts {', '.join(places)}")
            if hashlib.sha256("".join(self._digests).encode()).hexdigest() != self.sha256:
                raise ValueError("chunks of another sha256")
        self._stores = []  # (chunks, store)
        for part in parts:
            chunks = part.chunks(self.count, self.rows)
            size = min(chunks.stop * self.rows, self.count) - chunks.start * self.rows
            if size > 0:
                self._stores.append((chunks, _open(places[part.name], (size, self.dim))))

    def __len__(self) -> int:
        return self.count

    def chunks(self) -> Iterator[tuple[int, np.ndarray]]:
        """(number of the first row, float32 [rows, D]) over all rows, in order."""
        waiting: collections.deque = collections.deque()
        for chunks, store in self._stores:
            for chunk in chunks:
                at = (chunk - chunks.start) * self.rows
                waiting.append((chunk, store[at : min(at + self.rows, store.shape[0])].read()))
                if len(waiting) > AHEAD:
                    yield self._checked(*waiting.popleft())
        while waiting:
            yield self._checked(*waiting.popleft())

    def _checked(self, chunk: int, future: ts.Future) -> tuple[int, np.ndarray]:
        try:
            vectors = np.ascontiguousarray(future.result(), np.float32)
        except ValueError as error:
            raise UserError(f"{self._folder}: chunk {chunk} can't be read ({error!s:.200}); {REBUILD}") from error
        if digest(vectors) != self._digests[chunk]:
            raise UserError(f"{self._folder}: chunk {chunk} is not the one of the manifest (sha256); {REBUILD}")
        return chunk * self.rows, vectors

    def take(self, most: int, seed: int = 0) -> np.ndarray:
        """float32 [min(n, most), D]: rows drawn evenly without replacement, in order; the same for the same seed."""
        if most >= self.count:
            return np.concatenate([vectors for _, vectors in self.chunks()])
        chosen = np.sort(np.random.default_rng(seed).choice(self.count, most, replace=False))
        out = np.empty((most, self.dim), np.float32)
        for start, vectors in self.chunks():
            begin, end = np.searchsorted(chosen, [start, start + len(vectors)])
            out[begin:end] = vectors[chosen[begin:end] - start]
        return out
