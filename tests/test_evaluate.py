"""The numbers of results.json, recomputed by hand on four episodes."""

import pytest

from parasearch_jax.data import Question
from parasearch_jax.evaluate import rollout_metrics, summarize
from parasearch_jax.protocol import get_protocol
from parasearch_jax.rollout import Episode

PARALLEL = get_protocol("parallel")
DOCS = ("docs", "\n\n<information>Doc 1(Title: T) x <search>c ## d</search></information>\n\n")


def turn(action: str) -> tuple[str, str]:
    return "policy", f"<think>t</think>{action}"


EPISODES = [
    Episode.from_text([("prompt", "?"), turn("<search>a ## b</search>"), DOCS, turn("<answer>The Rome</answer>")]),
    Episode.from_text(
        [
            ("prompt", "?"),
            turn("<search>a</search>"),
            DOCS,
            turn("<search>a ## b ## c</search>"),
            DOCS,
            turn("<answer>in Rome</answer>"),
        ]
    ),
    Episode.from_text([("prompt", "?"), ("policy", "Rome"), ("notice", "no"), turn("<answer>Oslo</answer>")]),
    Episode.from_text([("prompt", "?"), turn("<search>a</search>"), DOCS, ("policy", "<search>b</search>")]),
]
QUESTIONS = [
    Question(str(i), "?", ("Rome",), kind, dataset)
    for i, (kind, dataset) in enumerate([("parallel", "x"), ("parallel", ""), ("single", "x"), ("sequential", "")])
]


def test_means_by_hand():
    subsets = summarize(EPISODES, QUESTIONS, PARALLEL)
    assert list(subsets) == ["all", "parallel", "single", "sequential", "x"]
    assert subsets["all"] == pytest.approx(
        {
            "n": 4,
            "em": 1 / 4,  # "The Rome" is Rome, "in Rome" is not
            "f1": (1 + 2 / 3) / 4,
            "cover_em": 2 / 4,
            "dr": 50.0,
            "dr_first": 25.0,  # the second episode splits its second search
            "dr_released": 75.0,  # the tags in a document count there: all episodes that saw one
            "turns": 9 / 4,
            "searches": 4 / 4,  # the unexecuted search of the last turn is none
            "sub_queries": (2 + 4 + 0 + 1) / 4,
            "valid_format": 2 / 4,
        }
    )
    assert subsets["parallel"]["dr"] == 100.0 and subsets["single"]["dr"] == 0.0
    assert subsets["x"]["n"] == 2


def test_training_batches_have_the_same_numbers_flat():
    line = rollout_metrics(EPISODES, QUESTIONS, PARALLEL)
    assert line["rollout/dr_parallel"] == 100.0
    assert line["rollout/em"] == 0.25
    assert line["rollout/stop_answer"] == 0.75 and line["rollout/stop_turns"] == 0.25


def test_every_episode_needs_its_question():
    with pytest.raises(ValueError):
        summarize(EPISODES, QUESTIONS[:3], PARALLEL)
