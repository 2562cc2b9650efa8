r"""Sweeps: a run for every point of a list or grid over leaves of a configuration, and every seed; then one table.

    python launch.py --config=configs/table4.py:tiny [--workdir=DIR]     # the same command runs what is not finished

Each run is a process of its own with a work directory under the sweep's, so one that fails takes no other with it.
`jobs` of them run at a time on this machine; with `cluster` each is a job that submitit hands to SLURM.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from parasearch_jax.errors import UserError
from parasearch_jax.resume import Sigterm
from parasearch_jax.tables import write_tables
from parasearch_jax.writers import write_json

ROW = "row.json"  # the configuration of a row, in its work directory
LOG = "log.txt"  # what it printed
# Sections and leaves that don't change what the model before training answers: rows that differ in these share that.
TRAINING = (
    "reward",
    "algorithm",
    "learner",
    "optimizer",
    "critic_optimizer",
    "train",
    "guard",
    "seed",
    "name",
    "method",
)

Point = dict[str, Any]  # leaf -> value, and perhaps "label" -> how it is called


def grid(**axes: Sequence[Any]) -> tuple[Point, ...]:
    """Every combination: grid(**{"reward.lambda_d": (0, 0.15), "reward.lambda_s": (0, 0.35)}) are four points."""
    return tuple(dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))


def make_sweep(
    base: ConfigDict,
    points: Sequence[Point],
    seeds: Sequence[int] = (0,),
    jobs: int = 1,
    cluster: Mapping[str, Any] | None = None,
    table: Mapping[str, Any] | None = None,
) -> ConfigDict:
    """The configuration of a sweep, as configs/table4.py returns one.

    `base`: the run's, of which every point changes leaves. `cluster`: parameters of submitit's AutoExecutor (such as
    slurm_partition, timeout_min); None or {}: this machine, `jobs` runs at a time. `table`: see `tables.write_tables`.
    Points are kept as JSON text, since their leaves have dots in them.
    """
    base.lock()
    sweep = dict(points=json.dumps(list(points)), seeds=tuple(seeds), jobs=jobs, cluster=dict(cluster or {}))
    return ConfigDict(dict(name=base.name, sweep=sweep, base=base, table=dict(table or {})))


@dataclasses.dataclass(frozen=True)
class Row:
    """One run: a point, a seed and the work directory."""

    point: Point
    seed: int
    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def finished(self) -> bool:
        return (self.path / "results.json").exists()


def rows_of(config: ConfigDict, workdir: Path) -> list[Row]:
    """The rows of a sweep, point by point. Raises UserError for a leaf that the configuration has not, a value of
    another type, and points that are the same."""
    rows = _rows(json.loads(config.sweep.points), config.sweep.seeds, workdir)
    if not rows:
        raise UserError("the sweep has no points or no seeds: give at least one of each")
    for row in rows:
        _configured(config.base, row.point, row.seed, "")
    if twice := [name for name in {r.name for r in rows} if sum(r.name == name for r in rows) > 1]:
        raise UserError(f"the sweep has {twice[0]!r} twice: give every point once")
    return rows


def read_rows(workdir: str | Path) -> list[Row]:
    """The finished rows of a sweep's work directory. Raises UserError if it is none."""
    path = Path(workdir, "sweep.json")
    if not path.exists():
        raise UserError(f"{workdir} is no sweep's work directory: it has no sweep.json")
    known = json.loads(path.read_text(encoding="utf-8"))
    rows = _rows(known["points"], known["seeds"], Path(workdir))
    return [row for row in rows if row.finished]


def _rows(points: Sequence[Point], seeds: Sequence[int], workdir: Path) -> list[Row]:
    out = []
    for point, seed in itertools.product(points, seeds):
        values = (f"{leaf.rpartition('.')[2]}={value}" for leaf, value in point.items())
        label = point.get("label") or ",".join(values) or "base"
        out.append(Row(point, seed, workdir / f"{label},seed={seed}".replace("/", "_")))
    return out


def sweep(config: ConfigDict, workdir: str | Path) -> list[Row]:
    """Runs the rows that are not finished, writes the tables, and returns all rows.

    Raises UserError at the end if rows failed, with their names and last lines; the others are finished then.
    """
    work = Path(workdir).expanduser().absolute()
    rows = rows_of(config, work)
    work.mkdir(parents=True, exist_ok=True)
    _check_same(config, work)
    if left := [row for row in rows if not row.finished]:
        with Sigterm() as sigterm, sigterm.interrupts():
            _run_all(config, work, left)
    failed = [row for row in rows if not row.finished]
    if len(failed) < len(rows):
        print(write_tables(work, config.table.to_dict(), [(row.point, row.path) for row in rows if row.finished]))
    if failed:
        told = "\n".join(f"  {row.name}: {_last_line(row)} ({row.path / LOG})" for row in failed)
        raise UserError(f"{len(failed)} of {len(rows)} rows failed; the same command runs them again:\n{told}")
    return rows


def _run_all(config: ConfigDict, work: Path, rows: Sequence[Row]) -> None:
    """Runs the rows. When this process is to end (Ctrl-C, SIGTERM) no other row begins, and those under way save and
    end."""
    initial, children = _share_initial(config, work), set()
    for row in rows:
        settings = _configured(config.base, row.point, row.seed, f"{config.name},{row.name}")
        write_json(row.path / ROW, json.loads(settings.to_json_best_effort()))
        for source, target in initial.items():
            if not (row.path / target).exists():
                (row.path / target).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, row.path / target)
    cluster = config.sweep.cluster.to_dict()
    run = _submit(cluster, work) if cluster else lambda row: _run_here(row.path, children)
    start, jobs = time.perf_counter(), len(rows) if cluster else config.sweep.jobs
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        runs = {pool.submit(run, row): row for row in rows}
        try:
            for done, future in enumerate(concurrent.futures.as_completed(runs), 1):
                row, fault = runs[future], future.exception()
                told = "finished" if row.finished else f"FAILED: {fault or _last_line(row)}"
                print(f"{done}/{len(rows)} {row.name}: {told}, {time.perf_counter() - start:.0f} s", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # first: a row that ends would make room for the next
            for child in list(children):
                child.terminate()
            raise


def _configured(base: ConfigDict, point: Point, seed: int, name: str) -> ConfigDict:
    config = ConfigDict(base.to_dict())
    config.lock()
    leaves = {leaf: value for leaf, value in point.items() if leaf != "label"}
    for leaf, value in {**leaves, "seed": seed, "name": name or base.name}.items():
        try:
            config.update_from_flattened_dict({leaf: value})
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            raise UserError(
                f"the sweep sets {leaf} to {value!r}, which the configuration can't take: {error}"
            ) from None
        if leaf not in _leaves(config):
            raise UserError(f"the sweep sets {leaf}, which is no leaf of the configuration")
    return config


def _leaves(config: ConfigDict, prefix: str = "") -> set[str]:
    out = set()
    for key, value in config.items():
        out |= _leaves(value, f"{prefix}{key}.") if isinstance(value, ConfigDict) else {prefix + key}
    return out


def _check_same(config: ConfigDict, work: Path) -> None:
    """Rows may be added; what they share must be as it was."""
    path, base = work / "sweep.json", json.loads(config.base.to_json_best_effort())
    if path.exists() and json.loads(path.read_text(encoding="utf-8"))["base"] != base:
        raise UserError(f"{work} holds a sweep over another configuration: give another --workdir")
    points = json.loads(config.sweep.points)
    write_json(path, {"base": base, "points": points, "seeds": list(config.sweep.seeds)})


def _share_initial(config: ConfigDict, work: Path) -> dict[Path, str]:
    """{file: where a row has it} of the evaluation before training, made once; none if the points change the model, the
    data or the rollout."""
    points = json.loads(config.sweep.points)
    if not config.base.train.steps or not all(
        leaf.split(".")[0] in TRAINING for point in points for leaf in point.keys() - {"label"}
    ):
        return {}
    path = work / "initial"
    if not (path / "results.json").exists():
        settings = ConfigDict(config.base.to_dict())
        settings.update(name=f"{config.name},initial")
        settings.train.steps = 0
        write_json(path / ROW, json.loads(settings.to_json_best_effort()))
        print("the evaluation before training, which all rows share", flush=True)
        _run_here(path, set())
        if not (path / "results.json").exists():
            row = Row({}, 0, path)
            raise UserError(f"the evaluation before training failed: {_last_line(row)} ({path / LOG})")
    files = [file for folder in ("evals", "episodes") for file in (path / folder).glob("final*")]
    return {file: f"{file.parent.name}/{file.name.replace('final', 'initial')}" for file in files}


# --------------------------------------------------------------------------------------------------- where rows run


def _run_here(path: Path, children: set) -> None:
    """One row, or an evaluation, in a process of its own; what it prints goes to its log."""
    root = str(Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    with (path / LOG).open("w", encoding="utf-8") as log:
        command = [sys.executable, "-m", "parasearch_jax.sweep", str(path)]
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        children.add(child)
        try:
            child.wait()
        except BaseException:  # in the main thread; what waits in another one is ended by `_run_all`
            child.terminate()
            child.wait()
            raise
        finally:
            children.discard(child)


def _submit(cluster: Mapping[str, Any], work: Path) -> Callable[[Row], None]:
    """row -> its job, waited for. Raises UserError without submitit."""
    try:
        import submitit
    except ImportError:
        raise UserError("sweep.cluster needs submitit: pip install -r requirements-cluster.txt") from None
    executor = submitit.AutoExecutor(folder=work / "jobs", cluster=cluster.pop("executor", None))
    executor.update_parameters(**cluster)
    lock = threading.Lock()

    def run(row: Row) -> None:
        with lock:
            job = executor.submit(run_row, str(row.path))
        try:
            job.result()
        finally:
            (row.path / LOG).write_text((job.stdout() or "") + (job.stderr() or ""), encoding="utf-8")

    return run


def _last_line(row: Row) -> str:
    path = row.path / LOG
    lines = path.read_text(encoding="utf-8").strip().splitlines() if path.exists() else []
    return lines[-1] if lines else "it printed nothing"


def run_row(path: str) -> None:
    """The run of a row's work directory."""
    from parasearch_jax.programs import keep_programs

    keep_programs()
    from parasearch_jax.train import train

    train(ConfigDict(json.loads(Path(path, ROW).read_text(encoding="utf-8"))), workdir=path)


if __name__ == "__main__":
    try:
        run_row(sys.argv[1])
    except UserError as error:
        sys.exit(f"error: {error}")
