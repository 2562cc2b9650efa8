"""Two runs question by question: what is paired, what is left out, and the numbers by hand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from parasearch_jax import paired
from parasearch_jax.data.answers import answer_metrics
from parasearch_jax.errors import UserError

ROOT = Path(__file__).parents[1]
EM = answer_metrics("squad")


def record(name, answer, queries=(("a",),), kind="single", sample=0, dataset="nq"):
    turns = [segment for _ in queries for segment in (("policy", "search"), ("docs", "text"))]
    return {
        "id": name,
        "question": f"{name}?",
        "kind": kind,
        "dataset": dataset,
        "golden_answers": ["Ann"],
        "sample": sample,
        "segments": [{"source": s, "text": t} for s, t in (("prompt", "?"), *turns, ("policy", "answer"))],
        "queries": [list(search) for search in queries],
        "answer": answer,
    }


def values(*records):
    return paired.stored_values(records, EM)


def test_values_by_hand():
    found = values(record("q", "the Ann Lee", [("a", "b"), ("c",)]))["q", "q?"]
    assert {name: row.tolist() for name, row in found.items()} == {
        "em": [0.0],
        "f1": [pytest.approx(2 / 3)],
        "cover_em": [1.0],
        "cover_em_bag": [1.0],
        "dr": [1.0],
        "turns": [3.0],
        "searches": [2.0],
        "sub_queries": [3.0],
    }


def test_differences_and_mcnemar_by_hand():
    """Of ten questions the second run has six right that the first has not, and lost one: p = 2 (1 + 7) / 2^7."""
    answers = [("Bob", "Ann")] * 6 + [("Ann", "Bob"), ("Ann", "Ann"), (None, "Bob"), (None, None)]
    pairs = [(record(f"q{i}", a), record(f"q{i}", b, [("a",), ("b",)])) for i, (a, b) in enumerate(answers)]
    first, second = (values(*side) for side in zip(*pairs, strict=True))
    found = paired.compare(first, second, list(first))
    assert (found["em"]["first"], found["em"]["second"]) == (0.2, 0.7)
    assert found["em"]["difference"] == pytest.approx(0.5) and 0.0 < found["em"]["low"] < 0.5 < found["em"]["high"]
    assert (found["em"]["only_first"], found["em"]["only_second"]) == (1, 6)
    assert found["em"]["mcnemar_p"] == 2 * (1 + 7) / 2**7
    assert found["searches"]["difference"] == found["searches"]["low"] == 1.0 and found["searches"]["p"] < 0.001
    assert found["dr"]["p"] == 1.0 and "mcnemar_p" not in found["dr"]


def test_samples_count_by_their_mean():
    first = values(record("q", "Ann", sample=0), record("q", "Bob", sample=1), record("r", "Ann"))
    second = values(record("q", "Ann"), record("r", "Ann"))
    found = paired.compare(first, second, list(first))["em"]
    assert (found["first"], found["second"]) == (0.75, 1.0) and "mcnemar_p" not in found


def write(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return str(path)


def command(*args):
    line = [sys.executable, "-m", "parasearch_jax.paired", *map(str, args)]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_command(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    write(a / "episodes" / "final.jsonl", *(record(f"q{i}", "Bob") for i in range(9)), record("x", "Ann"))
    other = [record(f"q{i}", "Ann") | {"id": f"nq/q{i}"} for i in range(9)]  # evaluated beside other sets
    write(b / "episodes" / "final.jsonl", record("y", "Ann"), *other)
    done = command(a, b)
    assert done.returncode == 0, done.stderr
    assert "9 questions in both; 1 only in the first, 1 only in the second: left out" in done.stdout
    assert "| EM % | 0.00 | 100.00 | +100.00 | +100.00 to +100.00 | 0.0005 |" in done.stdout
    assert "0 questions only the first has right, 9 only the second: p = 0.003906" in done.stdout
    assert [line.split(" |")[0] for line in done.stdout.splitlines() if "(9)" in line] == [
        "| all (9)", "| single (9)", "| nq (9)"]  # fmt: skip


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["{tmp}/a"], "two runs are compared, 1 given"),
        (["{tmp}/a", "{tmp}/b"], "no evaluation 'final' .*it has: initial"),
        (["{tmp}/a", "{tmp}/c.jsonl"], "have no question in common"),
        (["{tmp}/a", "{tmp}/d.jsonl"], "stored episode of 'q' has no 'answer' or no 'queries'"),
        (["{tmp}/a", "{tmp}/none.jsonl"], "there are no stored episodes"),
    ],
)
def test_what_can_not_be_compared(tmp_path, args, told, monkeypatch):
    write(tmp_path / "a" / "episodes" / "final.jsonl", record("q", "Ann"))
    write(tmp_path / "b" / "episodes" / "initial.jsonl", record("q", "Ann"))
    write(tmp_path / "c.jsonl", record("r", "Ann"))
    write(tmp_path / "d.jsonl", {key: value for key, value in record("q", "Ann").items() if key != "answer"})
    monkeypatch.setattr(paired.flags, "FLAGS", type("Given", (), {"evaluation": "final", "normalizer": "squad"}))
    with pytest.raises(UserError, match=told):
        paired.main(["paired", *(arg.format(tmp=tmp_path) for arg in args)])
