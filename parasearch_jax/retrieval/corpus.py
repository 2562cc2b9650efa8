"""Corpus files: one document a line, jsonl, in the two forms of the design's corpus contract."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator

from parasearch_jax.digests import sha256_of
from parasearch_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Document:
    """A passage. `contents` is what travels, is encoded and is served: the title on its first line, then the text.

    >>> Document("0", '"Mira Voss"\\nMira Voss is a painter.').title
    'Mira Voss'
    """

    id: str
    contents: str

    @property
    def title(self) -> str:
        """The first line, without the pair of quotes around it (inner quotes stay)."""
        line = self.contents.partition("\n")[0].strip()
        return line[1:-1].strip() if len(line) > 1 and line[0] == line[-1] == '"' else line

    @property
    def text(self) -> str:
        """Everything after the first line, stripped."""
        return self.contents.partition("\n")[2].strip()


def load_corpus(path: str | pathlib.Path) -> list[Document]:
    """The documents of a jsonl file, in file order.

    Rows are {"id", "contents"} or {"id", "title", "text"}, other keys are ignored, blank lines skipped. UserError names
    the file and the line for broken JSON or UTF-8, a missing or empty field and a repeated id; also raised for a file
    that is absent or holds no document.
    """
    documents = list(read_corpus(path))
    if not documents:
        raise UserError(f'corpus {path} holds no document; write one {{"id", "contents"}} object a line')
    return documents


def read_corpus(path: str | pathlib.Path) -> Iterator[Document]:
    """The documents of a jsonl file one by one; errors as in `load_corpus`, but a file without rows is no error."""
    first_line: dict[str, int] = {}  # id -> the line that used it
    # Bytes are split at \n only, as jsonl is: text may hold U+2028 and its kin.
    with _existing(path).open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                document = to_document(json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8")))
            except (ValueError, TypeError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
                raise UserError(f"corpus {path}, line {number}: {error}; mend or remove the line") from error
            if document.id in first_line:
                earlier = first_line[document.id]
                raise UserError(
                    f"corpus {path}, line {number}: id {document.id!r} was used by line {earlier}; ids must be unique"
                )
            first_line[document.id] = number
            yield document


def fingerprint(path: str | pathlib.Path) -> str:
    """sha256 of the file's bytes, 64 hex digits: what results.json records as `corpus_sha256`."""
    return sha256_of(_existing(path))


def _existing(path: str | pathlib.Path) -> pathlib.Path:
    path = pathlib.Path(path)
    if not path.is_file():
        raise UserError(f"corpus {path} is no file; give the path of a jsonl file as retriever.corpus")
    return path


def to_document(row: object) -> Document:
    """A row as a Document; ValueError says what is wrong with it."""
    if not isinstance(row, dict):
        raise ValueError(f"a row must be a JSON object, this is {type(row).__name__} {str(row)[:40]!r}")
    identity = row.get("id")
    if isinstance(identity, bool) or not isinstance(identity, str | int) or identity == "":
        raise ValueError(f'"id" must be a string or an integer, it is {identity!r}')
    if "contents" in row:
        contents = _string(row, "contents")
    elif "text" in row:
        title = " ".join(_string(row, "title", default="").split())  # on one line: the first line is the title
        contents = f'"{title}"\n{_string(row, "text")}'
    else:
        raise ValueError(f'neither "contents" nor "text" among the keys {sorted(row)}')
    document = Document(str(identity), contents)
    # A document without text would reach the policy as an empty observation, which no later part can tell from a miss.
    if not document.text:
        raise ValueError(f'document {document.id!r} has no text after its title line ("contents": "title\\ntext")')
    return document


def _string(row: dict, key: str, default: str | None = None) -> str:
    value = row.get(key, default)
    if not isinstance(value, str):
        raise ValueError(f'"{key}" must be a string, it is {value!r}')
    return value
