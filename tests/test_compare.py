"""Runs side by side: what is averaged, and what is said of runs that lack something."""

import json

import pytest

from parasearch_jax import compare
from parasearch_jax.errors import UserError


def make_run(path, values, final=None):
    path.mkdir()
    lines = [{"step": i, "reward/total": value} for i, value in enumerate(values, 1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if final is not None:
        results = {"seconds": 12.4, "evals": {"final": {"parallel": {"em": final, "dr": 50.0, "turns": 2.5}}}}
        (path / "results.json").write_text(json.dumps(results))
    return path


def test_curve_takes_the_steps_that_all_runs_have():
    runs = [
        [{"step": 1, "x": 1.0}, {"step": 2, "x": None}, {"step": 3, "x": 3.0}],
        [{"step": s, "x": 5.0} for s in (1, 2, 3, 4)],
    ]
    assert compare.curve(runs, "x") == ([1, 3], [[1.0, 5.0], [3.0, 5.0]])


def test_command(tmp_path, capsys):
    a, b = make_run(tmp_path / "a", [0.1, 0.2], final=0.75), make_run(tmp_path / "b", [0.3, 0.4, 0.5])
    out = tmp_path / "plots" / "curves.png"
    compare.flags.FLAGS(["compare", f"--out={out}"])
    compare.main(["compare", f"PPO={a},{b}", str(b)])
    printed = capsys.readouterr().out
    assert "| PPO a | 12 | - | - | - | 75.00 | 50.00 | 2.50 |" in printed
    assert "| PPO b | not finished |" in printed and "| b b |" in printed
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("args", "told"), [([], "no run is given"), (["A={tmp}"], "holds no metrics.jsonl")])
def test_bad_input(tmp_path, args, told):
    with pytest.raises(UserError, match=told):
        compare.groups([arg.format(tmp=tmp_path) for arg in args])
