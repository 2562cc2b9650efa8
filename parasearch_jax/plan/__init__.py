"""Memory and time of a run before it is started: `python launch.py --config=... --plan`.

run.py          what the configuration says: shapes, never weights
memory.py       bytes on a device by arithmetic, from shapes alone
compiled.py     the same from the real functions, compiled for virtual devices (buffers.py reads what they hold)
cost.py         FLOPs, decode bytes, hours on a device of devices.py
advice.py       what would make it fit
report.py       the page
"""

from __future__ import annotations

import os

import jax
from ml_collections import ConfigDict

from parasearch_jax.plan.compiled import by_compiler
from parasearch_jax.plan.devices import GIB, find_device
from parasearch_jax.plan.memory import by_arithmetic
from parasearch_jax.plan.report import Plan, page
from parasearch_jax.plan.run import read_corpus, read_run
from parasearch_jax.writers import Console


def print_plan(config: ConfigDict) -> Plan:
    """Prints the page. Before the first use of a device: it makes virtual ones, as many as the mesh has.

    Raises UserError for a configuration that no run could be made of.
    """
    run = read_run(config)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", run.mesh.size)
    plan = Plan(run, by_arithmetic(run), by_compiler(run))
    console = Console()
    for part in page(plan):
        console.print(part)
    return plan


def claim_memory(config: ConfigDict) -> None:
    """Sets the share of a GPU that JAX takes at its start, unless the environment says it: all but the reserve of
    `machine.device` and the FAISS index, if that shares the GPU. JAX's own 75 % of 80 GB would not hold the 7B run.

    Before the first use of a device. Does nothing for a configuration that names no device.
    """
    if config.machine.device and not os.environ.keys() & {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"}:
        os.environ["XLA_CLIENT_MEM_FRACTION"] = f"{memory_fraction(config):.3f}"


def memory_fraction(config: ConfigDict) -> float:
    """See `claim_memory`."""
    device, corpus = find_device(config.machine.device), read_corpus(config.retriever)
    index = (corpus.index_bytes or 0) / GIB / (config.mesh.fsdp * config.mesh.tp) if corpus.on_gpu else 0.0
    return (device.usable_gib - index) / device.memory_gib
