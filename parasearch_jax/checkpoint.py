"""Checkpoints on Orbax: a folder a step, with the arrays in `state/` and what else the run needs in `run/` (JSON).

A save runs in the background into a temporary folder that is renamed when it is complete, so a killed save leaves no
folder under a step's number. Folders that are numbered but not committed (a broken copy, another program's) are never
taken either. With several hosts all call the same methods: each writes the parts of the arrays that it holds, the first
one the JSON, and the folder is renamed when all have ended.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from absl import logging
from orbax.checkpoint import checkpoint_managers as policies

from parasearch_jax import hosts
from parasearch_jax.errors import UserError

ITEMS = ("state", "run")
DELETED = "deleted"  # where Orbax moves what is no longer kept


class Checkpoints:
    """The checkpoints of one run, `directory/<step>/`.

    Keeps the last `keep`, and the one that `protect` names. `read_only` leaves the directory untouched: for reading
    another run's work directory, perhaps while it trains.
    """

    def __init__(self, directory: str | Path, keep: int = 2, read_only: bool = False):
        if keep < 1:
            raise UserError(f"train.keep is {keep}, the number of last checkpoints to keep: give at least 1")
        self.directory = Path(directory).expanduser().absolute()
        self._read_only = read_only
        self._protected = _Protected()
        self._step: int | None = None  # of the last save begun
        self._failure: UserError | None = None
        if not read_only:
            _set_aside_incomplete(self.directory)
            self._delete()
        self._manager = ocp.CheckpointManager(
            self.directory,
            item_handlers={"state": ocp.StandardCheckpointHandler(), "run": ocp.JsonCheckpointHandler()},
            options=_options(keep, self._protected, read_only),
        )

    def protect(self, step: int | None) -> None:
        """Keeps checkpoint `step` beside the last ones until another is protected; None: no longer any.

        Holds from the next save on, and in this process only: name it again after a resume, before the first save.
        """
        self._protected.step = step

    def save(self, step: int, state: Any, run_state: dict) -> None:
        """Starts the save of `state` (pytree of jax arrays) and `run_state` (plain JSON values) under `step`.

        Waits for the save before it, and raises if that one failed. The caller may donate `state` at once: on devices
        Orbax has copied it to the host by then; on CPU, where it reads the arrays in place, XLA refuses the donation.
        """
        if self._read_only:
            raise ValueError(f"checkpoints in {self.directory} were opened read_only; open them without it to save")
        with hosts.together():
            _check_json(run_state)
            self.wait()
        self._step = step
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(run_state))
        try:
            self._manager.save(step, args=items, force=True)  # without force Orbax may skip it silently
        except OSError as error:  # no room for the folder itself
            raise self._fail(error) from error

    def wait(self) -> None:
        """Returns when the last save is complete; raises UserError if it failed, every time it is asked."""
        if self._failure is None:
            try:
                self._manager.wait_until_finished()
            except Exception as error:
                raise self._fail(error) from error
            self._delete()
        if self._failure is not None:
            raise self._failure

    def _delete(self) -> None:
        """Not left to Orbax: killed while it deletes, it leaves a part of a checkpoint under the step's number."""
        if jax.process_index() == 0 and not self._read_only:
            shutil.rmtree(self.directory / DELETED, ignore_errors=True)  # what stays goes the next time

    def check(self) -> None:
        """Raises UserError if a save has failed; doesn't wait for one in progress.

        Not by Orbax's `check_for_errors`: the thread that finishes a save takes the error before it can be asked for,
        and where the question comes first, that thread sees none and deletes the old checkpoints.
        """
        with hosts.together():
            if self._failure is not None or not self._manager.is_saving_in_progress():
                self.wait()

    def _fail(self, error: Exception) -> UserError:
        """Keeps the failure: Orbax raises it once only, and a swallowed one would look like success later."""
        self._failure = UserError(
            f"the save of checkpoint {self._step} in {self.directory} failed: {error}. Free disk space or mend the "
            f"directory; the last complete checkpoint is {self.latest()}"
        )
        return self._failure

    def latest(self) -> int | None:
        """The newest complete step on disk, None if there is none. A save in progress is not complete."""
        return latest_step(self.directory)

    def restore(self, step: int, like: Any) -> tuple[Any, dict]:
        """(state, run_state) of `step`, the state in the structure, dtypes and shardings of `like`.

        `like` is a pytree of arrays or ShapeDtypeStructs; one without a sharding goes to the first device, whatever
        devices the checkpoint was saved from. Raises UserError naming each leaf that differs.
        """
        if not is_complete(self.directory / str(step)):
            raise UserError(f"no complete checkpoint {step} in {self.directory}; the latest complete: {self.latest()}")
        self._check_leaves(step, like)
        target = jax.tree.map(_with_sharding, like)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(target), run=ocp.args.JsonRestore())
        restored = self._manager.restore(step, args=items)
        return restored["state"], restored["run"]

    def close(self) -> None:
        """Waits, then frees Orbax's threads; raises if the last save failed."""
        try:
            if not self._read_only:
                with hosts.together():
                    self.wait()
        finally:
            self._manager.close()

    def _check_leaves(self, step: int, like: Any) -> None:
        """Orbax casts another dtype in silence and reports structures as a page of reprs."""
        saved = leaves_by_path(self._manager.item_metadata(step)["state"].tree)
        wanted = leaves_by_path(like)
        pairs = {name: (saved.get(name), wanted.get(name)) for name in sorted(saved | wanted)}
        lines = [f"  {name}: saved {_show(s)}, wanted {_show(w)}" for name, (s, w) in pairs.items() if not _same(s, w)]
        if lines:
            more = [f"  and {len(lines) - 8} more"] if len(lines) > 8 else []
            raise UserError(
                f"checkpoint {step} in {self.directory} does not fit this model and optimizer; give the configuration "
                "it was made with, or another --workdir:\n" + "\n".join(lines[:8] + more)
            )


def latest_step(directory: Path) -> int | None:
    """`Checkpoints.latest` of a directory that need not be opened, which Orbax does on all hosts together."""
    return max((step for step, folder in _numbered(directory) if is_complete(folder)), default=None)


def is_complete(folder: Path) -> bool:
    """Whether `folder` is a committed checkpoint of ours: Orbax writes the commit time last, before the rename."""
    try:
        metadata = json.loads((folder / "_CHECKPOINT_METADATA").read_text())
    except (OSError, ValueError):
        return False
    return bool(metadata.get("commit_timestamp_nsecs")) and all((folder / item).is_dir() for item in ITEMS)


@dataclasses.dataclass
class _Protected(policies.PreservationPolicy):
    """Orbax asks it at every save which of its checkpoints to keep, the one being saved among them."""

    step: int | None = None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        return [checkpoint.step == self.step for checkpoint in checkpoints]


def _options(keep: int, protected: _Protected, read_only: bool) -> ocp.CheckpointManagerOptions:
    return ocp.CheckpointManagerOptions(
        preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep), protected]),
        todelete_subdir=None if read_only else DELETED,
        create=not read_only,
        cleanup_tmp_directories=not read_only,  # what a killed save left
    )


def _numbered(directory: Path) -> list[tuple[int, Path]]:
    if not directory.is_dir():
        return []
    return [(int(p.name), p) for p in directory.iterdir() if p.name.isdecimal() and p.is_dir()]


def _set_aside_incomplete(directory: Path) -> None:
    """Renames numbered folders that are no checkpoint: Orbax would count them as kept and refuse to save their step."""
    if jax.process_index() == 0:
        for _, folder in _numbered(directory):
            if not is_complete(folder):
                aside = folder.with_name(f"{folder.name}.incomplete-{time.time_ns()}")
                logging.warning("%s is not a complete checkpoint; renamed to %s", folder, aside.name)
                folder.rename(aside)
    ocp.multihost.sync_global_processes("parasearch:set_aside_incomplete")  # before the other hosts list the steps


def _check_json(run_state: dict) -> None:
    """Refuses what JSON would change or refuse in the background: int keys, tuples, numpy numbers."""
    for key, value in run_state.items():
        try:
            same = repr(json.loads(json.dumps(value))) == repr(value)  # by repr, so that nan equals nan
        except TypeError:
            same = False
        if not same or not isinstance(key, str):
            raise ValueError(
                f"run_state[{key!r}] = {value!r:.200} does not survive JSON; use dicts with string keys, lists, and "
                "plain int, float, str, bool or None"
            )


def _with_sharding(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)
    return leaf


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Leaves by path; optax's named tuples and the saved dicts and lists give the same names ("opt/0/mu/w")."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _same(saved: Any, wanted: Any) -> bool:
    if saved is None or wanted is None:
        return False
    if jax.dtypes.issubdtype(wanted.dtype, jax.dtypes.prng_key):  # stored as its uint32 words
        return saved.dtype == "uint32"
    return tuple(saved.shape) == tuple(wanted.shape) and saved.dtype == wanted.dtype


def _show(leaf: Any) -> str:
    return "nothing" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"
