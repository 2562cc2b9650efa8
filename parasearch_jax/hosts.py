"""Several hosts: one process each, joined by `jax.distributed`, that run the same program side by side.

    hosts.spread(sample, questions)       every host does its part, all get the whole, in order
    hosts.from_first(compute)             the first host computes, all get the value
    with hosts.together(): ...            an error on one host is raised on all, so that none waits for it for ever

All hosts must come to each of these, in the same order. With one process they do nothing but call what they are given.
"""

from __future__ import annotations

import collections
import contextlib
import os
import pickle
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from parasearch_jax.errors import UserError

T = TypeVar("T")
GONE = re.compile("gloo|remote process exited|connection|socket closed|unavailable|barrier|heartbeat", re.IGNORECASE)
HEARTBEAT = 100  # seconds without a sign of life after which JAX's coordinator takes a host for lost
BLOCK = 1 << 22  # bytes of one exchange: few sizes, so few programs, and little device memory


class Told(UserError):
    """An error of one host, or of all, that every host raises."""


class HostLost(UserError):
    """Another process of the run is gone."""

    def __init__(self, error: Exception):
        seen = " ".join(str(error).split())
        super().__init__(
            f"another host of the run was lost ({seen:.200}); see its log, then start all hosts again: the same "
            "command goes on from the last complete checkpoint"
        )


# ----------------------------------------------------------------------------------------------------- joining, leaving


@contextlib.contextmanager
def joined(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    distributed: bool = False,
    heartbeat: int = HEARTBEAT,
) -> Iterator[None]:
    """Joins the other hosts of a run, before the first use of a device; without arguments it does nothing.

    Either the first three (`coordinator`: "host:port" of process 0), or `distributed`: what SLURM, Open MPI, Kubernetes
    or a TPU pod says, as JAX reads it. An exception that leaves the block ends this process: the interpreter's own end
    would wait for hosts that wait for this one. Raises UserError naming the flag.
    """
    if not _join(coordinator, num_processes, process_id, distributed, heartbeat):
        yield
        return
    try:
        yield
    except SystemExit:  # of all hosts alike (SIGTERM): JAX waits for them when the interpreter ends
        raise
    except BaseException as error:
        _leave(error)


def _join(coordinator, num_processes, process_id, distributed, heartbeat) -> bool:
    given = {"--coordinator": coordinator, "--num_processes": num_processes, "--process_id": process_id}
    named = {flag: value for flag, value in given.items() if value is not None}
    if not named and not distributed:
        return False
    if named and distributed:
        flag, value = next(iter(named.items()))
        raise UserError(f"{flag}={value} and --distributed say the same in two ways: leave one of them out")
    if not distributed:
        _check_flags(given)
    place = "of this job" if distributed else f"at {coordinator}, as process {process_id} of {num_processes}"
    print(f"joins the hosts {place}; waits for all, 5 minutes at most", file=sys.stderr, flush=True)
    # JAX's own handler would swallow a SIGTERM that comes before the loop has installed ours.
    jax.config.update("jax_enable_preemption_service", False)
    method = None if distributed else "deactivate"
    try:
        jax.distributed.initialize(
            coordinator, num_processes, process_id, cluster_detection_method=method, heartbeat_timeout_seconds=heartbeat
        )
    except (ValueError, RuntimeError) as error:  # no cluster; Kubernetes without what JAX needs; the port is taken
        flag = "--distributed" if distributed else f"--coordinator={coordinator}"
        raise UserError(
            f"{flag}: JAX can't join the other hosts ({' '.join(str(error).split())}); give --coordinator=HOST:PORT (a "
            "free port of process 0's host), --num_processes and --process_id"
        ) from error
    if distributed and _alone_on_its_host():
        # JAX takes one GPU a process under SLURM and Open MPI: the one of the process's number on its host.
        for platform in ("cuda", "rocm"):
            jax.config.update(f"jax_{platform}_visible_devices", "all")
    counts = list(collections.Counter(device.process_index for device in jax.devices()).values())
    if len(set(counts)) > 1:
        raise UserError(
            f"the processes have {', '.join(map(str, counts))} devices: they need the same number each, for example by "
            "CUDA_VISIBLE_DEVICES"
        )
    return True


def _check_flags(given: dict[str, Any]) -> None:
    coordinator, count, index = given.values()
    missing = [flag for flag, value in given.items() if value is None]
    if missing:
        there = ", ".join(f"{flag}={value}" for flag, value in given.items() if value is not None)
        raise UserError(f"{missing[0]} is missing beside {there}: several hosts need all of {', '.join(given)}")
    if not re.fullmatch(r".+:\d+", coordinator):
        raise UserError(f"--coordinator is {coordinator!r}: give HOST:PORT, where process 0 runs and a port free there")
    if count < 1:
        raise UserError(f"--num_processes is {count}: give the number of hosts, at least 1")
    if not 0 <= index < count:
        raise UserError(f"--process_id is {index}: with --num_processes={count} give 0 to {count - 1}, each once")


def _alone_on_its_host() -> bool:
    """Whether this process may have all its host's devices."""
    if "JAX_LOCAL_DEVICE_IDS" in os.environ:
        return False
    slurm = os.environ.get("SLURM_NTASKS") == os.environ.get("SLURM_STEP_NUM_NODES", "")
    return slurm or os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"


def _leave(error: BaseException) -> None:
    """Tells the error and ends the process. Others that wait for this one see its connections closed."""
    told = isinstance(error, Told)
    fault = error.__cause__ if told else error
    if fault is not None and not isinstance(fault, UserError):
        traceback.print_exception(fault)
    if isinstance(error, UserError):
        print(f"error: {error}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    if told:  # so that the end of process 0, which coordinates, doesn't cut off the others' words
        jax.distributed.shutdown()
    os._exit(1)


@contextlib.contextmanager
def lost_is_told() -> Iterator[None]:
    """Turns what JAX raises when another host is gone into HostLost.

    Where nothing is raised, JAX's coordinator ends the process itself, HEARTBEAT seconds after the loss at the latest.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() > 1 and GONE.search(str(error)):
            raise HostLost(error) from error
        raise


# ------------------------------------------------------------------------------------------------------- who does what


def is_first() -> bool:
    """Whether this is the process that writes, prints and scores."""
    return jax.process_index() == 0


def is_alone() -> bool:
    """Whether no other host takes part."""
    return jax.process_count() == 1


def share(items: Sequence[T]) -> Sequence[T]:
    """This process's part: contiguous, in process order, sizes differing by one at most."""
    n, i, count = len(items), jax.process_index(), jax.process_count()
    return items[n * i // count : n * (i + 1) // count]


def spread(compute: Callable[[Sequence[T]], Sequence[Any]], items: Sequence[T]) -> list[Any]:
    """What `compute` makes of the shares, on every process and in the order of `items`."""
    with together():
        mine = compute(share(items))
    return gather(mine)


def gather(items: Sequence[T]) -> list[T]:
    """The items of all processes, in process order; Python objects that pickle."""
    if jax.process_count() == 1:
        return list(items)
    with lost_is_told():
        return [item for data in _exchange(pickle.dumps(list(items))) for item in pickle.loads(data)]


def on_first(compute: Callable[[], T]) -> T | None:
    """What `compute` gives on process 0; the others don't call it, wait for it, and get None."""
    with together():
        return compute() if is_first() else None


def from_first(compute: Callable[[], T]) -> T:
    """What `compute` gives on process 0, on every process."""
    value = on_first(compute)
    return gather([value] if is_first() else [])[0]


def any_host(flag: bool) -> bool:
    """Whether `flag` is true on some process."""
    return any(gather([flag]))


@contextlib.contextmanager
def together() -> Iterator[None]:
    """A block that all processes leave alike: an Exception in one of them is raised on all, as Told.

    No process may wait in the block for another that has an error behind it: only the first statement in it may be one
    of this module's functions.
    """
    if jax.process_count() == 1:
        yield
        return
    failure = None
    try:
        yield
    except (HostLost, Told):
        raise
    except Exception as error:
        failure = error
    reports = dict(enumerate(gather([_report(failure)])))
    failed = {i: report for i, report in reports.items() if report}
    if len(failed) == len(reports) and len(set(failed.values())) == 1:
        raise Told(failed[0]) from failure
    if failed:
        raise Told("; ".join(f"on host {i}: {report}" for i, report in failed.items())) from failure


def _report(failure: Exception | None) -> str:
    if failure is None:
        return ""
    return str(failure) if isinstance(failure, UserError) else f"{failure!r} (its log has the traceback)"


def _exchange(data: bytes) -> list[bytes]:
    """The data of all processes. Sizes first, then blocks as large as the longest needs, padded."""
    sizes = multihost_utils.process_allgather(np.frombuffer(len(data).to_bytes(8, "little"), np.uint8))
    sizes = [int.from_bytes(row.tobytes(), "little") for row in sizes]
    block = min(BLOCK, max(1 << 12, 1 << (max(sizes) - 1).bit_length()))
    parts: list[list[np.ndarray]] = [[] for _ in sizes]
    for start in range(0, max(sizes), block):
        mine = np.frombuffer(data[start : start + block], np.uint8)
        rows = multihost_utils.process_allgather(np.pad(mine, (0, block - len(mine))))
        for part, row in zip(parts, rows, strict=True):
            part.append(row)
    return [np.concatenate(part)[:size].tobytes() for part, size in zip(parts, sizes, strict=True)]


def fetch(x: jax.Array | np.ndarray) -> np.ndarray:
    """The whole of an array, on every process; one that spans processes is gathered on the devices first."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return jax.device_get(x)
    with lost_is_told():
        return multihost_utils.process_allgather(x, tiled=True)
