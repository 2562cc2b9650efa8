"""A run that is stopped and started again is the run that was never stopped, bit for bit (deterministic mode, CPU)."""

import functools
import gzip
import json
import os
import resource
import signal
from pathlib import Path

import jax
import pytest
from test_train import small

from parasearch_jax import evaluate as evaluating
from parasearch_jax import train as training
from parasearch_jax.errors import UserError
from parasearch_jax.rollout import Engine
from parasearch_jax.workdir import Workdir, params_sha256
from parasearch_jax.writers import read_episodes, read_metrics

PPO = {"algorithm.name": "ppo", "algorithm.questions": 8, "algorithm.samples": 1, "algorithm.updates": 2,
       "algorithm.reward_kl": 0.05, "learner.kl_coef": 0.0, "critic_optimizer.lr": 1e-3}  # fmt: skip
CASES = {"grpo": {}, "ppo": PPO}


def content(workdir: Path) -> dict:
    """All that a run leaves but for its times: metrics, episodes, evaluations."""
    lines = [
        {k: v for k, v in line.items() if not k.startswith(("seconds/", "retriever/"))}
        for line in read_metrics(workdir)
    ]
    episodes = {path.name: read_episodes(path) for path in sorted((workdir / "episodes").iterdir())}
    evals = {path.name: json.loads(path.read_text()) for path in sorted((workdir / "evals").iterdir())}
    for evaluation in evals.values():
        for subset in evaluation.values():
            del subset["seconds_per_question"]
    return {"metrics": lines, "episodes": episodes, "evals": evals}


def stop(monkeypatch, at: int, how):
    """Calls `how()` when the rollout of step `at` begins; once."""
    real, done = Engine.rollout, []

    def rollout(self, *args, step=0, **kwargs):
        if step == at and not done:
            done.append(step)
            how()
        return real(self, *args, step=step, **kwargs)

    monkeypatch.setattr(Engine, "rollout", rollout)


def crash():
    raise RuntimeError("the power failed")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """`whole(case)` -> (configuration, results, content) of 4 steps without a stop."""

    @functools.cache
    def run(case):
        tmp_path = tmp_path_factory.mktemp(case)
        config = small(tmp_path, **{"train.steps": 4, "train.save_every": 2} | CASES[case])
        results = training.train(config, workdir=tmp_path / "work")
        return config, results, content(tmp_path / "work")

    return run


@pytest.mark.parametrize(("case", "at"), [("grpo", 3), ("grpo", 4), pytest.param("ppo", 4, marks=pytest.mark.slow)])
def test_four_steps_are_two_and_two(whole, case, at, tmp_path, monkeypatch):
    """Stopped in step 3 right behind the checkpoint, and in step 4 with a step to undo."""
    config, results, expected = whole(case)
    stop(monkeypatch, at, crash)
    with pytest.raises(RuntimeError, match="power"):
        training.train(config, workdir=tmp_path / "work")
    assert [line["step"] for line in read_metrics(tmp_path / "work")] == list(range(1, at))
    again = training.train(config, workdir=tmp_path / "work")
    assert again["params_sha256"] == results["params_sha256"]
    assert content(tmp_path / "work") == expected
    assert again["seconds"] > 0 and {"initial", "final"} == set(again["evals"])


def test_sigterm_saves_and_the_run_goes_on(whole, tmp_path, monkeypatch):
    """It comes in the rollout of step 2: step 1, which no checkpoint holds, is saved; the process ends with 143."""
    config, results, expected = whole("grpo")
    stop(monkeypatch, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        training.train(config, workdir=tmp_path / "work")
    assert ended.value.code == 143
    assert [path.name for path in (tmp_path / "work" / "checkpoints").iterdir()] == ["1"]
    again = training.train(config, workdir=tmp_path / "work")
    assert again["params_sha256"] == results["params_sha256"] and content(tmp_path / "work") == expected
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


# ------------------------------------------------------------------------------------------- one short run, in parts


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("finished")
    config = small(tmp_path)
    return config, tmp_path / "work", training.train(config, workdir=tmp_path / "work")


def test_a_finished_run_is_not_done_again(finished, monkeypatch, capsys):
    config, workdir, results = finished
    monkeypatch.setattr(Engine, "rollout", lambda *args, **kwargs: crash())
    assert training.train(config, workdir=workdir) == json.loads(json.dumps(results))
    assert "this run is finished" in capsys.readouterr().out


def test_more_steps_continue_a_finished_run(finished, tmp_path):
    config, _, _ = finished
    training.train(config, workdir=tmp_path / "work")
    longer = config.copy_and_resolve_references()
    longer.train.steps = 3
    results = training.train(longer, workdir=tmp_path / "work")
    whole = training.train(longer, workdir=tmp_path / "whole")
    assert results["params_sha256"] == whole["params_sha256"]
    assert content(tmp_path / "work") == content(tmp_path / "whole")
    with pytest.raises(UserError, match=r"train\.steps is 2, but the run in .* has a checkpoint of step 3"):
        training.train(config, workdir=tmp_path / "work")


@pytest.mark.parametrize(
    ("leaf", "value"),
    [("reward.lambda_d", 0.5), ("algorithm.questions", 3), ("seed", 7), ("model.dtype", "bfloat16")],
)
def test_another_run_is_refused_with_the_leaf(finished, leaf, value):
    config, workdir, _ = finished
    other = config.copy_and_resolve_references()
    other.update_from_flattened_dict({leaf: value})
    with pytest.raises(UserError, match=rf"(?s){leaf}: .* there, {value!r}".replace("'", '"')):
        training.train(other, workdir=workdir)


def test_another_reward_function_is_refused(finished):
    config, workdir, _ = finished
    with pytest.raises(UserError, match="reward_fn"):
        training.train(config, reward_fn=lambda episode, question: {"x": 1.0}, workdir=workdir)


def test_other_questions_under_the_same_name_are_refused(tmp_path):
    config = small(tmp_path, **{"train.steps": 1})
    training.train(config, workdir=tmp_path / "work")
    path = Path(config.data.train)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(UserError, match=r"data\.train: the content has changed"):
        training.train(config, workdir=tmp_path / "work")


def test_a_checkpoint_of_another_run_is_refused(finished, tmp_path):
    """Its arrays fit, and config.json is missing: what it was trained with stands in the checkpoint itself."""
    config, workdir, _ = finished
    (tmp_path / "work").mkdir()
    os.symlink(workdir / "checkpoints", tmp_path / "work" / "checkpoints")
    other = config.copy_and_resolve_references()
    other.seed = 5
    with pytest.raises(UserError, match=r"(?s)checkpoint 2 in .*seed: 0 there, 5 now"):
        training.train(other, workdir=tmp_path / "work")


def test_a_model_in_the_work_directory_is_refused(finished):
    """The run would overwrite what it started from."""
    config, workdir, _ = finished
    other = config.copy_and_resolve_references()
    other.model.path = str(workdir)
    with pytest.raises(UserError, match="lies in the work directory"):
        training.train(other, workdir=workdir)


def test_two_processes_do_not_share_a_work_directory(finished):
    config, workdir, _ = finished
    with Workdir(workdir, config), pytest.raises(UserError, match="another process is writing"):
        training.train(config, workdir=workdir)


def test_an_evaluation_is_made_anew(tmp_path, monkeypatch):
    config, calls = small(tmp_path, **{"train.steps": 0}), []
    real = Engine.rollout
    monkeypatch.setattr(Engine, "rollout", lambda self, *args, **kw: calls.append(1) or real(self, *args, **kw))
    first = training.train(config, workdir=tmp_path / "work")
    second = training.train(config, workdir=tmp_path / "work")
    assert len(calls) == 2 and first["params_sha256"] == second["params_sha256"]


def test_a_save_that_fails_ends_the_run(tmp_path):
    """The disk is full from step 1 on: files of at most 64 KiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(episode, question):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
        return {"turns": -0.1 * episode.turns}

    try:
        with pytest.raises(UserError, match=r"the save of checkpoint 1 in .* failed"):
            training.train(small(tmp_path, **{"train.steps": 9}), reward_fn=fill, workdir=tmp_path / "work")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(read_metrics(tmp_path / "work")) < 9


def test_the_best_on_dev_is_kept(tmp_path, monkeypatch):
    """EM on dev is made to fall behind step 2: that checkpoint stays beside the last, and its evaluation is read."""
    config = small(tmp_path, **{"train.steps": 4, "train.eval_every": 1, "train.keep": 1})
    config.data.dev = config.data.train
    real, scores = evaluating.evaluate, iter((0.9, 0.3, 0.8, 0.5, 0.6, 0.9))  # initial, steps 1-4, final

    def evaluate(*args):
        subsets, episodes = real(*args)
        subsets["all"]["em"] = next(scores)
        return subsets, episodes

    monkeypatch.setattr(evaluating, "evaluate", evaluate)
    stop(monkeypatch, 4, crash)
    with pytest.raises(RuntimeError):
        training.train(config, workdir=tmp_path / "work")
    training.train(config, workdir=tmp_path / "work")
    assert sorted(path.name for path in (tmp_path / "work" / "checkpoints").iterdir()) == ["2", "4"]
    names = sorted(path.name for path in (tmp_path / "work" / "evals").iterdir())
    assert names == [*(f"dev_step_{i:06d}.json" for i in range(1, 5)), "final.json", "initial.json"]
    assert json.loads((tmp_path / "work" / "evals" / "dev_step_000002.json").read_text())["all"]["n"] == 30
    assert len(read_episodes(tmp_path / "work" / "episodes" / "step_000002.jsonl")) == 8  # of training, as ever


def test_profile_names_the_phases(tmp_path):
    config = small(tmp_path, **{"train.steps": 1})
    training.train(config, workdir=tmp_path / "work", profile=1)
    (trace,) = (tmp_path / "work" / "profile").rglob("*.trace.json.gz")
    with gzip.open(trace) as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"rollout", "reward", "score", "update", "sync"} <= names
    (planes,) = (tmp_path / "work" / "profile").rglob("*.xplane.pb")
    content = planes.read_bytes()  # the operations on the device carry the scopes of their functions
    update = b"(accumulate)/update/", b"(finish)/update/"
    for scope in (b"(extend)/rollout/", b"(decode_chunk)/rollout/", b"(score)/score/", *update):
        assert scope in content, scope
    with pytest.raises(UserError, match="--profile is 2, the run has the steps 1 to 1"):
        training.train(config, workdir=tmp_path / "other", profile=2)


def test_hash_of_the_parameters():
    tree = {"b": jax.numpy.arange(3.0), "a": {"x": jax.numpy.ones(2)}}
    same = {"a": {"x": jax.numpy.ones(2)}, "b": jax.numpy.arange(3.0)}
    assert params_sha256(tree) == params_sha256(same)
    assert params_sha256(tree) != params_sha256({**tree, "b": tree["b"].at[1].add(1e-7)})
    assert params_sha256(tree) != params_sha256({"a": tree["b"], "b": tree["a"]["x"]})
