"""Which metrics an evaluation takes, and where the two normalisers part."""

import pytest

from parasearch_jax.data.answers import NORMALIZERS, answer_metrics
from parasearch_jax.data.metrics import cover_em_bag
from parasearch_jax.errors import UserError


@pytest.mark.parametrize(
    ("prediction", "golds", "expected"),
    [
        ("New York City", ["York New"], 1),  # in any order
        ("in Paris, France", ["France Paris"], 1),
        ("Paris", ["Paris France"], 0),
        ("zebra", ["A"], 0),
        ("a zebra", ["A"], 0),  # an article of a longer text is none of its tokens
        ("", ["the"], 0),
        ("x", [""], 0),
        (None, ["x"], 0),
        ("b", ["x", "b"], 1),
    ],
)
def test_cover_em_in_any_order(prediction, golds, expected):
    assert cover_em_bag(prediction, golds) == expected


def test_the_normalisers_part_at_punctuation_and_at_yes_and_no():
    """methods.md, section 11: "U.S." is "us" or "u s"; "1,000" is "1000" or "1 000"; yes and no match wholly."""
    squad, r1 = answer_metrics("squad"), answer_metrics("r1_searcher")
    assert list(squad) == list(r1) == ["em", "f1", "cover_em", "cover_em_bag"]
    for prediction, gold, expected in (
        ("US", "U.S.", (1, 0)),
        ("u s", "U.S.", (0, 1)),
        ("1 000", "1,000", (0, 1)),
        ("1000", "1,000", (1, 0)),
        ("left handed", "left-handed", (0, 1)),
    ):
        assert (squad["em"](prediction, gold), r1["em"](prediction, gold)) == expected
    assert squad["f1"]("yes it was", "yes") == 0.5 and r1["f1"]("yes it was", "yes") == 0.0


def test_a_name_that_is_none():
    with pytest.raises(UserError, match=r"data.normalizer is 'hotpotqa'; use one of: squad, r1_searcher"):
        answer_metrics("hotpotqa")
    assert set(NORMALIZERS) == {"squad", "r1_searcher"}
