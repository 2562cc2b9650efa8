"""Rewards in runs: memory across a resume, steps and parts in the metrics, and one that is none."""

import jax
import numpy as np
import parallel_tiny
import pytest
from reward_cases import ASK, PARIS, RIGHT, SAW, episode
from test_train import small

from parasearch_jax import train as training
from parasearch_jax.errors import UserError
from parasearch_jax.rewards import make_reward, register
from parasearch_jax.workdir import Workdir
from parasearch_jax.writers import read_metrics


def test_what_otc_has_found_is_in_the_checkpoint(tmp_path):
    """The fewest calls of step 1 hold in step 2, whether the run was stopped in between or not."""
    reward, config = make_reward("otc_grpo"), parallel_tiny.get_config()
    state = {"w": np.ones(2, np.float32)}
    shapes = jax.eval_shape(lambda: state)
    one, three = episode(ASK, SAW, RIGHT), episode(*[ASK, SAW] * 3, RIGHT)
    with Workdir(tmp_path / "work", config) as work:
        _, _, memory = work.restore(shapes, lambda: state)
        reward.score_group([three, one], PARIS, memory)
        work.save(1, state, memory)
    whole = reward.score_group([three], PARIS, memory)
    with Workdir(tmp_path / "work", config) as work:
        _, step, memory = work.restore(shapes, lambda: state)
    assert step == 1 and memory == {"q": 1}
    assert reward.score_group([three], PARIS, memory) == whole != reward.score_group([three], PARIS, {})


def count(episodes, question, memory, *, weight=1.0):
    """A group reward: how many groups the run has scored, on every episode, and a step for its first action."""
    memory["seen"] = memory.get("seen", 0) + 1
    return [({"seen": weight * memory["seen"], "turns": -float(e.turns)}, [(0, 0.25)]) for e in episodes]


@pytest.mark.slow
def test_a_group_reward_by_dotted_path_goes_on_where_the_checkpoint_was(tmp_path):
    """Two steps of two questions in two starts: the groups are the 1st to 4th of the run."""
    register("count", group=True)(count)
    config = small(tmp_path, **{"train.steps": 1})
    config.reward = {"name": f"{__name__}:count", "weight": 2.0}
    training.train(config, workdir=tmp_path / "work")
    config.train.steps = 2
    training.train(config, workdir=tmp_path / "work")
    lines = read_metrics(tmp_path / "work")
    assert [line["reward/seen"] for line in lines] == [2 * 1.5, 2 * 3.5]
    for line in lines:
        assert line["reward/steps"] == 0.25
        parts = line["reward/seen"] + line["reward/turns"] + line["reward/steps"]
        assert line["reward/total"] == pytest.approx(parts, abs=1e-5)


@pytest.mark.slow
def test_a_reward_that_is_nan_ends_the_run_with_the_question_and_the_text(tmp_path):
    asked = []

    def broken(episode, question):
        asked.append((question, episode))
        return {"x": float("nan")}

    said = "reward 'broken' failed on question '.*', sample 0: ValueError: .*'x' is nan"
    with pytest.raises(UserError, match=said) as told:
        training.train(small(tmp_path, **{"train.steps": 1}), reward_fn=broken, workdir=tmp_path / "work")
    (question, episode), *more = asked
    assert not more and f"question {question.id!r}" in str(told.value)
    assert question.text in str(told.value) and str(told.value).endswith(episode.response)
