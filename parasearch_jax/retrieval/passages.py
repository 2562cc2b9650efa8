"""The passages of a folder of indexes: read from a corpus, split if they are articles, and looked up by number."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from parasearch_jax.errors import UserError
from parasearch_jax.retrieval.corpus import Document, read_corpus
from parasearch_jax.retrieval.folder import REBUILD, check_files, damaged, read_manifest, replacing, write_manifest
from parasearch_jax.retrieval.split import split_passages

LINES, OFFSETS = "passages.jsonl", "offsets.npy"


def passages_of(documents: Iterator[Document], words: int) -> Iterator[Document]:
    """Documents as they are (`words` 0), or each split into passages of at most so many words, under its title.

    Document "a" becomes "a-0", "a-1" and so on.
    """
    for document in documents:
        if not words:
            yield document
            continue
        title = document.contents.partition("\n")[0]
        for number, text in enumerate(split_passages(document.text, words)):
            yield Document(f"{document.id}-{number}", f"{title}\n{text}")


def write_passages(corpus: Path, folder: Path, words: int, about: dict[str, Any]) -> None:
    """Streams a corpus into `folder`; its manifest gets `about`, and the number of passages. Errors as `read_corpus`;
    UserError for a corpus without documents."""
    offsets = [0]
    with replacing(folder / LINES) as path, path.open("wb") as out:
        for document in passages_of(read_corpus(corpus), words):
            row = {"id": document.id, "contents": document.contents}
            # ASCII: JSON can carry a lone surrogate, which UTF-8 can't.
            offsets.append(offsets[-1] + out.write(json.dumps(row).encode("ascii") + b"\n"))
        if len(offsets) == 1:
            raise UserError(f'corpus {corpus} holds no document; write one {{"id", "contents"}} object a line')
    with replacing(folder / OFFSETS) as path, path.open("wb") as out:
        np.save(out, np.array(offsets, np.int64), allow_pickle=False)
    write_manifest(folder, {**about, "count": len(offsets) - 1}, [LINES, OFFSETS])


class Passages(Sequence[Document]):
    """Documents by number, read from the disk as they are asked for: 21 million take no memory but the system's cache.

    May be asked by several threads at once.
    """

    def __init__(self, folder: Path):
        """Raises UserError for files that are not those of the manifest."""
        self.manifest = read_manifest(folder)
        check_files(folder, self.manifest)
        try:
            self._offsets = np.load(folder / OFFSETS, mmap_mode="r", allow_pickle=False)
        except ValueError as error:  # a pickle, or no array
            raise UserError(f"{folder / OFFSETS} holds no array of numbers ({error}); {REBUILD}") from error
        with damaged(folder), (folder / LINES).open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            checked = {LINES, OFFSETS} <= set(self.manifest["files"])
            shape = (self.manifest["count"] + 1,)
            fits = checked and self._offsets.dtype == np.int64 and self._offsets.shape == shape
            if not fits or self._offsets[-1] != len(self._bytes):
                raise ValueError(f"{OFFSETS} does not fit {LINES}")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> Document:
        if not 0 <= number < len(self):
            raise IndexError(number)
        row = json.loads(self._bytes[self._offsets[number] : self._offsets[number + 1]])
        return Document(row["id"], row["contents"])

    @property
    def text_bytes(self) -> int:
        return len(self._bytes)
