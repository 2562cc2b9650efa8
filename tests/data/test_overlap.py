"""Held-out questions that are trained on: found by their text, told with their number, written with both ids."""

from pathlib import Path

import pytest

from parasearch_jax.data import Question, load_question_sets
from parasearch_jax.data.overlap import describe, find_overlap, record

SHARED = Path(__file__).parents[2].parent / "shared"


def question(name, text, dataset="x"):
    return Question(name, text, ("a",), dataset=dataset)


TRAIN = [question("t1", "Who wrote The Trial?"), question("t2", "When was A. born?")]


def test_text_counts_and_neither_case_nor_punctuation_nor_ids():
    held_out = {
        "test": [
            question("1", "who wrote the trial", "nq"),
            question("t2", "Who?"),
            question("3", "When was B. born?"),
        ],
        "dev": [question("4", "Where?")],
    }
    found = find_overlap(TRAIN, held_out)
    assert describe(found).splitlines() == [
        "data.test: 1 of 3 questions is in data.train too (1 of nq): see overlap.json",
        "data.dev: none of 1 questions is in data.train too",
    ]
    assert record(found) == {
        "test": {"n": 3, "shared": [{"id": "1", "train_id": "t1", "question": "who wrote the trial"}]},
        "dev": {"n": 1, "shared": []},
    }


@pytest.mark.skipif(not (SHARED / "data/qa").is_dir(), reason="shared/data is not part of the repository")
def test_real_sets_overlap_as_published():
    """`in_r1searcher_train` of PROVENANCE.md: 6 of hotpotqa, 18 of 2wikimultihopqa, none elsewhere."""
    data = SHARED / "data"
    names = ("hotpotqa", "2wikimultihopqa", "nq", "popqa", "triviaqa", "multihop_rag")
    train = load_question_sets(",".join(f"{data}/qa_only/r1searcher_train_stage{i}.jsonl" for i in (1, 2)))
    held_out = {name: load_question_sets(f"{name}={data}/qa/{name}.jsonl") for name in names}
    found = find_overlap(train, held_out)
    assert {name: len(found[name].shared) for name in names} == dict.fromkeys(names, 0) | {
        "hotpotqa": 6,
        "2wikimultihopqa": 18,
    }
    for name in names:
        marked = {q.id for q in held_out[name] if q.meta["in_r1searcher_train"]}
        assert {q.id for q, _ in found[name].shared} == marked
