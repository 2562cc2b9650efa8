"""Work directory, metrics, episodes and console: what is written can be read again and never spoils another run."""

import io
import json
import math
import os
import re

import jax.numpy as jnp
import numpy as np
import pytest

from parasearch_jax.data.types import Question
from parasearch_jax.errors import UserError
from parasearch_jax.rollout.types import Episode
from parasearch_jax.writers import (
    Console,
    MetricsWriter,
    episode_record,
    prepare_workdir,
    read_episodes,
    read_metrics,
    results_table,
    step_line,
    write_episodes,
    write_json,
)

# ---------------------------------------------------------------------------------------------------------- workdir


def test_workdir_is_created_and_an_empty_or_crashed_one_reused(tmp_path):
    workdir = prepare_workdir(tmp_path / "a" / "b")
    assert workdir.is_dir() and list(workdir.iterdir()) == []
    (workdir / "metrics.jsonl").touch()  # a run that ended before its first step
    assert prepare_workdir(workdir) == workdir


@pytest.mark.parametrize("path", ["file", "file/below"])
def test_file_in_the_way_of_the_workdir(tmp_path, path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match=rf"{re.escape(str(tmp_path / path))}: .*give another --workdir"):
        prepare_workdir(tmp_path / path)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_workdir_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(UserError, match="Permission denied"):
            prepare_workdir(tmp_path)
    finally:
        tmp_path.chmod(0o700)


def test_workdir_that_holds_a_run_is_taken_again_and_one_with_other_metrics_is_refused(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(1, {"loss": 1.0})
    writer.close()
    with pytest.raises(UserError, match=r"holds a metrics\.jsonl without a config\.json.*give another --workdir"):
        prepare_workdir(tmp_path)
    write_json(tmp_path / "config.json", {})
    before = sorted(tmp_path.rglob("*"))
    assert prepare_workdir(tmp_path) == tmp_path
    assert sorted(tmp_path.rglob("*")) == before


# ------------------------------------------------------------------------------------------------------------- JSON


def test_write_json_is_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "results.json"
    write_json(path, {"em": np.float32(0.5), "n": np.int64(3), "x": jnp.float32(2), "bad": float("nan"), "t": (1, "é")})
    assert json.loads(path.read_text()) == {"em": 0.5, "n": 3, "x": 2.0, "bad": None, "t": [1, "é"]}
    with pytest.raises(TypeError):
        write_json(path, {"em": object()})
    assert json.loads(path.read_text())["em"] == 0.5
    assert [p.name for p in path.parent.iterdir()] == ["results.json"]


def refuse_constant(name):
    raise AssertionError(f"{name} is no JSON")


def test_metrics_lines_are_flushed_and_valid_json(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(1, {"reward/total": np.float32(0.25), "seconds/decode": 1.5, "batch": 128, "phase": "train"})
    writer.write(2, {"loss": float("nan"), "kl": jnp.float32(float("-inf")), "reward/total": jnp.float32(0.5)})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # before close: each line is flushed
    writer.close()
    lines = [json.loads(line, parse_constant=refuse_constant) for line in lines]
    assert lines == read_metrics(tmp_path)
    assert lines[0] == {"step": 1, "reward/total": 0.25, "seconds/decode": 1.5, "batch": 128, "phase": "train"}
    assert lines[1] == {
        "step": 2, "loss": None, "kl": None, "reward/total": 0.5, "nonfinite": {"loss": "nan", "kl": "-inf"},
    }  # fmt: skip


def test_metrics_are_appended(tmp_path):
    for step in (1, 2):
        writer = MetricsWriter(tmp_path)
        writer.write(step, {"step": 99, "loss": step})
        writer.close()
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 1}, {"step": 2, "loss": 2}]
    assert read_metrics(tmp_path / "none") == []


def test_metrics_are_flat(tmp_path):
    writer = MetricsWriter(tmp_path)
    for value in ([1.0], np.ones(2), {"a": 1}):
        with pytest.raises(ValueError, match="metric 'x'"):
            writer.write(1, {"x": value})
    writer.close()
    assert read_metrics(tmp_path) == []


def events(workdir):
    """What a reader of TensorBoard files is left with: a session's start purges what came before, from its step on."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    found = []
    for path in sorted((workdir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:  # length (8 bytes), its crc (4), the event, its crc (4)
            size = int.from_bytes(data[:8], "little")
            event, data = Event.FromString(data[12 : 12 + size]), data[16 + size :]
            if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                found = [old for old in found if old[0] < event.step]
            found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
    return found


def test_tensorboard_holds_the_finite_numbers(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(3, {"reward/total": 0.5, "kl": float("nan"), "phase": "train"})
    writer.close()
    assert events(tmp_path) == [(3, "reward/total", 0.5)]


def test_tensorboard_drops_the_steps_after_the_one_a_run_continues_from(tmp_path):
    for start, steps, value in ((0, (0, 1, 2, 3), 0.25), (1, (2, 3), 0.5), (3, (4,), 1.0)):
        writer = MetricsWriter(tmp_path, start)  # all within a second, so a file must not overwrite the one before
        for step in steps:
            writer.write(step, {"loss": value})
        writer.close()
    want = [(0, 0.25), (1, 0.25), (2, 0.5), (3, 0.5), (4, 1.0)]
    assert events(tmp_path) == [(step, "loss", value) for step, value in want]
    MetricsWriter(tmp_path).close()  # from the beginning again: only the evaluation before training is left
    assert events(tmp_path) == [(0, "loss", 0.25)]


# --------------------------------------------------------------------------------------------------------- episodes

PAIRS = [
    ("prompt", "Question: Who was born first?\n"),
    ("policy", "<think>two</think>\n<search>P birth ## Q birth</search>"),
    ("docs", "\n<information>Doc <search>no</search>\u2028 \u00e9</information>\n"),
    ("policy", "<answer> P </answer>"),
]
QUESTION = Question("q/1", "Who was born first?", ("P", "Pe"), "parallel", "toy")


def test_episodes_round_trip(tmp_path):
    episode = Episode.from_text(PAIRS)
    record = episode_record(episode, QUESTION, {"outcome": 1.0, "decomposition": np.float32(0.5)}, em=1.0)
    broken = episode_record(Episode.from_text([("policy", "half \udce2 \x1b[31m")]), QUESTION)
    path = tmp_path / "episodes" / "step_000001.jsonl"
    write_episodes(path, [record, broken])
    got, got_broken = read_episodes(path)
    assert [(s["source"], s["text"]) for s in got["segments"]] == PAIRS
    assert Episode.from_text((s["source"], s["text"]) for s in got["segments"]) == episode
    assert got["queries"] == [["P birth", "Q birth"]]
    assert got["actions"][0] == {"type": "search", "queries": ["P birth", "Q birth"], "span": [1, 19, len(PAIRS[1][1])]}
    assert got["parts"] == {"outcome": 1.0, "decomposition": 0.5} and got["total"] == 1.5
    wanted = {"id": "q/1", "question": QUESTION.text, "kind": "parallel", "golden_answers": ["P", "Pe"], "em": 1.0}
    assert wanted.items() <= got.items() and got["answer"] == "P" and got["stop_reason"] == "answer"
    assert got_broken["segments"][0]["text"] == "half \udce2 \x1b[31m"
    assert got_broken["answer"] is None and got_broken["total"] is None


def test_ids_are_written_when_asked(tmp_path):
    from parasearch_jax.rollout.types import Segment

    episode = Episode([Segment("prompt", "a", (1, 2)), Segment("policy", "b", (3,), (-0.5,))])
    record = episode_record(episode, QUESTION, ids=True)
    assert record["segments"] == [
        {"source": "prompt", "text": "a", "ids": [1, 2]},
        {"source": "policy", "text": "b", "ids": [3], "logprobs": [-0.5]},
    ]
    assert "ids" not in episode_record(episode, QUESTION)["segments"][0]


def test_broken_line_is_named(tmp_path):
    (tmp_path / "e.jsonl").write_text('{"id": 1}\n{"id": \n')
    with pytest.raises(UserError, match=r"e\.jsonl, line 2"):
        read_episodes(tmp_path / "e.jsonl")


# ---------------------------------------------------------------------------------------------------------- console

METRICS = {
    "reward/total": 0.91234, "rollout/dr_parallel": 83.5, "loss": None, "seconds/decode": 4.0, "seconds/update": 2.5,
}  # fmt: skip
EVALS = {
    "parallel": {"n": 300, "em": 0.86, "dr": 31.04, "turns": 2.98, "searches": 2.0, "valid_format": 0.715},
    "single": {"n": 300, "em": 0.9, "dr": 5, "turns": 2.0, "searches": 1.0, "valid_format": 1},
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run_console(file):
    with Console(20, file=file) as console:
        console.print("[parallel] " + "x" * 300)
        for step in (1, 2):
            console.step(step, METRICS)
        console.print(results_table(EVALS, EVALS))
    return file.getvalue()


def test_no_control_characters_and_no_bar_without_a_terminal(monkeypatch):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):  # must not turn a log file into a terminal
        monkeypatch.setenv(name, "1")
    text = run_console(io.StringIO())
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
    assert text.count("step") == 2 and "training" not in text
    lines = text.splitlines()
    assert lines[0] == "[parallel] " + "x" * 300
    assert lines[1] == "step  1/20 | reward 0.912 | DR par 83.5 | loss - | 6.5 s"


def test_bar_and_lines_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    text = run_console(Terminal())
    assert "\x1b[" in text and "training" in text and "2/20" in text
    assert "step  2/20 | reward 0.912 | DR par 83.5 | loss - | 6.5 s" in text


def test_dumb_terminal_gets_plain_text(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in run_console(Terminal())


def test_step_line_takes_what_is_there():
    assert step_line(3, 0, {}) == "step 3"
    assert step_line(3, 0, {"seconds/total": 7, "seconds/a": 1, "loss": math.nan}) == "step 3 | loss nan | 7.0 s"


def show(table, file=None):
    file = file or io.StringIO()
    Console(file=file).print(table)
    return file.getvalue()


def test_results_table_before_and_after():
    after = {"parallel": EVALS["parallel"] | {"em": 0.9125, "dr": 97.3, "turns": 2.05}, "new": {"n": 2, "em": None}}
    rows = {line.split(" (")[0]: line for line in show(results_table(EVALS, after)).splitlines()}
    cells = re.split(r"\s{2,}", rows["parallel"].strip())
    assert cells == ["parallel (300)", "86.0 -> 91.2", "31.0 -> 97.3", "2.98 -> 2.05", "2.00 -> 2.00", "71.5 -> 71.5"]
    assert rows["new"].split() == ["new", "(2)", *"-----"]  # not in `initial`, and its values are missing
    alone = show(results_table(None, EVALS))
    assert "->" not in alone and "86.0" in alone


def test_results_table_loses_nothing_on_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    text = show(results_table(EVALS, EVALS), Terminal())
    assert all(text.count(value) == 2 for value in ("86.0", "31.0", "2.98", "71.5"))
