"""report.md with plots, and episodes.html: what training changed, in numbers and in trajectories."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from parasearch_jax.data.types import KINDS
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

# Line plots: (file name, title, key prefix, axis label). A line is a reward part, elsewhere a kind or "all".
PANELS = (
    ("reward", "Reward parts", "reward/", "reward, mean of the batch"),
    ("dr", "Decomposition ratio by kind", "rollout/dr", "% of questions"),
    ("turns", "Turns by kind", "rollout/turns", "model calls per question"),
    ("em", "Exact match", "rollout/em", "share of questions"),
)
LOSSES = ("loss", "kl", "entropy", "grad_norm", "critic/loss", "critic/explained_variance")

# Okabe-Ito, told apart by colour-blind readers too. A kind has the same colour in every plot.
KIND_COLORS = {"parallel": "#0072B2", "sequential": "#D55E00", "single": "#009E73", "unknown": "#999999"}
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6A3D9A", "#8C564B")


def write_report(
    workdir: str | Path,
    results: Mapping[str, Any],
    metrics: Sequence[Mapping[str, Any]] = (),
    episodes_before: Sequence[Mapping] = (),
    episodes_after: Sequence[Mapping] = (),
    per_kind: int = 20,
) -> Path:
    """Writes report.md, report/*.png and episodes.html into `workdir`; returns the path of report.md.

    `results` is results.json, `metrics` the lines of metrics.jsonl (none for an evaluation), the episodes are records
    of `writers.episode_record`. The page shows the first `per_kind` questions of each kind; the files hold all.
    """
    workdir = Path(workdir)
    plots = write_plots(workdir / "report", metrics)
    if episodes_before or episodes_after:
        page = episodes_html(episodes_before, episodes_after, per_kind)
        (workdir / "episodes.html").write_text(page, encoding="utf-8", errors="replace")
    report = workdir / "report.md"
    report.write_text(report_markdown(results, plots, bool(episodes_before or episodes_after)), encoding="utf-8")
    return report


def report_markdown(results: Mapping[str, Any], plots: Mapping[str, Path], with_episodes: bool) -> str:
    """The text of report.md: the run, the table before -> after, the plots by relative path."""
    retriever = results.get("retriever") or {}
    facts = {key: results.get(key) or "-" for key in ("config", "model", "method", "variant")}
    facts["retriever"] = ", ".join(f"{k} {v}" for k, v in retriever.items()) or "-"
    facts["seconds"] = "-" if results.get("seconds") is None else f"{results['seconds']:.0f}"
    blocks = [f"# {facts['config']}", "\n".join(f"- {name}: {value}" for name, value in facts.items())]
    blocks += ["## Evaluation", _markdown_table(results.get("evals") or {})]
    if with_episodes:
        blocks.append("Trajectories before and after, side by side: [episodes.html](episodes.html).")
    if plots:
        blocks.append("## Training")
        blocks += [f"![{title}](report/{path.name})" for title, path in plots.items()]
    return "\n\n".join(blocks) + "\n"


def _markdown_table(evals: Mapping[str, Mapping]) -> str:
    before, after = evals.get("initial"), evals.get("final") or {}
    columns = [c for c in COLUMNS if any(c[0] in row for row in after.values())]
    lines = ["| questions | n | " + " | ".join(c[1] for c in columns) + " |", "|---|" + "---:|" * (len(columns) + 1)]
    for subset, row in after.items():
        cells = [before_after((before or {}).get(subset), row, *column) for column in columns]
        lines.append(f"| {subset} | {row.get('n', '-')} | " + " | ".join(cells) + " |")
    note = "before -> after training" if before else "evaluation only"
    return "\n".join(lines) + f"\n\n({note}; DR in percent of questions, turns = model calls per question)"


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
    losses = {key: _column(metrics, key) for key in LOSSES if any(key in line for line in metrics)}
    if losses:
        plots["Loss, KL, entropy"] = save(_loss_figure(steps, losses), folder / "losses.png")
    seconds = _series(metrics, "seconds/", without=("total",))
    if seconds:
        plots["Seconds per phase"] = save(_seconds_figure(steps, seconds), folder / "seconds.png")
    return plots


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
    palette = itertools.cycle(COLORS)
    for name, values in series.items():
        total = name in ("total", "all")  # the sum or the mean of the others: black and thicker
        color = "#222222" if total else KIND_COLORS.get(name) or next(palette)
        ax.plot(steps, values, label=name, color=color, linewidth=2.4 if total else 1.6, marker=_marker(steps))
    ax.set_title(title, loc="left")
    ax.set_ylabel(label)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return figure


def _loss_figure(steps: list[int], losses: Mapping[str, list[float]]):
    """One axis each, as their scales have nothing in common."""
    figure, axes = figure_of(rows=len(losses), height=0.6 + 1.7 * len(losses))
    for ax, (name, values), color in zip(axes, losses.items(), itertools.cycle(COLORS), strict=False):
        ax.plot(steps, values, color=color, linewidth=1.6, marker=_marker(steps))
        ax.set_ylabel(name)
    axes[0].set_title("Loss, KL, entropy", loc="left")
    return figure


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


# --------------------------------------------------------------------------------------------------- episodes.html

STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1400px; padding: 16px; color: #16181d; }
h1 { font-size: 20px; margin: 0 0 8px; } h2 { font-size: 15px; margin: 0; }
.bar { position: sticky; top: 0; background: #fff; padding: 8px 0; border-bottom: 1px solid #ddd; z-index: 1; }
button { font: inherit; padding: 2px 10px; margin-right: 4px; border: 1px solid #bbb; border-radius: 4px;
  background: #fff; cursor: pointer; }
button[aria-pressed=true] { background: #16181d; color: #fff; border-color: #16181d; }
.question { border-bottom: 1px solid #ddd; padding: 16px 0; } .question[hidden] { display: none; }
.kind { font-size: 12px; padding: 1px 7px; border-radius: 9px; background: #e8eef7; margin-right: 8px; }
.gold, .facts { color: #5a5f69; font-size: 13px; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 24px; margin-top: 8px; }
.episode { min-width: 0; } .episode h3 { font-size: 13px; margin: 0 0 4px; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; }
.policy { color: #16181d; }
.masked { color: #6f7680; background: #f2f3f5; }
.query { background: #ffe28a; color: inherit; border-radius: 2px; } .final { background: #c9ecd2; border-radius: 2px; }
details.masked { padding: 0 6px; } summary { cursor: pointer; font-size: 12px; }
table { border-collapse: collapse; margin-top: 8px; font-size: 12px; } td { padding: 1px 10px 1px 0; }
td + td { text-align: right; font-variant-numeric: tabular-nums; } tr.total td { border-top: 1px solid #999; }
@media (max-width: 800px) { .pair { grid-template-columns: 1fr; } }
"""

SCRIPT = """
for (const button of document.querySelectorAll("button[data-show]"))
  button.addEventListener("click", () => {
    const show = button.dataset.show;
    for (const b of document.querySelectorAll("button[data-show]")) b.setAttribute("aria-pressed", b === button);
    for (const q of document.querySelectorAll(".question"))
      q.hidden = show !== "all" && q.dataset.kind !== show;
  });
"""

LEGEND = (
    '<span class="policy">Dark: sampled by the policy, trained on.</span> '
    '<span class="masked">Grey: prompt, documents and notices, masked, excluded from the loss.</span> '
    '<mark class="query">Yellow</mark>: executed queries. <span class="final">Green</span>: the executed answer.'
)


def episodes_html(before: Sequence[Mapping], after: Sequence[Mapping], per_kind: int = 20) -> str:
    """One self-contained page: for each question its episode before and after training, side by side.

    What is masked and what is a query comes from the segments' sources and the actions' spans. All text is escaped.
    """
    pairs = sorted(_pairs(before, after), key=lambda pair: _kind_order(_first(pair)["kind"]))
    found = Counter(_first(pair)["kind"] for pair in pairs)
    shown, taken = [], Counter()
    for pair in pairs:
        kind = _first(pair)["kind"]
        taken[kind] += 1
        if taken[kind] <= per_kind:
            shown.append(pair)
    counts = {kind: min(found[kind], per_kind) for kind in sorted(found, key=_kind_order)}
    note = f"Shown: {len(shown)} of {len(pairs)} episode pairs; all are in episodes/*.jsonl."
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Episodes before and after training</title>
<style>{STYLE}</style>
</head>
<body>
<h1>Episodes before and after training</h1>
<p class="legend">{LEGEND}</p>
<p class="facts">{note}</p>
<div class="bar">{_buttons(counts)}</div>
{"".join(_question_html(pair) for pair in shown)}
<script>{SCRIPT}</script>
</body>
</html>
"""


def _pairs(before: Iterable[Mapping], after: Iterable[Mapping]) -> list[tuple[Mapping | None, Mapping | None]]:
    """(before, after) of the same question and sample, in order of appearance; None where one side has no episode."""
    sides = []
    for records in (before, after):
        seen = Counter()
        side = {}
        for record in records:
            key = (record["id"], record.get("sample", 0))
            seen[key] += 1
            side[(*key, seen[key])] = record  # several episodes under one key are paired in order, none is dropped
        sides.append(side)
    return [(sides[0].get(key), sides[1].get(key)) for key in dict.fromkeys([*sides[0], *sides[1]])]


def _first(pair: tuple[Mapping | None, Mapping | None]) -> Mapping:
    return pair[0] if pair[0] is not None else pair[1]


def _kind_order(kind: str) -> tuple[int, str]:
    return (KINDS.index(kind) if kind in KINDS else len(KINDS), kind)


def _buttons(counts: Mapping[str, int]) -> str:
    buttons = [f'<button data-show="all" aria-pressed="true">all ({sum(counts.values())})</button>']
    for kind, n in counts.items():
        buttons.append(f'<button data-show="{escape(kind)}" aria-pressed="false">{escape(kind)} ({n})</button>')
    return "".join(buttons)


def _question_html(pair: tuple[Mapping | None, Mapping | None]) -> str:
    question = _first(pair)
    kind = escape(question["kind"])
    gold = escape(" | ".join(question.get("golden_answers", ())))
    name = escape(str(question["id"]))
    return (
        f'<section class="question" data-kind="{kind}"><h2><span class="kind">{kind}</span>'
        f'{escape(question["question"])}</h2><div class="gold">gold: {gold} &middot; {name}</div>'
        f'<div class="pair">{_episode_html("before", pair[0])}{_episode_html("after", pair[1])}</div></section>\n'
    )


def _episode_html(side: str, record: Mapping | None) -> str:
    if record is None:
        return f'<div class="episode {side}"><h3>{side}</h3><div class="facts">no episode</div></div>'
    segments = record.get("segments", ())
    texts = "".join(_segment_html(i, segment, record.get("actions", ())) for i, segment in enumerate(segments))
    turns = sum(segment["source"] == "policy" for segment in segments)
    facts = f"{turns} turns, stopped by {record.get('stop_reason', '?')}"
    if record.get("em") is not None:
        facts += f", EM {record['em']:g}"
    return (
        f'<div class="episode {side}"><h3>{side} <span class="facts">{escape(facts)}</span></h3>'
        f'<div class="text">{texts}</div>{_parts_html(record)}</div>'
    )


def _segment_html(index: int, segment: Mapping, actions: Sequence[Mapping]) -> str:
    source, text = segment["source"], segment["text"]
    if source == "policy":
        return f'<span class="policy">{_policy_html(index, text, actions)}</span>'
    body = f'<span class="masked {escape(source)}" title="{escape(source)}, masked">{escape(text)}</span>'
    if source == "prompt":  # long, and the same everywhere
        return f'<details class="masked"><summary>prompt</summary>{body}</details>'
    return body


def _policy_html(index: int, text: str, actions: Sequence[Mapping]) -> str:
    """The text of policy segment `index`, its executed queries and answer marked inside their action's span."""
    marks: list[tuple[int, int, str]] = []
    for action in actions:
        segment, start, end = action["span"]
        if segment != index or action["type"] == "invalid":
            continue
        wanted = action["queries"] if action["type"] == "search" else [action["text"]]
        tag = ("mark", "query") if action["type"] == "search" else ("span", "final")
        marks += [(a, b, tag) for a, b in _find_in_order(text, wanted, start, end)]
    pieces, at = [], 0
    for start, end, (name, css) in sorted(marks):
        pieces += [escape(text[at:start]), f'<{name} class="{css}">', escape(text[start:end]), f"</{name}>"]
        at = end
    return "".join([*pieces, escape(text[at:])])


def _find_in_order(text: str, wanted: Sequence[str], start: int, end: int) -> list[tuple[int, int]]:
    """Where each string stands in text[start:end], each behind the one before. Starts behind the opening tag, so that
    the query "search" is not found in "<search>"."""
    start = text.find(">", start, end) + 1 or start
    places = []
    for string in wanted:
        at = text.find(string, start, end)
        if string and at >= 0:
            places.append((at, at + len(string)))
            start = at + len(string)
    return places


def _parts_html(record: Mapping) -> str:
    parts = record.get("parts") or {}
    if not parts:
        return ""
    rows = "".join(f"<tr><td>{escape(str(k))}</td><td>{_signed(v)}</td></tr>" for k, v in parts.items())
    total = f'<tr class="total"><td>total</td><td>{_signed(record.get("total"))}</td></tr>'
    return f'<table class="parts">{rows}{total}</table>'


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.3f}"  # None: it was not finite
