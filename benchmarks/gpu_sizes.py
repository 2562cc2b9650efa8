"""What benchmarks/gpu.py measures, and what its figures are held against: cards, and the plan's arithmetic.

Axes: B rows, T tokens, N heads, K kv-heads, H head dim.
"""

from __future__ import annotations

import dataclasses
import re

import jax

from parasearch_jax.models.decoder import DecoderConfig
from parasearch_jax.models.shapes import named_shape
from parasearch_jax.plan.cost import cost
from parasearch_jax.plan.devices import DEVICES
from parasearch_jax.plan.memory import by_arithmetic
from parasearch_jax.plan.run import Corpus, Run
from parasearch_jax.rl.learner import AlgorithmConfig
from parasearch_jax.rl.optim import OptimConfig
from parasearch_jax.rl.update import UpdateConfig
from parasearch_jax.rollout import RolloutConfig
from parasearch_jax.sharding.mesh import MeshConfig


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured."""

    models: tuple[tuple[str, DecoderConfig], ...]
    heads: tuple[int, int, int]  # N, K, H of attention
    lengths: tuple[int, ...]  # T of attention, the most telling first
    attention_tokens: int  # B T of attention
    calls: int  # of attention between two looks at the clock, so that the host's part vanishes
    slots: int  # of the decode step
    cells: int  # of a slot
    window: int  # cells read: the engine reads a power of two that holds the longest row
    steps: int  # of a decode chunk; rollout.chunk
    rows: int  # of a micro-batch of the train step
    tokens: int  # of a row
    micro_batches: int
    attention: str  # of the train step
    repeats: int


FULL = Sizes(
    models=tuple((name, named_shape(name)) for name in ("qwen2.5-1.5b", "qwen2.5-7b")),
    heads=(28, 4, 128),
    lengths=(4096, 2048, 1024, 512),
    attention_tokens=16384,
    calls=10,
    slots=32,
    cells=4096,
    window=2048,
    steps=16,
    rows=8,
    tokens=4096,
    micro_batches=2,
    attention="cudnn",  # what "auto" takes on GPUs
    repeats=9,
)
TOY = DecoderConfig(
    vocab_size=256,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=64,
    dtype="bfloat16",
)
SMOKE = Sizes(
    models=(("toy", TOY),),
    heads=(4, 2, 8),
    lengths=(64,),
    attention_tokens=128,
    calls=2,
    slots=4,
    cells=64,
    window=32,
    steps=4,
    rows=2,
    tokens=32,
    micro_batches=2,
    attention="xla",
    repeats=3,
)

# ------------------------------------------------------------------------------------------------------------ the card


def _of_plan(name: str) -> tuple[float, float]:
    return DEVICES[name].flops_per_second, DEVICES[name].bytes_per_second


# Name in JAX's device_kind, FLOP/s of dense bf16, bytes/s of its memory. The first that matches holds. Those that plans
# can name come from their table, the others from NVIDIA's data sheets.
CARDS = (
    ("H200", *_of_plan("h200")),
    ("H100 PCIe", 756e12, 2.0e12),
    ("H100 NVL", 835e12, 3.9e12),
    ("H100", *_of_plan("h100")),
    ("A100-(SXM4|PCIE)-40GB", 312e12, 1.555e12),
    ("A100 80GB PCIe", 312e12, 1.935e12),
    ("A100", *_of_plan("a100")),
    ("L40S", 362e12, 0.864e12),
    ("L4", 121e12, 0.3e12),
    ("RTX 4090", 165e12, 1.008e12),
)


@dataclasses.dataclass(frozen=True)
class Card:
    """The device, and what it could do at best (None: not in CARDS)."""

    kind: str
    memory: float  # bytes that JAX may use
    peak: float | None  # FLOP/s, dense bf16
    bandwidth: float | None  # bytes/s

    @classmethod
    def of(cls, device: jax.Device) -> Card:
        memory = (device.memory_stats() or {}).get("bytes_limit", 8e9)  # a CPU tells none
        found = [peaks for name, *peaks in CARDS if re.search(rf"\b{name}\b", device.device_kind)]
        return cls(device.device_kind, memory, *(found or [(None, None)])[0])

    def utilisation(self, flops: float, seconds: float) -> str:
        """As "41.2 % of 989 TFLOP/s", or the rate alone."""
        if self.peak is None:
            return f"{flops / seconds / 1e12:.3g} TFLOP/s, peak of {self.kind!r} unknown"
        return f"{100 * flops / seconds / self.peak:.1f} % of {self.peak / 1e12:.0f} TFLOP/s"

    def roofline(self, read: float, seconds: float) -> str:
        if self.bandwidth is None:
            return f"{read / seconds / 1e9:.3g} GB/s, bandwidth of {self.kind!r} unknown"
        least = read / self.bandwidth
        return f"at least {1e3 * least:.2f} ms at {self.bandwidth / 1e9:.0f} GB/s: {100 * least / seconds:.0f} %"


# ------------------------------------------------------------------------------------------------------ the arithmetic
#
# Of the plan (parasearch_jax/plan): what is measured here is what it assumes.


def plan_run(cfg: DecoderConfig, sizes: Sizes, rows: int) -> Run:
    """What is measured, as the plan sees it: one device, `rows` in a micro-batch, all cells that are read in use."""
    return Run(
        name="gpu",
        model=cfg,
        model_source="",
        mesh=MeshConfig(),
        algorithm=AlgorithmConfig(name="grpo", questions=rows * sizes.micro_batches // 2, samples=2),
        learner=UpdateConfig(micro_rows=rows, buckets=(sizes.tokens,), remat="full"),
        optimizer=OptimConfig(lr=1e-6),
        critic_optimizer=OptimConfig(lr=1e-6),
        rollout=RolloutConfig(slots=sizes.slots, max_total_tokens=sizes.window, chunk=sizes.steps),
        tokens=sizes.tokens,
        steps=1,
        corpus=Corpus(None, None, None, 0, False, ""),
        device=DEVICES["h100"],  # of which bytes and operations know nothing
        host_gib=0.0,
    )


def model_flops(run: Run) -> float:
    """Of an update: 6 a token and matrix parameter and attention's, so three forward passes. MFU counts these."""
    return 3 * cost(run).flops["score"]


def computed_flops(run: Run) -> float:
    """Of an update, with what remat makes again. Of these the plan assumes that a device does a share of its peak."""
    return cost(run).flops["update"]


def attention_flops(B: int, T: int, N: int, H: int) -> int:
    """Of a forward pass: two products, each over half of the square."""
    return 2 * B * N * H * T * T


def train_bytes(run: Run) -> float:
    """At the peak of an update, with no sampler on the card."""
    plan = by_arithmetic(run)
    return plan.phases["update"] - plan.parts["sampler's copy"] - plan.parts["KV cache"]


def run_that_fits(cfg: DecoderConfig, sizes: Sizes, memory: float) -> Run | None:
    """All rows and layers, or as many as `memory` bytes hold; None if not a layer fits beside the embedding.

    Layers are left out, and rows halved as long as that makes room for a fifth more layers.
    """

    def fitting(rows: int) -> list[Run]:
        cut = (dataclasses.replace(cfg, num_layers=k) for k in range(1, cfg.num_layers + 1))
        return [run for run in (plan_run(shape, sizes, rows) for shape in cut) if train_bytes(run) <= 0.95 * memory]

    rows = sizes.rows
    while rows > 2 and len(fitting(rows)) < cfg.num_layers and len(fitting(rows // 2)) > 1.2 * len(fitting(rows)):
        rows //= 2
    return (fitting(rows) or [None])[-1]
