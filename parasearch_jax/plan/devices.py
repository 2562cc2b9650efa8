"""Accelerators that a plan can speak of."""

from __future__ import annotations

import dataclasses

from parasearch_jax.errors import UserError

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Device:
    """One chip: memory and bandwidth of its HBM, dense bf16 peak. `reserve`: what is not the run's, so CUDA's context
    and NCCL's buffers on a GPU, the runtime's on a TPU (an allowance, not measured)."""

    name: str
    memory_gib: float
    bytes_per_second: float
    flops_per_second: float
    reserve_gib: float

    @property
    def usable_gib(self) -> float:
        return self.memory_gib - self.reserve_gib


# Vendors' data sheets: NVIDIA H100, H200 and A100 (SXM, 80 GB); Google Cloud TPU v5e and v5p, "system architecture".
# GiB of the GPUs as nvidia-smi shows them: 81,559, 143,771 and 81,920 MiB.
DEVICES = {
    device.name.lower(): device
    for device in (
        Device("H100", 79.6, 3.35e12, 989e12, 3.5),
        Device("H200", 140.4, 4.8e12, 989e12, 3.5),
        Device("A100", 80.0, 2.04e12, 312e12, 3.5),
        Device("TPU v5e", 16.0, 0.819e12, 197e12, 0.5),
        Device("TPU v5p", 95.0, 2.765e12, 459e12, 0.5),
    )
}


def find_device(name: str) -> Device:
    """By name, with or without "TPU" and in any case; UserError listing the names."""
    key = name.lower().replace("-", " ").strip()
    for known in (key, f"tpu {key}"):
        if known in DEVICES:
            return DEVICES[known]
    raise UserError(f"machine.device is {name!r}; use one of: {', '.join(device.name for device in DEVICES.values())}")
