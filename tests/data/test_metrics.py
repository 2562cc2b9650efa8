"""Answer metrics: case T02, and the published normaliser wherever that one leaves something over."""

import random
import re
import string

import numpy as np
import pytest

from parasearch_jax.data.metrics import cover_em, em, em_released, f1, normalize, normalize_released

METRICS = (em, f1, cover_em)


@pytest.mark.parametrize(
    ("prediction", "golds", "expected"),
    [
        ("The Beatles!", ["beatles"], 1),
        ("", ["the"], 0),
        ("", ["x"], 0),
        ("A", ["A"], 1),
        (" a ", ["A."], 1),
        ("The A.", ["A"], 1),
        ("the", ["A"], 0),
        (None, ["x"], 0),
        (None, ["None"], 0),
        ("P", "Paris", 0),
        ("paris", "Paris", 1),
        ("x", [], 0),
        ("1914–1918", ["1914-1918"], 0),  # an en dash is not ASCII punctuation, as published
        ("1914 - 1918", ["1914-1918"], 0),
        ("19141918", ["1914-1918"], 1),  # deleted, not replaced by a blank
        ("caf\u00e9", ["cafe\u0301"], 0),  # composed against decomposed: not folded
        ("C#", ["c"], 1),
        ("?", ["?"], 1),
        ("London", ["Paris", "London"], 1),
        ("Paris and London", ["Paris", "London"], 0),
    ],
)
def test_em(prediction, golds, expected):
    assert em(prediction, golds) == expected


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("empty", ["", "  ", "\n", None])
def test_an_empty_answer_earns_nothing(metric, empty):
    for golds in (["x"], ["the"], ["A"], [""], ["?!"], [], "Paris"):
        assert metric(empty, golds) == 0


@pytest.mark.parametrize("metric", METRICS)
def test_golden_answers_in_any_container(metric):
    array = np.array(["Rome", "Paris"], dtype=object)
    for prediction, expected in (("Paris", 1), ("P", 0)):
        for golds in (["Rome", "Paris"], ("Rome", "Paris"), array, "Paris", np.array("Paris", dtype=object)):
            assert metric(prediction, golds) == expected


@pytest.mark.parametrize(
    ("prediction", "golds", "expected"),
    [
        ("zebra", ["A"], 0),
        ("in Paris, France", ["paris"], 1),
        ("born in 1941", ["194"], 0),
        ("New York City", ["York New"], 0),  # in a row
        ("the film The Red Shoes (1948)", ["Red Shoes"], 1),
        ("Paris", ["Paris France"], 0),
        ("x", [""], 0),
    ],
)
def test_cover_em(prediction, golds, expected):
    assert cover_em(prediction, golds) == expected


@pytest.mark.parametrize(
    ("prediction", "golds", "expected"),
    [
        ("Edgar Degas", ["Edgar Degas"], 1.0),
        ("Degas", ["Edgar Degas"], 2 / 3),
        ("Degas", ["Edgar Degas", "Degas"], 1.0),
        ("red red fish", ["red fish fish"], 2 / 3),  # multiplicity: common {red, fish} of 3 and 3
        ("one two", ["three"], 0.0),
    ],
)
def test_f1(prediction, golds, expected):
    assert f1(prediction, golds) == pytest.approx(expected)


def published(text):
    """SQuAD's normaliser, written out once more."""
    kept = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def test_normaliser_differs_from_the_published_one_only_where_that_is_empty():
    rng = random.Random(0)
    pieces = ["a", "an", "the", "A.", "The", "theory", "x-y", "(b)", "'s", "é", "–", "12", "?!", " ", "\n"]
    empty = 0
    for _ in range(3000):
        text = rng.choice(["", " "]).join(rng.choices(pieces, k=rng.randint(1, 4)))
        assert normalize_released(text) == published(text)
        assert normalize(text) == published(text) or published(text) == ""
        assert bool(normalize(text)) == bool(text.strip())
        empty += published(text) == ""
    assert empty > 100


def test_released_em_has_the_hole_that_ours_closes():
    assert em_released("", ["A"]) == em_released("the", ["A"]) == 1.0
    assert em_released(None, ["A"]) == 0.0
    assert em_released("The Beatles!", "beatles") == 1.0 and em_released("x", ["A", "y"]) == 0.0
