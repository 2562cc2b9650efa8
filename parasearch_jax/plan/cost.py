"""Work and time of a run: floating-point operations of a step, bytes of a decode step, hours on a device. Estimates.

Axes as in memory.py. A product of [m,k] and [k,n] counts 2 m k n; attention half of its square; nothing else counts.
"""

from __future__ import annotations

import dataclasses

from parasearch_jax.plan.memory import cell_bytes, matrices
from parasearch_jax.plan.run import Run


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """What nobody can know before the run."""

    length: float = 0.5  # tokens of a mean episode, as a share of rollout.max_total_tokens
    sampled: float = 0.5  # of them by the policy, the rest prompt and documents
    prompt: float = 0.1  # of them the prompt, which is fed once for all samples of a question
    occupancy: float = 0.7  # of the slots, over the decode steps
    flops: float = 0.4  # of a device's peak, in training, scoring and prefill
    bandwidth: float = 0.6  # of a device's peak, in decode steps


ASSUMED = Assumptions()


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one step of training. FLOPs of all devices together, bytes of one device; seconds by phase."""

    flops: dict[str, float]
    decode_bytes: float
    decode_seconds: float  # of one, at the full bandwidth
    seconds: dict[str, float]

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())


def cost(run: Run, assumed: Assumptions = ASSUMED) -> Cost:
    m, device, count = run.model, run.device, matrices(run)
    layers, head = m.num_layers * count["layer"], count["vocab"]
    flops: dict[str, float] = {}

    # ---- Rollout. Idle slots decode too; attention counts with the prefill, whoever does it.
    length = assumed.length * run.rollout.max_total_tokens
    sampled = run.episodes * length * assumed.sampled
    steps = sampled / run.rollout.slots / assumed.occupancy
    flops["decode"] = 2 * (layers + head) * steps * run.rollout.slots
    copied = (run.episodes - run.algorithm.questions) * length * assumed.prompt
    fed = run.episodes * length - sampled - copied
    flops["prefill"] = 2 * layers * fed + run.episodes * _attention(run, length)

    # ---- Score, update: rows are padded to their bucket.
    backbone = 2 * layers * run.rows * run.tokens + run.rows * _attention(run, run.tokens)
    logits = 2 * head * run.rows * run.tokens
    # Remat makes a layer again but for its last product, whose result only the next layer reads.
    down = 2 * m.num_layers * m.hidden_size * m.intermediate_size * run.rows * run.tokens
    passes = 3 * backbone + (backbone - down if run.learner.remat == "full" else 0)  # forward, twice that backward
    flops["score"] = (backbone + logits) * (1 + run.reference) + backbone * run.ppo
    flops["update"] = passes + logits * 4  # logits are made again whatever remat says
    if run.ppo:
        flops["update of the critic"] = passes

    decode_bytes = decode_step_bytes(run)
    seconds = {phase: work / (run.mesh.size * device.flops_per_second * assumed.flops) for phase, work in flops.items()}
    read = steps * decode_bytes / device.bytes_per_second
    compute = flops["decode"] / run.mesh.size / device.flops_per_second
    seconds["decode"] = max(read / assumed.bandwidth, compute)
    return Cost(flops, decode_bytes, decode_bytes / device.bytes_per_second, seconds)


def _attention(run: Run, length: float) -> float:
    """FLOPs of a row of `length` tokens, forward: scores and weighted sums, each with half of the square."""
    return 2 * 2 * run.model.num_layers * run.model.num_heads * run.model.head_dim * length**2 / 2


def decode_step_bytes(run: Run) -> float:
    """Read by one device: the weights but for the embedding, of which it takes a row a slot, and a full cache."""
    count = matrices(run)
    weights = run.model.num_layers * count["layer"] + count["vocab"]
    cells = run.rollout.slots / run.mesh.fsdp * run.rollout.max_total_tokens
    return (weights * run.item + cells * cell_bytes(run)) / run.mesh.tp
