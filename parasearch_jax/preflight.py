"""What a large run needs and this machine lacks, on one page, before anything is loaded.

A configuration says what it was laid out for (`machine`) and how to get what may be absent (`setup`).
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax
from ml_collections import ConfigDict

from parasearch_jax.data import hub
from parasearch_jax.data.questions import public_sets, question_files
from parasearch_jax.errors import UserError
from parasearch_jax.models.paths import lacks
from parasearch_jax.retrieval import ENCODERS
from parasearch_jax.retrieval.opening import is_built
from parasearch_jax.sharding.mesh import MeshConfig

GIB = 2**30
WIDTH = 110
LABEL = 18  # column of what a lack is


@dataclasses.dataclass(frozen=True)
class Lack:
    """Something that isn't there. `get` is the key of `config.setup` that says how to come by it."""

    leaf: str
    text: str
    get: str


def preflight(config: ConfigDict) -> None:
    """Raises UserError with a page that names everything missing, how to get it, and what to run instead.

    Does nothing for a configuration that asks nothing of the machine (`mesh` and `machine` at their defaults): there
    the loaders' own errors are more exact. Reads no weights, no questions, no corpus.
    """
    machine = config.machine
    mesh = MeshConfig(**config.mesh)
    if mesh.size == 1 and not machine.device_gib and not machine.host_gib:
        return
    of_machine = [*_devices(machine, mesh.size), *_host_memory(machine)]
    lacks = [*of_machine, *_model(config), *_questions(config), *_retriever(config)]
    if lacks:
        raise UserError(_page(config, lacks))


# ------------------------------------------------------------------------------------------------------- the machine


def _devices(machine: ConfigDict, wanted: int) -> Iterator[Lack]:
    """Fewer devices than wanted, or devices with too little memory. With `device_gib` a CPU is no device."""
    found = [d for d in jax.devices() if not (machine.device_gib and d.platform == "cpu")]
    seen = ", ".join(f"{count} x {kind}" for kind, count in Counter(d.device_kind for d in jax.devices()).items())
    if len(found) < wanted:
        size = f" with {machine.device_gib:g} GiB each" if machine.device_gib else ""
        yield Lack("devices", f"{len(found)} of {wanted}{size} (JAX sees: {seen})", "machine")
    sizes = [size for d in found if (size := _device_gib(d)) is not None]
    if sizes and min(sizes) < machine.device_gib:
        yield Lack("device memory", f"{min(sizes):.0f} of {machine.device_gib:g} GiB (JAX sees: {seen})", "machine")


def _device_gib(device: jax.Device) -> float | None:
    """Memory of a device, None where JAX doesn't tell (CPU, other hosts' devices).

    On a GPU JAX tells its own share, by default 75 % of the card; the card is what was asked for.
    """
    stats = device.memory_stats() if device.process_index == jax.process_index() else None
    if not stats or "bytes_limit" not in stats:
        return None
    share = os.environ.get("XLA_CLIENT_MEM_FRACTION") or os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or 0.75
    return stats["bytes_limit"] / GIB / (float(share) if device.platform == "gpu" else 1)


def _host_memory(machine: ConfigDict) -> Iterator[Lack]:
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    if found < machine.host_gib:
        yield Lack("host memory", f"{found:.0f} of {machine.host_gib:g} GiB", "machine")


# --------------------------------------------------------------------------------------------------------- the files


def _model(config: ConfigDict) -> Iterator[Lack]:
    if text := lacks(config.model.path):
        yield Lack("model.path", text, "model")


def _questions(config: ConfigDict) -> Iterator[Lack]:
    for split in ("train", "dev", "test") if config.train.steps else ("test",):
        spec = config.data[split]
        absent = [str(path) for _, path in question_files(spec) if not path.is_file()] if spec else []
        absent += filter(None, map(hub.lacks, public_sets(spec))) if spec else []
        if absent:
            yield Lack(f"data.{split}", ", ".join(absent), "data")


def _retriever(config: ConfigDict) -> Iterator[Lack]:
    settings = config.retriever
    if settings.kind != "local":  # the files are its server's, or there are none
        return
    if settings.corpus and not Path(settings.corpus).exists():
        yield Lack("retriever.corpus", settings.corpus, "corpus")
    if settings.get("index") and not is_built(settings.index):
        yield Lack("retriever.index", settings.index, "index")
    encoder = settings.get("encoder")
    if encoder and encoder not in ENCODERS and (text := lacks(encoder)):
        yield Lack("retriever.encoder", text, "encoder")


# ---------------------------------------------------------------------------------------------------------- the page


def _page(config: ConfigDict, lacks: list[Lack]) -> str:
    """Sections apart by blank lines; under the lacks of each kind the commands that end them, ready to be copied."""
    blocks = ["Missing on this machine, each with the way to get it:"]
    for get, group in itertools.groupby(lacks, key=lambda lack: lack.get):
        lines = [line for lack in group for line in _entry(lack.leaf, lack.text)]
        blocks.append("\n".join(lines + _indented(config.setup.get(get, ""), 4)))
    if config.setup.instead:
        blocks.append("\n".join(["What runs here instead:", *_indented(config.setup.instead, 2)]))
    return f"{config.name} can't run here. " + "\n\n".join(blocks)


def _entry(name: str, text: str) -> list[str]:
    """ "  name      text", the text's further lines under its first."""
    lines = textwrap.wrap(text, WIDTH - 2 - LABEL, break_long_words=False, break_on_hyphens=False)
    return [f"  {head:{LABEL}}{line}" for head, line in zip([name] + [""] * len(lines), lines, strict=False)]


def _indented(text: str, columns: int) -> list[str]:
    return textwrap.indent(text, " " * columns).splitlines()
