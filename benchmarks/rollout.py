"""Episodes a second of the whole rollout, searches included: the engine against two lock-step loops.

    python benchmarks/rollout.py                # both workloads, about ten minutes on two CPU cores
    python benchmarks/rollout.py --quick        # a minute: does it run? Episodes are few and short

    ours   `Engine.rollout`, asynchronous: exact stops, one cache for the episode, slots that are refilled
    (a)    as users report of Search-R1's released loop: a fixed batch in lock-step turns; every row samples 20 % behind
           its tag, which is cut on the host; what is left is encoded anew, and each turn feeds the whole context
    (b)    lock-step turns that feed the whole context, with the engine's exact stops: no token is wasted

and between (b) and ours two more, so that each gain shows by itself: the cache kept over turns, and the prompt's cells
copied within a group. All run on the same model code in this process (lockstep.py), in turn within a round.

Workloads (scripted_search.py): shape S with scripted episodes of three turns (prompt 200 tokens; tokens a turn
log-normal, median 100, 95th percentile 300, limit 500; documents 450; 8 samples a question; every search takes 50 ms),
and the small world with its own model, stops and index, 50 ms a search, temperature 1.

A lock-step loop does one batch after the other, so one is enough to know its rate: on shape S it gets the first batch,
and the script is one in which this is a usual one (`Script.typical`). The engine gets all episodes, since its slots
fill and empty but once a rollout. The lock-step loops run at the batch size that is best for (b), whose steps cost what
those of the others do. The two loops in between run in the first round only.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from peers import ENVIRONMENT, THREADS, machine

BEHIND = 0.2  # tokens behind the tag, as a share of the turn
NAMES = {
    "a": "(a) 20 % behind the tag, cut, encoded anew, all fed each turn",
    "b": "(b) exact stops",
    "keeps": "cache kept over turns",
    "shares": "prompt copied within its group",
    "ours": "ours: slots refilled, searches overlapped",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few episodes, short ones, one round")
    parser.add_argument("--only", choices=("scripted", "small"), help="one of the workloads")
    parser.add_argument("--rounds", type=int, default=3, help="in which each loop runs once")
    parser.add_argument("--questions", type=int, default=0, help="of the workload; default: 32")
    parser.add_argument("--slots", type=int, default=0, help="of the engine; default: 32 scripted, 64 small")
    parser.add_argument("--chunk", type=int, default=8, help="of the engine; default: 8")
    parser.add_argument("--batches", type=int, nargs="+", help="the lock-step loops choose from")
    args = parser.parse_args()
    if os.environ.get("GLIBC_TUNABLES") != ENVIRONMENT["GLIBC_TUNABLES"]:  # read when a process starts
        env = os.environ | ENVIRONMENT | {"PYTHONPATH": str(Path(__file__).parents[1])}
        os.execve(sys.executable, [sys.executable, *sys.argv], env)

    start = time.perf_counter()
    for name in [args.only] if args.only else ["scripted", "small"]:
        run = {"scripted": run_scripted, "small": run_small}[name]
        print(f"\n{run(args)}", flush=True)
    print(f"\nfp32, {THREADS} threads; {machine()}; {time.perf_counter() - start:.0f} s with compilation")


# ----------------------------------------------------------------------------------------------------- the workloads


def run_scripted(args) -> str:
    from scripted_search import Script, scripted

    script = Script(48, 112, median=25, p95=75, limit=125) if args.quick else Script()
    limits = {"slots": args.slots or (16 if args.quick else 32), "chunk": args.chunk}
    work = scripted(args.questions or (4 if args.quick else 32), script=script, **limits)
    batch = best_batch(work, args.batches or ([16] if args.quick else [8, 16, 32]))
    work.lengths = work.script.typical(len(work.lengths), batch)
    loops = make_loops(work, batch)
    for loop in loops.values():
        compile_calls(loop, work, scripted_calls(loop, work))
        work.prepare(loop)
    return measure_all(loops, work, slice(max(1, batch // work.samples)), 1 if args.quick else args.rounds)


def run_small(args) -> str:
    from scripted_search import small_world

    limits = {"slots": args.slots or 64, "chunk": args.chunk}
    work = small_world(args.questions or (8 if args.quick else 32), **limits)
    sizes = args.batches or ([64] if args.quick else [64, 128, 256])
    batch = quickest_batch(work, sizes) if len(sizes) > 1 else sizes[0]
    loops = make_loops(work, batch)
    compile_calls(loops["ours"], work, all_calls(loops["ours"]))  # which it meets depends on the clock
    for loop in loops.values():
        measure(loop, work, work.questions, step=1)  # compiles the others'
    return measure_all(loops, work, slice(None), 1 if args.quick else args.rounds)


def make_loops(work, batch: int) -> dict[str, Any]:
    from lockstep import Design, LockStep

    from parasearch_jax.rollout import Engine

    designs = {
        "a": Design(behind=BEHIND),
        "b": Design(),
        "keeps": Design(keeps=True),
        "shares": Design(keeps=True, shares=True),
    }
    loops = {name: LockStep(work.model, work.config, design, batch) for name, design in designs.items()}
    return loops | {"ours": Engine(work.model, work.config)}


def best_batch(work, sizes: Sequence[int]) -> int:
    """The batch size whose decoding takes (b) least time an episode: the steps that many scripted batches take, each at
    the cost of a step at that length, of which two are measured. What is fed does not depend on the batch."""
    import numpy as np
    from lockstep import Design, LockStep

    if len(sizes) == 1:
        return sizes[0]
    lengths = work.script.draw(1024)
    starts, costs = work.script.starts(lengths), {}
    short, long = work.config.max_total_tokens // 4, work.config.max_total_tokens - 64
    for size in sizes:
        loop = LockStep(work.model, work.config, Design(), size)
        low, high = loop.step_seconds(short), loop.step_seconds(long)
        costs[size] = 0.0
        for i in range(0, len(lengths), size):
            for n, start in zip(lengths[i : i + size].T, starts[i : i + size].T, strict=True):
                at = np.arange(n.max())
                longest = np.where(at < n[:, None], start[:, None] + at, 0).max(0)
                costs[size] += (low + (high - low) * (longest - short) / (long - short)).sum() / len(lengths)
    said = ", ".join(f"{size}: {seconds:.2f}" for size, seconds in costs.items())
    print(f"\nbatch size of the lock-step loops: seconds of decoding an episode {said}", flush=True)
    return min(costs, key=costs.get)


def quickest_batch(work, sizes: Sequence[int]) -> int:
    """The batch size at which (b) has the highest rate over all questions."""
    from lockstep import Design, LockStep

    rates = {}
    for size in sizes:
        loop = LockStep(work.model, work.config, Design(), size)
        rates[size] = [measure(loop, work, work.questions, step)["rate"] for step in (0, 0)][1]  # the first compiles
    said = ", ".join(f"{size}: {rate:.1f}" for size, rate in rates.items())
    print(f"\nbatch size of the lock-step loops: episodes/s of (b) {said}", flush=True)
    return max(rates, key=rates.get)


def scripted_calls(loop, work) -> set[tuple[int, int]]:
    """(tokens of a row, cells it has behind the call; 0: a new row) of what the script will have fed."""
    from parasearch_jax.rollout.sizes import holding

    sizes, starts = loop.shards.sizes, work.script.starts(work.lengths)
    if design(loop) and not design(loop).keeps:
        return {(holding(int(start), sizes.lengths), 0) for start in starts.ravel()}
    ends = {holding(int(start), sizes.long_windows) for start in starts[:, 1:].ravel()}
    return {(work.script.prompt, 0)} | {(work.script.documents + 1, end) for end in ends}


def all_calls(loop) -> set[tuple[int, int]]:
    """The same of what a loop may meet."""
    sizes = loop.shards.sizes
    return {(n, end) for n in sizes.lengths for end in (0, *sizes.long_windows) if not 0 < end < n}


def design(loop):
    """What a lock-step loop does; None: the engine."""
    return getattr(loop, "design", None)


def compile_calls(loop, work, calls: set[tuple[int, int]]) -> None:
    """Compiles `decode_chunk` of all sizes and `extend` of these, with one row; drops what that leaves in slots."""
    import jax
    from lockstep import CHUNK

    from parasearch_jax.rollout.kv_cache import PAGE
    from parasearch_jax.rollout.sampler import Sampling
    from parasearch_jax.rollout.shards import Row

    shards, steps = loop.shards, CHUNK if design(loop) else work.config.chunk
    shards.open()
    sizes = shards.sizes
    for read in sizes.reads:  # no slot is active: it ends at once
        lengths = [PAGE * read] if sizes.paged else [read - steps]
        shards.decode(loop.table(work.protocol), steps, dict(enumerate(lengths)), False)
    key = shards.put(jax.random.key(0))
    for tokens, end in sorted(calls):
        row = Row(0, [0] * (tokens - 1), end and end - tokens + 1, 0, 1, 0, Sampling())
        shards.extend([row], key)
        if not end and (design(loop) is None or design(loop).shares):
            shards.extend([row._replace(slot=1, source=0)], key)
    shards.drop()


# ------------------------------------------------------------------------------------------------------- measurements


def measure(loop, work, questions: Sequence, step: int) -> dict[str, float]:
    """Episodes a second, and what the loop counts, for each episode."""
    loop.pop_stats()
    start, cpu = time.perf_counter(), time.process_time()
    episodes = loop.rollout(questions, work.protocol, work.retriever, samples=work.samples, step=step)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    stats = loop.pop_stats() | {"seconds/cpu": cpu}
    occupancy = stats["tokens/sampled"] / stats["slot_steps"]
    return {"rate": len(episodes) / seconds, "occupancy": occupancy} | {k: v / len(episodes) for k, v in stats.items()}


def measure_all(loops: dict, work, part: slice, rounds: int) -> str:
    """The tables of a workload. Who goes first changes from round to round."""
    import jax

    compiled: list[float] = []
    listen = lambda name, seconds, **_: compiled.append(seconds) if name.endswith("compile_duration") else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    results: dict[str, list[dict]] = {name: [] for name in loops}
    for i in range(rounds):
        names = [name for name in loops if name in ("a", "b", "ours") or not i]  # those between run once
        for name in names[:: 1 if i % 2 else -1]:
            questions = work.questions if name == "ours" else work.questions[part]
            results[name].append(measure(loops[name], work, questions, step=i + 1))
            print(f"{name} {results[name][-1]['rate']:.3f}", end="  ", file=sys.stderr, flush=True)
    loops["ours"].close()
    slots, batch = work.config.slots, loops["b"].batch
    counts = len(work.questions) * work.samples, len(work.questions[part]) * work.samples
    text = (
        f"**{work.name}**: {counts[0]} episodes of {work.samples} a question through {slots} slots, {counts[1]} in "
        f"batches of {batch} for the lock-step loops; {rounds} rounds"
    )
    if compiled:
        text += f" (in which programs were compiled for {sum(compiled):.1f} s)"
    return "\n\n".join([text, rates(results), shares(results)])


# ------------------------------------------------------------------------------------------------------------- report


def rates(results: dict[str, list[dict]]) -> str:
    """Medians and ranges of episodes/s, and ours against each loop round by round."""
    rate = {name: [m["rate"] for m in measured] for name, measured in results.items()}
    lines = ["| episodes/s | median | lowest | highest |", "|---|---:|---:|---:|"]
    for name in reversed(NAMES):
        lines.append(row(NAMES[name], rate[name], ".3g"))
    for name in ("a", "b"):
        ratios = [ours / theirs for ours, theirs in zip(rate["ours"], rate[name], strict=True)]
        lines.append(row(f"ours / ({name}), round by round", ratios, ".2f"))
    return "\n".join(lines)


def row(label: str, values: Iterable[float], form: str) -> str:
    return f"| {label} | " + " | ".join(f"{f(values):{form}}" for f in (statistics.median, min, max)) + " |"


COLUMNS = {  # heading -> (counter, decimals); all but occupancy are means of an episode
    "tokens fed": ("tokens/prefilled", 0),
    "tokens kept": ("tokens/sampled", 0),
    "steps x slots": ("slot_steps", 0),
    "occupancy": ("occupancy", 2),
    "s prefill": ("seconds/prefill", 3),
    "s decode": ("seconds/decode", 3),
    "s wait": ("seconds/wait", 3),
    "s of CPU": ("seconds/cpu", 3),
}


def shares(results: dict[str, list[dict]]) -> str:
    """What each step from (a) to ours brings; medians over the rounds, counters by episode."""
    lines = [
        "| each with what stands above it | episodes/s | gain | share | " + " | ".join(COLUMNS) + " |",
        "|---|---:|---:|---:|" + "---:|" * len(COLUMNS),
    ]
    rate = {name: statistics.median(m["rate"] for m in results[name]) for name in NAMES}
    whole, before = math.log(rate["ours"] / rate["a"]), rate["a"]
    for name, label in NAMES.items():
        gain = f"x {rate[name] / before:.2f} | {math.log(rate[name] / before) / whole:.0%}" if name != "a" else " | "
        cells = [f"{statistics.median(m.get(k, 0) for m in results[name]):.{d}f}" for k, d in COLUMNS.values()]
        lines.append(f"| {label} | {rate[name]:.3g} | {gain} | " + " | ".join(cells) + " |")
        before = rate[name]
    return "\n".join(lines) + "\n\nshare: of the logarithm of the whole gain, so that shares add up."


if __name__ == "__main__":
    main()
