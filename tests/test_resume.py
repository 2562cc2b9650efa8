"""Resuming: another run is never continued, later steps leave no trace, SIGTERM waits for its moment."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from functools import partial

import parallel_tiny
import pytest

from parasearch_jax import resume
from parasearch_jax.errors import UserError
from parasearch_jax.resume import Sigterm, Terminated, check_inputs, check_same, cut_back, describe, fingerprints
from parasearch_jax.writers import MetricsWriter, read_metrics, write_episodes, write_json

# --------------------------------------------------------------------------------------------------------- the same run


def described(reward_fn=None, **leaves):
    config = parallel_tiny.get_config()
    config.update_from_flattened_dict(leaves)
    return describe(config, reward_fn)


def test_the_same_configuration_is_the_same_run_after_json():
    run = described()
    assert isinstance(run["train"]["buckets"], list)  # a tuple in the configuration
    check_same(json.loads(json.dumps(run)), run, "x")
    config = parallel_tiny.get_config()
    check_same(config.to_dict(), {k: v for k, v in run.items() if k != "reward_fn"}, "x")  # a tuple is its list


@pytest.mark.parametrize(
    "leaf, value",
    [("train.steps", 99), ("train.save_every", 7), ("train.episodes_every", 7), ("train.eval_every", 7),
     ("train.keep", 7), ("train.best", "f1"), ("name", "other"), ("mesh.fsdp", 8),
     ("machine.host_gib", 8.0), ("setup.instead", "x")],
)  # fmt: skip
def test_leaves_that_change_nothing_may_differ(leaf, value):
    assert described(**{leaf: value}) != described()
    check_same(described(), described(**{leaf: value}), "x")


def test_each_differing_leaf_is_named():
    new = described(**{"seed": 3, "optimizer.lr": 0.5, "reward.alpha": float("nan"), "train.buckets": (320,)})
    new["reward"]["extra"] = "é"
    del new["learner"]["remat"]
    with pytest.raises(UserError) as error:
        check_same(described(), new, "checkpoint 4 in /w")
    head, *lines = str(error.value).splitlines()
    assert head.startswith("checkpoint 4 in /w belongs to another run") and "another --workdir" in head
    assert lines == [
        '  learner.remat: "none" there, nothing now',
        "  optimizer.lr: 0.0002 there, 0.5 now",
        "  reward.alpha: 3.0 there, null now",
        '  reward.extra: nothing there, "é" now',
        "  seed: 0 there, 3 now",
        "  train.buckets: [128, 192, 320] there, [320] now",
    ]


def test_at_most_eight_leaves_are_named():
    with pytest.raises(UserError) as error:
        check_same({"a": {str(i): 1 for i in range(11)}}, {"a": {}}, "x")
    assert len(str(error.value).splitlines()) == 1 + 8 + 1 and str(error.value).endswith("and 3 more")


def reward(episode, question):
    return {"a": 1.0}


def test_another_reward_function_is_another_method(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    modules = []
    for name, value in (("cell_1", 1.0), ("cell_2", 2.0)):  # a notebook's cell, then the same one changed
        (tmp_path / f"{name}.py").write_text(f"def reward(episode, question):\n    return {{'a': {value}}}\n")
        modules.append(__import__(name))
    first, second = (described(module.reward)["reward_fn"] for module in modules)
    assert first["name"] == "cell_1:reward" and len(first["sha256"]) == 64
    second["name"] = first["name"]
    with pytest.raises(UserError, match=r"reward_fn\.sha256"):
        check_same({"reward_fn": first}, {"reward_fn": second}, "x")
    with pytest.raises(UserError, match="reward_fn: null there, nothing now"):
        check_same(described(), described(reward), "x")
    check_same(described(reward), described(reward), "x")
    bound = [described(partial(reward, question=x)) for x in (None, None, 1)]
    check_same(bound[0], bound[1], "x")
    with pytest.raises(UserError, match=r"reward_fn\.bound"):
        check_same(bound[0], bound[2], "x")


def test_a_reward_function_without_source():
    assert described(max)["reward_fn"] == {"name": "builtins:max", "sha256": None}
    namespace = {"__name__": "typed"}
    exec("def f(episode, question): return {}", namespace)
    assert described(namespace["f"])["reward_fn"] == {"name": "typed:f", "sha256": None}

    class Reward:
        def __call__(self, episode, question):
            return {}

    assert described(Reward())["reward_fn"]["name"].endswith("Reward")


# -------------------------------------------------------------------------------------------------------- fingerprints


def sha(data):
    return hashlib.sha256(data).hexdigest()


def make_inputs(tmp_path):
    """A configuration whose inputs are files of a few bytes."""
    model = tmp_path / "base"
    model.mkdir()
    for name in ("config.json", "model-1.safetensors", "model-2.safetensors", "tokenizer.json", "README.md",
                 "generation_config.json", "chat_template.jinja"):  # fmt: skip
        (model / name).write_text(name)
    for name in ("a", "b", "test", "corpus"):
        (tmp_path / f"{name}.jsonl").write_text(name)
    config = parallel_tiny.get_config()
    config.model.path = str(model)
    config.data.train = f"nq={tmp_path / 'a.jsonl'},hotpotqa={tmp_path / 'b.jsonl'}"
    config.data.test, config.retriever.corpus = str(tmp_path / "test.jsonl"), str(tmp_path / "corpus.jsonl")
    return config


def test_fingerprints_speak_of_the_content(tmp_path):
    config = make_inputs(tmp_path)
    before = fingerprints(config)
    assert set(before) == {"model.path", "data.train", "data.test", "retriever.corpus"}  # data.dev is empty
    assert before["data.test"] == sha(b"test") and before["retriever.corpus"] == sha(b"corpus")
    (tmp_path / "base" / "README.md").write_text("other")  # not read by a run
    assert fingerprints(config) == before
    check_inputs(before, fingerprints(config), "x")
    for file, leaf in (
        ("base/config.json", "model.path"),
        ("base/model-2.safetensors", "model.path"),
        ("base/tokenizer.json", "model.path"),
        ("base/generation_config.json", "model.path"),
        ("base/chat_template.jinja", "model.path"),
        ("a.jsonl", "data.train"),
        ("b.jsonl", "data.train"),
        ("test.jsonl", "data.test"),
        ("corpus.jsonl", "retriever.corpus"),
    ):
        old = (tmp_path / file).read_text()
        (tmp_path / file).write_text("changed")
        now = fingerprints(config)
        assert {key for key in now if now[key] != before[key]} == {leaf}
        with pytest.raises(UserError, match=f"^{leaf}: .*changed since checkpoint 3 in w"):
            check_inputs(before, now, "checkpoint 3 in w")
        (tmp_path / file).write_text(old)
    assert fingerprints(config) == before


def test_fingerprint_of_a_finished_run_is_that_of_its_model(tmp_path):
    config = make_inputs(tmp_path)
    before = fingerprints(config)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "config.json").write_text("the run's")
    (tmp_path / "base").rename(tmp_path / "work" / "model")
    config.model.path = str(tmp_path / "work")
    assert fingerprints(config) == before


def test_missing_input_is_named(tmp_path):
    config = make_inputs(tmp_path)
    (tmp_path / "b.jsonl").unlink()
    with pytest.raises(UserError, match=r"^data\.train: .*b\.jsonl can't be read .*check the path"):
        fingerprints(config)


# ------------------------------------------------------------------------------------------------------------- cut back


def make_run(workdir, steps=4, end=True):
    """What a run of `steps` steps leaves, with an evaluation on data.dev every second step."""
    writer = MetricsWriter(workdir)
    for step in range(1, steps + 1):
        writer.write(step, {"loss": step / 10, "phase": "é"})
        write_episodes(workdir / "episodes" / f"step_{step:06d}.jsonl", [{"id": "q"}])
        if step % 2 == 0:
            write_json(workdir / "evals" / f"step_{step:06d}.json", {"all": {}})
            write_episodes(workdir / "episodes" / f"dev_step_{step:06d}.jsonl", [])
    writer.close()
    for name in ("initial", "final") if end else ("initial",):
        write_json(workdir / "evals" / f"{name}.json", {"all": {}})
        write_episodes(workdir / "episodes" / f"{name}.jsonl", [])
    for name in ("results.json", "report.md", "episodes.html", "model/model.safetensors", "report/losses.png"):
        if end:
            (workdir / name).parent.mkdir(exist_ok=True)
            (workdir / name).write_text("x")


def files(workdir):
    found = {str(p.relative_to(workdir)) for p in workdir.rglob("*") if p.is_file()}
    return {name for name in found if not name.startswith("tensorboard")}


FIRST = {"metrics.jsonl", "evals/initial.json", "episodes/initial.jsonl"}
SECOND = FIRST | {
    "episodes/step_000001.jsonl", "episodes/step_000002.jsonl", "episodes/dev_step_000002.jsonl",
    "evals/step_000002.json",
}  # fmt: skip


@pytest.mark.parametrize("step, left", [(0, FIRST), (2, SECOND), (3, SECOND | {"episodes/step_000003.jsonl"})])
def test_later_steps_and_the_end_are_removed(tmp_path, step, left):
    make_run(tmp_path)
    lines = read_metrics(tmp_path)
    for name in ("config.json.tmp", "episodes/step_000003.jsonl.tmp", "evals/final.json.tmp"):
        (tmp_path / name).write_text("{")
    (tmp_path / "notes.tmp").write_text("the user's")
    cut_back(tmp_path, step, steps=4)
    assert files(tmp_path) == left | {"notes.tmp"}
    assert read_metrics(tmp_path) == lines[:step]
    before = (tmp_path / "metrics.jsonl").read_bytes()
    cut_back(tmp_path, step, steps=4)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_the_end_stays_where_the_checkpoint_is_the_end_and_goes_when_the_run_becomes_longer(tmp_path):
    make_run(tmp_path)
    before = files(tmp_path)
    cut_back(tmp_path, 4, steps=4)
    assert files(tmp_path) == before
    cut_back(tmp_path, 4, steps=6)
    gone = {"results.json", "report.md", "episodes.html", "model/model.safetensors", "report/losses.png",
            "evals/final.json", "episodes/final.jsonl"}  # fmt: skip
    assert files(tmp_path) == before - gone


@pytest.mark.parametrize("steps", [0, 3])
def test_an_evaluation_alone_is_made_anew_and_no_end_of_the_training_that_follows(tmp_path, steps):
    write_json(tmp_path / "evals" / "final.json", {})
    write_json(tmp_path / "evals" / "initial.json", {})
    cut_back(tmp_path, 0, steps)
    assert files(tmp_path) == {"evals/initial.json"}


def test_a_folder_named_model_is_not_taken_for_a_runs(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("the user's base")
    cut_back(tmp_path, 0, steps=3)
    assert files(tmp_path) == {"model/config.json"}


def test_fewer_steps_than_the_checkpoints_are_refused_and_nothing_is_removed(tmp_path):
    make_run(tmp_path)
    before = files(tmp_path)
    with pytest.raises(UserError, match=r"train\.steps is 3, .* checkpoint of step 4: give at least 4, or another"):
        cut_back(tmp_path, 4, steps=3)
    assert files(tmp_path) == before


@pytest.mark.parametrize("cut", [1, 5, 25])
def test_a_half_written_last_line_is_dropped(tmp_path, cut):
    make_run(tmp_path, steps=3, end=False)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])  # 1: only the newline is missing; 5: inside "é"
    cut_back(tmp_path, 2, steps=4)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
    assert path.read_text().endswith("\n")


def test_a_last_line_without_its_newline_is_whole(tmp_path):
    make_run(tmp_path, steps=3, end=False)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    cut_back(tmp_path, 3, steps=4)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("line", ['{"step": 2, "lo', "[1]", '{"loss": 1}', "", '{"step": null}'])
def test_a_broken_line_elsewhere_is_named_and_nothing_is_lost(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    before = path.read_text()
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2 .*mend or remove"):
        cut_back(tmp_path, 1, steps=3)
    assert path.read_text() == before


def test_a_missing_line_is_told(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(resume.logging, "warning", lambda text, *args: told.append(text % args))
    make_run(tmp_path, steps=3, end=False)
    cut_back(tmp_path, 3, steps=9)
    assert told == []
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text(lines[1])
    cut_back(tmp_path, 3, steps=9)
    assert len(told) == 1 and "no line of step 1, 3 of 1..3" in told[0]


# -------------------------------------------------------------------------------------------------------------- SIGTERM


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)  # the handler runs before the next line


@pytest.fixture(autouse=True)
def handler():
    """A handler to be restored, so that a wrong one doesn't end the test session."""
    called = []
    old = signal.signal(signal.SIGTERM, lambda *_: called.append(True))
    yield called
    signal.signal(signal.SIGTERM, old)


def test_sigterm_is_noted_and_raises_where_nothing_is_half_done(handler):
    with Sigterm() as sigterm:
        assert not sigterm.received
        with sigterm.interrupts():
            pass
        terminate()
        terminate()  # the second one, while saving
        assert sigterm.received
        with pytest.raises(Terminated) as error, sigterm.interrupts():
            raise AssertionError("entered")
        assert error.value.code == 143
    assert not handler
    terminate()
    assert handler  # restored


def test_sigterm_interrupts_and_no_except_exception_swallows_it():
    reached = []
    with Sigterm() as sigterm:
        with pytest.raises(Terminated), sigterm.interrupts():
            try:
                terminate()
                reached.append("the next line")
            except Exception:
                reached.append("swallowed")
            finally:
                terminate()  # the second one, while what was interrupted cleans up
                reached.append("cleaned up")
        terminate()
        assert sigterm.received
    assert reached == ["cleaned up"]


def test_the_handler_is_restored_after_an_error(handler):
    with pytest.raises(KeyError), Sigterm():
        raise KeyError
    terminate()
    assert handler


def test_in_another_thread_sigterm_is_left_alone(handler):
    seen = []

    def work():
        with Sigterm() as sigterm, sigterm.interrupts():
            seen.append(signal.getsignal(signal.SIGTERM))

    old = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [old]


def test_sigint_is_left_alone():
    old = signal.getsignal(signal.SIGINT)
    with Sigterm():
        assert signal.getsignal(signal.SIGINT) is old


def test_terminated_ends_a_process_with_143_and_without_a_traceback():
    code = """
        import os, signal
        from parasearch_jax.resume import Sigterm
        with Sigterm() as sigterm, sigterm.interrupts():
            os.kill(os.getpid(), signal.SIGTERM)
            print("went on")
    """
    done = subprocess.run([sys.executable, "-c", code.replace("\n        ", "\n")], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "")
