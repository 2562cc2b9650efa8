"""`f1` and ZeroSearch's reward."""

import pytest
from reward_cases import ASK, SAW, episode

from parasearch_jax.data import Question
from parasearch_jax.rewards import score
from parasearch_jax.rewards.f1 import QUIRKS

DEGAS = Question("q", "?", ("Hilaire Degas", "Edgar Degas the painter"))


@pytest.mark.parametrize("name", ["f1", "zero_search"])
@pytest.mark.parametrize(
    ("turn", "value"),  # by hand: 2 common / (tokens + golden tokens), the best of two golden answers
    [
        ("<answer>Edgar Degas</answer>", 0.8),
        ("<answer>The Edgar Degas, painter.</answer>", 1.0),
        ("<answer>Degas</answer>", 2 / 3),
        ("<answer>Monet</answer>", 0.0),
        ("<answer></answer>", 0.0),
        ("Edgar Degas", 0.0),
    ],
)
def test_paper(name, turn, value):
    assert score(name, episode(ASK, SAW, ("policy", turn)), DEGAS) == {"f1": pytest.approx(value)}


@pytest.mark.parametrize(
    ("quirk", "golds", "turn", "paper", "switched"),
    [
        ("last_answer", ("Degas",), "<answer>Monet</answer><answer>Degas</answer>", 0.0, 1.0),
        ("squad_f1", ("A",), "<answer>A</answer>", 1.0, 0.0),
    ],
)
def test_each_quirk_is_a_switch(quirk, golds, turn, paper, switched):
    played, question = episode(("policy", turn)), Question("q", "?", golds)
    assert score("zero_search", played, question)["f1"] == paper
    assert score("zero_search", played, question, **{quirk: True})["f1"] == switched
    assert score("zero_search", played, question, "released")["f1"] == switched
    assert score("zero_search", played, question, "released", **{quirk: False})["f1"] == paper
    assert len(QUIRKS) == 2
