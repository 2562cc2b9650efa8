"""Every public format: its rows become the same questions, and what is wrong with one is told with file and number."""

import json
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from parasearch_jax.data import Question, load_question_sets, load_questions
from parasearch_jax.errors import UserError

SHARED = Path(__file__).parents[2].parent / "shared"

PROMPT = "Answer the given question. For example, <answer> Beijing </answer>. Question: Who was first, A or B?\n"
SEARCH_R1 = {  # as PeterJinGo/nq_hotpotqa_train and ParallelSearch's script have it: with FlashRAG's own columns
    "id": "train_0",
    "question": "Who was first, A or B?",
    "golden_answers": ["A"],
    "data_source": "hotpotqa",
    "prompt": [{"role": "user", "content": PROMPT}],
    "ability": "fact-reasoning",
    "reward_model": {"ground_truth": {"target": ["A"]}, "style": "rule"},
    "extra_info": {"index": 0, "split": "train", "type": "comparison"},
    "metadata": {"type": "comparison", "level": "hard"},
}
R1_SEARCHER = {"idx": 37653, "question": "Who?", "answer": "Ann"}
MULTIHOP = {"query": "Did both say so?", "answer": "Yes", "question_type": "comparison_query", "evidence_list": []}


def parquet(path, *rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_json(path, *rows):
    path.write_text(json.dumps(rows))
    return path


def test_search_r1(tmp_path):
    nq = SEARCH_R1 | {"data_source": "nq", "metadata": None, "extra_info": {"index": 0, "split": "train", "type": "na"}}
    first, second = load_questions(parquet(tmp_path / "train.parquet", SEARCH_R1, nq))
    meta = {"ability": "fact-reasoning", "type": "comparison", "level": "hard"}
    assert first == Question("hotpotqa/train_0", "Who was first, A or B?", ("A",), "parallel", "hotpotqa", meta)
    assert (second.id, second.kind, second.meta["type"]) == ("nq/train_0", "single", "na")  # an id of both sets


def test_search_r1_by_its_own_columns_alone(tmp_path):
    """Without FlashRAG's: the question is read off the prompt, behind the example's."""
    own = ("data_source", "prompt", "ability", "reward_model", "extra_info")
    row = {key: SEARCH_R1[key] for key in own}
    row["prompt"] = [{"role": "user", "content": f"For example, Question: Who?\n{PROMPT}"}]
    (question,) = load_questions(parquet(tmp_path / "x.parquet", row))
    meta = {"ability": "fact-reasoning", "type": "comparison"}
    assert question == Question("hotpotqa/train_0", "Who was first, A or B?", ("A",), "parallel", "hotpotqa", meta)


def test_the_data_sets_own_type_goes_before_the_scripts(tmp_path):
    """ParallelSearch's test script writes "comparison" into every row."""
    row = SEARCH_R1 | {"metadata": {"type": "bridge"}}
    (question,) = load_questions(parquet(tmp_path / "test.parquet", row))
    assert (question.kind, question.meta["type"]) == ("sequential", "bridge")


def test_r1_searcher(tmp_path):
    (question,) = load_questions(jsonl(tmp_path / "stage_2.jsonl", R1_SEARCHER | {"gen_text_store": ""}))
    assert question == Question("37653", "Who?", ("Ann",), "unknown", "", {"gen_text_store": ""})


def test_multihop_rag(tmp_path):
    rows = [MULTIHOP, MULTIHOP | {"question_type": "null_query", "answer": "Insufficient information."}]
    first, second = load_questions(as_json(tmp_path / "MultiHopRAG.json", *rows))
    meta = {"type": "comparison_query", "evidence_list": []}
    assert first == Question("MultiHopRAG-1", "Did both say so?", ("Yes",), "parallel", "", meta)
    assert (second.id, second.kind) == ("MultiHopRAG-2", "unknown")


OURS = {"id": "1", "question": "Who?", "golden_answers": ["Ann", "Anna"], "type": "bridge", "hops": 2}


@pytest.mark.parametrize("write, name", [(jsonl, "a.jsonl"), (as_json, "a.json"), (parquet, "a.parquet")])
def test_every_format_in_every_file(tmp_path, write, name):
    assert load_questions(write(tmp_path / name, OURS)) == load_questions(jsonl(tmp_path / "b.jsonl", OURS))
    flashrag = {"id": "dev_0", "question": "Who?", "golden_answers": ["Ann"], "metadata": {"type": "bridge"}}
    assert load_questions(write(tmp_path / name, flashrag))[0].kind == "sequential"
    for row in (R1_SEARCHER, MULTIHOP):
        assert len(load_questions(write(tmp_path / name, row))[0].golden_answers) == 1


def test_a_row_of_ours_may_have_any_other_field(tmp_path):
    (question,) = load_questions(jsonl(tmp_path / "a.jsonl", OURS | {"query": "x", "idx": 3, "answer": "y"}))
    assert (question.id, question.text, question.golden_answers) == ("1", "Who?", ("Ann", "Anna"))
    assert {"query", "idx", "answer"} < set(question.meta)


BAD = {
    "no answer": (jsonl, "a.jsonl", R1_SEARCHER | {"answer": ""}, r"2: field 'answer' is \[''\]"),
    "answer of a wrong type": (jsonl, "a.jsonl", R1_SEARCHER | {"answer": True}, "2: field 'answer' is True"),
    "no query": (as_json, "a.json", MULTIHOP | {"query": " "}, "2: field 'query' is ' ' .fields: query, answer"),
    "unknown type": (as_json, "a.json", MULTIHOP | {"question_type": "bridges"}, "2: question type 'bridges'"),
    "no target": (
        parquet,
        "a.parquet",
        SEARCH_R1 | {"reward_model": {"ground_truth": {"target": None}, "style": "rule"}},
        "2: field 'reward_model.ground_truth.target' is None",
    ),
    "no question in the prompt": (
        jsonl,
        "a.jsonl",
        {"prompt": [{"role": "user", "content": "Who?"}], "reward_model": {"ground_truth": "A"}},
        r"2: field 'question \(or prompt\)' is None",
    ),
    "metadata is no object": (jsonl, "a.jsonl", OURS | {"metadata": "bridge"}, "2: field 'metadata' is 'bridge'; it"),
    "reward_model is no object": (jsonl, "a.jsonl", {"reward_model": [1]}, r"2: field 'reward_model' is '\[1\]'; it"),
    "an id that is a list": (jsonl, "a.jsonl", OURS | {"id": ["1"]}, r"2: field 'id' is \['1'\]; write a text"),
    "a data set that is none": (jsonl, "a.jsonl", OURS | {"dataset": ["nq"]}, r"2: field 'dataset' is \['nq'\]"),
    "a type that is none": (jsonl, "a.jsonl", OURS | {"id": "2", "type": 3}, "2: question type 3 is unknown"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_told_with_file_number_and_their_own_field(tmp_path, name):
    write, file, row, told = BAD[name]
    good = {jsonl: OURS, as_json: MULTIHOP, parquet: SEARCH_R1}[write]
    path = write(tmp_path / file, good, row)
    with pytest.raises(UserError, match=f"{file}:{told}"):
        load_questions(path)


def test_bad_files(tmp_path):
    (tmp_path / "a.json").write_text('{"question": "Who?"}\n{"question": "Who?"}')
    with pytest.raises(UserError, match=r"a\.json: not JSON .*call it \.jsonl"):
        load_questions(tmp_path / "a.json")
    (tmp_path / "b.json").write_text('{"data": []}')
    with pytest.raises(UserError, match=r"b\.json holds no list"):
        load_questions(tmp_path / "b.json")
    (tmp_path / "a.parquet").write_text("PAR")
    with pytest.raises(UserError, match=r"a\.parquet is no parquet file"):
        load_questions(tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"b\.parquet does not exist"):
        load_questions(tmp_path / "b.parquet")


@pytest.mark.skipif(not (SHARED / "data/qa").is_dir(), reason="shared/data is not part of the repository")
def test_real_sets_without_passages_count_as_published():
    """qa_only of PROVENANCE.md: eval sets of 500, 350 + 8,148 to train on (without types), ParallelQA's 113."""
    found = {
        path.stem: Counter(question.kind for question in load_questions(path))
        for path in sorted((SHARED / "data/qa_only").glob("*.jsonl"))
    }
    assert found == {
        "parallelqa": {"parallel": 113},
        "r1searcher_eval_2wikimultihopqa": {"parallel": 113, "sequential": 58 + 204 + 125},
        "r1searcher_eval_hotpotqa": {"parallel": 101, "sequential": 399},
        "r1searcher_eval_musique": {"sequential": 500},
        "r1searcher_train_stage1": {"unknown": 350},
        "r1searcher_train_stage2": {"unknown": 8_148},
    }


@pytest.mark.skipif(not (SHARED / "data/qa").is_dir(), reason="shared/data is not part of the repository")
def test_subsets_of_the_real_sets():
    """By the data set's own type: bridge_comparison (235), temporal and null are in neither."""
    qa = SHARED / "data/qa"
    counts = {
        (name, subset): len(load_question_sets(f"{qa}/{name}.jsonl:{subset}"))
        for name in ("hotpotqa", "2wikimultihopqa", "multihop_rag")
        for subset in ("parallel", "sequential")
    }
    assert counts == {
        ("hotpotqa", "parallel"): 118,
        ("hotpotqa", "sequential"): 482,
        ("2wikimultihopqa", "parallel"): 294,
        ("2wikimultihopqa", "sequential"): 505 + 108,
        ("multihop_rag", "parallel"): 499,
        ("multihop_rag", "sequential"): 755,
    }
    with pytest.raises(UserError, match=r"nq\.jsonl:parallel: no question is of a type of that subset"):
        load_question_sets(f"{qa}/nq.jsonl:parallel")
