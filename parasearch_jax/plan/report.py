"""A plan as a page of text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import rich.box
import rich.table

from parasearch_jax.models.shapes import parameter_count
from parasearch_jax.plan.advice import advise
from parasearch_jax.plan.cost import ASSUMED, cost
from parasearch_jax.plan.devices import GIB
from parasearch_jax.plan.memory import PARTS, PHASES, STATE, Memory, by_arithmetic
from parasearch_jax.plan.run import Run

APART = 0.2  # from here on two columns differ
HOST_DEVICES = 8  # of one host, at most

# Why the compiled column of a part may lie apart from its arithmetic.
_CHOICE = "how many of its arrays live at one time is the compiler's choice"
REASONS = {
    "prefill": _CHOICE,
    "decode step": _CHOICE,
    "scoring": _CHOICE,
    "gradients": "copies of parameters and moments that the compiler can't update in place count here too",
    "kept activations": "what is kept but for the layers' inputs is the compiler's choice",
    "one layer at work": _CHOICE,
    "layer gathered": "which of a layer's matrices and gradients lie gathered at one time is the compiler's choice",
    "head gathered": _CHOICE,
    "log-prob chunk": _CHOICE,
    "weights on their way": "which matrices are gathered at one time is the compiler's choice",
}
SHARDED = "sharding/rules.py does not split it over all devices"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes on one device, in two columns."""

    run: Run
    arithmetic: Memory
    compiled: Memory

    @property
    def larger(self) -> Memory:
        return max(self.arithmetic, self.compiled, key=lambda memory: memory.peak)

    @property
    def room(self) -> float:
        """Bytes that are left at the peak; below 0: that are lacking."""
        return self.run.device.usable_gib * GIB - self.larger.peak

    def apart(self) -> dict[str, tuple[float, float]]:
        """Parts above a thousandth of the peak whose columns differ by more than APART of the larger."""
        pairs = {part: (self.arithmetic.parts[part], self.compiled.parts[part]) for part in PARTS}
        differ = lambda a, b: max(a, b) > self.larger.peak / 1000 and abs(a - b) > APART * max(a, b)  # noqa: E731
        return {part: pair for part, pair in pairs.items() if differ(*pair)}


def page(plan: Plan) -> Iterator[str | rich.table.Table]:
    """Lines and tables, in the order of reading."""
    yield from _head(plan.run)
    yield from ("", _parts(plan), "", _phases(plan), "")
    yield from _verdict(plan)
    yield from _differences(plan)
    yield from _host(plan.run)
    if plan.run.steps:
        yield from _time(plan.run)


def _head(run: Run) -> Iterator[str]:
    mesh, learner, algorithm = run.mesh, run.learner, run.algorithm
    slots, cells = run.rollout.slots, run.rollout.max_total_tokens
    yield f"{run.name}: {mesh.size} x {run.device.name}, mesh fsdp {mesh.fsdp} x tp {mesh.tp}"
    yield f"  model    {run.model_source}"
    yield f"           {parameter_count(run.model) / 1e9:.3g} billion parameters, computes in {run.model.dtype}"
    yield f"  rollout  {slots} slots of {cells:,} tokens ({slots // mesh.fsdp} a device)"
    if run.steps:
        updates = f"{algorithm.updates} update{'s' * (algorithm.updates > 1)}"
        micro = f"{learner.micro_rows} rows ({learner.micro_rows // mesh.fsdp} a device)"
        yield f"  step     {algorithm.name.upper()}, {run.episodes:,} episodes in rows of {run.tokens:,} tokens"
        yield f"           {updates}, micro-batches of {micro}"
        yield f"           remat {learner.remat}, logits of {learner.logprob_chunk} tokens at a time"
    yield f"  corpus   {run.corpus.source}"


def _table(*headings: str) -> rich.table.Table:
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i in (1, 2) else "left", no_wrap=True)
    return table


def _gib(size: float) -> str:
    return "-" if not size else f"{size / GIB:.2f}" if size >= 0.01 * GIB else f"{size / GIB:.4f}"


def _parts(plan: Plan) -> rich.table.Table:
    table, apart = _table("GiB on a device", "arithmetic", "compiled", "there in"), plan.apart()
    for part, phases in PARTS.items():
        sizes = plan.arithmetic.parts[part], plan.compiled.parts[part]
        if any(sizes):
            where = "all phases" if phases == PHASES else ", ".join(phases)
            table.add_row(part, *map(_gib, sizes), where + (" (*)" if part in apart else ""))
    return table


def _phases(plan: Plan) -> rich.table.Table:
    table = _table("together at most", "arithmetic", "compiled", "")
    for phase in plan.larger.phases:
        sizes = plan.arithmetic.phases[phase], plan.compiled.phases[phase]
        table.add_row(phase, *map(_gib, sizes), "<- peak" if phase == plan.larger.peak_phase else "")
    return table


def _verdict(plan: Plan) -> Iterator[str]:
    device, peak, room = plan.run.device, plan.larger.peak / GIB, plan.room / GIB
    usable = f"{device.usable_gib:.1f} GiB ({device.memory_gib:g} less {device.reserve_gib:g} for driver, libraries)"
    if room >= 0:
        yield f"FITS on {device.name}: {peak:.1f} of {usable}, {room:.1f} GiB are left."
        return
    yield f"DOES NOT FIT on {device.name}: {peak:.1f} of {usable}, {-room:.1f} GiB are lacking."
    # By what the arithmetic falls short of the compiled column here, it is taken to do so with other settings too.
    short = plan.larger.peak - plan.arithmetic.peak
    steps, enough = advise(plan.run, device.usable_gib * GIB - short)
    if enough and all(step.peak + short <= device.usable_gib * GIB for step in steps):
        yield "By the arithmetic each of these makes it fit:"
    else:
        told = "make it fit" if enough else "help, but are not enough"
        yield f"By the arithmetic these together {told}; the peak with each and those above it:"
    for step in steps:
        yield f"  --config.{step.leaf + '=' + step.value:<36} {(step.peak + short) / GIB:6.1f} GiB   {step.price}"


def _differences(plan: Plan) -> Iterator[str]:
    if apart := plan.apart():
        yield from ("", f"(*) The columns differ by more than {APART:.0%}:")
    for part, sizes in apart.items():
        yield f"  {part}: {' against '.join(map(_gib, sizes))}; {REASONS.get(part, SHARDED)}"


def _host(run: Run) -> Iterator[str]:
    """What a host's own memory has to hold."""
    hosts, corpus = -(-run.mesh.size // HOST_DEVICES), run.corpus
    parts = {
        "index": 0 if corpus.on_gpu else corpus.index_bytes or 0,
        "passages": corpus.text_bytes,
    }
    if run.steps:
        state = by_arithmetic(run).parts
        parts["a checkpoint being saved"] = sum(state[part] for part in STATE) * run.mesh.size / hosts
    total = sum(parts.values()) / GIB
    told = ", ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size)
    each = f"each of {hosts} hosts" if hosts > 1 else "the host"
    yield from ("", f"Memory of {each}, GiB: {told}; together {total:.3g}.")
    if run.host_gib:
        yield f"  machine.host_gib asks for {run.host_gib:g}: {'enough' if run.host_gib >= total else 'TOO LITTLE'}."


def _time(run: Run) -> Iterator[str | rich.table.Table]:
    found, device, a = cost(run), run.device, ASSUMED
    table = _table("a step of training", "FLOPs", "seconds")
    for phase, seconds in found.seconds.items():
        table.add_row(phase, f"{found.flops[phase]:.2e}", _number(seconds))
    hours, tokens = run.steps * found.step_seconds / 3600, f"{a.length * run.rollout.max_total_tokens:,.0f} tokens"
    step, read, ms = map(_number, (found.step_seconds, found.decode_bytes / 1e9, 1000 * found.decode_seconds))
    peak, rate = f"{device.flops_per_second / 1e12:.0f} TFLOP/s", f"{device.bytes_per_second / 1e12:.2f} TB/s"
    yield from ("", f"Time on {run.mesh.size} x {device.name}, estimated from what is assumed below, not measured:")
    yield from ("", table, "")
    yield f"{run.steps:,} steps of {step} seconds: {_number(hours)} hours, without evaluation and saving."
    yield f"A decode step with the cache full reads {read} GB a device: {ms} ms at {rate}."
    yield f"Assumed: {a.flops:.0%} of {peak}, {a.bandwidth:.0%} of the bandwidth in decode steps, episodes of {tokens}"
    yield f"in the mean, {a.sampled:.0%} of them sampled, {a.prompt:.0%} prompt (fed once a question),"
    yield f"{a.occupancy:.0%} of the slots busy, searches in no time."
    yield "Another device: --config.machine.device=H200"


def _number(x: float) -> str:
    return f"{x:,.0f}" if x >= 10 else f"{x:.2g}"
