"""Two programs measured in turn on one machine, A B A B ..., so that a machine that slows down slows both.

A benchmark script starts itself again as a worker, once with this Python (ours) and once with the peer's. A worker
prepares everything and says {"check": numbers that both must agree on}, then answers every line with a measurement.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

THREADS = 2
# For both sides: large pages. Without them a fifth of our step is page faults, as its buffers are new every time.
ENVIRONMENT = {"OMP_NUM_THREADS": str(THREADS), "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
# Shape S: small enough for two cores, large enough that products dominate.
# A dict, since the peer's Python has no JAX; the fields are DecoderConfig's.
S = {
    "vocab_size": 32768,
    "hidden_size": 512,
    "num_layers": 8,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1408,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}


class Worker:
    """A script of ours as another process; `ready` is what it said when it was prepared."""

    def __init__(self, python: str, script: str, *args: str):
        env = os.environ | ENVIRONMENT | {"PYTHONPATH": str(Path(__file__).parents[1])}
        command = [python, script, *args]
        self._process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ready = self._read()

    def measure(self) -> dict:
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict:
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries print what they like
                return json.loads(line)
        raise SystemExit(f"a worker ended early: {' '.join(self._process.args)}")


def serve(ready: dict, measure: Callable[[], dict]) -> None:
    """The worker's side: says `ready`, then measures once a line."""
    print(json.dumps(ready), flush=True)
    for _ in sys.stdin:
        print(json.dumps(measure()), flush=True)


def seconds_each(once: Callable[[], object], times: int) -> float:
    """Seconds of one call among `times` in a row. One before them is not counted: on a virtual machine the first work
    after a pause pays for memory that the host took back meanwhile (a third of our train step)."""
    once()
    start = time.perf_counter()
    for _ in range(times):
        once()
    return (time.perf_counter() - start) / times


def paired(ours: Worker, peer: Worker, rounds: int) -> Iterator[tuple[dict, dict]]:
    """`rounds` pairs of measurements; who goes first changes from pair to pair."""
    for i in range(rounds):
        first, second = (ours, peer) if i % 2 == 0 else (peer, ours)
        a, b = first.measure(), second.measure()
        yield (a, b) if first is ours else (b, a)


def table(name: str, unit: str, pairs: list[tuple[float, float]], peer: str) -> str:
    """Medians with ranges in Markdown, and the ratio pair by pair. Figures are rates: more is better."""
    ours, theirs = zip(*pairs, strict=True)
    ratios = [a / b for a, b in pairs]
    rows = [("ours", ours, ",.0f"), (peer, theirs, ",.0f"), ("ratio, pair by pair", ratios, ".2f")]
    lines = [f"| {name} | median | lowest | highest |", "|---|---:|---:|---:|"]
    for label, values, form in rows:
        shown = [f"{f(values):{form}}" for f in (statistics.median, min, max)]
        lines.append(f"| {label}{'' if form == '.2f' else f', {unit}'} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def peer_python(given: str, module: str) -> str:
    """The Python that has the peer: the one given, else this one if it has it (or `module` is "")."""
    if not module:
        return sys.executable
    if given:
        return given
    if importlib.util.find_spec(module):
        return sys.executable
    raise SystemExit(
        f"this Python has no {module}; install it beside (python -m venv peer && peer/bin/pip install {module} "
        "transformers) and give --peer-python=peer/bin/python"
    )


def machine() -> str:
    """Processor, cores and versions, for the line under a table."""
    import jax

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}, Python {platform.python_version()}, JAX {jax.__version__}"


class Case(NamedTuple):
    """Two workers, each a function of the model's directory, that do the same and measure {"tokens_per_second"}, and
    perhaps {"seconds": {part: s}} of it. They say {"check"} as `serve` has it; the peer also its "name"."""

    title: str
    ours: Callable[[str], None]
    peer: Callable[[str], None]
    what: str  # the numbers under "check"
    tolerance: float  # of their differences
    needs: str = "torch"  # module that the peer's Python must have; "": it is this Python


def run_cases(script: str, doc: str, cases: dict[str, Case], rounds: int) -> None:
    """The command line of a benchmark of shape S: each case in turn."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", default="", help="a Python with torch and transformers")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--only", default=",".join(cases), help="cases with commas, of: %(default)s")
    parser.add_argument("--worker", choices=("ours", "peer"), help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := set(names) - set(cases):
        parser.error(f"--only has {', '.join(sorted(unknown))}; the cases are {', '.join(cases)}")
    if args.worker:
        return getattr(cases[args.only], args.worker)(args.directory)

    import jax

    from parasearch_jax.models import decoder
    from parasearch_jax.models.weights import save_model

    pythons = {name: peer_python(args.peer_python, cases[name].needs) for name in names}
    with tempfile.TemporaryDirectory() as directory:  # the same weights for both
        cfg = decoder.DecoderConfig(**S)
        save_model(directory, cfg, decoder.init(cfg, jax.random.key(0)), None)
        for name in names:
            sides = (sys.executable, "ours"), (pythons[name], "peer")
            told = f"--only={name}", f"--directory={directory}"
            ours, peer = (Worker(python, script, f"--worker={who}", *told) for python, who in sides)
            compare(cases[name], ours, peer, args.rounds)
    print(f"fp32, {THREADS} threads, {args.rounds} pairs each; {machine()}\nshape: {S}")


def compare(case: Case, ours: Worker, peer: Worker, rounds: int) -> None:
    """Prints the table of a case and where the time of each side goes; ends both workers."""
    gap = np.abs(np.array(ours.ready["check"]) - np.array(peer.ready["check"])).max()
    if not gap <= case.tolerance:  # nan too
        raise SystemExit(f"{case.title}: {case.what} differ by {gap:.2g}: the two do not compute the same")
    pairs = list(paired(ours, peer, rounds))
    for worker in (ours, peer):
        worker.close()
    rates = [(a["tokens_per_second"], b["tokens_per_second"]) for a, b in pairs]
    print(table(case.title, "tokens/s", rates, peer.ready["name"]))
    print(f"\n{case.what} agree to {gap:.1g}")
    for who, found in zip(("ours", peer.ready["name"]), zip(*pairs, strict=True), strict=True):
        if "seconds" in found[0]:
            parts = {part: statistics.median(x["seconds"][part] for x in found) for part in found[0]["seconds"]}
            print(f"{who}: " + ", ".join(f"{part} {seconds:.2f} s" for part, seconds in parts.items()))
    print(flush=True)
