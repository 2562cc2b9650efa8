"""Sweeps: rows, what they share, failures, a kill, and the table."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import parallel_tiny
import pytest
import table2
import table3
import table4

from parasearch_jax import sweep as sweeps
from parasearch_jax.errors import UserError
from parasearch_jax.sweep import grid, make_sweep, read_rows, rows_of, sweep
from parasearch_jax.tables import write_tables

ROOT = Path(__file__).parents[1]
COLUMNS = [
    {"heading": "EM %", "subset": "all", "metric": "em", "factor": 100.0, "digits": 1, "paper": (50.0, 60.0)},
    {"heading": "turns", "subset": "parallel", "metric": "turns"},
]
TABLE = {"title": "T", "columns": COLUMNS, "notes": ["other questions"]}


def config_of(points, tmp_path, seeds=(0,), **changes):
    """Steps of 4 questions of the small world."""
    base = parallel_tiny.get_config("smoke")
    base.train.steps = 1
    base.algorithm.questions, base.algorithm.samples = 4, 2
    lines = Path(base.data.test).read_text().splitlines()
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(lines[::60]) + "\n")
    base.data.test = str(few)
    return make_sweep(base, points, seeds, table=TABLE, **changes)


def test_grid():
    assert grid(**{"a.b": (1, 2), "c": (3,)}) == ({"a.b": 1, "c": 3}, {"a.b": 2, "c": 3})


def test_rows(tmp_path):
    config = config_of([{"reward.lambda_d": 0.0}, {"reward.lambda_d": 0.5}], tmp_path, seeds=(0, 1))
    rows = rows_of(config, tmp_path)
    assert [row.name for row in rows] == [f"lambda_d={d},seed={s}" for d in (0.0, 0.5) for s in (0, 1)]
    labelled = config_of([{"label": "a/b", "train.steps": 3}], tmp_path)
    assert [row.name for row in rows_of(labelled, tmp_path)] == ["a_b,seed=0"]
    for points, match in (
        ([{"reward.lambda_x": 1.0}], r"sets reward.lambda_x"),
        ([{"train.steps": "many"}], r"sets train.steps to 'many'"),
        ([{"train.steps": 2}, {"train.steps": 2}], r"'steps=2,seed=0' twice"),
        ([], "no points or no seeds"),
    ):
        with pytest.raises(UserError, match=match):
            rows_of(config_of(points, tmp_path), tmp_path)


def test_table4_has_the_papers_seven_settings():
    config = table4.get_config("tiny")
    points = json.loads(config.sweep.points)
    assert len(points) == 7 and len(rows_of(config, Path("x"))) == 21
    assert {tuple(p.values()) for p in points} == {
        (0.0, 0.35), (0.15, 0.35), (0.35, 0.35), (0.5, 0.35), (0.15, 0.0), (0.15, 0.15), (0.15, 0.5),
    }  # fmt: skip
    full = table4.get_config()
    columns = {c["heading"]: c for c in full.table.to_dict()["columns"]}
    best = points.index({"reward.lambda_d": 0.15, "reward.lambda_s": 0.35})
    assert [columns[f"hotpotqa {n}, sampled"]["paper"][best] for n in ("EM %", "DR %", "turns")] == [65.6, 94.3, 2.08]
    assert columns["2wikimultihopqa turns, sampled"]["paper"][4] == 2.96  # lambda_s = 0
    assert full.base.evaluation.sampled and columns["hotpotqa EM %"]["evaluation"] == "final"
    assert full.base.model.path == "models/Qwen2.5-7B-Instruct"


def test_table3_evaluates_two_models_in_three_ways():
    config = table3.get_config("instruct,search_r1=runs/a,parallel=runs/b")
    points = json.loads(config.sweep.points)
    assert [(p["label"], p["model.path"], p["protocol.name"]) for p in points] == [
        ("Search-R1", "runs/a", "search_r1"),
        ("Search-R1 + parallel prompt", "runs/a", "parallel"),
        ("ParallelSearch", "runs/b", "parallel"),
    ]
    assert config.base.data.test == "hotpotqa/dev:parallel,2wikimultihopqa/dev:parallel" and not config.base.train.steps
    columns = {c["heading"]: c for c in config.table.to_dict()["columns"]}
    assert columns["hotpotqa DR %, sampled"]["paper"] == (None, 83.20, 94.30)
    assert columns["2wikimultihopqa turns, sampled"]["paper"] == (3.05, 2.64, 2.03)
    multihop = {c["heading"]: c for c in table3.get_config("multihop").table.to_dict()["columns"]}
    assert multihop["multihop_rag EM %, sampled"]["paper"] == (56.9, 59.8, 57.3)
    for arg in ("tiny", "multihop", None):
        rows_of(table3.get_config(arg), Path("x"))


def test_table2_has_a_row_for_every_model_given():
    config = table2.get_config("search_r1=runs/a,r1=runs/c,parallel=runs/b")
    points = json.loads(config.sweep.points)
    assert [(p["label"], p["model.path"], p["protocol.name"]) for p in points] == [
        ("R1", "runs/c", "no_search"),
        ("Search-R1", "runs/a", "search_r1"),
        ("ParallelSearch", "runs/b", "parallel"),
    ]
    columns = {c["heading"]: c for c in config.table.to_dict()["columns"]}
    assert columns["nq, sampled"]["paper"] == (29.7, 48.8, 49.2)
    assert columns["bamboogle, sampled"]["paper"] == (29.6, 40.3, 46.8) and columns["nq"]["paper"] == ()
    for model, mean in (("instruct", 42.57), ("base", 45.87)):  # of ParallelSearch's rows
        assert sum(table2.PAPER[model]["parallel"]) / 7 == pytest.approx(mean, abs=0.01)
    assert len(rows_of(config, Path("x"))) == 3 and len(rows_of(table2.get_config("tiny"), Path("x"))) == 6
    with pytest.raises(UserError, match="give a model for an agent"):
        table2.get_config()


def fake_runs(tmp_path, values):
    """Work directories with results.json alone; values: {(point, seed): (em, turns)}."""
    runs = []
    for i, ((point, _), (em, turns)) in enumerate(values.items()):
        path = tmp_path / str(i)
        path.mkdir()
        final = {"all": {"em": em, "turns": 9.0}, "parallel": {"em": 0.0, "turns": turns}}
        (path / "results.json").write_text(json.dumps({"evals": {"final": final}}))
        runs.append(({"reward.lambda_d": point}, path))
    return runs


def test_table(tmp_path):
    runs = fake_runs(tmp_path, {(0.0, 0): (0.5, 2.0), (0.0, 1): (0.7, 3.0), (0.5, 0): (0.25, 4.0)})
    text = write_tables(tmp_path, TABLE, runs)
    assert text == (tmp_path / "table.md").read_text()
    assert text.splitlines() == [
        "# T",
        "",
        "| lambda_d | seeds | EM % | paper | turns |",
        "|---|---|---|---|---|",
        "| 0.0 | 2 | 60.0 (50.0 to 70.0) | 50.0 | 2.50 (2.00 to 3.00) |",
        "| 0.5 | 1 | 25.0 | 60.0 | 4.00 |",
        "",
        "* other questions",
    ]
    with (tmp_path / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["column"], float(r["value"]), r["paper"]) for r in rows][:3] == [
        ("EM %", 50.0, "50.0"), ("EM %", 70.0, "50.0"), ("turns", 2.0, ""),
    ]  # fmt: skip
    assert (tmp_path / "table.png").stat().st_size > 1000
    named = [({**point, "label": f"at {point['reward.lambda_d']}"}, path) for point, path in runs]
    columns = [COLUMNS[1] | {"heading": "calls %", "relative": True, "digits": 0}]
    assert write_tables(tmp_path, TABLE | {"columns": columns}, named).splitlines()[2:6] == [
        "| label | seeds | calls % |",
        "|---|---|---|",
        "| at 0.0 | 2 | 100 (80 to 120) |",
        "| at 0.5 | 1 | 160 |",
    ]
    columns = [{"heading": "x", "subset": "hotpotqa", "metric": "em"}]
    with pytest.raises(UserError, match=r"asks for 'hotpotqa' of 'final'; the results have final: all, parallel"):
        write_tables(tmp_path, TABLE | {"columns": columns}, runs)


def test_a_failed_row_is_named_and_run_again(tmp_path, monkeypatch, capsys):
    """Rows are faked: what is tested is what runs, what is shared, and what is told."""
    ran, broken = [], {"lambda_d=0.5,seed=0"}

    def run_here(path, children):
        ran.append(path.name)
        row = json.loads((path / sweeps.ROW).read_text())
        if path.name in broken:
            return (path / sweeps.LOG).write_text("...\nerror: no memory\n")
        final = {"all": {"em": 1.0}, "parallel": {"turns": row["reward"]["lambda_d"]}}
        for file in ("evals/{}.json", "episodes/{}.jsonl", "evals/{}_sampled.json"):
            if not row["train"]["steps"]:
                (path / file).parent.mkdir(exist_ok=True)
                (path / file.format("final")).write_text("shared")
            else:
                assert (path / file.format("initial")).read_text() == "shared"
        (path / "results.json").write_text(json.dumps({"evals": {"final": final}}))

    monkeypatch.setattr(sweeps, "_run_here", run_here)
    config, work = config_of([{"reward.lambda_d": d} for d in (0.0, 0.5)], tmp_path), tmp_path / "work"
    with pytest.raises(UserError, match=r"1 of 2 rows failed.*\n  lambda_d=0.5,seed=0: error: no memory"):
        sweep(config, work)
    assert ran == ["initial", "lambda_d=0.0,seed=0", "lambda_d=0.5,seed=0"] and "| 0.0 | 1 |" in capsys.readouterr().out
    broken.clear()
    assert all(row.finished for row in sweep(config, work))
    assert ran[3:] == ["lambda_d=0.5,seed=0"] and "| 0.5 | 1 |" in capsys.readouterr().out
    assert [row.name for row in read_rows(work)] == ["lambda_d=0.0,seed=0", "lambda_d=0.5,seed=0"]
    with pytest.raises(UserError, match="is no sweep's work directory"):
        read_rows(tmp_path)
    other = config_of([{"reward.lambda_d": 0.0}], tmp_path)
    other.base.train.steps = 2
    with pytest.raises(UserError, match="holds a sweep over another configuration"):
        sweep(other, work)


def test_points_that_change_the_data_share_no_evaluation(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(sweeps, "_run_here", lambda path, children: ran.append(path.name))
    with pytest.raises(UserError, match="it printed nothing"):
        sweep(config_of([{"retriever.topk": 2}], tmp_path), tmp_path / "work")
    assert ran == ["topk=2,seed=0"]


def test_a_cluster_without_submitit_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    config = config_of([{"retriever.topk": 2}], tmp_path, cluster={"slurm_partition": "gpu"})
    with pytest.raises(UserError, match=r"pip install -r requirements-cluster\.txt"):
        sweep(config, tmp_path / "work")


@pytest.mark.slow
def test_rows_as_jobs_of_submitit(tmp_path):
    """On this machine, through submitit's local executor."""
    pytest.importorskip("submitit")
    points, cluster = [{"reward.lambda_d": 0.5}], {"executor": "local", "timeout_min": 10}
    rows = sweep(config_of(points, tmp_path, cluster=cluster), tmp_path / "work")
    assert all(row.finished for row in rows) and "step 1" in (rows[0].path / sweeps.LOG).read_text().replace("  ", " ")


@pytest.mark.slow
def test_a_killed_sweep_goes_on(tmp_path):
    """SIGTERM while rows run: their processes end too, and the same command finishes."""
    command = [sys.executable, "launch.py", "--config=configs/table4.py:smoke", f"--workdir={tmp_path / 'work'}"]
    lines = (ROOT / "parasearch_jax/toy/small_world/test.jsonl").read_text().splitlines()[::60]
    (tmp_path / "few.jsonl").write_text("\n".join(lines) + "\n")
    command += [f"--config.base.data.test={tmp_path / 'few.jsonl'}", "--config.base.algorithm.questions=4"]
    first = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 300
    while not list((tmp_path / "work").glob("lambda*/metrics.jsonl")):
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.2)
    first.send_signal(signal.SIGTERM)
    out, _ = first.communicate(timeout=120)
    assert first.returncode == 128 + signal.SIGTERM, out
    assert not list((tmp_path / "work").glob("lambda*/results.json")), "rows ran on behind the signal"
    found = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True).stdout.split()
    assert [pid for pid in found if int(pid) != os.getpid()] == []
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "| 0.15 | 0.35 | 1 |" in second.stdout and "| 0.35 | 0.35 | 1 |" in second.stdout
    for path in (tmp_path / "work").glob("lambda*"):
        assert json.loads((path / "evals/initial.json").read_text()) == json.loads(
            (tmp_path / "work/initial/evals/final.json").read_text()
        )
