"""Mixing data sets: the ratios hold, every set has whole epochs, and a step is a function of (seed, step)."""

from collections import Counter

import pytest

from parasearch_jax.data import Question
from parasearch_jax.data.drawing import check_mix, draw, shares
from parasearch_jax.errors import UserError

SIZES = {"nq": 40, "hotpotqa": 7, "x": 13}
QUESTIONS = [Question(f"{name}{i}", "?", ("x",), dataset=name) for name, size in SIZES.items() for i in range(size)]


def drawn(mix, steps, count, seed=0):
    return [draw(QUESTIONS, seed, step, count, mix) for step in range(steps)]


@pytest.mark.parametrize("mix", ["nq=1,hotpotqa=1,x=1", "hotpotqa=0.05, x=0.9, nq=0.05", "x=30,nq=60,hotpotqa=10"])
def test_ratios_hold_in_every_stretch(mix):
    wanted = shares(mix, QUESTIONS)
    places = [question.dataset for step in drawn(mix, 300, 7) for question in step]
    for length, off in ((10, 2), (100, 4), (2100, 6)):
        for start in range(0, len(places) - length + 1, 37):
            counts = Counter(places[start : start + length])
            assert all(abs(counts[name] - share * length) <= off for name, share in wanted.items()), (start, length)


def test_every_set_has_whole_epochs_of_its_own():
    ids = [question.id for step in drawn("nq=1,hotpotqa=2,x=1", 50, 8) for question in step]
    orders = {}
    for name, size in SIZES.items():
        mine = [i for i in ids if i.startswith(name)]
        epochs = [mine[at : at + size] for at in range(0, len(mine) - size + 1, size)]
        assert epochs and all(len(set(epoch)) == size for epoch in epochs)
        orders[name] = epochs
    assert orders["hotpotqa"][0] != orders["hotpotqa"][1]


def test_a_step_is_a_function_of_seed_and_step():
    mix = "nq=1,hotpotqa=2,x=1"
    steps = drawn(mix, 20, 6)
    assert draw(QUESTIONS, 0, 13, 6, mix) == steps[13]
    other = drawn(mix, 3, 6, seed=1)
    assert [q.dataset for step in other for q in step] != [q.dataset for step in steps[:3] for q in step]
    assert [q for step in drawn(mix, 10, 12) for q in step] == [q for step in steps for q in step]  # cut otherwise


def test_sets_of_one_size_have_orders_of_their_own():
    twins = [Question(str(i), "?", ("x",), dataset=name) for name in "ab" for i in range(20)]
    first = draw(twins, 0, 0, 40, "a=1,b=1")
    a, b = ([int(q.id) for q in first if q.dataset == name][:15] for name in "ab")
    assert a != b


def test_without_a_mix_sets_come_as_they_are():
    assert sorted(q.id for step in drawn("", 6, 10) for q in step) == sorted(q.id for q in QUESTIONS)


@pytest.mark.parametrize(
    ("mix", "told"),
    [
        ("nq=1,hotpotqa=1", "has to name each data set of data.train once: 'nq', 'hotpotqa', 'x'"),
        ("nq=1,hotpotqa=1,x=1,y=1", "has to name each data set"),
        ("nq=1,hotpotqa=1,x=1,x=2", "has to name each data set"),
        ("nq=1,hotpotqa=0,x=1", "'hotpotqa=0' is no ratio"),
        ("nq=1,hotpotqa=-1,x=1", "'hotpotqa=-1' is no ratio"),
        ("nq=1,hotpotqa=inf,x=1", "'hotpotqa=inf' is no ratio"),
        ("nq=1,hotpotqa,x=1", "'hotpotqa' is no ratio; write nq=1"),
        ("nq=1,hotpotqa=8,x=1", "takes 8 questions of 'hotpotqa' into a step of 10 .* and it holds 7"),
    ],
)
def test_a_mix_that_is_none(mix, told):
    with pytest.raises(UserError, match=told):
        check_mix(mix, QUESTIONS, 10)


def test_a_mix_that_fits():
    check_mix("nq=1,hotpotqa=1,x=1", QUESTIONS, 10)
    check_mix("", QUESTIONS, 60)
