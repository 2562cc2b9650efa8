"""The table of a sweep: what its runs found, seeds aggregated, a paper's numbers beside them; Markdown, CSV, a plot."""

from __future__ import annotations

import csv
import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parasearch_jax.errors import UserError
from parasearch_jax.report import COLORS, figure_of, save
from parasearch_jax.writers import write_text


@dataclasses.dataclass(frozen=True)
class Column:
    """`subset` and `metric` of an evaluation as results.json has them, shown as factor * value."""

    heading: str
    subset: str
    metric: str
    factor: float = 1.0
    digits: int = 2
    evaluation: str = "final"  # or "final_sampled"
    relative: bool = False  # in percent of the first point's mean
    paper: tuple[float | None, ...] = ()  # as shown, by point; none: the paper has no such column


@dataclasses.dataclass(frozen=True)
class Cell:
    """A point's values over its seeds, as shown."""

    values: tuple[float, ...]
    paper: float | None

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None


def write_tables(workdir: Path, table: Mapping[str, Any], runs: Sequence[tuple[Mapping[str, Any], Path]]) -> str:
    """Writes table.md, table.csv and table.png into `workdir`; returns the Markdown.

    `runs`: (point, work directory) of every finished run; those of one point are its seeds. `table`: {"title",
    "columns": mappings of `Column`'s fields, "notes": lines under the table that say what can't be compared}. Points
    are in the order in which they first occur. Raises UserError for a subset that the results have not.
    """
    columns = [Column(**column) for column in table["columns"]]
    points: dict[str, list[Path]] = {}
    for point, path in runs:
        points.setdefault(json.dumps(point), []).append(path)
    rows = []
    for place, (point, paths) in enumerate(points.items()):
        results = [json.loads((path / "results.json").read_text(encoding="utf-8")) for path in paths]
        rows.append((json.loads(point), [_cell(column, results, place) for column in columns]))
    for i, column in enumerate(columns):
        if column.relative:
            first = rows[0][1][i].mean
            for _, cells in rows:
                cells[i] = dataclasses.replace(cells[i], values=tuple(100 * x / first for x in cells[i].values))
    text = _markdown(table, columns, rows)
    write_text(workdir / "table.md", text)
    _write_csv(workdir / "table.csv", columns, rows)
    _plot(workdir / "table.png", columns, rows)
    return text


def _cell(column: Column, results: Sequence[Mapping], place: int) -> Cell:
    values = []
    for result in results:
        subsets = result["evals"].get(column.evaluation, {})
        if column.subset not in subsets:
            there = ", ".join(f"{name}: {', '.join(found)}" for name, found in result["evals"].items())
            raise UserError(f"the table asks for {column.subset!r} of {column.evaluation!r}; the results have {there}")
        values.append(column.factor * subsets[column.subset][column.metric])
    return Cell(tuple(values), column.paper[place] if place < len(column.paper) else None)


def _markdown(table: Mapping, columns: Sequence[Column], rows: Sequence[tuple[Mapping, Sequence[Cell]]]) -> str:
    leaves = ["label"] if "label" in rows[0][0] else list(dict.fromkeys(leaf for point, _ in rows for leaf in point))
    head = [leaf.rpartition(".")[2] for leaf in leaves] + ["seeds"]
    for column in columns:
        head += [column.heading, "paper"] if column.paper else [column.heading]
    lines = [head]
    for point, cells in rows:
        line = [str(point.get(leaf, "")) for leaf in leaves] + [str(max(len(cell.values) for cell in cells))]
        for column, cell in zip(columns, cells, strict=True):
            line.append(_shown(cell, column.digits))
            if column.paper:
                line.append("" if cell.paper is None else f"{cell.paper:.{column.digits}f}")
        lines.append(line)
    out = ["| " + " | ".join(line) + " |" for line in lines]
    out.insert(1, "|" + "---|" * len(head))
    notes = [f"* {note}" for note in table.get("notes", ())]
    return "\n".join([f"# {table['title']}", "", *out, "", *notes]) + "\n"


def _shown(cell: Cell, digits: int) -> str:
    """The mean, and behind it the range over several seeds."""
    mean = f"{cell.mean:.{digits}f}"
    if len(cell.values) == 1:
        return mean
    return f"{mean} ({min(cell.values):.{digits}f} to {max(cell.values):.{digits}f})"


def _write_csv(path: Path, columns: Sequence[Column], rows: Sequence[tuple[Mapping, Sequence[Cell]]]) -> None:
    """A line for each point, column and seed."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["point", "column", "subset", "metric", "run", "value", "paper"])
        for point, cells in rows:
            for column, cell in zip(columns, cells, strict=True):
                for run, value in enumerate(cell.values):
                    about = json.dumps(point), column.heading, column.subset, column.metric
                    writer.writerow([*about, run, value, "" if cell.paper is None else cell.paper])


def _values(point: Mapping[str, Any]) -> list[str]:
    return [f"{leaf.rpartition('.')[2]} {value}" for leaf, value in point.items()]


def _plot(path: Path, columns: Sequence[Column], rows: Sequence[tuple[Mapping, Sequence[Cell]]]) -> None:
    """A panel for each column: every seed a dot, the paper's number a cross."""
    labels = [point.get("label") or ", ".join(_values(point)) for point, _ in rows]
    figure, axes = figure_of(rows=len(columns), height=1.2 + 1.5 * len(columns))
    for i, (ax, column) in enumerate(zip(axes, columns, strict=True)):
        for place, (_, cells) in enumerate(rows):
            cell = cells[i]
            ax.plot([place] * len(cell.values), cell.values, "o", color=COLORS[0], alpha=0.7)
            if cell.paper is not None:
                ax.plot([place], [cell.paper], "x", color=COLORS[1])
        ax.set_title(column.heading, loc="left", fontsize=10)
        ax.set_xlabel("")
        ax.set_xticks(range(len(labels)), labels if i == len(columns) - 1 else [], rotation=20, ha="right", fontsize=8)
    save(figure, path)
