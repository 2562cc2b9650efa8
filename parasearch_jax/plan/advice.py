"""What makes a run fit that does not: settings tried in the order of what they cost, each through the arithmetic."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from parasearch_jax.plan.memory import by_arithmetic
from parasearch_jax.plan.run import Run
from parasearch_jax.sharding.mesh import MeshConfig

DEVICES = " devices"  # how the price of more of them ends


class Change(NamedTuple):
    """A setting that lowers the peak of some runs."""

    leaf: str
    value: Callable[[Run], str]  # of the leaf, in a run
    price: str
    make: Callable[[Run], Run]


class Step(NamedTuple):
    """A change made: the leaf's value, and the peak with it and all before it, bytes."""

    leaf: str
    value: str
    price: str
    peak: float


def advise(run: Run, room: float) -> tuple[list[Step], bool]:
    """Settings that lower the arithmetic's peak to at most `room` bytes, and whether they do.

    On the same devices if it can be done there: each that does it alone; if none does, the two or three that do it
    together and whose dearest is cheapest. Else the same on more devices; else all that lower the peak.
    """
    changes = list(_changes(run))
    same = [change for change in changes if not change.price.endswith(DEVICES)]
    for pool, size in itertools.product((same, changes), (1, 2, 3)):
        fitting = [
            (max(map(changes.index, some)), steps)
            for some in itertools.combinations(pool, size)
            if (steps := _steps(run, some)) and steps[-1].peak <= room
        ]
        if fitting and size == 1:
            alone: dict[str, Step] = {}
            for _, (step,) in fitting:
                alone.setdefault(step.leaf, step)  # the cheapest value of each
            return list(alone.values()), True
        if fitting:
            return min(fitting, key=lambda pair: pair[0])[1], True
    taken, lowest = [], by_arithmetic(run).peak
    for change in changes:
        some = [other for other in taken if other.leaf != change.leaf] + [change]
        if (steps := _steps(run, some)) and steps[-1].peak < 0.999 * lowest:
            taken, lowest = some, steps[-1].peak
    return _steps(run, taken), False


def _steps(run: Run, changes: Sequence[Change]) -> list[Step]:
    """Empty if the changes don't go together."""
    steps = []
    for change in changes:
        run = change.make(run)
        steps.append(Step(change.leaf, change.value(run), change.price, by_arithmetic(run).peak))
    distinct = len({change.leaf for change in changes}) == len(changes)
    return steps if distinct and _is_possible(run) else []


def _is_possible(run: Run) -> bool:
    """Whether the mesh divides what it has to."""
    m, (fsdp, tp) = run.model, (run.mesh.fsdp, run.mesh.tp)
    split = (m.num_kv_heads, m.num_heads, m.intermediate_size, m.vocab_size)
    rows = (run.learner.micro_rows, run.rollout.slots, m.hidden_size)
    return all(size % tp == 0 for size in split) and all(size % fsdp == 0 for size in rows)


def _changes(run: Run) -> Iterator[Change]:
    """The cheapest first."""

    def setting(part: str, field: str, value: Any, price: str) -> Change:
        def make(run: Run) -> Run:
            return dataclasses.replace(run, **{part: dataclasses.replace(getattr(run, part), **{field: value})})

        return Change(f"{part}.{field}", lambda run: str(getattr(getattr(run, part), field)), price, make)

    yield setting("learner", "remat", "full", "a third more work in the update")
    rows = run.learner.micro_rows
    while rows > 1:
        rows //= 2
        yield setting("learner", "micro_rows", rows, "weights travel more often in the update")
    for chunk in (64, 32):
        if chunk < run.learner.logprob_chunk:
            yield setting("learner", "logprob_chunk", chunk, "smaller products with the head")
    for part in ("optimizer", "critic_optimizer"):
        yield setting(part, "mu_dtype", "bfloat16", "the first moment is rounded")
    for share in (2, 4):
        yield setting("rollout", "slots", run.rollout.slots // share, "rollouts take longer")
    for more in (1, 2, 4, 8):
        for tp in (1, 2, 4, 8):
            size = more * run.mesh.size
            if tp >= run.mesh.tp and size % tp == 0 and (more, tp) != (1, run.mesh.tp):
                mesh = MeshConfig(size // tp, tp)
                price = f"{size}{DEVICES}" if more > 1 else "sums over tp in every layer"
                flags = str(mesh.fsdp) + (f" --config.mesh.tp={tp}" if tp != run.mesh.tp else "")
                make = lambda run, mesh=mesh: dataclasses.replace(run, mesh=mesh)  # noqa: E731
                yield Change("mesh.fsdp", lambda run, flags=flags: flags, price, make)
