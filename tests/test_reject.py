"""Rejection sampling on episodes made by hand: what is chosen, what is dropped and why; how stored files are read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from parasearch_jax import reject
from parasearch_jax.errors import UserError
from parasearch_jax.rewards import make_reward, wrap
from parasearch_jax.stored import episode_files, read_stored, to_episode

ROOT = Path(__file__).parents[1]


def stored(
    name="q1", sample=0, answer="Ann", searches=("Ann born ## Bob born",), thought="So", kind="parallel", **more
):
    """A record of an episode: a turn for each search, then the answer (None: it gives none)."""
    segments = [("prompt", f"Question: {name}?\n")]
    for queries in searches:
        segments += [
            ("policy", f"<think>Look.</think><search>{queries}</search>"),
            ("docs", "\n<information>1</information>\n"),
        ]
    last = f"<think>{thought}</think>" + ("" if answer is None else f"<answer>{answer}</answer>")
    segments.append(("policy", last))
    return {
        "id": name,
        "question": f"{name}?",
        "kind": kind,
        "golden_answers": ["Ann"],
        "sample": sample,
        "segments": [{"source": source, "text": text} for source, text in segments],
    } | more


def samples(choice):
    return [(record["id"], record["sample"]) for record in choice.kept]


def test_good_is_right_and_well_formed():
    records = [
        stored(sample=0, answer="Bob"),
        stored(sample=1, answer=None),
        stored(sample=2, thought="So</think> stray <think>so"),
        stored(sample=3),
        stored("q2", sample=0, answer="Bob"),
        stored("q3", sample=0, kind="single", searches=()),
    ]
    choice = reject.choose(records)
    assert samples(choice) == [("q1", 3), ("q3", 0)]
    assert dict(choice.dropped) == {
        reject.WRONG: 2, reject.NO_ANSWER: 1, reject.INVALID: 1, "not among the best 1": 0}  # fmt: skip
    assert dict(choice.asked) == {"parallel": 2, "single": 1} and choice.answered == {"parallel": 1, "single": 1}
    told = reject.describe(choice)
    assert "2 of 3 questions have a good episode" in told and "2 episodes kept, 4 dropped" in told
    assert choice.kept[0] == records[3] | {"em": 1.0}


def test_an_answer_in_documents_or_in_an_unexecuted_block_is_none():
    record = stored(answer="Bob")
    record["segments"][2]["text"] = "\n<information><answer>Ann</answer></information>\n"
    assert not reject.choose([record]).kept


def test_ties_go_to_the_shortest_then_to_the_lowest_sample():
    records = [stored(sample=i, thought=thought) for i, thought in enumerate(("Longer", "Sa", "Sb", "So"))]
    assert samples(reject.choose(records)) == [("q1", 1)]
    assert samples(reject.choose(records[::-1], keep=2)) == [("q1", 1), ("q1", 2)]
    # Documents don't make an episode long: the policy has not said them.
    records[2]["segments"][2]["text"] = "\n<information></information>\n"
    assert samples(reject.choose(records)) == [("q1", 1)]


def test_a_reward_ranks_what_is_good_and_only_that():
    """Split beats not split, and the one more query that it takes; a wrong answer earns what it will."""
    serial = stored(sample=0, searches=("Ann born", "Bob born"))
    split, short = stored(sample=1, thought="A long thought"), stored(sample=2, searches=())
    wrong = stored(sample=3, answer="Bob")
    assert samples(reject.choose([serial, split, short, wrong])) == [("q1", 2)]
    choice = reject.choose([serial, split, short, wrong], 9, make_reward("parallel_search"))
    assert samples(choice) == [("q1", 1), ("q1", 2), ("q1", 0)]
    assert choice.kept[0]["total"] == pytest.approx(1.45) == sum(choice.kept[0]["parts"].values())
    assert samples(reject.choose([split, wrong], 9, wrap(lambda e, q: {"x": float(e.answer == "Bob")}))) == [("q1", 1)]


def test_equal_texts_count_once():
    records = [stored(sample=3), stored(sample=1), stored(sample=2, thought="Other")]
    choice = reject.choose(records, keep=3)
    assert samples(choice) == [("q1", 1), ("q1", 2)] and choice.dropped[reject.TWICE] == 1


def test_data_sets_that_number_alike_are_kept_apart():
    other = stored() | {"question": "Another?"}
    assert reject.choose([stored(), other]).asked.total() == 2


def test_a_reward_that_needs_the_kind_says_so():
    with pytest.raises(UserError, match="depends on the kind"):
        reject.choose([stored(kind="unknown")], 1, make_reward("parallel_search"))


def test_without_golden_answers_nothing_can_be_chosen():
    with pytest.raises(UserError, match="'q1' has no golden_answers"):
        reject.choose([stored(golden_answers=[])])


def test_an_episode_is_read_back_by_who_said_what():
    episode = to_episode(stored(sample=2, stop_reason="length"), "parallel")
    assert (episode.question_id, episode.sample, episode.stop_reason) == ("q1", 2, "length")
    assert [search.queries for search in episode.searches] == [("Ann born", "Bob born")] and episode.answer == "Ann"


# --------------------------------------------------------------------------------------------------------------- files


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_files_and_patterns(tmp_path):
    for name in ("step_000002", "step_000001", "final"):
        write(tmp_path / f"{name}.jsonl", stored(name))
    write(tmp_path / "odd[1].jsonl", stored("odd"))
    spec = f"{tmp_path}/step_*.jsonl, {tmp_path}/final.jsonl,{tmp_path}/*.jsonl,{tmp_path}/odd[1].jsonl"
    assert [path.stem for path in episode_files(spec)] == ["step_000001", "step_000002", "final", "odd[1]"]
    assert [record["id"] for record in read_stored(f"{tmp_path}/step_*.jsonl")] == ["step_000001", "step_000002"]


BROKEN = {
    "not JSON": ("{", "line 1 is not JSON"),
    "no object": ("[1]", r"line 1 is no stored episode: it holds '\[1\]'"),
    "no question": (json.dumps(stored() | {"question": ""}), "its 'question' is ''"),
    "no segments": (json.dumps(stored() | {"segments": []}), "the prompt has to be its first"),
    "another source": (json.dumps(stored() | {"segments": [{"source": "user", "text": ""}]}), "its .segments. are no"),
    "two prompts": (json.dumps(stored() | {"segments": [{"source": "prompt", "text": ""}] * 2}), "and only that"),
    "no policy": (json.dumps(stored() | {"segments": [{"source": "prompt", "text": ""}]}), "the policy says nothing"),
    "empty": ("", "hold no episode: sample some with"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_holds_no_episodes_is_told_with_its_line(tmp_path, name):
    text, told = BROKEN[name]
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(UserError, match=rf"(?s)a\.jsonl.*{told}"):
        read_stored(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("spec", ["none.jsonl", "{tmp}/*.jsonl", "{tmp}", "", ","])
def test_no_file_is_told_with_the_way_to_get_one(tmp_path, spec):
    with pytest.raises(UserError, match=r"stored episodes .*launch\.py .*--sample"):
        read_stored(spec.format(tmp=tmp_path))


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"a\.jsonl can't be read as UTF-8"):
        read_stored(str(tmp_path / "a.jsonl"))


# ---------------------------------------------------------------------------------------------------------- the command


def command(*args):
    line = [sys.executable, "-m", "parasearch_jax.reject", *map(str, args)]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_command(tmp_path):
    write(tmp_path / "a.jsonl", stored(sample=0, searches=("x", "y")), stored(sample=1, answer="Bob"))
    write(tmp_path / "b.jsonl", stored(sample=2), stored("q2"))
    out = tmp_path / "good" / "chosen.jsonl"
    done = command(f"--episodes={tmp_path}/*.jsonl", f"--out={out}", "--keep=1", "--reward=parallel_search")
    assert done.returncode == 0, done.stderr
    assert "4 episodes in 2 files" in done.stdout and "2 of 2 questions" in done.stdout
    assert [(record["id"], record["sample"]) for record in read_stored(str(out))] == [("q1", 2), ("q2", 0)]


BAD = {
    "an input as the output": (["--out={tmp}/a.jsonl"], "is one of the files"),
    "nothing good": (["--out={tmp}/b.jsonl"], "no episode is good"),
    "a pattern that the shell has opened": (["--out={tmp}/b.jsonl", "{tmp}/c.jsonl"], "put a pattern in quotes"),
    "no such reward": (["--out={tmp}/b.jsonl", "--reward=best"], "'best' is unknown"),
}


@pytest.mark.parametrize("name", BAD)
def test_command_that_can_not_be_done_is_one_line(tmp_path, name):
    args, told = BAD[name]
    before = write(tmp_path / "a.jsonl", stored(answer="Bob"))
    done = command(f"--episodes={before}", *(arg.format(tmp=tmp_path) for arg in args))
    assert done.returncode != 0 and "Traceback" not in done.stderr and told in done.stderr.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"] and read_stored(before)
