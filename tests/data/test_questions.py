"""Loading questions: both jsonl shapes, kinds, and one clear error for each kind of bad file."""

import json
import logging
from pathlib import Path

import pytest

from parasearch_jax.data import Question, load_questions
from parasearch_jax.data.questions import kind_of
from parasearch_jax.errors import UserError

SHARED = Path(__file__).parents[2].parent / "shared"
GOOD = {"id": "q1", "question": "Who?", "golden_answers": ["Ann"], "type": "comparison"}


def write(tmp_path, *rows):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return path


def test_our_rows(tmp_path):
    path = write(tmp_path, GOOD, "", {"id": 7, "question": "é?", "golden_answers": "Bo", "type": "single", "hops": 1})
    first, second = load_questions(path)
    assert first == Question("q1", "Who?", ("Ann",), "parallel", "", {"type": "comparison"})
    assert second == Question("7", "é?", ("Bo",), "single", "", {"type": "single", "hops": 1})


def test_flashrag_rows(tmp_path):
    row = {"id": "dev_0", "question": "Who?", "golden_answers": ["Ann", 3]}
    path = write(tmp_path, row | {"metadata": {"type": "bridge", "level": "hard"}}, row | {"id": "1", "metadata": None})
    first, second = load_questions(path, dataset="hotpotqa")
    assert first.golden_answers == ("Ann", "3") and first.dataset == "hotpotqa"
    assert (first.kind, first.meta) == ("sequential", {"type": "bridge", "level": "hard"})
    assert (second.kind, second.meta) == ("unknown", {})


def test_the_row_names_its_data_set_and_a_missing_id_is_made(tmp_path):
    row = {"question": "Who?", "golden_answers": ["Ann"]}
    first, second = load_questions(write(tmp_path, row | {"dataset": "nq"}, row), dataset="x")
    assert (first.id, first.dataset, first.kind) == ("questions-1", "nq", "single")
    assert (second.id, second.dataset, second.kind) == ("questions-2", "x", "unknown")


@pytest.mark.parametrize(
    ("type", "dataset", "kind"),
    [
        ("comparison", "hotpotqa", "parallel"),
        ("comparison_query", "", "parallel"),
        ("parallel", "", "parallel"),
        *[(t, "", "sequential") for t in ("bridge", "inference", "inference_query", "compositional", "sequential")],
        ("bridge_comparison", "2wikimultihopqa", "sequential"),
        *[(t, "", "single") for t in ("single-hop", "na", "single")],
        *[(None, d, "single") for d in ("nq", "NQ", "TriviaQA", "popqa")],
        *[(t, "", "unknown") for t in ("temporal", "temporal_query", "null", "null_query", "unknown", "", None)],
    ],
)
def test_kinds(type, dataset, kind):
    assert kind_of(type, dataset) == kind


@pytest.mark.parametrize("type", ["comparision", "Bridge", 3, ["bridge"]])
def test_any_other_type_is_named(type):
    with pytest.raises(UserError, match=r"question type .*(comparision|Bridge|3|bridge).* is unknown; use one of"):
        kind_of(type)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{not json", ":2: not JSON .*'{not json'"),
        ("[1]", ":2: '\\[1\\]' is no JSON object"),
        ({"id": "x", "golden_answers": ["a"]}, ":2: field 'question' is None .fields: id, golden_answers"),
        (GOOD | {"id": "x", "question": " "}, ":2: field 'question' is ' '"),
        ({"id": "x", "question": "Who?"}, ":2: field 'golden_answers' is None; a question needs at least one"),
        (GOOD | {"id": "x", "golden_answers": []}, ":2: field 'golden_answers' is \\[\\]"),
        (GOOD | {"id": "x", "golden_answers": ["", " "]}, ":2: field 'golden_answers' is \\['', ' '\\]"),
        (GOOD | {"id": "x", "golden_answers": ["a", None]}, ":2: answer None is no string"),
        (GOOD | {"id": "x", "golden_answers": [True]}, ":2: answer True is no string"),
        (GOOD, ":2: id 'q1' is already used in line 1"),
        (GOOD | {"id": "x", "type": "comparision"}, ":2: question type 'comparision' is unknown"),
    ],
)
def test_bad_rows_name_file_and_line(tmp_path, row, message):
    with pytest.raises(UserError, match=r"questions\.jsonl" + message):
        load_questions(write(tmp_path, GOOD, row))


def test_bad_files(tmp_path):
    with pytest.raises(UserError, match=r"absent\.jsonl does not exist"):
        load_questions(tmp_path / "absent.jsonl")
    with pytest.raises(UserError, match="holds no question"):
        load_questions(write(tmp_path, "", " "))
    with pytest.raises(UserError, match=r"ending '\.csv' is unknown; use one of: \.jsonl"):
        load_questions(tmp_path / "questions.csv")
    (tmp_path / "latin.jsonl").write_bytes('{"question": "é"}'.encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.jsonl cannot be read as UTF-8"):
        load_questions(tmp_path / "latin.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(UserError, match=r"folder\.jsonl cannot be read"):
        load_questions(tmp_path / "folder.jsonl")


def test_kinds_are_logged(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        load_questions(write(tmp_path, GOOD, GOOD | {"id": "2", "type": None}))
    assert "2 questions: 1 parallel, 1 unknown" in caplog.text and caplog.records[-1].levelname == "WARNING"


@pytest.mark.skipif(not (SHARED / "data/qa").is_dir(), reason="shared/data is not part of the repository")
def test_real_files_count_as_published():
    counts = {}
    for path in sorted((SHARED / "data/qa").glob("*.jsonl")):
        for question in load_questions(path):
            counts[path.stem, question.kind] = counts.get((path.stem, question.kind), 0) + 1
    expected = {  # data/PROVENANCE.md
        ("hotpotqa", "sequential"): 482,
        ("hotpotqa", "parallel"): 118,
        ("2wikimultihopqa", "sequential"): 505 + 235 + 108,
        ("2wikimultihopqa", "parallel"): 294,
        ("nq", "single"): 410,
        ("triviaqa", "single"): 225,
        ("popqa", "single"): 180,
        ("multihop_rag", "sequential"): 755,
        ("multihop_rag", "parallel"): 499,
        ("multihop_rag", "unknown"): 463 + 40,
    }
    assert counts == expected
