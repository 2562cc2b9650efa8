"""report.md with plots, and episodes.html beside it: what training changed, in numbers and in trajectories."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from parasearch_jax.data.types import KINDS
from parasearch_jax.episodes_page import episodes_html
from parasearch_jax.writers import before_after

# Columns of the table: (key in results.json, heading, factor, format).
COLUMNS = (
    ("em", "EM %", 100, "{:.1f}"),
    ("f1", "F1 %", 100, "{:.1f}"),
    ("cover_em", "cover-EM %", 100, "{:.1f}"),
    ("dr", "DR %", 1, "{:.1f}"),
    ("dr_first", "DR first %", 1, "{:.1f}"),
    ("dr_released", "DR released %", 1, "{:.1f}"),
    ("turns", "turns", 1, "{:.2f}"),
    ("searches", "searches", 1, "{:.2f}"),
    ("sub_queries", "sub-queries", 1, "{:.2f}"),
    ("valid_format", "valid %", 100, "{:.1f}"),
    ("seconds_per_question", "s/question", 1, "{:.3f}"),
)

# Of them those whose intervals are told and drawn, for which results.json has KEY_ci.
MEASURED = ("em", "f1", "dr", "turns", "searches")
DRAWN = ("em", "dr", "turns")

# Line plots: (file name, title, key prefix, axis label). A line is a reward part, elsewhere a kind or "all".
PANELS = (
    ("reward", "Reward parts", "reward/", "reward, mean of the batch"),
    ("dr", "Decomposition ratio by kind", "rollout/dr", "% of questions"),
    ("turns", "Turns by kind", "rollout/turns", "model calls per question"),
    ("em", "Exact match by kind", "rollout/em", "share of questions"),
)
# {key in metrics.jsonl: axis label}; a panel each, as their scales have nothing in common.
LOSSES = {
    "loss": "loss",
    "kl": "KL, nats/token",
    "entropy": "entropy, nats/token",
    "grad_norm": "gradient norm",
    "critic/loss": "critic's loss",
    "critic/explained_variance": "explained variance",
}
LENGTHS = {"rollout/tokens": "all", "rollout/tokens_sampled": "sampled", "rollout/tokens_read": "documents, notices"}
ENDS = {"rollout/stop_length": "no tokens left", "rollout/stop_turns": "no turns left"}

# Okabe-Ito, told apart by colour-blind readers too. A kind has the same colour in every plot.
KIND_COLORS = {"parallel": "#0072B2", "sequential": "#D55E00", "single": "#009E73", "unknown": "#999999"}
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6A3D9A", "#8C564B", "#444444")


def write_report(
    workdir: str | Path,
    results: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]] = (),
    episodes_before: Sequence[Mapping] = (),
    episodes_after: Sequence[Mapping] = (),
) -> Path:
    """Writes report.md, report/*.png and episodes.html into `workdir`; returns the path of report.md.

    `results` is results.json, `metrics` the lines of metrics.jsonl (none for an evaluation), the episodes are records
    of `writers.episode_record`. The page shows some of the episodes (`episodes_html`); the files hold all.
    """
    workdir = Path(workdir)
    measured = _draw_evaluation(workdir / "report", results.get("evals") or {})
    plots = write_plots(workdir / "report", metrics)
    if episodes_before or episodes_after:
        page = episodes_html(episodes_before, episodes_after, name=results.get("config") or "")
        (workdir / "episodes.html").write_text(page, encoding="utf-8", errors="replace")
    sides = [name for name, records in (("initial", episodes_before), ("final", episodes_after)) if records]
    report = workdir / "report.md"
    report.write_text(report_markdown(results, measured, plots, sides), encoding="utf-8")
    return report


def report_markdown(
    results: Mapping[str, Any], measured: Path | None, plots: Mapping[str, Path], sides: Sequence[str]
) -> str:
    """The text of report.md: the run, the evaluation before -> after with intervals, the plots by relative path.

    `measured` is the plot of the evaluation, `sides` the evaluations whose episodes the page shows.
    """
    retriever = results.get("retriever") or {}
    facts = {key: results.get(key) or "-" for key in ("config", "model", "method", "variant")}
    facts["retriever"] = ", ".join(f"{k} {v}" for k, v in retriever.items()) or "-"
    facts["seconds"] = "-" if results.get("seconds") is None else f"{results['seconds']:.0f}"
    if results.get("slots"):
        facts["slots"] = f"{results['slots']}, all at work while seconds per question are measured"
    blocks = [f"# {facts['config']}", "\n".join(f"- {name}: {value}" for name, value in facts.items())]
    blocks += ["## Evaluation", *_evaluation(results.get("evals") or {})]
    if measured:
        blocks.append(f"![Evaluation](report/{measured.name})")
    if len(sides) == 2:
        files = " ".join(f"WORKDIR/episodes/{name}.jsonl" for name in sides)
        blocks.append("Differences with their intervals and p-values, question by question:")
        blocks.append(f"    python -m parasearch_jax.paired {files}")
    if sides:
        told = "Trajectories before and after, side by side" if len(sides) == 2 else "Trajectories"
        blocks.append(f"{told}: [episodes.html](episodes.html).")
    if plots:
        blocks += ["## Training", "Of each step's batch: of the episodes that were sampled for it."]
        blocks += [f"![{title}](report/{path.name})" for title, path in plots.items()]
    return "\n\n".join(blocks) + "\n"


def _evaluation(evals: Mapping[str, Mapping]) -> list[str]:
    before, after = evals.get("initial") or {}, evals.get("final") or {}
    columns = [c for c in COLUMNS if any(c[0] in row for row in after.values())]
    note = "before -> after training" if before else "evaluation only"
    blocks = [
        _table(before, after, columns, before_after),
        f"({note}; DR in percent of questions, turns = model calls per question)",
    ]
    measured = [c for c in columns if c[0] in MEASURED and any(row.get(f"{c[0]}_ci") for row in after.values())]
    if measured:
        blocks.append("95 % intervals (percentile bootstrap over questions):")
        blocks.append(_table(before, after, measured, _interval_cell))
    return blocks


def _table(before: Mapping, after: Mapping, columns: Sequence[tuple], cell) -> str:
    lines = ["| questions | n | " + " | ".join(c[1] for c in columns) + " |", "|---|" + "---:|" * (len(columns) + 1)]
    for subset, row in after.items():
        cells = [cell(before.get(subset), row, *column) for column in columns]
        lines.append(f"| {subset} | {row.get('n', '-')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _interval_cell(before: Mapping | None, after: Mapping, key: str, heading: str, factor: float, form: str) -> str:
    """ "25.4 to 37.0 -> 95.2 to 98.9", "95.2 to 98.9" without a before, "-" where there is none."""
    return " -> ".join(
        " to ".join(form.format(factor * end) for end in ends) if ends and None not in ends else "-"
        for ends in (row.get(f"{key}_ci") for row in (before, after) if row is not None)
    )


# ----------------------------------------------------------------------------------------------------------- plots


def write_plots(folder: Path, metrics: Sequence[Mapping[str, Any]]) -> dict[str, Path]:
    """Draws what `metrics` holds, {title: png}; plots without data are left out."""
    if not metrics:
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    steps = [line["step"] for line in metrics]
    plots = {}
    for name, title, prefix, label in PANELS:
        series = _series(metrics, prefix)
        if prefix.startswith("rollout/"):  # not dr_first and the like, which would draw over dr
            series = {kind: values for kind, values in series.items() if kind in ("all", *KINDS)}
        if series:
            plots[title] = save(_line_figure(steps, series, title, label), folder / f"{name}.png")
    lengths, ends = (_present(metrics, names) for names in (LENGTHS, ENDS))
    if lengths and ends:
        plots["Lengths"] = save(_lengths_figure(steps, lengths, ends), folder / "lengths.png")
    losses = _present(metrics, LOSSES)
    if losses:
        plots["Loss, KL, entropy"] = save(_loss_figure(steps, losses), folder / "losses.png")
    seconds = _series(metrics, "seconds/", without=("total",))
    if seconds:
        plots["Seconds per phase"] = save(_seconds_figure(steps, seconds), folder / "seconds.png")
    return plots


def _present(metrics: Sequence[Mapping], names: Mapping[str, str]) -> dict[str, list[float]]:
    """{label: values} of those keys of `names` that `metrics` has."""
    return {label: _column(metrics, key) for key, label in names.items() if any(key in line for line in metrics)}


def _column(metrics: Sequence[Mapping], key: str) -> list[float]:
    """One metric over the steps; nan, a gap in the plot, where it is missing or was not finite."""
    return [float("nan") if line.get(key) is None else float(line[key]) for line in metrics]


def _series(metrics: Sequence[Mapping], prefix: str, without: tuple[str, ...] = ()) -> dict[str, list[float]]:
    """{"parallel": values, ...} of all numeric keys below `prefix`, in the order of their first appearance."""
    keys = dict.fromkeys(k for line in metrics for k, v in line.items() if k.startswith(prefix) and _is_number(v))
    names = {key: key.removeprefix(prefix).strip("_/") or "all" for key in keys}
    return {name: _column(metrics, key) for key, name in names.items() if name not in without}


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float)


def figure_of(rows: int = 1, height: float = 3.6):
    # Figure without pyplot: no global state, so that a report drawn inside a notebook leaves its plots alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        ax.set_axisbelow(True)
        ax.xaxis.get_major_locator().set_params(integer=True)
    axes[-1].set_xlabel("step")
    return figure, axes


def _line_figure(steps: list[int], series: Mapping[str, list[float]], title: str, label: str):
    figure, (ax,) = figure_of()
    _lines(ax, steps, series)
    ax.set_title(title, loc="left")
    ax.set_ylabel(label)
    return figure


def _lines(ax, steps: list[int], series: Mapping[str, list[float]]) -> None:
    palette = itertools.cycle(COLORS)
    for name, values in series.items():
        total = name in ("total", "all")  # the sum or the mean of the others: black and thicker
        color = "#222222" if total else KIND_COLORS.get(name) or next(palette)
        ax.plot(steps, values, label=name, color=color, linewidth=2.4 if total else 1.6, marker=_marker(steps))
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def _lengths_figure(steps: list[int], lengths: Mapping[str, list[float]], ends: Mapping[str, list[float]]):
    figure, (tokens, cut) = figure_of(rows=2, height=5.4)
    _lines(tokens, steps, lengths)
    _lines(cut, steps, {name: [100 * share for share in shares] for name, shares in ends.items()})
    tokens.set_title("Lengths", loc="left")
    tokens.set_ylabel("tokens an episode")
    cut.set_ylabel("% of episodes ended by")
    return figure


def _loss_figure(steps: list[int], losses: Mapping[str, list[float]]):
    figure, axes = figure_of(rows=len(losses), height=0.6 + 1.7 * len(losses))
    for ax, (name, values), color in zip(axes, losses.items(), itertools.cycle(COLORS), strict=False):
        ax.plot(steps, values, color=color, linewidth=1.6, marker=_marker(steps))
        ax.set_ylabel(name, fontsize=9)
    axes[0].set_title("Loss, KL, entropy", loc="left")
    return figure


def _draw_evaluation(folder: Path, evals: Mapping[str, Mapping]) -> Path | None:
    """A panel for each of DRAWN: the subsets before and after, with their intervals; None if there are none."""
    sides = [(name, evals[key]) for key, name in (("initial", "before"), ("final", "after")) if evals.get(key)]
    columns = [
        c for c in COLUMNS if c[0] in DRAWN and any(row.get(c[0]) is not None for _, s in sides for row in s.values())
    ]
    if not columns:
        return None
    subsets = list(evals.get("final") or sides[0][1])
    figure, axes = figure_of(rows=len(columns), height=1.0 + 1.7 * len(columns))
    for ax, (key, heading, factor, _) in zip(axes, columns, strict=True):
        for place, (name, rows) in enumerate(sides):
            color = COLORS[0] if name == "after" else "#7a7a7a"
            shift = 0.24 * (place - (len(sides) - 1) / 2)
            _points(ax, [rows.get(subset) or {} for subset in subsets], key, factor, shift, label=name, color=color)
        ax.set_ylabel(heading)
        if key == "dr":
            ax.set_ylim(-4, 104)
        crowded = {"rotation": 20, "ha": "right"} if len(subsets) > 6 else {}
        ax.set_xticks(range(len(subsets)), subsets, **crowded)
    axes[-1].set_xlabel("")
    known = any(row.get(f"{column[0]}_ci") for column in columns for _, rows in sides for row in rows.values())
    axes[0].set_title("Evaluation, 95 % intervals" if known else "Evaluation", loc="left")
    if len(sides) == 2:
        axes[0].legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return save(figure, folder / "evaluation.png")


def _points(ax, rows: Sequence[Mapping], key: str, factor: float, shift: float, **look) -> None:
    """Values as dots, a line over each interval; where one is missing, none."""
    nan = float("nan")
    number: Callable[[float | None], float] = lambda value: nan if value is None else factor * value  # noqa: E731
    places = [place + shift for place in range(len(rows))]
    ax.plot(places, [number(row.get(key)) for row in rows], "o", markersize=5, **look)
    ends = [[number(end) for end in row.get(f"{key}_ci") or (None, None)] for row in rows]
    ax.vlines(places, [low for low, _ in ends], [high for _, high in ends], colors=look["color"], linewidth=1.6)


def _seconds_figure(steps: list[int], seconds: Mapping[str, list[float]]):
    figure, (ax,) = figure_of()
    bottom = [0.0] * len(steps)
    for (name, values), color in zip(seconds.items(), itertools.cycle(COLORS), strict=False):
        heights = [0.0 if v != v else v for v in values]  # a phase that a step did not have takes no time
        ax.bar(steps, heights, bottom=bottom, label=name, color=color, width=0.9)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    ax.set_title("Seconds per phase", loc="left")
    ax.set_ylabel("seconds a step")
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, reverse=True)
    return figure


def _marker(steps: list[int]) -> str | None:
    return "o" if len(steps) < 3 else None  # a line through one point is invisible


def save(figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return path
