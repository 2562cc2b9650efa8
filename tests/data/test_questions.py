"""Loading questions: both jsonl shapes, kinds, and one clear error for each kind of bad file."""

import json
import logging
from pathlib import Path

import pytest

from parasearch_jax.data import Question, load_question_sets, load_questions
from parasearch_jax.data.questions import kind_of, question_files
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


def flashrag(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"question": "Who?", "golden_answers": ["Ann"]} | row) + "\n" for row in rows))
    return path


def test_several_sets_keep_their_names_and_their_ids_apart(tmp_path):
    nq = flashrag(tmp_path / "nq" / "train.jsonl", {"id": "train_0"}, {"id": "train_1"})
    hotpotqa = flashrag(
        tmp_path / "hotpotqa" / "train.jsonl",
        {"id": "train_0", "metadata": {"type": "comparison", "level": "medium"}},
        {"id": "train_1", "metadata": {"type": "bridge", "level": "easy"}},
    )
    questions = load_question_sets(f"nq={nq}, hotpotqa={hotpotqa}")
    assert [(q.id, q.dataset, q.kind) for q in questions] == [
        ("nq/train_0", "nq", "single"),
        ("nq/train_1", "nq", "single"),
        ("hotpotqa/train_0", "hotpotqa", "parallel"),
        ("hotpotqa/train_1", "hotpotqa", "sequential"),
    ]
    assert questions[2].meta == {"type": "comparison", "level": "medium"}


def test_a_set_without_a_name_goes_by_its_file(tmp_path):
    first = flashrag(tmp_path / "first.jsonl", {"id": "0"})
    second = flashrag(tmp_path / "second.jsonl", {"id": "0"})
    questions = load_question_sets(f"{first},x={second}")
    assert [(q.id, q.dataset) for q in questions] == [("first/0", ""), ("x/0", "x")]


def test_one_file_is_load_questions(tmp_path):
    path = write(tmp_path, GOOD, GOOD | {"id": "q2", "type": None})
    assert load_question_sets(str(path)) == load_questions(path)
    assert load_question_sets(f"nq={path}") == load_questions(path, dataset="nq")
    odd = flashrag(tmp_path / "step=3" / "a.jsonl", {"id": "0"})  # "=" in a path, as sweeps write it
    assert load_question_sets(str(odd)) == load_questions(odd)


def test_files_of_a_spec():
    assert question_files("a.jsonl") == [("", Path("a.jsonl"))]
    files = question_files("2wikimultihopqa=/x/dev.jsonl, b/step=3/c.jsonl")
    assert files == [("2wikimultihopqa", Path("/x/dev.jsonl")), ("", Path("b/step=3/c.jsonl"))]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "'' names no file; write"),
        ("a.jsonl,,b.jsonl", "'' names no file"),
        ("nq=", "'nq=' names no file"),
        ("nq/train.jsonl,hotpotqa/train.jsonl", "'train' stands for two files; give each a name"),
        ("nq=a.jsonl,nq=b.jsonl", "'nq' stands for two files"),
        ("parallel=a.jsonl", "'parallel' is what results call another subset"),
    ],
)
def test_a_spec_that_names_no_file_or_one_name_twice(spec, message):
    with pytest.raises(UserError, match=message):
        load_question_sets(spec)


def test_errors_in_a_set_name_its_file(tmp_path):
    good = flashrag(tmp_path / "good.jsonl", {"id": "0"})
    with pytest.raises(UserError, match=r"absent\.jsonl does not exist"):
        load_question_sets(f"{good},nq={tmp_path}/absent.jsonl")


@pytest.mark.skipif(not (SHARED / "data/qa").is_dir(), reason="shared/data is not part of the repository")
def test_real_sets_together():
    paths = {name: SHARED / f"data/qa/{name}.jsonl" for name in ("nq", "hotpotqa")}
    questions = load_question_sets(",".join(f"{name}={path}" for name, path in paths.items()))
    assert len(questions) == len({q.id for q in questions}) == 410 + 600
    assert {(q.dataset, q.kind) for q in questions} == {
        ("nq", "single"),
        ("hotpotqa", "parallel"),
        ("hotpotqa", "sequential"),
    }


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
