"""The command line: what the user can mend is told in one line, with an exit code that is not 0 and no traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parasearch_jax.toy.files import DIRECTORY

ROOT = Path(__file__).parents[1]


def launch(*args):
    command = [sys.executable, "launch.py", "--config=configs/parallel_tiny.py:smoke", *args]
    if args and args[0].startswith("--config="):
        command = [sys.executable, "launch.py", *args]
    env = os.environ | {"PYTHONPATH": ""}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


def file(tmp_path, text: str) -> str:
    path = tmp_path / "input.jsonl"
    path.write_text(text)
    return str(path)


def first_row(name: str) -> dict:
    return json.loads((DIRECTORY / name).read_text().splitlines()[0])


CASES = {
    "unknown leaf": (lambda tmp: "--config.train.stepz=3", ["stepz"]),
    "unknown argument of the configuration": (lambda tmp: "--config=configs/parallel_tiny.py:smokey", ["smokey"]),
    "absent configuration": (lambda tmp: "--config=configs/nothing.py", ["configs/nothing.py"]),
    "value of another type": (lambda tmp: "--config.train.steps=many", ["steps", "many"]),
    "missing model": (lambda tmp: f"--config.model.path={tmp}/none", ["model.path", "none"]),
    "model directory without weights": (lambda tmp: f"--config.model.path={tmp}", ["model.safetensors"]),
    "empty corpus": (lambda tmp: f"--config.retriever.corpus={file(tmp, '')}", ["input.jsonl", "corpus"]),
    "question without answer": (
        lambda tmp: f"--config.data.test={file(tmp, json.dumps(first_row('test.jsonl') | {'golden_answers': []}))}",
        ["input.jsonl:1", "golden_answers"],
    ),
    "zero train questions": (lambda tmp: f"--config.data.train={file(tmp, '')}", ["input.jsonl", "no question"]),
    "unwritable work directory": (lambda tmp: f"--workdir={file(tmp, 'in the way')}/run", ["work directory"]),
    "more questions a step than there are": (
        lambda tmp: f"--config.data.train={file(tmp, json.dumps(first_row('train.jsonl')))}",
        ["algorithm.questions", "holds 1 questions"],
    ),
    "episodes longer than the buckets": (lambda tmp: "--config.rollout.max_total_tokens=400", ["buckets", "400"]),
    "unknown reward": (lambda tmp: "--config.reward.name=em2", ["em2", "parallel_search"]),
    "unknown protocol": (lambda tmp: "--config.protocol.name=serial", ["serial", "search_r1"]),
    "unknown retriever": (lambda tmp: "--config.retriever.kind=magic", ["magic", "local"]),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_clear_line(name, tmp_path):
    make, words = CASES[name]
    flag = make(tmp_path)
    done = launch(flag) if flag.startswith("--workdir") else launch(flag, f"--workdir={tmp_path}/work")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr + done.stdout
    told = done.stderr.strip().splitlines()[-1]
    assert all(word in told for word in words), told


def test_a_work_directory_of_something_else_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    done = launch("--config=configs/parallel_tiny.py:smoke", f"--workdir={tmp_path}")
    assert done.returncode != 0 and "no run to resume" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("",), "runs/parallel_tiny"),
        ((":ppo,smoke,seed=2",), "runs/parallel_tiny_ppo_smoke_seed2"),
        (("", "--config.reward.lambda_d=0.5", "--config.data.test=a/b c.jsonl"),
         "runs/parallel_tiny,data.test=a_b_c.jsonl,reward.lambda_d=0.5"),
        (("", "--config.train.steps=60"), "runs/parallel_tiny"),  # the same run, for longer
        (("", "--config.protocol.prompt=" + "x" * 300), "runs/parallel_tiny,protocol.prompt=" + "x" * 80),
    ],
)  # fmt: skip
def test_the_command_names_the_work_directory(args, expected):
    """The same command finds its run again, another one does not meet it."""
    code = (
        "import sys, launch\n"
        "launch.parse(['launch.py', *sys.argv[1:]])\n"
        "print(launch.default_workdir(launch.CONFIG.value))"
    )
    command = [sys.executable, "-c", code, f"--config=configs/parallel_tiny.py{args[0]}", *args[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    told = done.stdout.strip()
    assert told.startswith(expected) if len(told) > 100 else told == expected, done.stderr


def test_without_a_configuration(tmp_path):
    done = subprocess.run([sys.executable, "launch.py"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "--config" in done.stderr and "Traceback" not in done.stderr
