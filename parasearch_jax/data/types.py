"""What a question is, and which kinds of questions the methods tell apart."""

from __future__ import annotations

import dataclasses
from typing import Any

KINDS = ("parallel", "sequential", "single", "unknown")


@dataclasses.dataclass(frozen=True)
class Question:
    """One question with its accepted answers.

    `kind` is one of `KINDS`; `meta` keeps the data set's own type, support documents and the like.
    """

    id: str
    text: str
    golden_answers: tuple[str, ...]
    kind: str = "unknown"
    dataset: str = ""
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if isinstance(self.golden_answers, str):  # "Paris" is one answer, not five letters
            object.__setattr__(self, "golden_answers", (self.golden_answers,))
        else:  # lists and numpy object arrays
            object.__setattr__(self, "golden_answers", tuple(str(a) for a in self.golden_answers))
        if self.kind not in KINDS:
            raise ValueError(f"question {self.id!r}: kind {self.kind!r} is none of {', '.join(KINDS)}")
