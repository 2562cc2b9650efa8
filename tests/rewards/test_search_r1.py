"""Search-R1's rewards: `released` against the authors' scorer, `paper` against the table of its docstring."""

import pytest
from reward_cases import ASK, DOCS, PARIS, RIGHT, SAW, THINK, WRONG, episode, golden_cases, needs_golden

from parasearch_jax.data import Question
from parasearch_jax.rewards import score
from parasearch_jax.rewards.search_r1 import EM_QUIRKS, FORMAT_QUIRKS

BARE, NO_ANSWER = ("policy", "<answer>Paris</answer>"), ("policy", "hm")
BARE_WRONG = ("policy", "<answer>Rome</answer>")


def total(name, episode, question=PARIS, variant="paper", **params):
    return sum(score(name, episode, question, variant, **params).values())


@needs_golden
@pytest.mark.parametrize(("name", "key"), [("em", "search_r1_em"), ("em_format", "search_r1_format")])
def test_released_totals(name, key):
    """All but r10, which gives no answer: the authors' extractor then reads the prompt's example, which is its gold."""
    for case, played, question in golden_cases():
        example = case["id"] == "r10"
        expected = case["released"][key] - (0.7 if example and name == "em_format" else float(example))
        assert total(name, played, question, "released") == pytest.approx(expected), case["id"]


@pytest.mark.parametrize(
    ("pairs", "em", "paper", "released"),  # methods of v0.3: 1, 0.8, 0.2, 0.1; none: 0 in the paper
    [
        ([ASK, SAW, RIGHT], 1, 1.0, 1.0),
        ([RIGHT], 1, 1.0, 1.0),
        ([ASK, SAW, BARE], 1, 0.8, 0.8),
        ([ASK, SAW, WRONG], 0, 0.2, 0.2),
        ([ASK, SAW, BARE_WRONG], 0, 0.1, 0.1),
        ([ASK, SAW, NO_ANSWER], 0, 0.0, 0.1),
        ([ASK, ("docs", DOCS[:20]), RIGHT], 1, 1.0, 0.8),  # the policy can't help it
        ([ASK, ("docs", "<information><answer>Paris</answer></information>"), NO_ANSWER], 0, 0.0, 0.8),
    ],
)
def test_table(pairs, em, paper, released):
    played = episode(*pairs)
    assert total("em", played) == em
    assert total("em_format", played) == pytest.approx(paper)
    assert total("em_format", played, variant="released") == pytest.approx(released)


def test_parts_of_em_format_and_its_constants():
    constants = {"lambda_f": 0.3, "final": 0.05, "retrieval": 0.02}
    parts = lambda *pairs: score("em_format", episode(*pairs), PARIS, **constants)  # noqa: E731
    saw_paris = ("docs", "<information>Doc 1(Title: T) in Paris</information>")
    zeros = dict.fromkeys(("outcome", "format", "final", "retrieval"), 0.0)
    assert parts(ASK, saw_paris, RIGHT) == zeros | {"outcome": 1.0}
    assert parts(ASK, saw_paris, WRONG) == zeros | {"format": 0.3, "retrieval": 0.02}
    assert parts(ASK, SAW, WRONG) == zeros | {"format": 0.3}
    assert parts(ASK, saw_paris, BARE_WRONG) == zeros | {"final": 0.05}
    assert parts(ASK, saw_paris, BARE) == zeros | {"outcome": 1.0, "format": -0.3}


@pytest.mark.parametrize(
    ("name", "quirk", "golds", "pairs", "paper", "switched"),
    [
        ("em", "last_answer", "Paris", [("policy", WRONG[1] + RIGHT[1])], 0, 1),
        ("em", "squad_em", "A", [("policy", "<answer></answer>")], 0, 1),
        ("em_format", "last_answer", "Paris", [("policy", WRONG[1] + RIGHT[1])], 0.1, 0.8),
        ("em_format", "squad_em", "A", [("policy", THINK + "<answer></answer>")], 0.2, 1),
        ("em_format", "text_format", "Paris", [ASK, ("docs", DOCS[:20]), RIGHT], 1, 0.8),
        ("em_format", "final_without_answer", "Paris", [NO_ANSWER], 0, 0.1),
        # "par" in "DEPART" is no golden answer; by its letters it is
        (
            "em_format",
            "retrieval_by_substring",
            "Par",
            [ASK, ("docs", DOCS.replace("text", "DEPART")), WRONG],
            0.2,
            0.5,
        ),
        ("em_format", "retrieval_by_substring", "A", [ASK, SAW, WRONG], 0.2, 0.5),
    ],
)
def test_each_quirk_is_a_switch(name, quirk, golds, pairs, paper, switched):
    params = {"retrieval": 0.3} if "retrieval" in quirk else {}
    played, question = episode(*pairs), Question("q", "?", golds)
    assert total(name, played, question, **params) == pytest.approx(paper)
    assert total(name, played, question, **params, **{quirk: True}) == pytest.approx(switched)
    quirks = EM_QUIRKS if name == "em" else FORMAT_QUIRKS
    assert total(name, played, question, "released", **params) == pytest.approx(
        total(name, played, question, **params, **dict.fromkeys(quirks, True))
    )
    without = total(name, played, question, "released", **params, **{quirk: False})
    assert without != pytest.approx(total(name, played, question, "released", **params))


def test_the_switch_cases_cover_every_quirk():
    (mark,) = (m for m in test_each_quirk_is_a_switch.pytestmark if m.name == "parametrize")
    named = {case[:2] for case in mark.args[1]}
    assert named == {("em", q) for q in EM_QUIRKS} | {("em_format", q) for q in FORMAT_QUIRKS}
