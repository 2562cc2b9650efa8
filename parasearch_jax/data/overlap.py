"""Questions that a run is measured on and also trained on: the same text, whatever its id, case and punctuation."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from parasearch_jax.data.metrics import normalize
from parasearch_jax.data.types import Question


@dataclasses.dataclass(frozen=True)
class Overlap:
    """`shared`: (held-out question, training question) of the same normalised text; `asked`: the number held out."""

    asked: int
    shared: list[tuple[Question, Question]]


def find_overlap(train: Sequence[Question], held_out: Mapping[str, Sequence[Question]]) -> dict[str, Overlap]:
    """What each split of `held_out` has in common with `train`, by text as `metrics.normalize` leaves it."""
    known = {normalize(question.text): question for question in train}
    found = {}
    for split, questions in held_out.items():
        keys = [(question, normalize(question.text)) for question in questions]
        found[split] = Overlap(len(questions), [(question, known[key]) for question, key in keys if key in known])
    return found


def describe(overlaps: Mapping[str, Overlap]) -> str:
    """A line a split: "data.test: 18 of 1142 questions are in data.train too (18 of 2wikimultihopqa)"."""
    lines = []
    for split, overlap in overlaps.items():
        text = f"data.{split}: {len(overlap.shared) or 'none'} of {overlap.asked} questions"
        text += f" {'is' if len(overlap.shared) < 2 else 'are'} in data.train too"
        sets = Counter(question.dataset for question, _ in overlap.shared if question.dataset)
        named = ", ".join(f"{count} of {name}" for name, count in sets.items())
        lines.append(text + (f" ({named})" if named else "") + (": see overlap.json" if overlap.shared else ""))
    return "\n".join(lines)


def record(overlaps: Mapping[str, Overlap]) -> dict[str, Any]:
    """What overlap.json holds: {split: {"n", "shared": [{"id", "train_id", "question"}]}}."""
    return {
        split: {
            "n": overlap.asked,
            "shared": [{"id": q.id, "train_id": other.id, "question": q.text} for q, other in overlap.shared],
        }
        for split, overlap in overlaps.items()
    }
