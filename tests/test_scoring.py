"""Rewards and rows of a step, made group by group."""

import pytest

from parasearch_jax import rewards
from parasearch_jax.data import Question
from parasearch_jax.rewards.base import Entry
from parasearch_jax.rl import stack_rows
from parasearch_jax.rollout import Answer, Episode, Segment
from parasearch_jax.scoring import Scorer, reward_metrics

SAMPLES = 2


def episode(question, sample):
    segments = [Segment("prompt", "p", (1, 2)), Segment("policy", "a" * (sample + 1), (3, 4), (-1.0, -2.0))]
    return Episode(segments, [Answer("a" * (sample + 1), (1, 0, 1))], "answer", question, sample)


QUESTIONS = [Question(name, name, ("a",)) for name in "abc"]
EPISODES = [episode(q.id, i) for q in QUESTIONS for i in range(SAMPLES)]


def seen_so_far(episodes, question, memory):
    """A group reward that depends on the order of the groups, as running minima do."""
    memory["seen"] = memory.get("seen", 0) + 1
    memory[question.id] = min(len(e.answer) for e in episodes)
    return [{"seen": float(memory["seen"]), "length": float(len(e.answer))} for e in episodes]


def scorer(memory):
    return Scorer(rewards.Reward(Entry("seen", seen_so_far, group=True), {}), QUESTIONS, SAMPLES, memory)


def group(i):
    return EPISODES[i * SAMPLES : (i + 1) * SAMPLES]


@pytest.mark.parametrize("early", range(4))
def test_scored_early_or_late_is_the_same(early):
    """`early` groups during the rollout, the others behind it."""
    memory = {"seen": 4, "z": 1}
    scoring = scorer(memory)
    for i in range(early):
        scoring(i, group(i))
    scored, rows = scoring.finish(EPISODES)
    assert [parts for parts, _ in scored] == [
        {"seen": 5.0 + i, "length": 1.0 + sample} for i in range(3) for sample in range(SAMPLES)
    ]
    assert [(row.question_id, row.rewards.tolist()) for row in rows] == [
        (q.id, [0, 0, 0, 6.0 + i + sample]) for i, q in enumerate(QUESTIONS) for sample in range(SAMPLES)
    ]
    assert memory == {"seen": 7, "z": 1, "a": 1, "b": 1, "c": 1}


def test_a_step_that_is_broken_off_leaves_no_trace():
    memory = {"seen": 4, "inner": {"x": 1}}
    scoring = scorer(memory)
    scoring(0, group(0))
    scoring(1, group(1))
    assert memory == {"seen": 4, "inner": {"x": 1}}


def test_parts_and_steps_are_in_the_metrics_by_name():
    """Means over the episodes; the total is that of parts and steps together."""

    def reward(episode, question):
        parts = {"length": float(len(episode.answer))} | ({"late": 4.0} if question.id == "c" else {})
        return parts, [(0, 0.5)] * episode.sample

    scoring = Scorer(rewards.wrap(reward), QUESTIONS, SAMPLES, {})
    scored, rows = scoring.finish(EPISODES)
    line = reward_metrics(scored, stack_rows(rows, 4))
    named = {name: value for name, value in line.items() if name.startswith("reward/")}
    assert named == pytest.approx(
        {"reward/length": 1.5, "reward/late": 4 / 3, "reward/steps": 0.25, "reward/total": 1.5 + 4 / 3 + 0.25}
    )
    plain, _ = Scorer(rewards.wrap(lambda episode, question: {"x": 1.0}), QUESTIONS, SAMPLES, {}).finish(EPISODES)
    assert "reward/steps" not in reward_metrics(plain, stack_rows(rows, 4))
