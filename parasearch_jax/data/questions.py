"""Questions from files.

Two tables hold what is known about formats: `_READERS` (file ending -> rows) and `_SHAPES` (a field that gives a row's
format away -> its fields under our names). A new public format is a new line in one of them.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parasearch_jax.data.types import KINDS, Question
from parasearch_jax.errors import UserError

log = logging.getLogger(__name__)

# The type strings of the public data sets (HotpotQA, 2WikiMultiHopQA, MultiHop-RAG, FlashRAG), and our own kinds.
KIND_OF_TYPE = {
    "comparison": "parallel",
    "comparison_query": "parallel",
    "bridge": "sequential",
    "inference": "sequential",
    "inference_query": "sequential",
    "compositional": "sequential",
    "bridge_comparison": "sequential",
    "single-hop": "single",
    "na": "single",  # what the authors' data script writes for data sets without types: NQ and the like
    "temporal": "unknown",
    "temporal_query": "unknown",
    "null": "unknown",
    "null_query": "unknown",
} | {kind: kind for kind in KINDS}
SINGLE_HOP_SETS = ("nq", "triviaqa", "popqa")

_NAMED_FILE = re.compile(r"(?:([\w.-]*)=)?(.*)")  # a "=" further on belongs to the path

_OWN_FIELDS = ("id", "question", "golden_answers", "dataset")  # the rest of a row goes to Question.meta


def kind_of(type: str | None, dataset: str = "") -> str:
    """The kind of a question (one of `KINDS`) from its data set's own type string.

    Every question of a single-hop set is single; a missing type is unknown elsewhere. Raises UserError for any other
    string, so that a new or misspelt type is never trained on as something else.
    """
    if dataset.lower() in SINGLE_HOP_SETS:
        return "single"
    if type is None or type == "":
        return "unknown"
    if not isinstance(type, str) or type not in KIND_OF_TYPE:
        raise UserError(f"question type {type!r} is unknown; use one of: {', '.join(KIND_OF_TYPE)}")
    return KIND_OF_TYPE[type]


def load_questions(path: str | os.PathLike, dataset: str = "") -> list[Question]:
    """The questions of a file, in its order.

    jsonl, one object a line: ours (`id, question, golden_answers, type`) or FlashRAG's (`metadata.type`). `dataset`
    names the data set of rows that do not say it themselves. `meta` keeps every other field, the type as it was
    written among them. A row without an id gets `<file>-<line>`.

    Raises UserError naming file and line: no such file, unreadable row, question or answer missing, an id used twice,
    unknown type, no question at all. The number of each kind is logged.
    """
    path = Path(path)
    if path.suffix not in _READERS:
        raise UserError(f"questions file {path}: ending {path.suffix!r} is unknown; use one of: {', '.join(_READERS)}")
    seen: dict[str, int] = {}
    questions = []
    for line, row in _READERS[path.suffix](path):
        question = _question(row, f"{path}:{line}", f"{path.stem}-{line}", dataset)
        if question.id in seen:
            raise UserError(
                f"{path}:{line}: id {question.id!r} is already used in line {seen[question.id]}; rename one"
            )
        seen[question.id] = line
        questions.append(question)
    if not questions:
        raise UserError(f"questions file {path} holds no question; it needs one JSON object a line")
    _log_kinds(path, questions)
    return questions


def load_question_sets(spec: str) -> list[Question]:
    """The questions of one file or of several: "a.jsonl" or "nq=nq/train.jsonl,hotpotqa=hotpotqa/train.jsonl".

    A name is the data set of the file's rows. With several files ids become "name/id", or "stem/id" without a name:
    public sets number their questions alike ("train_0"). Raises UserError as `question_files` and `load_questions`.
    """
    files = question_files(spec)
    if len(files) == 1:
        return load_questions(files[0][1], dataset=files[0][0])
    return [
        dataclasses.replace(question, id=f"{name or path.stem}/{question.id}")
        for name, path in files
        for question in load_questions(path, dataset=name)
    ]


def question_files(spec: str) -> list[tuple[str, Path]]:
    """(name, path) of each file that a `load_question_sets` spec names, the name "" where it gives none; reads nothing.

    Raises UserError for an item without a path, and for two files whose ids would get the same prefix.
    """
    files = []
    for item in spec.split(","):
        name, path = _NAMED_FILE.fullmatch(item.strip()).groups()
        if not path:
            raise UserError(
                f"questions {spec!r}: {item!r} names no file; write file.jsonl or name=file.jsonl, with commas"
            )
        files.append((name or "", Path(path)))
    prefixes = Counter(name or path.stem for name, path in files)
    if twice := [prefix for prefix, count in prefixes.items() if count > 1]:
        raise UserError(f"questions {spec!r}: {twice[0]!r} stands for two files; give each a name: name=file.jsonl")
    return files


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(line number from 1, parsed object) of each line that is not blank."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _parse_json(line, f"{path}:{number}")
    except FileNotFoundError:
        raise UserError(f"questions file {path} does not exist; check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"questions file {path} cannot be read as UTF-8 text: {error}") from error


def _parse_json(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error}): {line.strip()[:60]!r}; write one JSON object a line") from None


def _flashrag(row: dict) -> dict:
    """FlashRAG keeps type, support and the like one level down; fields of the row itself win."""
    return {**(row["metadata"] or {}), **{key: value for key, value in row.items() if key != "metadata"}}


_READERS = {".jsonl": _jsonl_rows}
_SHAPES = (("metadata", _flashrag),)


def _question(row: Any, where: str, default_id: str, dataset: str) -> Question:
    if not isinstance(row, dict):
        raise UserError(f"{where}: {str(row)[:60]!r} is no JSON object; write one question object a line")
    fields = next((convert(row) for marker, convert in _SHAPES if marker in row), row)
    text = fields.get("question")
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where}: field 'question' is {text!r} (fields: {', '.join(row)}); give the question's text")
    dataset = fields.get("dataset") or dataset
    try:
        kind = kind_of(fields.get("type"), dataset)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    meta = {k: v for k, v in fields.items() if k not in _OWN_FIELDS and not (k == "type" and v is None)}
    name = fields.get("id")
    name = default_id if name is None else str(name)
    return Question(name, text, _answers(fields.get("golden_answers"), where), kind, dataset, meta)


def _answers(answers: Any, where: str) -> tuple[str, ...]:
    if isinstance(answers, str):
        answers = [answers]
    if not isinstance(answers, list) or not any(str(a).strip() for a in answers):
        raise UserError(f"{where}: field 'golden_answers' is {answers!r}; a question needs at least one answer")
    for answer in answers:
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):  # true would become "True", not "yes"
            raise UserError(f"{where}: answer {answer!r} is no string; write it as the text a model would give")
    return tuple(str(answer) for answer in answers)


def _log_kinds(path: Path, questions: list[Question]) -> None:
    counts = Counter(q.kind for q in questions)
    text = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])
    log.log(logging.WARNING if counts["unknown"] else logging.INFO, "%s: %d questions: %s", path, len(questions), text)
