"""Difficulty by rollouts: R1-Searcher's bounds, what is undecided, and a file that loads as questions."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from parasearch_jax.data import Question, load_questions
from parasearch_jax.data.difficulty import Rollouts, count_rollouts, difficulty, select
from parasearch_jax.errors import UserError

ROOT = Path(__file__).parents[2]


def rollouts(name, first, tried):
    """`tried` episodes of a question, of which number `first` is the first right one; every one behind it is too."""
    return [
        {
            "id": name,
            "question": f"{name}?",
            "golden_answers": ["Ann"],
            "sample": i,
            "segments": [{"source": "prompt", "text": "?"}, {"source": "policy", "text": "x"}],
            "answer": "Ann" if first and i + 1 >= first else ("Bob" if i % 2 else None),
        }
        for i in range(tried)
    ]


@pytest.mark.parametrize(
    ("needed", "name"),
    [(1, "easy"), (9, "easy"), (10, "medium"), (20, "medium"), (21, "difficult"), (100, "difficult")],
)
def test_the_papers_bounds(needed, name):
    assert difficulty(needed) == name


@pytest.mark.parametrize(
    ("first", "tried", "needed"),
    [(1, 1, 1), (12, 20, 12), (None, 20, 21), (None, 40, 41), (None, 19, None), (3, 5, 3), (25, 30, 25)],
)
def test_rollouts_needed(first, tried, needed):
    (found,) = count_rollouts(rollouts("q", first, tried)).values()
    assert found == Rollouts(tried, first) and found.needed == needed


def test_rollouts_go_on_from_file_to_file():
    assert count_rollouts(rollouts("q", None, 8) + rollouts("q", 4, 8))["q", "q?"] == Rollouts(16, 12)


QUESTIONS = [
    Question(name, f"{name}?", ("Ann",), "sequential", "hotpotqa", {"type": "bridge", "level": "hard"})
    for name in ("easy", "medium", "hard", "never", "few", "other")
]
RECORDS = (
    rollouts("easy", 2, 20) + rollouts("medium", 15, 20) + rollouts("hard", 22, 25)
    + rollouts("never", None, 20) + rollouts("few", None, 5)
)  # fmt: skip


def test_selection_keeps_order_fields_and_counts():
    rows, counts = select(QUESTIONS, count_rollouts(RECORDS), ("medium", "difficult"))
    assert [(row["id"], row["difficulty"], row["rollouts"]) for row in rows] == [
        ("medium", "medium", 15), ("hard", "difficult", 22), ("never", "difficult", 21)]  # fmt: skip
    assert counts == {"easy": 1, "medium": 1, "difficult": 2, "undecided": 1, "not sampled": 1}


def test_an_episode_without_an_answer_field():
    record = {key: value for key, value in rollouts("q", 1, 1)[0].items() if key != "answer"}
    with pytest.raises(UserError, match="stored episode of 'q' has no 'answer'"):
        count_rollouts([record])


def command(tmp_path, *args):
    episodes, questions = tmp_path / "sampled_000001.jsonl", tmp_path / "train.jsonl"
    episodes.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    rows = [{"id": q.id, "question": q.text, "golden_answers": ["Ann"], "metadata": dict(q.meta)} for q in QUESTIONS]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = [sys.executable, "-m", "parasearch_jax.data.difficulty", f"--episodes={tmp_path}/sampled*.jsonl"]
    line += [f"--questions=hotpotqa={questions}", *args]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_command_writes_questions(tmp_path):
    out = tmp_path / "chosen" / "hard.jsonl"
    done = command(tmp_path, f"--out={out}")
    assert done.returncode == 0, done.stderr
    assert "6 questions: 1 easy, 1 medium, 2 difficult, 1 undecided, 1 not sampled" in done.stdout
    chosen = load_questions(out)
    assert [(q.id, q.kind, q.dataset) for q in chosen] == [
        (name, "sequential", "hotpotqa") for name in ("medium", "hard", "never")]  # fmt: skip
    assert chosen[0].meta == {"type": "bridge", "level": "hard", "difficulty": "medium", "rollouts": 15}
    done = command(tmp_path, f"--out={out}", "--keep=easy")
    assert done.returncode == 0 and [q.id for q in load_questions(out)] == ["easy"]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--out={tmp}/train.jsonl"], "none of --questions"),
        (["--out={tmp}/x.parquet"], "has to be a .jsonl file"),
        (["--out={tmp}/x.jsonl", "{tmp}/y.jsonl"], "put a pattern in quotes"),
    ],
)
def test_command_that_can_not_be_done_is_one_line(tmp_path, args, told):
    done = command(tmp_path, *(arg.format(tmp=tmp_path) for arg in args))
    assert done.returncode != 0 and "Traceback" not in done.stderr and told in done.stderr.splitlines()[-1]
