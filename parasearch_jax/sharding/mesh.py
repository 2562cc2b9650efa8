"""The devices of a run as a mesh ('fsdp', 'tp').

fsdp    rows of a batch and slots of the sampler are split over it; parameters and moments too, gathered where used
tp      heads, ffn and vocabulary are split over it; always within one host
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from parasearch_jax.errors import UserError

AXES = ("fsdp", "tp")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis."""

    fsdp: int = 1
    tp: int = 1

    def __post_init__(self):
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise UserError(f"mesh.{axis} is {getattr(self, axis)}, it must be >= 1")

    @property
    def size(self) -> int:
        return self.fsdp * self.tp


def make_mesh(config: MeshConfig = MeshConfig(), devices: list[jax.Device] | None = None) -> Mesh:
    """The mesh over the first devices of all hosts; those of one host lie side by side.

    Raises UserError if there are too few devices, if several hosts would take unequal shares, or if tp would cross a
    host (its collectives run in every layer).
    """
    devices = devices or sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    hosts = len({d.process_index for d in devices})
    asked = f"mesh.fsdp x mesh.tp is {config.fsdp} x {config.tp} = {config.size}"
    if len(devices) < config.size:
        raise UserError(f"{asked} devices, JAX sees {len(devices)}: lower mesh.fsdp or mesh.tp")
    if hosts > 1 and config.size != len(devices):
        raise UserError(f"{asked} devices, the {hosts} hosts have {len(devices)}: their product must be that number")
    if (len(devices) // hosts) % config.tp and hosts > 1:
        raise UserError(
            f"mesh.tp is {config.tp}, a host has {len(devices) // hosts} devices: give a tp that divides their number"
        )
    return _mesh(np.asarray(devices[: config.size]).reshape(config.fsdp, config.tp))


def local_mesh(mesh: Mesh) -> Mesh:
    """The rows of `mesh` whose devices belong to this process: what it samples on."""
    mine = [row for row in mesh.devices if all(d.process_index == jax.process_index() for d in row)]
    return _mesh(np.asarray(mine))


def _mesh(devices: np.ndarray) -> Mesh:
    # Auto: the compiler follows the specs of rules.py; jax.make_mesh's own default asks for types in every operation.
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))
