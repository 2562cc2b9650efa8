"""Resuming: whether the run in a work directory is this one, and what of it is taken back to its last checkpoint.

Also SIGTERM, by which schedulers end a run that is to be resumed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import logging
from ml_collections import ConfigDict

from parasearch_jax import hosts
from parasearch_jax.data.hub import PublicSet
from parasearch_jax.data.questions import public_sets, question_files
from parasearch_jax.digests import sha256_of
from parasearch_jax.errors import UserError
from parasearch_jax.models.paths import model_files
from parasearch_jax.retrieval.folder import MANIFEST
from parasearch_jax.retrieval.opening import find_index
from parasearch_jax.stored import episode_files
from parasearch_jax.writers import METRICS, plain, write_text

# Leaves, and sections, that may differ from the checkpoint's: they don't change what a step computes.
MAY_DIFFER = frozenset(
    {
        "name",  # a label in results.json
        "train.steps",  # a longer run begins with the shorter one: nothing is scheduled by the number of steps
        "train.save_every",  # these and the next: when something is written or measured
        "train.episodes_every",
        "train.eval_every",
        "train.best",
        "evaluation",  # what else is measured
        "train.keep",  # which checkpoints stay
        "guard",  # looks on and changes nothing, but that it may end the run
        "mesh",  # these two: where the run goes; last bits differ with the number of devices
        "machine",
        "setup",  # how to get what is missing
        "retriever.url",  # where a server listens; what it searches is one of the inputs
        "retriever.deadline",
        "retriever.retries",
    }
)
QUESTIONS = ("data.train", "data.dev", "data.test")
INPUTS = ("model.path", *QUESTIONS, "data.episodes", "retriever.corpus", "retriever.encoder", "retriever.index")
# Of a model directory: also generation_config.json (end tokens) and the tokenizer's chat template are read.

# What the end of a run leaves; all of it speaks of the weights of the last step.
END = ("results.json", "report.md", "episodes.html", "evals/final.json", "episodes/final.jsonl")
END += ("evals/final_sampled.json", "episodes/final_sampled.jsonl")
END_FOLDERS = ("model", "report")

_NOTHING = object()


# ---------------------------------------------------------------------------------------------------- the same run?


def describe(config: ConfigDict, reward_fn: Callable | None = None) -> dict[str, Any]:
    """What the run is, as JSON holds it: the resolved configuration, and "reward_fn" (None, or its name and source).

    The source is that of the function itself: a change in what it calls, or in values it closes over, isn't seen.
    """
    return plain(json.loads(config.to_json_best_effort()) | {"reward_fn": _describe_function(reward_fn)})


def _describe_function(function: Callable | None) -> dict[str, str | None] | None:
    if function is None:
        return None
    bound = []
    while isinstance(function, functools.partial):
        bound.append(f"{function.args} {function.keywords}")
        function = function.func
    if not hasattr(function, "__qualname__"):  # an object with __call__
        function = type(function)
    try:
        sha256 = hashlib.sha256(inspect.getsource(function).encode()).hexdigest()
    except (OSError, TypeError):  # typed at a prompt, or written in C
        sha256 = None
    name = f"{function.__module__}:{function.__qualname__}"
    return {"name": name, "sha256": sha256} | ({"bound": " ".join(bound)} if bound else {})


def check_same(old: dict, new: dict, where: str) -> None:
    """Raises UserError naming each leaf in which two `describe`s differ, MAY_DIFFER aside.

    `where` is what `old` belongs to: "checkpoint 40 in runs/tiny".
    """
    pairs = _differences(_leaves(plain(old)), _leaves(plain(new)))
    lines = [f"  {leaf}: {_show(a)} there, {_show(b)} now" for leaf, (a, b) in pairs.items() if not may_differ(leaf)]
    if lines:
        more = [f"  and {len(lines) - 8} more"] if len(lines) > 8 else []
        raise UserError(
            f"{where} belongs to another run than this one; give its configuration, or another --workdir:\n"
            + "\n".join(lines[:8] + more)
        )


def check_hosts(run: dict) -> None:
    """Raises UserError naming the leaves in which the `describe`s of the hosts differ; all hosts call it."""
    first, *others = (_leaves(other) for other in hosts.gather([run]))
    lines = [
        f"  {leaf}: {_show(a)} on host 0, {_show(b)} on host {i}"
        for i, other in enumerate(others, 1)
        for leaf, (a, b) in _differences(first, other).items()
    ]
    if lines:
        more = [f"  and {len(lines) - 8} more"] if len(lines) > 8 else []
        raise UserError(
            "the hosts were not started alike; give all of them the same command:\n" + "\n".join(lines[:8] + more)
        )


def _leaves(tree: dict, prefix: str = "") -> dict[str, Any]:
    """{"train.buckets": [192, 320], ...}: dicts are walked, a list is one leaf."""
    out = {}
    for key, value in tree.items():
        out |= _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out


def _differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    pairs = {leaf: (old.get(leaf, _NOTHING), new.get(leaf, _NOTHING)) for leaf in sorted(old | new)}
    return {leaf: (a, b) for leaf, (a, b) in pairs.items() if a != b}


def may_differ(leaf: str) -> bool:
    return leaf in MAY_DIFFER or leaf.partition(".")[0] in MAY_DIFFER


def _show(value: Any) -> str:
    return "nothing" if value is _NOTHING else f"{json.dumps(value, ensure_ascii=False):.80}"


def fingerprints(config: ConfigDict) -> dict[str, str]:
    """{leaf: sha256} of the files behind the leaves INPUTS; an empty leaf is left out. Of a retrieval server, for which
    it waits, the fingerprint of what it searches.

    That of a single file is what `sha256sum` prints. Reads all of them: some seconds for the weights of a 7B model.
    """
    values = {leaf: config[section].get(name) for leaf in INPUTS for section, name in [leaf.split(".")]}
    served = {}
    if config.retriever.kind == "remote":  # the files are its server's
        from parasearch_jax.retrieval.remote import served_index

        values |= {"retriever.corpus": "", "retriever.encoder": "", "retriever.index": ""}
        served = {"retriever.url": served_index(config.retriever.url)}
    if not Path(values["retriever.encoder"] or "").is_dir():  # a name, not a model's directory
        del values["retriever.encoder"]
    pinned = {leaf: public_sets(value) for leaf, value in values.items() if value and leaf in QUESTIONS}
    found = {leaf: _digest(leaf, _files(leaf, value), pinned.get(leaf, ())) for leaf, value in values.items() if value}
    return served | found


def _files(leaf: str, value: str) -> list[Path]:
    if leaf in QUESTIONS:
        return [path for _, path in question_files(value)]
    if leaf == "data.episodes":
        return episode_files(value)
    if leaf == "model.path":
        return model_files(value)
    if leaf == "retriever.index":  # whose manifest has the sha256 of all the rest
        return [find_index(value) / MANIFEST]
    path = Path(value)
    return sorted(file for file in path.glob("**/*") if file.is_file()) if path.is_dir() else [path]


def _digest(leaf: str, files: Sequence[Path], pinned: Sequence[PublicSet] = ()) -> str:
    """`pinned`: public sets, whose content their commit says: they are not read."""
    digests = []
    for path in files:
        try:
            digests.append(sha256_of(path))
        except OSError as error:
            raise UserError(f"{leaf}: {path} can't be read ({error.strerror}); check the path") from error
    if len(digests) == 1 and not pinned:
        return digests[0]
    lines = [f"{digest}  {path.name}\n" for digest, path in zip(digests, files, strict=True)]
    lines += [f"{public}\n" for public in pinned]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def check_inputs(old: dict[str, str], new: dict[str, str], where: str) -> None:
    """Raises UserError naming the leaves whose `fingerprints` differ; `where` as in `check_same`."""
    changed = ", ".join(_differences(old, new))
    if changed:
        raise UserError(
            f"{changed}: the content has changed since {where}, so the run would not be the same; put the old files "
            "back, or give another --workdir"
        )


# -------------------------------------------------------------------------------------------- back to the checkpoint


def cut_back(workdir: Path, step: int, steps: int) -> None:
    """Removes what the run wrote after checkpoint `step` (0: there is none); `steps` is train.steps.

    Metrics, episodes and evaluations of later steps go, half-written files too, and what belongs to a run's end unless
    `step` is the end. The evaluation before training stays. To be called when `check_same` has passed. Raises UserError
    if the checkpoint is beyond `steps`, or for a broken line of metrics.jsonl (the last one, unfinished, aside).
    """
    if steps < step:
        raise UserError(
            f"train.steps is {steps}, but the run in {workdir} has a checkpoint of step {step}: give at least {step}, "
            "or another --workdir"
        )
    for folder in (workdir, workdir / "episodes", workdir / "evals"):
        for pattern in ("*.json.tmp", "*.jsonl.tmp"):  # left of a `write_text` that was killed
            for path in folder.glob(pattern):
                path.unlink()
    if (workdir / METRICS).exists():
        _cut_metrics(workdir / METRICS, step)
    for folder in (workdir / "episodes", workdir / "evals"):
        for path in folder.glob("*.json*"):
            found = re.fullmatch(r"(?:.*_)?step_(\d+)\.jsonl?", path.name)
            if found and int(found[1]) > step:
                path.unlink()
    if step != steps or not steps:  # an evaluation alone is made anew: what model.path names may have moved on
        _remove_end(workdir, step)


def _cut_metrics(path: Path, step: int) -> None:
    *lines, rest = path.read_bytes().split(b"\n")
    with contextlib.suppress(ValueError):  # what a kill cut off is no JSON
        json.loads(rest)
        lines.append(rest)  # only the end of the line is missing
    numbers = [_step(path, number, line) for number, line in enumerate(lines, 1)]
    missing = sorted(set(range(1, step + 1)) - set(numbers))
    if missing:
        logging.warning("%s holds no line of step %s of 1..%d", path, ", ".join(map(str, missing)), step)
    kept = [line.decode() + "\n" for line, number in zip(lines, numbers, strict=True) if number <= step]
    write_text(path, "".join(kept))


def _step(path: Path, number: int, line: bytes) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f'{path}, line {number} is no object with a "step" ({line.decode(errors="replace")!r:.80}); mend or remove '
            "the line"
        ) from error


def _remove_end(workdir: Path, step: int) -> None:
    # A folder "model" where no run of ours has been may be the user's base.
    ours = step > 0 or (workdir / "results.json").exists()
    for name in END:
        (workdir / name).unlink(missing_ok=True)
    for name in END_FOLDERS if ours else ():
        shutil.rmtree(workdir / name, ignore_errors=True)


# ---------------------------------------------------------------------------------------------------------- SIGTERM


class Terminated(SystemExit):
    """The run was asked to end by SIGTERM. Not an Exception, so that no `except Exception` swallows it; where nothing
    catches it the process ends with 143 (128 + 15), as after SIGTERM without a handler, and without a traceback."""

    def __init__(self):
        super().__init__(128 + signal.SIGTERM)


class Sigterm:
    """Turns SIGTERM into a wish that the loop reads between two steps, in place of an end at once.

        with Sigterm() as sigterm:
            with sigterm.interrupts():
                ...  # long, and nothing half done: SIGTERM raises Terminated here, or came before and raises on entry
            ...  # SIGTERM sets `sigterm.received`; one that comes again, while the run saves, changes nothing

    Python runs signal handlers in the main thread only, so in another thread (a notebook's) this does nothing. SIGINT
    stays as it is: Ctrl-C ends at once, and the last checkpoint is what a resume takes.

    With several hosts SIGTERM interrupts nothing, as the others would wait for one that has left. Where `interrupts`
    begins they agree, and if one has got it Terminated is raised on all.
    """

    def __init__(self):
        self.received = False
        self._interrupting = False

    def __enter__(self) -> Sigterm:
        self._installed = threading.current_thread() is threading.main_thread()
        if self._installed:
            self._old = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *_) -> None:
        if self._installed:  # None: the old one wasn't installed from Python
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._old is None else self._old)

    def _handle(self, *_) -> None:
        self.received = True
        if self._interrupting:
            self._interrupting = False  # the second one doesn't disturb the cleaning up
            raise Terminated

    @contextlib.contextmanager
    def interrupts(self) -> Iterator[None]:
        """While in it, SIGTERM raises Terminated."""
        if jax.process_count() > 1:
            if hosts.any_host(self.received):
                raise Terminated
            yield
            return
        self._interrupting = True  # before the look at `received`: a signal in between raises by itself
        try:
            if self.received:
                raise Terminated
            yield
        finally:
            self._interrupting = False
