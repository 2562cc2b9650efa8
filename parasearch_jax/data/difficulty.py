r"""R1-Searcher's selection of questions by difficulty: how many rollouts a model needs until one is right.

    python launch.py --config=configs/parallel_tiny.py --workdir=runs/rolled --sample \
        --config.algorithm.samples=20 --config.train.steps=47                            # 47 x 32 questions: all 1,500
    python -m parasearch_jax.data.difficulty --episodes='runs/rolled/episodes/*.jsonl' \
        --questions=parasearch_jax/toy/small_world/train.jsonl --out=runs/hard.jsonl

Right is an executed answer that matches exactly. Easy questions take fewer than 10 rollouts, medium ones 10 to 20,
difficult ones more; easy ones are dropped (arXiv 2503.05592; no code of it was released, and its test of an answer is
not told). So 20 samples of each question decide: with none of them right it is difficult, whatever the next would be. A
question with fewer, and none right, is undecided, and left out with its number told.

--out is a questions file: the rows of --questions with "difficulty" and "rollouts" (of difficult ones without a right
answer the number that was tried, plus 1). Rollouts of a question count in the order of the files, then of the samples.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from absl import app, flags

from parasearch_jax.data.metrics import em
from parasearch_jax.data.questions import load_question_sets, question_files
from parasearch_jax.data.types import Question
from parasearch_jax.errors import UserError
from parasearch_jax.stored import read_stored, to_question
from parasearch_jax.writers import write_episodes

EASY, MEDIUM, DIFFICULT = CLASSES = ("easy", "medium", "difficult")
MEDIUM_FROM, MEDIUM_TO = 10, 20


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """Of one question: `tried` rollouts, of which number `first` (from 1) is the first right one; None: none is."""

    tried: int
    first: int | None

    @property
    def needed(self) -> int | None:
        """Rollouts until the first right one, at least; None if too few were tried to tell the class."""
        if self.first is None and self.tried < MEDIUM_TO:
            return None
        return self.first or self.tried + 1


def difficulty(needed: int) -> str:
    """One of CLASSES."""
    if needed < MEDIUM_FROM:
        return EASY
    return MEDIUM if needed <= MEDIUM_TO else DIFFICULT


def count_rollouts(records: Sequence[Mapping]) -> dict[tuple[str, str], Rollouts]:
    """{(id, question): its rollouts}, from stored episodes in their order."""
    right: dict[tuple[str, str], list[bool]] = {}
    for record in records:
        if "answer" not in record:
            raise UserError(f"the stored episode of {record['id']!r} has no 'answer': take those of launch.py --sample")
        exact = bool(em(record["answer"], to_question(record).golden_answers))
        right.setdefault((record["id"], record["question"]), []).append(exact)
    return {key: Rollouts(len(row), row.index(True) + 1 if any(row) else None) for key, row in right.items()}


def select(
    questions: Sequence[Question], rollouts: Mapping[tuple[str, str], Rollouts], keep: Sequence[str]
) -> tuple[list[dict], Counter]:
    """The rows of --out, in the order of `questions`, and how many questions are of each class, "undecided" or "not
    sampled"."""
    rows, counts = [], Counter()
    for question in questions:
        found = rollouts.get((question.id, question.text))
        if found is None or found.needed is None:
            counts["not sampled" if found is None else "undecided"] += 1
            continue
        name = difficulty(found.needed)
        counts[name] += 1
        if name in keep:
            rows.append(_row(question) | {"difficulty": name, "rollouts": found.needed})
    return rows, counts


def _row(question: Question) -> dict:
    """As `load_questions` reads it back."""
    own = {"id": question.id, "question": question.text, "golden_answers": list(question.golden_answers)}
    return own | ({"dataset": question.dataset} if question.dataset else {}) | question.meta


def main(argv: Sequence[str]) -> None:
    given = flags.FLAGS
    if len(argv) > 1:
        raise UserError(f"unexpected argument {argv[1]!r}: put a pattern in quotes, --episodes='DIR/*.jsonl'")
    out = Path(given.out)
    if out.suffix != ".jsonl" or out.resolve() in [path.resolve() for _, path in question_files(given.questions)]:
        raise UserError(f"--out={out} has to be a .jsonl file, and none of --questions")
    questions, rollouts = load_question_sets(given.questions), count_rollouts(read_stored(given.episodes))
    rows, counts = select(questions, rollouts, given.keep)
    print(f"{len(questions)} questions: " + ", ".join(f"{counts[name]} {name}" for name in counts))
    if counts["undecided"]:
        print(f"undecided: none of fewer than {MEDIUM_TO} rollouts is right; sample more (algorithm.samples)")
    if not rows:
        raise UserError(f"no question is {' or '.join(given.keep)}, so nothing was written; see --keep and --questions")
    write_episodes(out, rows)
    print(f"written: {len(rows)} questions to {out}")


if __name__ == "__main__":
    flags.DEFINE_string("episodes", None, "Stored episodes: files or patterns, with commas.", required=True)
    flags.DEFINE_string("questions", None, "What was sampled: the run's data.train.", required=True)
    flags.DEFINE_string("out", None, "File to write, jsonl.", required=True)
    flags.DEFINE_multi_enum("keep", [MEDIUM, DIFFICULT], CLASSES, "Classes that are written; give it several times.")
    try:
        app.run(main)
    except UserError as error:
        sys.exit(f"error: {error}")
