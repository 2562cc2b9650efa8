"""Several hosts: two processes of two devices each on this machine are one process of four."""

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_train import small

from parasearch_jax import hosts
from parasearch_jax import train as training
from parasearch_jax.errors import UserError
from parasearch_jax.writers import read_episodes, read_metrics

TESTS = Path(__file__).parent
LOST = "error: another host of the run was lost"


class Pair:
    """The two processes of a run, and what the last ones printed."""

    def __init__(self, folder: Path):
        self.logs = [folder / f"process_{i}.log" for i in (0, 1)]
        self.processes: list[subprocess.Popen] = []

    def start(self, *arguments: str, slurm: bool = False) -> None:
        self.stop()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        paths = os.pathsep.join(map(str, (TESTS.parent, TESTS, TESTS.parent / "configs")))
        env = os.environ | {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
        for i, path in enumerate(self.logs):
            place = ("cluster", "", "") if slurm else (f"127.0.0.1:{port}", "2", str(i))
            env |= slurm_step(port, i) if slurm else {}
            command = [sys.executable, str(TESTS / "hosts_run.py"), *place, *map(str, arguments)]
            with open(path, "w") as log:
                self.processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))

    def wait(self, seconds: float = 300) -> list[int]:
        """The exit codes."""
        end = time.monotonic() + seconds
        return [process.wait(max(end - time.monotonic(), 0.1)) for process in self.processes]

    def finish(self, *arguments: str, **kwargs) -> list[dict]:
        """What each prints last, as JSON."""
        self.start(*arguments, **kwargs)
        assert self.wait() == [0, 0], self.told()
        return [json.loads(path.read_text().splitlines()[-1]) for path in self.logs]

    def wait_for_lines(self, workdir: Path, count: int) -> None:
        """Returns when the metrics have so many."""
        end, path = time.monotonic() + 300, workdir / "metrics.jsonl"
        while not path.exists() or path.read_bytes().count(b"\n") < count:
            assert all(process.poll() is None for process in self.processes), self.told()
            assert time.monotonic() < end, self.told()
            time.sleep(0.01)

    def told(self) -> str:
        return "\n".join(f"---- {path.name}\n{path.read_text()}" for path in self.logs)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.processes = []


def slurm_step(port: int, index: int) -> dict[str, str]:
    """What SLURM tells a step of one task on each of two nodes."""
    step = {"JOB_ID": "1", "STEP_NODELIST": "127.0.0.1", "STEP_NUM_NODES": "2", "NTASKS": "2", "LOCALID": "0"}
    names = {f"SLURM_{name}": value for name, value in step.items()}
    return names | {"SLURM_PROCID": str(index), "JAX_COORDINATOR_PORT": str(port)}


@pytest.fixture
def pair(tmp_path):
    pair = Pair(tmp_path)
    yield pair
    pair.stop()


def test_what_hosts_tell_each_other(pair):
    first, second = pair.finish("units", slurm=True)
    assert first.pop("share") + second.pop("share") == list(range(7))
    assert first == second == {
        "uneven": [{"of": 0}, {"of": 0}, {"of": 1}],
        "large": True,
        "from_first": 10,
        "any": [True, False],
        "spread": [[0, "a"], [1, "b"], [1, "c"]],
        "none": [],
        "fetch": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [6.0, 7.0, 8.0], [9.0, 10.0, 11.0]],
        "error on one": "on host 1: data.train: mend it",
        "fault on the first": "on host 0: ZeroDivisionError('division by zero') (its log has the traceback)",
        "goes on": [0, 1],
    }  # fmt: skip


def test_one_host_is_none_to_wait_for():
    assert hosts.gather("ab") == ["a", "b"] and hosts.share("ab") == "ab"
    assert hosts.from_first(lambda: 3) == 3 and not hosts.any_host(False)
    with pytest.raises(ZeroDivisionError), hosts.together():
        1 / 0  # noqa: B018


def test_a_killed_host_ends_the_other_with_a_clear_error(pair):
    pair.start("killed")
    assert pair.wait(60) == [1, -signal.SIGKILL], pair.told()
    assert LOST in pair.logs[0].read_text().splitlines()[-1]


def test_hosts_that_were_started_differently_are_refused(pair, tmp_path):
    first, second = pair.finish("refused", tmp_path / "work", tmp_path)
    assert first == second
    assert "  seed: 0 on host 0, 1 on host 1\n  train.steps: 2 on host 0, 3 on host 1" in first["settings"]
    assert "on host 1" in first["directory"] and "is not that of the first host" in first["directory"]
    assert [path.name for path in (tmp_path / "work" / "1").iterdir()] == [".lock"]


BAD_FLAGS = {
    "one of three": ({"coordinator": "h:1"}, ["--num_processes is missing", "--coordinator=h:1"]),
    "two of three": ({"num_processes": 2, "process_id": 0}, ["--coordinator is missing"]),
    "no port": ({"coordinator": "h", "num_processes": 2, "process_id": 0}, ["--coordinator is 'h'", "PORT"]),
    "no process": ({"coordinator": "h:1", "num_processes": 0, "process_id": 0}, ["--num_processes is 0"]),
    "index too large": ({"coordinator": "h:1", "num_processes": 2, "process_id": 2}, ["--process_id is 2", "0 to 1"]),
    "both ways": ({"process_id": 0, "distributed": True}, ["--process_id=0", "--distributed"]),
}


@pytest.mark.parametrize("name", BAD_FLAGS)
def test_flags_that_make_no_sense_are_refused(name):
    flags, words = BAD_FLAGS[name]
    with pytest.raises(UserError) as error, hosts.joined(**flags):
        pass
    assert all(word in str(error.value) for word in words), error.value


def test_launch_without_a_cluster_is_one_clear_line():
    command = [sys.executable, "launch.py", "--config=configs/parallel_tiny.py:smoke", "--distributed"]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert all(word in done.stderr.splitlines()[-1] for word in ("error: --distributed", "--coordinator=HOST:PORT"))


def test_a_process_alone_on_its_host_takes_all_its_devices(monkeypatch):
    for name, value in slurm_step(1234, 0).items():
        monkeypatch.setenv(name, value)
    assert hosts._alone_on_its_host()
    monkeypatch.setenv("SLURM_NTASKS", "16")  # a process a GPU
    assert not hosts._alone_on_its_host()
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "0,1")
    assert not hosts._alone_on_its_host()


# ------------------------------------------------------------------------------------------------------ a run of two


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """`alone(devices)` -> the work directory of the run of 4 steps by one process; the data lie beside it."""

    @functools.cache
    def run(devices: int) -> Path:
        folder = tmp_path_factory.mktemp("alone")
        training.train(small(folder, **{"mesh.fsdp": devices, "train.steps": 4}), workdir=folder / "work")
        return folder / "work"

    return run


def agree(workdir: Path, one: Path) -> None:
    """The runs have the same losses, the same episodes in the same order, and one set of checkpoints."""
    got, want = read_metrics(workdir), read_metrics(one)
    assert [line["step"] for line in got] == [1, 2, 3, 4]
    for a, b in zip(got, want, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
        assert a["reward/total"] == pytest.approx(b["reward/total"], abs=1e-5)
        assert a["tokens/sampled"] == b["tokens/sampled"] and 0 < a["rollout/occupancy"] <= 1
    for name in ("initial", "final", *(f"step_{i:06d}" for i in range(1, 5))):
        first, second = (read_episodes(path / "episodes" / f"{name}.jsonl") for path in (workdir, one))
        assert [(e["id"], e["sample"]) for e in first] == [(e["id"], e["sample"]) for e in second]
    assert sorted(path.name for path in (workdir / "checkpoints").iterdir()) == ["3", "4"]


@pytest.mark.slow
def test_two_hosts_train_like_one(pair, alone, tmp_path):
    """Like one device even, whose programs other tests have compiled."""
    workdir, one = tmp_path / "work", alone(1)
    first, second = pair.finish("train", workdir, one.parent, "train.steps=4")
    assert first == second == json.loads((workdir / "results.json").read_text())
    agree(workdir, one)
    for folder in (".", "model", "evals", "report"):  # nothing more and nothing less
        assert {p.name for p in (workdir / folder).iterdir()} == {p.name for p in (one / folder).iterdir()}
    text = pair.logs[1].read_text()
    assert "step 1/4" in pair.logs[0].read_text() and "step 1/4" not in text  # one of them talks


@pytest.mark.slow
def test_sigterm_to_one_host_ends_both_and_the_same_command_goes_on(pair, alone, tmp_path):
    """No checkpoint is due before the end, so the second start goes on from the one that SIGTERM has brought."""
    workdir, one = tmp_path / "work", alone(4)
    run = "train", workdir, one.parent, "train.steps=4"
    pair.start(*run, "train.save_every=1000")
    pair.wait_for_lines(workdir, 1)
    pair.processes[1].send_signal(signal.SIGTERM)
    assert pair.wait() == [143, 143], pair.told()
    assert "Traceback" not in pair.told()
    saved = [path.name for path in (workdir / "checkpoints").iterdir()]
    assert saved == [str(len(read_metrics(workdir)))] and saved != ["4"]
    pair.finish(*run)
    agree(workdir, one)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0])
def test_a_host_killed_in_a_run_ends_the_other(pair, alone, tmp_path, victim):
    workdir, one = tmp_path / "work", alone(4)
    run = "train", workdir, one.parent, "train.steps=4"
    pair.start(*run)
    pair.wait_for_lines(workdir, 2)
    pair.processes[victim].kill()
    codes = pair.wait(60)
    assert codes[victim] == -signal.SIGKILL and codes[1 - victim] in (1, -signal.SIGABRT), pair.told()
    text = pair.logs[1 - victim].read_text()
    assert LOST in text or "another task died" in text  # the second are JAX's words
    pair.finish(*run)
    agree(workdir, one)
