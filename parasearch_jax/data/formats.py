"""Files of questions as they are published: how rows are read, and what their fields are called here.

Two tables hold what is known: `READERS` (file ending -> rows) and `SHAPES` (a field that gives a row's format away ->
its fields under our names). A new public format is a new line in one of them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from parasearch_jax.errors import UserError

Rows = Iterator[tuple[int, Any]]  # (number from 1, row); in .jsonl the number of the line


@dataclasses.dataclass(frozen=True)
class Shape:
    """A public format: `convert(row)` gives the row's fields under our names (id, question, golden_answers, type,
    dataset, and whatever else there is); `question` and `answers` are what its own fields are called, for errors."""

    convert: Callable[[Mapping], dict]
    question: str = "question"
    answers: str = "golden_answers"


def shape_of(row: Mapping) -> Shape:
    """The format of a row, by the first marker of SHAPES that it has; ours if it has none.

    A row with golden_answers may call anything else "query" or "idx".
    """
    known = SHAPES[:2] if "golden_answers" in row else SHAPES
    return next((shape for marker, shape in known if marker in row), OURS)


# --------------------------------------------------------------------------------------------------------------- shapes


def _flashrag(row: Mapping) -> dict:
    """FlashRAG keeps type, support and the like one level down; fields of the row itself win."""
    return {**_object(row, "metadata"), **{key: value for key, value in row.items() if key != "metadata"}}


def _search_r1(row: Mapping) -> dict:
    """Search-R1's and ParallelSearch's parquet, also with the columns of FlashRAG that their scripts leave in.

    `id` gets the data source before it: their merged files hold "train_0" of every set. FlashRAG's own type goes before
    that of `extra_info`, as ParallelSearch's test script writes "comparison" into every row. The prompt is left out.
    """
    extra, model = _object(row, "extra_info"), _object(row, "reward_model")
    truth = model.get("ground_truth")
    fields = _flashrag({key: v for key, v in row.items() if key not in ("prompt", "reward_model", "extra_info")})
    source = fields.pop("data_source", None)
    name = fields.get("id")
    if name is None and "index" in extra:
        name = f"{extra.get('split')}_{extra['index']}"
    return {
        **{key: value for key, value in extra.items() if key not in ("index", "split")},
        **{key: value for key, value in fields.items() if value is not None},
        "id": name if name is None or not source else f"{source}/{name}",
        "question": row.get("question") or _question_in_prompt(row.get("prompt")),
        "golden_answers": truth.get("target") if isinstance(truth, Mapping) else truth,
        "dataset": source,
    }


def _question_in_prompt(prompt: Any) -> Any:
    """What stands behind the last "Question:" of the last message; None if there is none."""
    last = prompt[-1] if isinstance(prompt, list) and prompt else None
    text = last.get("content") if isinstance(last, Mapping) else prompt
    return text.rpartition("Question:")[2].strip() if isinstance(text, str) and "Question:" in text else None


def _multihop_rag(row: Mapping) -> dict:
    return _renamed(row, query="question", answer="golden_answers", question_type="type")


def _r1_searcher(row: Mapping) -> dict:
    return _renamed(row, idx="id", answer="golden_answers")


def _renamed(row: Mapping, **names: str) -> dict:
    return {names.get(key, key): value for key, value in row.items()}


def _object(row: Mapping, field: str) -> Mapping:
    value = row.get(field)
    if value is not None and not isinstance(value, Mapping):
        raise UserError(f"field {field!r} is {str(value)[:60]!r}; it must be an object, or be left out")
    return value or {}


OURS = Shape(dict)
SHAPES = (
    ("reward_model", Shape(_search_r1, "question (or prompt)", "reward_model.ground_truth.target")),
    ("metadata", Shape(_flashrag)),
    ("query", Shape(_multihop_rag, "query", "answer")),
    ("idx", Shape(_r1_searcher, answers="answer")),
)


# -------------------------------------------------------------------------------------------------------------- readers


def _jsonl_rows(path: Path) -> Rows:
    """Each line that is not blank."""
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, _parse_json(line, f"{path}:{number}")


def _parse_json(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error}): {line.strip()[:60]!r}; write one JSON object a line") from None


def _json_rows(path: Path) -> Rows:
    """The items of one list."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON ({error}); if it holds an object a line, call it .jsonl") from None
    if not isinstance(rows, list):
        raise UserError(f"{path} holds no list: {str(rows)[:60]!r}; write a list of question objects")
    yield from enumerate(rows, 1)


def _parquet_rows(path: Path) -> Rows:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path}: reading parquet needs pyarrow: pip install -r requirements-parquet.txt") from error
    with path.open("rb") as file:  # so that an absent file is told as of the other formats
        try:
            batches = pyarrow.parquet.ParquetFile(file).iter_batches()
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)
        except pyarrow.ArrowException as error:
            raise UserError(f"{path} is no parquet file: {' '.join(str(error).split())[:200]}") from error


READERS = {".jsonl": _jsonl_rows, ".json": _json_rows, ".parquet": _parquet_rows}


def read_rows(path: Path) -> Rows:
    """The rows of a questions file. Raises UserError naming the file for an unknown ending, and for one that is absent
    or can't be read."""
    if path.suffix not in READERS:
        raise UserError(f"questions file {path}: ending {path.suffix!r} is unknown; use one of: {', '.join(READERS)}")
    try:
        yield from READERS[path.suffix](path)
    except FileNotFoundError:
        raise UserError(f"questions file {path} does not exist; check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"questions file {path} cannot be read as {_what(path)}: {error}") from error


def _what(path: Path) -> str:
    return "parquet" if path.suffix == ".parquet" else "UTF-8 text"
