"""Which questions a step asks: a pure function of (seed, step), so that the step is the data's whole state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from parasearch_jax.data.types import Question
from parasearch_jax.errors import UserError

T = TypeVar("T")
GOLDEN = (5**0.5 - 1) / 2  # its multiples fill [0, 1) more evenly than those of any other number


def draw(questions: Sequence[T], seed: int, step: int, count: int, mix: str = "") -> list[T]:
    """The `count` questions of a step (from 0), epoch after epoch: each is a permutation of its own, none is skipped.

    With `mix` ("nq=1,hotpotqa=3") the data sets come in these ratios, and each has epochs of its own: a small set with
    a large share is repeated. Any stretch of questions has them but for a few: place p belongs to the set into whose
    part of [0, 1) the p-th multiple of GOLDEN falls. Raises UserError as `shares`.
    """
    if not mix:
        return _places(questions, range(step * count, (step + 1) * count), [seed])
    bounds = np.cumsum(list(shares(mix, questions).values()))
    start = np.random.default_rng([seed]).random()
    owner = np.searchsorted(bounds[:-1], (start + GOLDEN * np.arange((step + 1) * count)) % 1, side="right")
    before, now = owner[: step * count], owner[step * count :]
    drawn = []
    for i, group in enumerate(by_dataset(questions).values()):
        first = int((before == i).sum())
        drawn.append(iter(_places(group, range(first, first + int((now == i).sum())), [seed, i])))
    return [next(drawn[i]) for i in now.tolist()]


def shares(mix: str, questions: Sequence[Question]) -> dict[str, float]:
    """The share of each data set of `questions`, in the order in which they come; sums to 1.

    Raises UserError for a `mix` that is none, or that does not name each data set once with a number above 0.
    """
    given: dict[str, float] = {}
    for item in mix.split(","):
        name, _, value = (part.strip() for part in item.rpartition("="))
        try:
            given[name] = float(value)
        except ValueError:
            given[name] = 0.0
        if not 0 < given[name] < float("inf"):
            raise UserError(f"data.mix {mix!r}: {item!r} is no ratio; write nq=1,hotpotqa=3, with numbers above 0")
    names = list(by_dataset(questions))
    if sorted(given) != sorted(names) or len(given) != len(mix.split(",")):
        raise UserError(f"data.mix {mix!r} has to name each data set of data.train once: {', '.join(map(repr, names))}")
    return {name: given[name] / sum(given.values()) for name in names}


def check_mix(mix: str, questions: Sequence[Question], count: int) -> None:
    """Raises UserError as `shares`, and for a set of which a step of `count` questions would ask one twice: that gives
    the same samples twice."""
    held = {name: len(group) for name, group in by_dataset(questions).items()}
    for name, share in shares(mix, questions).items() if mix else ():
        if share * count > held[name]:
            raise UserError(
                f"data.mix {mix!r} takes {share * count:.0f} questions of {name!r} into a step of {count} "
                f"(algorithm.questions), and it holds {held[name]}: lower its ratio, or algorithm.questions"
            )


def by_dataset(questions: Sequence[Question]) -> dict[str, list[Question]]:
    """{data set: its questions}, in the order in which the sets come."""
    sets: dict[str, list[Question]] = {}
    for question in questions:
        sets.setdefault(question.dataset, []).append(question)
    return sets


def _places(questions: Sequence[T], places: range, seed: list[int]) -> list[T]:
    orders: dict[int, np.ndarray] = {}
    out = []
    for place in places:
        epoch, i = divmod(place, len(questions))
        if epoch not in orders:
            orders[epoch] = np.random.default_rng([*seed, epoch]).permutation(len(questions))
        out.append(questions[orders[epoch][i]])
    return out
