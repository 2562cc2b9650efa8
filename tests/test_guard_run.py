"""Guards within a training run: what is kept when one ends it, and runs that are made to collapse."""

import parallel_tiny
import pytest
from test_train import small

from parasearch_jax.guards import GuardError
from parasearch_jax.train import train
from parasearch_jax.writers import read_metrics


def constant(episode, question):
    return {"constant": 1.0}


def saved(workdir):
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit())


def alarms(workdir):
    return [line["alarms"] for line in read_metrics(workdir)]


def test_a_run_that_goes_wrong_is_stopped_and_its_last_good_checkpoint_is_kept(tmp_path):
    """The reward of the first step differs from episode to episode, then it is the same for all."""
    paid = []

    def reward(episode, question):
        paid.append(1.0)
        return {"paid": float(len(paid)) if len(paid) <= 8 else 1.0}  # 2 questions x 4 samples

    leaves = {"guard.on_alarm": "stop", "guard.patience": 2, "train.steps": 5}
    with pytest.raises(GuardError, match=r"all samples earn the same.*2 steps in a row.*checkpoint is of step 1"):
        train(small(tmp_path, **leaves), reward_fn=reward, workdir=tmp_path / "work")
    assert alarms(tmp_path / "work") == [0, 1, 1] and saved(tmp_path / "work") == [1]


def test_a_warning_goes_on(tmp_path, capsys):
    leaves = {"guard.patience": 1, "train.steps": 2}
    train(small(tmp_path, **leaves), reward_fn=constant, workdir=tmp_path / "work")
    assert alarms(tmp_path / "work") == [1, 1] and saved(tmp_path / "work") == [1, 2]
    assert capsys.readouterr().out.count("ALARM at step 1: in nearly all groups") == 1


@pytest.mark.soak
@pytest.mark.parametrize(
    "leaves, reward, told",
    [({"optimizer.lr": 2e-2}, None, "valid format"), ({}, constant, "all samples earn the same")],
    ids=["learning rate x 100", "constant reward"],
)
def test_runs_that_are_made_to_collapse_are_told(tmp_path, leaves, reward, told):
    """configs/parallel_tiny.py itself; tests/test_tiny_run.py sees that no alarm is told of good runs."""
    config = parallel_tiny.get_config()
    config.update_from_flattened_dict({"train.steps": 30, "guard.on_alarm": "stop"} | leaves)
    with pytest.raises(GuardError, match=told):
        train(config, reward_fn=reward, workdir=tmp_path / "work")
