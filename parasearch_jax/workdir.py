"""The work directory of a run, written so that the same command continues it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import jax
from ml_collections import ConfigDict

from parasearch_jax import hosts, resume
from parasearch_jax.checkpoint import Checkpoints
from parasearch_jax.errors import UserError
from parasearch_jax.report import write_report
from parasearch_jax.writers import (
    MetricsWriter,
    episode_record,
    prepare_workdir,
    read_episodes,
    read_metrics,
    write_episodes,
    write_json,
)

LOCK = ".lock"


class Workdir:
    """Checkpoints, metrics, episodes and evaluations of one run; a context manager, which waits for the last save.

    Opening it takes the directory for this process, and raises UserError if it holds another run: other settings (a
    leaf of the configuration, the reward function) or the content of other input files. `restore` comes next.

    With several hosts each calls every method, on a directory that all of them see. The first one writes, and what it
    reads is sent to the others; only the arrays of checkpoints are written and read by all.
    """

    def __init__(self, path: str | Path, config: ConfigDict, reward_fn: Callable | None = None):
        self.path = Path(path).expanduser().absolute()
        self._lock = hosts.on_first(lambda: _taken(self.path, config))
        if jax.process_count() > 1:
            _check_shared(self.path, self._lock)
        self._steps, self._best = config.train.steps, config.train.best
        inputs = hosts.from_first(lambda: resume.fingerprints(config))
        self.run = resume.describe(config, reward_fn) | {"inputs": inputs}
        hosts.on_first(self._check_earlier)
        self._keep, self._checkpoints, self._metrics = config.train.keep, None, None  # opened by `restore`
        self._earlier, self._opened = 0.0, time.time()  # seconds of earlier starts; when this one began
        self.saved = 0  # step of the last checkpoint

    def __enter__(self) -> Workdir:
        return self

    def __exit__(self, kind: type | None, *_) -> None:
        # A save takes all hosts: behind an error of one it may never end.
        waits = jax.process_count() == 1 or kind is None or issubclass(kind, resume.Terminated)
        parts = self._lock, self._metrics, self._checkpoints if waits else None
        with contextlib.ExitStack() as stack:
            for part in parts:  # closed last to first, whatever fails
                if part is not None:
                    stack.callback(part.close)

    def restore(self, shapes: Any, init: Callable[[], Any]) -> tuple[Any, int, dict]:
        """(state, step, reward memory) of the last complete checkpoint, the state as `shapes` (ShapeDtypeStructs) say;
        without one `init()`, 0 and {}.

        What an earlier start wrote behind that step is removed.
        """
        self._checkpoints = Checkpoints(self.path / "checkpoints", self._keep)
        step, memory = hosts.from_first(self._checkpoints.latest) or 0, {}
        if step:
            state, saved = self._checkpoints.restore(step, shapes)
            with hosts.together():
                self._check(saved["run"], f"checkpoint {step} in {self.path}")
            memory, self._earlier = saved["memory"], saved["seconds"]
        else:
            state = init()
        self._metrics = hosts.on_first(lambda: self._begin(step))
        self.saved = step
        self._protect_best()
        return state, step, memory

    def _begin(self, step: int) -> MetricsWriter:
        resume.cut_back(self.path, step, self._steps)
        write_json(self.path / "config.json", self.run)
        return MetricsWriter(self.path, step)

    def save(self, step: int, state: Any, memory: dict) -> None:
        """Starts the save of a checkpoint, unless there is one of this step."""
        if step > self.saved:
            run_state = {"step": step, "memory": memory, "seconds": self.seconds(), "run": self.run}
            self._checkpoints.save(step, state, run_state)
            self.saved = step

    def check(self) -> None:
        """Raises UserError if a save has failed in the background."""
        self._checkpoints.check()

    def log(self, step: int, line: dict[str, float]) -> None:
        """The line of a step in metrics.jsonl, and TensorBoard."""
        hosts.on_first(lambda: self._metrics.write(step, line))

    def metrics(self) -> list[dict]:
        """The lines of the steps so far."""
        return hosts.from_first(lambda: read_metrics(self.path))

    def write_episodes(self, name: str, episodes, questions, parts=None, em=None) -> None:
        """episodes/NAME.jsonl; `parts` and `em`, where given, are lists as long as `episodes`."""
        none = [None] * len(episodes)
        rows = zip(episodes, questions, parts or none, em or none, strict=True)
        records = (episode_record(*row) for row in rows)
        hosts.on_first(lambda: write_episodes(self.path / "episodes" / f"{name}.jsonl", records))

    def write_evaluation(self, name: str, subsets: dict) -> None:
        """evals/NAME.json, which says that evaluation NAME is finished."""
        hosts.on_first(lambda: write_json(self.path / "evals" / f"{name}.json", subsets))
        self._protect_best()

    def read_evaluation(self, name: str) -> dict | None:
        """What an earlier start evaluated, or None."""
        return self._read(self.path / "evals" / f"{name}.json")

    def results(self) -> dict | None:
        """results.json of a run that is finished, or None."""
        return self._read(self.path / "results.json") if self._steps and self.saved == self._steps else None

    def _read(self, path: Path) -> dict | None:
        return hosts.from_first(lambda: _read_json(path) if path.exists() else None)

    def finish(self, results: dict) -> None:
        """The report, and last results.json, by which the next start knows that nothing is left to do."""
        hosts.on_first(lambda: self._finish(results))

    def _finish(self, results: dict) -> None:
        before, after = (self._episodes(name) if name in results["evals"] else () for name in ("initial", "final"))
        write_report(self.path, results, read_metrics(self.path), before, after)
        write_json(self.path / "results.json", results)

    def _episodes(self, name: str) -> list[dict]:
        path = self.path / "episodes" / f"{name}.jsonl"
        return read_episodes(path) if path.exists() else []

    def seconds(self) -> float:
        """Of all starts together, without what a kill undid."""
        return self._earlier + time.time() - self._opened

    def _check_earlier(self) -> None:
        if (self.path / "config.json").exists():
            self._check(_read_json(self.path / "config.json"), str(self.path))

    def _check(self, old: dict, where: str) -> None:
        inputs = old.get("inputs", {})
        resume.check_same({**old, "inputs": None}, {**self.run, "inputs": None}, where)
        resume.check_inputs(inputs, self.run["inputs"], where)

    def _protect_best(self) -> None:
        """Keeps the checkpoint with the best evaluation on data.dev; of equal ones the earliest."""
        self._checkpoints.protect(hosts.from_first(self._best_step))

    def _best_step(self) -> int | None:
        scores = {}
        for path in sorted((self.path / "evals").glob("dev_step_*.json")):
            scores[int(path.stem.removeprefix("dev_step_"))] = _read_json(path)["all"][self._best]
        return max(scores, key=scores.get) if scores else None


def _taken(path: Path, config: ConfigDict) -> IO[str]:
    """The directory, made where it is missing and held for this process by the open file."""
    prepare_workdir(path)
    if Path(config.model.path).resolve().is_relative_to(path.resolve()):
        raise UserError(
            f"model.path {config.model.path} lies in the work directory {path}, whose model/ the run writes: "
            "give another --workdir"
        )
    return _locked(path)


def _check_shared(path: Path, lock: IO[str] | None) -> None:
    """Raises UserError on all hosts if one doesn't see what the first one, which holds `lock`, writes."""

    def sign() -> str:
        token = secrets.token_hex()
        lock.write(token)
        lock.flush()
        os.fsync(lock.fileno())
        return token

    token = hosts.from_first(sign)
    with hosts.together():
        seen = path / LOCK
        if not seen.exists() or seen.read_text() != token:
            raise UserError(
                f"the work directory {path} is not that of the first host: give all hosts the same --workdir, on a "
                "file system that they share"
            )


def _locked(path: Path) -> IO[str]:
    """Holds the directory for this process: two runs in one would spoil both. A kill frees it too."""
    lock = open(path / LOCK, "w")  # noqa: SIM115 (closed with the work directory)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise UserError(
            f"another process is writing to the work directory {path}; wait, or give another --workdir"
        ) from None
    return lock


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); remove it, or give another --workdir") from error


def params_sha256(params: Any) -> str:
    """sha256 of all parameters, in the order of their paths: two runs that agree have trained the same model."""
    digest = hashlib.sha256()
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    for path in sorted(leaves):
        leaf = leaves[path]
        digest.update(path.encode())
        for part in (leaf[i] for i in range(len(leaf))) if "layers" in path else (leaf,):  # a layer in memory at a time
            digest.update(hosts.fetch(part).tobytes())
    return digest.hexdigest()
