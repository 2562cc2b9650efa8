"""A run killed at any moment and started again with the same command is the run that was never killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from parasearch_jax.writers import read_metrics

STEPS = 12  # a kill is followed by one new checkpoint at least, mostly by two
TESTS = Path(__file__).parent


class Run:
    """The same command every time, in a process of its own; `log` is what the last one printed."""

    def __init__(self, workdir: Path, cache: Path, save_every: int = 1):
        self.workdir, self.log, self.save_every = workdir, Path(f"{workdir}.log"), save_every
        self.env = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS, TESTS.parent / "configs"))),
            "PYTHONUNBUFFERED": "1",
            "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(cache)),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",  # a restart compiles nothing
        }

    def start(self) -> subprocess.Popen:
        leaves = f"train.steps={STEPS}", f"train.save_every={self.save_every}"
        command = [sys.executable, str(TESTS / "kill_run.py"), str(self.workdir), str(self.workdir.parent), *leaves]
        with open(self.log, "w") as log:
            return subprocess.Popen(command, env=self.env, stdout=log, stderr=log)

    def finish(self) -> None:
        assert self.start().wait(600) == 0, self.log.read_text()

    def end_when(self, moment: Callable[[], bool], by: signal.Signals) -> int:
        """Starts it, and sends the signal as soon as `moment()` is true; returns the exit status."""
        process, end = self.start(), time.monotonic() + 300
        while not moment() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.001)
        assert process.poll() is None, "ended before the signal:\n" + self.log.read_text()
        process.send_signal(by)
        assert time.monotonic() < end, "the moment did not come:\n" + self.log.read_text()
        return process.wait(60)

    def kill_when(self, moment: Callable[[], bool]) -> None:
        assert self.end_when(moment, signal.SIGKILL) == -signal.SIGKILL, self.log.read_text()

    def lines(self) -> int:
        path = self.workdir / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def results(self) -> dict:
        return json.loads((self.workdir / "results.json").read_text())

    def latest(self) -> int:
        names = [path.name for path in (self.workdir / "checkpoints").glob("*")]
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def newer(self) -> Callable[[], bool]:
        """A moment: there is a checkpoint that wasn't there before."""
        before = self.latest()
        return lambda: self.latest() > before

    def half_saved(self) -> list[Path]:
        """Folders that Orbax is writing, or was when it was killed."""
        return list((self.workdir / "checkpoints").glob("*.orbax-checkpoint-tmp*"))

    def files(self, pattern: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted(self.workdir.glob(pattern))}


def passed(seconds: float, begin: Callable[[], bool] = lambda: True) -> Callable[[], bool]:
    """A moment: `seconds` after `begin()` was true for the first time."""
    since = []

    def moment():
        if not since and begin():
            since.append(time.monotonic())
        return bool(since) and time.monotonic() >= since[0] + seconds

    return moment


def kill_five_times(run: Run, seconds: float) -> None:
    """During a save; somewhere in the start; and three times within `seconds` after a new checkpoint."""
    for _ in range(3):  # a save may be over between the look and the kill
        newer = run.newer()
        run.kill_when(lambda newer=newer: newer() and bool(run.half_saved()))
        if run.half_saved():
            break
    assert run.half_saved(), "no kill left a half-written checkpoint"
    rng = random.Random(0)
    newer, start = run.newer(), passed(rng.uniform(1, 6))
    run.kill_when(lambda: start() or newer())
    for _ in range(3):
        run.kill_when(passed(rng.uniform(0, seconds), run.newer()))
    assert 0 < run.latest() < STEPS


def without_times(line: dict) -> dict:
    return {name: value for name, value in line.items() if "seconds" not in name and not name.startswith("retriever/")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nothing disturbed. Its folder is that of the data, which is the same for all."""
    folder = tmp_path_factory.mktemp("kill")
    run = Run(folder / "whole", folder / "cache")
    run.finish()
    return run


def beside(whole: Run, name: str, **kwargs) -> Run:
    return Run(whole.workdir.with_name(name), whole.workdir.with_name("cache"), **kwargs)


@pytest.mark.slow
def test_a_killed_run_is_the_run_that_was_not_killed(whole):
    killed, want = beside(whole, "killed"), read_metrics(whole.workdir)
    kill_five_times(killed, seconds=2 * min(line["seconds/total"] for line in want if "seconds/total" in line))
    killed.finish()

    assert killed.results()["params_sha256"] == whole.results()["params_sha256"]
    assert killed.files("model/*") == whole.files("model/*")
    got = read_metrics(killed.workdir)
    assert [line["step"] for line in got if "loss" in line] == list(range(1, STEPS + 1))
    assert [without_times(line) for line in got] == [without_times(line) for line in want]
    assert killed.files("episodes/*") == whole.files("episodes/*")  # the questions drawn, and every sampled token
    assert killed.files("evals/*").keys() == whole.files("evals/*").keys()
    names = [{path.name for path in (run.workdir / "checkpoints").iterdir()} for run in (whole, killed)]
    assert names[0] == names[1]  # the last ones, and nothing half-written
    assert not [path for path in killed.workdir.rglob("*") if "tmp" in path.name]


@pytest.mark.slow
def test_sigterm_saves_then_exits_and_the_same_command_goes_on(whole):
    ended = beside(whole, "ended", save_every=1000)
    assert ended.end_when(lambda: ended.lines() >= 3, signal.SIGTERM) == 143, ended.log.read_text()
    assert "Traceback" not in ended.log.read_text()
    assert 3 <= ended.latest() < STEPS and ended.latest() == ended.lines()  # saved where it stood, though none was due
    ended.finish()
    assert ended.results()["params_sha256"] == whole.results()["params_sha256"]
    assert [without_times(line) for line in read_metrics(ended.workdir)] == [
        without_times(line) for line in read_metrics(whole.workdir)
    ]
