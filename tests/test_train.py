"""The loop end to end on a few questions of the small world with the shipped base: what a run writes, and that it is
the same run when repeated."""

import json
import re
import threading
from pathlib import Path

import jax
import numpy as np
import parallel_tiny
import pytest
from ml_collections import ConfigDict

from parasearch_jax import train as training
from parasearch_jax.checkpoint import Checkpoints
from parasearch_jax.data import Question
from parasearch_jax.data.drawing import draw
from parasearch_jax.errors import UserError
from parasearch_jax.models import load_model
from parasearch_jax.protocol.parallel import PARALLEL
from parasearch_jax.rl.optim import OptimConfig, make_optimizer
from parasearch_jax.rl.update import init_state
from parasearch_jax.writers import read_episodes, read_metrics

SUBSET = ("n", "em", "f1", "cover_em", "dr", "dr_first", "dr_released", "turns", "searches", "sub_queries",
          "valid_format", "seconds_per_question")  # fmt: skip


def small(tmp_path, **leaves):
    """The tiny configuration on 12 test and 30 train questions, 2 steps of 2 questions x 4 samples."""
    config = parallel_tiny.get_config()
    for name, count in (("test", 4), ("train", 10)):
        rows = [json.loads(line) for line in Path(config.data[name]).read_text().splitlines()]
        chosen = [r for t in ("na", "comparison", "compositional") for r in [x for x in rows if x["type"] == t][:count]]
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in chosen))
        config.data[name] = str(path)
    config.train.update(steps=2, save_every=1, episodes_every=1, buckets=(320,))
    config.algorithm.update(questions=2, samples=4)
    config.learner.micro_rows = 4
    config.rollout.slots = 8
    config.update_from_flattened_dict(leaves)
    return config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("run")
    config = small(tmp_path)
    return config, tmp_path / "work", training.train(config, workdir=tmp_path / "work")


def test_work_directory_holds_what_the_contract_names(run):
    config, workdir, results = run
    assert json.loads((workdir / "results.json").read_text()) == json.loads(json.dumps(results))
    assert json.loads((workdir / "config.json").read_text())["reward"]["name"] == "parallel_search"
    named = {key: results[key] for key in ("config", "model", "method", "variant")}
    model = config.model.path
    assert named == {"config": "parallel_tiny", "model": model, "method": "parallel_search", "variant": "paper"}
    assert {"initial", "final"} == set(results["evals"])
    for evaluation in results["evals"].values():
        assert {"all", "parallel", "sequential", "single"} == set(evaluation)
        assert evaluation["all"]["n"] == 12  # always the whole set
        for numbers in evaluation.values():
            assert set(SUBSET) <= set(numbers)
            low, high = numbers["em_ci"]
            assert low <= numbers["em"] <= high
    assert (results["slots"], results["normalizer"]) == (8, "squad")
    assert re.fullmatch("[0-9a-f]{64}", results["retriever"]["corpus_sha256"]) and results["retriever"]["topk"] == 1
    for name in ("report.md", "episodes.html", "tensorboard", "model/model.safetensors", "model/tokenizer.json"):
        assert (workdir / name).exists(), name


def test_metrics_have_a_line_a_step(run):
    _, workdir, _ = run
    lines = read_metrics(workdir)
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["gap_max"] < 1e-4 and line["ess"] > 0.999  # sampler and trainer are the same policy
        assert 0 <= line["sync_probe"] < 1e-4  # and were asked behind the sync
        assert abs(line["ratio_mean"] - 1) < 1e-5 and line["clip_fraction"] == 0
        total = sum(line[f"reward/{part}"] for part in ("outcome", "decomposition", "search_count", "format"))
        assert line["reward/total"] == pytest.approx(total, abs=1e-6)
        for phase in ("prefill", "decode", "wait", "schedule", "reward", "score", "update", "sync"):
            assert line[f"seconds/{phase}"] > 0
        assert (line["seconds/save"] > 0) == (line["step"] == 2)  # that of the step before
        assert 0 < line["rollout/occupancy"] <= 1
        # Of the rollout alone: an evaluation's searches are no part of a step.
        assert line["retriever/queries"] == line["queries/sent"] >= line["retriever/searched"] > 0
        assert line["retriever/cache_hit_rate"] == line["retriever/cache_hits"] / line["retriever/queries"]


def test_episodes_are_in_order_and_carry_the_version_of_the_weights(run):
    _config, workdir, _ = run
    first, second = (read_episodes(workdir / "episodes" / f"step_{i:06d}.jsonl") for i in (1, 2))
    assert [record["sample"] for record in first] == [0, 1, 2, 3] * 2
    assert {record["version"] for record in first} == {0} and {record["version"] for record in second} == {1}
    final = read_episodes(workdir / "episodes" / "final.jsonl")
    assert len(final) == 12  # those of an evaluation have the reward's parts too
    assert all(set(r["parts"]) == {"outcome", "decomposition", "search_count", "format"} for r in final)


def test_checkpoint_and_model_are_the_trained_weights(run):
    config, workdir, _ = run
    trained = load_model(workdir)
    tx = make_optimizer(OptimConfig(**config.optimizer))
    checkpoints = Checkpoints(workdir / "checkpoints", read_only=True)
    state, run_state = checkpoints.restore(checkpoints.latest(), {"actor": init_state(trained.params, tx)})
    assert run_state["step"] == 2 and int(state["actor"]["step"]) == 2
    jax.tree.map(np.testing.assert_array_equal, state["actor"]["params"], trained.params)
    base = load_model(config.model.path)
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), base.params, trained.params)
    assert all(change > 0 for change in jax.tree.leaves(moved))


def test_the_same_run_gives_the_same_weights_bit_for_bit(run, tmp_path):
    """Evaluated by samples too, which changes nothing else."""
    config, workdir, results = run
    config = ConfigDict(config.to_dict())
    config.evaluation.sampled = True
    again = training.train(config, workdir=tmp_path / "again")
    assert list(again["evals"]) == ["initial", "initial_sampled", "final", "final_sampled"]
    greedy, sampled = (
        [[s["text"] for s in record["segments"]] for record in read_episodes(tmp_path / f"again/episodes/{name}.jsonl")]
        for name in ("initial", "initial_sampled")
    )
    assert greedy != sampled and len(greedy) == len(sampled) == again["evals"]["initial_sampled"]["all"]["n"] == 12
    assert again["params_sha256"] == results["params_sha256"]
    again, before = load_model(tmp_path / "again"), load_model(workdir)
    jax.tree.map(np.testing.assert_array_equal, again.params, before.params)


def test_a_reward_function_of_ones_own(tmp_path):
    threads = set()

    def short(episode, question):
        threads.add(threading.current_thread().name)
        return {"turns": -0.1 * episode.turns}

    results = training.train(small(tmp_path, **{"train.steps": 1}), reward_fn=short, workdir=tmp_path / "work")
    assert results["method"] == "short" and {name.split("_")[0] for name in threads} == {"groups"}  # during the rollout
    (line,) = read_metrics(tmp_path / "work")
    assert line["reward/turns"] == pytest.approx(-0.1 * line["rollout/turns"])
    assert line["reward/total"] == pytest.approx(line["reward/turns"])


def test_evaluation_only(tmp_path, monkeypatch):
    """Which makes no moments and no reference: they would be three times the parameters."""
    made = []
    real = training.make_learner

    def watched(*args):
        learner = real(*args)
        refuse = lambda params: made.append(1)  # noqa: E731
        return learner._replace(init=refuse, reference=refuse)

    monkeypatch.setattr(training, "make_learner", watched)
    results = training.train(small(tmp_path, **{"train.steps": 0}), workdir=tmp_path / "work")
    assert set(results["evals"]) == {"final"} and not made
    assert not (tmp_path / "work" / "model").exists()


def test_an_empty_prompt_is_the_protocols_own(tmp_path):
    """The question reaches the model (parallel_base.py leaves the prompt empty)."""
    leaves = {"train.steps": 0, "protocol.prompt": "", "rollout.max_total_tokens": 768, "rollout.max_turns": 0}
    training.train(small(tmp_path, **leaves), workdir=tmp_path / "work")
    for record in read_episodes(tmp_path / "work" / "episodes" / "final.jsonl"):
        assert record["segments"][0] == {"source": "prompt", "text": PARALLEL.render_prompt(record["question"])}
        assert record["question"] in record["segments"][0]["text"]


def test_an_evaluation_between_two_steps_changes_nothing_in_the_second(run, tmp_path):
    config, workdir, results = run
    config = small(tmp_path, **{"train.eval_every": 1})
    config.data.dev = config.data.train
    other = training.train(config, workdir=tmp_path / "work")
    assert (tmp_path / "work" / "evals" / "dev_step_000001.json").exists()
    assert other["params_sha256"] == results["params_sha256"]
    second = [read_episodes(path / "episodes" / "step_000002.jsonl") for path in (workdir, tmp_path / "work")]
    assert second[0] == second[1]


@pytest.mark.parametrize("leaf, value", [("data.mix", "nq=1"), ("data.normalizer", "trivia")])
def test_leaves_of_the_data_are_checked_before_the_work_begins(tmp_path, leaf, value):
    with pytest.raises(UserError, match=leaf):
        training.train(small(tmp_path, **{leaf: value}), workdir=tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_overlap_is_told_at_the_start_and_written(run, tmp_path, capsys):
    _config, workdir, _ = run
    assert json.loads((workdir / "overlap.json").read_text()) == {"test": {"n": 12, "shared": []}}
    config = small(tmp_path, **{"train.steps": 1})
    config.data.test = config.data.train
    training.train(config, workdir=tmp_path / "work")
    assert "data.test: 30 of 30 questions are in data.train too: see overlap.json" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "work" / "overlap.json").read_text())["test"]["shared"]) == 30


def test_draw_is_a_function_of_the_step_and_skips_nothing():
    questions = [Question(str(i), "?", ("x",)) for i in range(7)]
    drawn = [q.id for step in range(7) for q in draw(questions, 0, step, 3)]
    assert [sorted(drawn[i : i + 7]) for i in (0, 7, 14)] == [[str(i) for i in range(7)]] * 3  # three epochs
    assert drawn[:7] != drawn[7:14]
    assert [q.id for q in draw(questions, 0, 4, 3)] == drawn[12:15]
    assert [q.id for q in draw(questions, 1, 0, 7)] != drawn[:7]
