"""One GPU measured with random weights, in six minutes: what the plan assumes, what a first run there wants to know.

    python benchmarks/gpu.py                # --seconds=360, --out=FILE.md
    python benchmarks/gpu.py --smoke        # every part with toy shapes on the CPU: does the script run?

    attention   cuDNN against XLA at the head shape of 7B: milliseconds, ratio, and whether both agree
    decode      milliseconds of a decode step against the time that reading weights and cache must take
    train       utilisation (MFU) of the train step as a run has it: bf16 products, fp32 masters, AdamW, remat "full"
    run         two steps of configs/parallel_tiny.py: is everything finite, do sampler and trainer agree?

Each part is a process of its own (gpu_parts.py): it starts with an empty card, and one that crashes or hangs costs only
its own rows. A part is ended when its share of the time is over; what it leaves of it goes to the parts behind it. The
table is written after every part: FILE.md, FILE.jsonl (one object a row) and FILE.log (what the processes said).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHARES = {"attention": 0.22, "decode": 0.2, "train": 0.42, "run": 0.16}  # of --seconds
GRACE = 2.0  # seconds: what ending a part and writing the table may take
# Of the card's memory, for JAX. Its own default of 0.75 would leave out layers that fit; cuBLAS, cuDNN and the CUDA
# context take theirs from the rest.
MEMORY = "0.92"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=360.0, help="in all; what does not fit is named in the table")
    parser.add_argument("--out", type=Path, help="default: gpu-CARD-DATE.md in $OUT, else in benchmarks/results")
    parser.add_argument("--smoke", action="store_true", help="toy shapes on the CPU")
    args = parser.parse_args()

    start, spent, machine, rows, said = time.monotonic(), 0.0, {}, [], ""
    for part, share in SHARES.items():
        spent += share
        seconds = start + spent * args.seconds - time.monotonic() - GRACE
        given = ["--smoke"] if args.smoke else []
        if part == "train" and cudnn_fails(rows):
            given.append("--attention=xla")
        seen, new, stderr = run_part(part, seconds, given)
        machine, rows, said = seen or machine, rows + new, f"{said}==== {part}\n{stderr}"
        out = args.out or default_out(machine)
        write(out, machine, rows, said)
    print(f"\n{table(machine, rows)}\n\n{time.monotonic() - start:.0f} s. Written: {out}, {out.with_suffix('.jsonl')}")
    sys.exit(not any("median" in row for row in rows))


# --------------------------------------------------------------------------------------------------- parts as processes


def run_part(part: str, seconds: float, given: list[str]) -> tuple[dict, list[dict], str]:
    """(the machine, the rows, what was said on stderr) of a part that may take `seconds`.

    The process prints {"machine", "planned"}, then a row at a time. What is planned and has no row in the end gets one
    that says why. SystemExit if there is no GPU to measure.
    """
    if seconds < 1:
        return {}, [{"part": part, "what": "all", "note": "skipped: no time was left"}], ""
    script = str(Path(__file__).with_name("gpu_parts.py"))
    command = [sys.executable, script, part, f"--end={time.time() + seconds:.1f}", *given]
    machine, planned, rows = {}, [], []
    with tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(command, env=environment(given), stdout=subprocess.PIPE, stderr=stderr, text=True)
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        for line in process.stdout:
            if not (line.startswith("{") and line.endswith("}\n")):  # libraries print what they like
                continue
            said = json.loads(line)
            if "machine" in said:
                machine, planned = said["machine"], said["planned"]
            else:
                rows.append({"part": part, **said})
                print(" | ".join(cells(rows[-1])), flush=True)
        code = process.wait()
        in_time = timer.is_alive()
        timer.cancel()
        stderr.seek(0)
        log = stderr.read()
    if machine and machine["backend"] != "gpu" and "--smoke" not in given:
        sys.exit(
            f"error: JAX {machine['jax']} sees no GPU, only {machine['card']!r}: install JAX for the driver "
            "(requirements-cuda12.txt, or jax[cuda13]), or give --smoke to try the script on this machine"
        )
    reason = f"skipped: the part's {seconds:.0f} s were over"
    if in_time:
        last = (log.strip().splitlines() or ["it said nothing"])[-1]
        reason = f"failed: the process ended with {code}: {last}"
    done = {row["what"] for row in rows}
    if code or not machine:
        rows += [{"part": part, "what": what, "note": reason} for what in planned or ["all"] if what not in done]
    return machine, rows, log


def environment(given: list[str]) -> dict[str, str]:
    """Of a part."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path, "XLA_CLIENT_MEM_FRACTION": MEMORY}
    env.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)  # its old name; JAX refuses both
    if "--smoke" in given:  # its figures mean nothing, so nothing is spent on fast programs
        return env | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    # One GPU, the first of those that this process may use: JAX takes memory on all that it sees.
    return env | {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}


def cudnn_fails(rows: list[dict]) -> bool:
    """Whether a row of cuDNN has no figure or a wrong result; the train step then takes XLA's attention."""
    mine = [row for row in rows if row["part"] == "attention" and row["what"].endswith("cudnn")]
    return any("median" not in row or not row["agrees"] for row in mine)


# ------------------------------------------------------------------------------------------------------------ the table

HEAD = ("part", "what", "unit", "median", "lowest", "highest", "n", "first call, s", "note")


def cells(row: dict) -> list[str]:
    """A row of the table; one without a figure has a dash in its places."""
    figures = [f"{row[key]:.4g}" if key in row else "-" for key in ("median", "lowest", "highest")]
    first = f"{row['first']:.1f}" if "first" in row else "-"
    note = " ".join(row.get("note", "").split()).replace("|", "/")
    return [row["part"], row["what"], row.get("unit", "-"), *figures, str(row.get("n", "-")), first, note]


def table(machine: dict, rows: list[dict]) -> str:
    lines = [", ".join(f"{name}: {value}" for name, value in machine.items()), ""]
    lines += [f"| {' | '.join(line)} |" for line in (HEAD, ["---"] * len(HEAD), *map(cells, rows))]
    return "\n".join(lines)


def default_out(machine: dict) -> Path:
    card = re.sub(r"[^a-z0-9]+", "-", machine.get("card", "unknown").lower()).strip("-")
    folder = os.environ.get("OUT") or ROOT / "benchmarks" / "results"
    return Path(folder, f"gpu-{card}-{datetime.date.today():%Y%m%d}.md")


def write(out: Path, machine: dict, rows: list[dict], said: str) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(table(machine, rows) + "\n")
    out.with_suffix(".jsonl").write_text("".join(json.dumps(row | {"machine": machine}) + "\n" for row in rows))
    out.with_suffix(".log").write_text(said)


if __name__ == "__main__":
    main()
