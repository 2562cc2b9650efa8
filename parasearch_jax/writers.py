"""What a run leaves in its work directory, and what it prints: metrics, TensorBoard events, episodes, the console."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import rich.box
import rich.console
import rich.progress
import rich.table

from parasearch_jax.data.types import Question
from parasearch_jax.errors import UserError
from parasearch_jax.rollout.types import Action, Answer, Episode, Search

METRICS = "metrics.jsonl"

# What the one line a step shows, where present: (key, label, format).
LINE = (
    ("reward/total", "reward", "{:.3f}"),
    ("rollout/dr_parallel", "DR par", "{:.1f}"),
    ("rollout/dr_sequential", "DR seq", "{:.1f}"),
    ("rollout/dr_single", "DR single", "{:.1f}"),
    ("rollout/turns_parallel", "turns par", "{:.2f}"),
    ("rollout/valid_format", "valid", "{:.2f}"),
    ("loss", "loss", "{:.4f}"),
    ("kl", "kl", "{:.4f}"),
)

# Columns of the table at the end: (key in results.json, heading, factor, format).
COLUMNS = (
    ("em", "EM %", 100, "{:.1f}"),
    ("dr", "DR %", 1, "{:.1f}"),
    ("turns", "turns", 1, "{:.2f}"),
    ("searches", "searches", 1, "{:.2f}"),
    ("valid_format", "valid %", 100, "{:.1f}"),
)


def prepare_workdir(path: str | Path) -> Path:
    """Creates the work directory and proves that it can be written; returns its absolute path.

    It may hold an earlier start of the run (resume.py compares the two). Raises UserError if it can't be written, or
    if it holds metrics of something else.
    """
    workdir = Path(path).expanduser().absolute()
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=workdir):
            pass
    except OSError as error:  # a file in the way, no permission, a read-only or full disk
        raise UserError(
            f"can't write into the work directory {workdir}: {error.strerror or error}; give another --workdir"
        ) from error
    metrics = workdir / METRICS
    if metrics.exists() and metrics.stat().st_size > 0 and not (workdir / "config.json").exists():
        raise UserError(
            f"the work directory {workdir} holds a {METRICS} without a config.json, so no run to resume; give another "
            "--workdir"
        )
    return workdir


def write_json(path: str | Path, obj: Any) -> None:
    """Writes `obj` as JSON, whole or not at all. Numpy and jax scalars become numbers, nan and infinities null."""
    write_text(Path(path), json.dumps(plain(obj), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes `text`, whole or not at all: a kill leaves at most `<name>.tmp`, which a resume removes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    # A lone surrogate from a decoded half character is written as its JSON escape rather than ending the run.
    temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    os.replace(temporary, path)


def plain(value: Any) -> Any:
    """`value` as JSON can hold it; a number that is not finite becomes None."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):  # numpy and jax scalars and arrays
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class MetricsWriter:
    """Appends one object a step to `workdir/metrics.jsonl` and its numbers to TensorBoard (`workdir/tensorboard`).

    `start` is the step that the run continues from: TensorBoard drops what an earlier start wrote of later steps.
    In metrics.jsonl `resume.cut_back` has done so.
    """

    def __init__(self, workdir: str | Path, start: int = 0):
        from tensorboardX import SummaryWriter  # here, so that reading episodes does not need it

        self._file = open(Path(workdir) / METRICS, "a", encoding="utf-8")  # noqa: SIM115 (closed in close)
        self._events = SummaryWriter(
            str(Path(workdir) / "tensorboard"),
            purge_step=start + 1,
            flush_secs=1,  # a thread writes them; its flush() doesn't wait for what is still in the queue
            filename_suffix=f".{time.time_ns()}",  # files are named by the second: a quick restart would overwrite one
        )

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One line, flushed. A number that is not finite is written as null and named: {"nonfinite": {"kl": "nan"}}."""
        raw = {name: _scalar(name, value) for name, value in metrics.items()}
        line = {"step": None} | plain(raw) | {"step": int(step)}  # first in the line, whatever `metrics` says
        nonfinite = {k: str(v) for k, v in raw.items() if isinstance(v, float) and not math.isfinite(v)}
        if nonfinite:
            line["nonfinite"] = nonfinite
        self._file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()
        for name, value in line.items():
            if isinstance(value, int | float) and name != "step":
                self._events.add_scalar(name, value, step)

    def close(self) -> None:
        self._file.close()
        self._events.close()


def _scalar(name: str, value: Any) -> int | float | str | bool | None:
    value = value.tolist() if hasattr(value, "tolist") else value
    if value is not None and not isinstance(value, int | float | str):
        raise ValueError(f"metric {name!r} is {value!r:.80}; metrics are flat: write one key a number")
    return value


def read_jsonl(path: str | Path) -> list[dict]:
    """The objects of a jsonl file, one a line. Raises UserError naming the file and the line that is no JSON."""
    records = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                records.append(json.loads(line))
            except ValueError as error:
                raise UserError(f"{path}, line {number} is not JSON ({error}); remove the line") from error
    return records


def read_metrics(workdir: str | Path) -> list[dict]:
    """The lines of `workdir/metrics.jsonl`; empty if there are none (an evaluation writes none)."""
    path = Path(workdir) / METRICS
    return read_jsonl(path) if path.exists() else []


# -------------------------------------------------------------------------------------------------------- episodes


def episode_record(
    episode: Episode, question: Question, parts: Mapping[str, float] | None = None, em: float | None = None, ids=False
) -> dict:
    """One episode as episodes/*.jsonl holds it: what was said, by whom, and what it earned.

    `actions` keep their spans, so that a reader marks queries by provenance and need not search the text for tags;
    `tags` are those of the protocol, {"search": [opening, closing], ...}. `extra` are the segments of each model call
    beside the episode's turns.
    `ids=True` adds the token ids and the sampler's log-probs of each segment.
    """
    return {
        "id": question.id,
        "question": question.text,
        "kind": question.kind,
        "dataset": question.dataset,
        "golden_answers": list(question.golden_answers),
        "sample": episode.sample,
        "version": episode.version,
        "segments": [_segment_record(segment, ids) for segment in episode.segments],
        "actions": [_action_record(action) for action in episode.actions],
        "queries": [list(search.queries) for search in episode.searches],
        "stop_reason": episode.stop_reason,
        "answer": episode.answer,
        "em": em,
        "parts": dict(parts or {}),
        "total": float(sum(parts.values())) if parts else None,
        "dropped_queries": episode.dropped_queries,
        "failed_searches": episode.failed_searches,
        "tags": {kind: list(pair) for kind, pair in episode.protocol.tags().items()} if episode.protocol else {},
        "extra": [[_segment_record(segment, ids) for segment in call.segments] for call in episode.extra],
    }


def _segment_record(segment, ids: bool) -> dict:
    record = {"source": segment.source, "text": segment.text}
    if ids and segment.ids is not None:
        record["ids"] = list(segment.ids)
    if ids and segment.logprobs is not None:
        record["logprobs"] = list(segment.logprobs)
    return record


def _action_record(action: Action) -> dict:
    if isinstance(action, Search):
        return {"type": "search", "queries": list(action.queries), "span": list(action.span)}
    if isinstance(action, Answer):
        return {"type": "answer", "text": action.text, "span": list(action.span)}
    return {"type": "invalid", "span": list(action.span)}


def write_episodes(path: str | Path, records: Iterable[dict]) -> None:
    """Writes records (`episode_record`) one a line, the file whole or not at all."""
    lines = [json.dumps(plain(record), ensure_ascii=False, allow_nan=False) + "\n" for record in records]
    write_text(Path(path), "".join(lines))


def read_episodes(path: str | Path) -> list[dict]:
    """The records of an episodes file; `Episode.from_text([(s["source"], s["text"]) for s in r["segments"]])` scores
    one again."""
    return read_jsonl(path)


# --------------------------------------------------------------------------------------------------------- console


class Console:
    """A line a step, and on a terminal a progress bar below them.

    Anywhere else (a pipe, a log file, a notebook) the lines are plain text without control characters. Use it as a
    context manager; `steps` is the run's number of steps, 0 for no bar. `quiet`: prints nothing.
    """

    def __init__(self, steps: int = 0, file=None, quiet: bool = False):
        file = file or sys.stdout
        self._steps = steps
        # Decided here, as rich also counts FORCE_COLOR and some environments as a terminal.
        self.is_terminal = file.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._rich = rich.console.Console(
            file=file,
            force_terminal=self.is_terminal,
            force_jupyter=False,
            no_color=not self.is_terminal,
            width=None if self.is_terminal else 120,
            markup=False,  # "[parallel]" in a question is no markup
            highlight=False,
            quiet=quiet,
        )
        self._progress = _progress(self._rich) if self.is_terminal and steps and not quiet else None

    def __enter__(self) -> Console:
        if self._progress:
            self._task = self._progress.add_task("training", total=self._steps)
            self._progress.start()
        return self

    def __exit__(self, *_) -> None:
        if self._progress:
            self._progress.stop()

    def print(self, obj: str | rich.table.Table = "") -> None:
        """Prints a line (never wrapped) or a table."""
        self._rich.print(obj, soft_wrap=isinstance(obj, str))

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """The line of step `step` (counted from 1), and the bar moved to it."""
        self.print(step_line(step, self._steps, metrics))
        if self._progress:
            self._progress.update(self._task, completed=step)


def _progress(console: rich.console.Console) -> rich.progress.Progress:
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("left"),
        rich.progress.TimeRemainingColumn(),
    )
    return rich.progress.Progress(*columns, console=console, transient=True)


def step_line(step: int, steps: int, metrics: Mapping[str, Any]) -> str:
    """For example "step  7/20 | reward 0.912 | DR par 83.5 | loss 0.0132 | 6.9 s"; only what `metrics` has."""
    head = f"step {step:>{len(str(steps))}}/{steps}" if steps else f"step {step}"
    fields = [f"{label} {_number(metrics[key], form)}" for key, label, form in LINE if key in metrics]
    phases = [float(v) for k, v in metrics.items() if k.startswith("seconds/") and k != "seconds/total"]
    seconds = metrics.get("seconds/total", sum(phases) if phases else None)
    if seconds is not None:
        fields.append(f"{_number(seconds, '{:.1f}')} s")
    return " | ".join([head, *fields])


def _number(value: Any, form: str) -> str:
    return "-" if value is None else form.format(float(value))


def results_table(initial: Mapping[str, Mapping] | None, final: Mapping[str, Mapping]) -> rich.table.Table:
    """The evaluation before and after training, a row a subset ("before -> after"); without `initial` only the final.

    Both are `E` of results.json: {subset: {"n", "em", "dr", ...}}.
    """
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("questions", no_wrap=True)
    for _, heading, _, _ in COLUMNS:
        table.add_column(heading, justify="right")  # on a narrow terminal a cell breaks at its arrow
    for subset, after in final.items():
        before = (initial or {}).get(subset)
        cells = [before_after(before, after, *column) for column in COLUMNS]
        table.add_row(f"{subset} ({after.get('n', '?')})", *cells)
    return table


def before_after(before: Mapping | None, after: Mapping, key: str, heading: str, factor: float, form: str) -> str:
    """One cell: "31.0 -> 97.3", "97.3" without a before, "-" for a value that is missing."""
    shown = [_number(None if e.get(key) is None else e[key] * factor, form) for e in (before, after) if e is not None]
    return " -> ".join(shown)
