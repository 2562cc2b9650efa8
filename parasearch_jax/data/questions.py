"""Questions: their kinds, and how a configuration names the sets that they come from.

    "a.jsonl"                                              a file
    "nq=nq/train.jsonl,hotpotqa=hotpotqa/train.jsonl"      several, each with the name of its data set
    "nq/train,hotpotqa/train"                              public sets by name
    "hotpotqa/dev:parallel,2wikimultihopqa/dev:parallel"   subsets of the papers' tables, of a file too

A new public format is a line in formats.py, a new public set one in hub.py.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

from parasearch_jax.data import hub
from parasearch_jax.data.formats import READERS, read_rows, shape_of
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

# The subsets of the papers' tables select on the data set's own type; bridge_comparison is in none.
SUBSETS = {
    "parallel": ("comparison", "comparison_query"),
    "sequential": ("bridge", "inference", "inference_query", "compositional"),
}

_ITEM = re.compile(r"(?:([\w.-]*)=)?(.*?)(?::(" + "|".join(SUBSETS) + "))?")  # a "=" further on belongs to the path

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
    """The questions of a file, in its order: .jsonl, .json or .parquet, in any format of formats.py, which rows tell.

    `dataset` names the data set of rows that do not say it themselves. `meta` keeps every other field, the type as it
    was written among them. A row without an id gets `<file>-<number>`.

    Raises UserError naming file and line (of .json and .parquet the number of the row): no such file, unreadable row,
    a field missing, empty or of a wrong type, an id used twice, unknown type, no question at all. The number of each
    kind is logged.
    """
    path = Path(path)
    seen: dict[str, int] = {}
    questions = []
    for line, row in read_rows(path):
        question = _question(row, f"{path}:{line}", f"{path.stem}-{line}", dataset)
        if question.id in seen:
            raise UserError(
                f"{path}:{line}: id {question.id!r} is already used in line {seen[question.id]}; rename one"
            )
        seen[question.id] = line
        questions.append(question)
    if not questions:
        raise UserError(f"questions file {path} holds no question; it needs one JSON object a line")
    _log_kinds(str(path), questions)
    return questions


# ----------------------------------------------------------------------------------------------------------------- sets


@dataclasses.dataclass(frozen=True)
class QuestionSet:
    """An item of a spec: a file or a public set, or a subset of one. `name` is what the spec calls it, or ""."""

    name: str
    source: Path | hub.PublicSet
    subset: str = ""

    @property
    def label(self) -> str:
        """The data set of its questions: its name; of a public set without one its own, "hotpotqa_parallel"."""
        if self.name or isinstance(self.source, Path):
            return self.name
        return "_".join(filter(None, (self.source.dataset, self.subset)))

    @property
    def prefix(self) -> str:
        """Of ids, where there are several sets."""
        return self.label or self.source.stem

    def load(self) -> list[Question]:
        """Its questions. Raises UserError as `load_questions` and `hub.download`, for an empty subset, and for a public
        set or a subset of one that has not as many questions as the papers say."""
        public = self.source if isinstance(self.source, hub.PublicSet) else None
        path, dataset = (hub.download(public), public.dataset) if public else (self.source, self.name)
        questions = load_questions(path, dataset)
        if public:
            _check_count(public, "", questions)
            questions = [dataclasses.replace(question, dataset=self.label) for question in questions]
        if self.subset:
            questions = [q for q in questions if q.meta.get("type") in SUBSETS[self.subset]]
            _log_kinds(f"{path}:{self.subset}", questions)
            if not questions:
                wanted = ", ".join(SUBSETS[self.subset])
                raise UserError(f"{path}:{self.subset}: no question is of a type of that subset ({wanted})")
            if public:
                _check_count(public, self.subset, questions)
        return questions


def load_question_sets(spec: str) -> list[Question]:
    """The questions of all sets that `spec` names (see the top), in order.

    A name is the data set of the rows. With several sets ids become "name/id", or "stem/id" without a name: public sets
    number their questions alike ("train_0"). Raises UserError as `question_sets` and `QuestionSet.load`.
    """
    sets = question_sets(spec)
    if len(sets) == 1:
        return sets[0].load()
    return [
        dataclasses.replace(question, id=f"{each.prefix}/{question.id}") for each in sets for question in each.load()
    ]


def question_sets(spec: str) -> list[QuestionSet]:
    """What a spec names; reads nothing.

    Raises UserError for an item that is neither a file's path nor a public set's name, for two whose ids would get the
    same prefix, and for a name that results have for something else.
    """
    sets = [_parse_item(spec, item.strip()) for item in spec.split(",")]
    prefixes = Counter(each.prefix for each in sets)
    if twice := [prefix for prefix, count in prefixes.items() if count > 1]:
        raise UserError(f"questions {spec!r}: {twice[0]!r} stands for two files; give each a name: name=file.jsonl")
    if taken := [each.name for each in sets if each.name in ("all", *KINDS)]:
        raise UserError(f"questions {spec!r}: {taken[0]!r} is what results call another subset; give another name")
    return sets


def _parse_item(spec: str, item: str) -> QuestionSet:
    name, place, subset = _ITEM.fullmatch(item).groups()
    if not place:
        raise UserError(f"questions {spec!r}: {item!r} names no file; write file.jsonl or name=file.jsonl, with commas")
    public = hub.PUBLIC.get(place)
    if public is None and Path(place).suffix not in READERS:
        raise UserError(
            f"questions {spec!r}: {place!r} is neither a file (ending {' or '.join(READERS)}) nor a public set: "
            f"{', '.join(hub.PUBLIC)}; each may be followed by {' or '.join(f':{subset}' for subset in SUBSETS)}"
        )
    return QuestionSet(name or "", public or Path(place), subset or "")


def question_files(spec: str) -> list[tuple[str, Path]]:
    """(name, path) of each file that a spec names, the name "" where it gives none; public sets are left out."""
    return [(each.name, each.source) for each in question_sets(spec) if isinstance(each.source, Path)]


def public_sets(spec: str) -> list[hub.PublicSet]:
    """The public sets that a spec names."""
    return [each.source for each in question_sets(spec) if isinstance(each.source, hub.PublicSet)]


def _check_count(public: hub.PublicSet, subset: str, questions: list[Question]) -> None:
    if len(questions) != public.counts.get(subset, len(questions)):
        name = f"{public.name}:{subset}" if subset else public.name
        raise UserError(
            f"{name}: {len(questions)} questions, where {public.counts[subset]} are expected of {public}; remove the "
            "file from the hub's cache, or see what its mirror serves"
        )


# ----------------------------------------------------------------------------------------------------------------- rows


def _question(row: Any, where: str, default_id: str, dataset: str) -> Question:
    if not isinstance(row, dict):
        raise UserError(f"{where}: {str(row)[:60]!r} is no JSON object; write one question object a line")
    shape = shape_of(row)
    try:
        fields = shape.convert(row)
        text = fields.get("question")
        if not isinstance(text, str) or not text.strip():
            found = f"field {shape.question!r} is {text!r} (fields: {', '.join(row)})"
            raise UserError(f"{found}; give the question's text")
        name, dataset = _name(fields, "id") or default_id, _name(fields, "dataset") or dataset
        kind = kind_of(fields.get("type"), dataset)
        answers = _answers(fields.get("golden_answers"), shape.answers)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    meta = {k: v for k, v in fields.items() if k not in _OWN_FIELDS and not (k == "type" and v is None)}
    return Question(name, text, answers, kind, dataset, meta)


def _name(fields: dict, field: str) -> str:
    """A field that may be missing, or a number."""
    value = fields.get(field)
    if isinstance(value, bool) or not isinstance(value, str | int | None):
        raise UserError(f"field {field!r} is {value!r:.60}; write a text, or leave it out")
    return "" if value is None else str(value)


def _answers(answers: Any, field: str) -> tuple[str, ...]:
    if isinstance(answers, str):
        answers = [answers]
    if not isinstance(answers, list) or not any(str(a).strip() for a in answers):
        raise UserError(f"field {field!r} is {answers!r}; a question needs at least one answer")
    for answer in answers:
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):  # true would become "True", not "yes"
            raise UserError(f"answer {answer!r} is no string; write it as the text a model would give")
    return tuple(str(answer) for answer in answers)


def _log_kinds(path: str, questions: list[Question]) -> None:
    counts = Counter(q.kind for q in questions)
    text = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])
    log.log(logging.WARNING if counts["unknown"] else logging.INFO, "%s: %d questions: %s", path, len(questions), text)
