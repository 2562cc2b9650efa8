"""The embedded default learns: the whole run of configs/parallel_tiny.py, as README starts it. Some minutes."""

import parallel_tiny
import pytest

from parasearch_jax.train import train
from parasearch_jax.writers import read_metrics

SLOW, SOAK = pytest.mark.slow, pytest.mark.soak  # soak: by hand


def shortfalls(before: dict, after: dict) -> list[str]:
    """What the run was required to reach and did not."""
    required = {
        "DR on parallel": after["parallel"]["dr"] >= 95,
        "DR on single": after["single"]["dr"] <= 5,
        "DR on sequential": after["sequential"]["dr"] <= 5,
        "turns on parallel before": before["parallel"]["turns"] >= 2.9,
        "turns on parallel after": after["parallel"]["turns"] <= 2.1,
        "turns on sequential": 2.8 <= after["sequential"]["turns"] <= 3.2,
    }
    for kind in ("single", "parallel", "sequential"):
        required[f"EM on {kind}"] = after[kind]["em"] >= before[kind]["em"] - 0.03
    return [name for name, met in required.items() if not met]


@pytest.mark.parametrize(
    "args", [pytest.param(args, marks=mark) for args, mark in (("", SLOW), ("ppo", SLOW), ("reinforce_pp", SOAK))]
)
def test_learns_to_split_questions(tmp_path, args):
    evals = train(parallel_tiny.get_config(args), workdir=tmp_path / "work")["evals"]
    assert not shortfalls(evals["initial"], evals["final"]), evals
    assert not any(line["alarms"] for line in read_metrics(tmp_path / "work"))


def test_shortfalls_are_noticed():
    good = {"dr": 100.0, "turns": 2.0, "em": 0.9}
    before = {"single": {"em": 0.9}, "parallel": {"em": 0.9, "turns": 3.0}, "sequential": {"em": 0.9}}
    after = {"parallel": good, "single": good | {"dr": 0.0}, "sequential": good | {"dr": 0.0, "turns": 3.0}}
    assert shortfalls(before, after) == []
    worse = after | {"sequential": {"dr": 6.0, "turns": 3.0, "em": 0.86}}
    assert shortfalls(before, worse) == ["DR on sequential", "EM on sequential"]
