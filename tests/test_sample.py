"""Sampling without training: the episodes of the run's first step, and no other run's directory is touched."""

import pytest
from test_train import small

from parasearch_jax.errors import UserError
from parasearch_jax.sample import sample
from parasearch_jax.train import train
from parasearch_jax.workdir import Workdir
from parasearch_jax.writers import read_episodes, write_json


@pytest.mark.slow
def test_the_first_step_is_that_of_training_and_the_model_stays(tmp_path):
    """Which the second step's is not: its questions and random numbers are, but its weights are the base's."""
    config = small(tmp_path)
    files = sample(config, tmp_path / "sampled")
    assert [path.name for path in files] == ["sampled_000001.jsonl", "sampled_000002.jsonl"]
    train(config, workdir=tmp_path / "work")
    first, second = ([read_episodes(file), read_episodes(tmp_path / "work" / "episodes" / f"step_00000{i}.jsonl")]
                     for i, file in enumerate(files, 1))  # fmt: skip
    assert [r["segments"] for r in first[0]] == [r["segments"] for r in first[1]]
    assert [(r["id"], r["sample"]) for r in second[0]] == [(r["id"], r["sample"]) for r in second[1]]
    assert {r["version"] for r in second[0]} == {0} != {r["version"] for r in second[1]}
    assert {r["em"] for r in first[0]} <= {0.0, 1.0}


def test_a_training_run_is_left_alone(tmp_path):
    config, work = small(tmp_path), tmp_path / "work"
    with Workdir(work, config) as held:
        write_json(work / "config.json", held.run)
    (work / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match="holds a training run; give another --workdir"):
        sample(config, work)
    assert not (work / "episodes").exists()


def test_no_steps_are_nothing_to_sample(tmp_path):
    with pytest.raises(UserError, match=r"train\.steps is 0"):
        sample(small(tmp_path, **{"train.steps": 0}), tmp_path / "work")
