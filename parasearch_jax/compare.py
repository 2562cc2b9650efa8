"""Curves and results of several runs side by side:

    python -m parasearch_jax.compare --out=curves.png GRPO=runs/a,runs/b PPO=runs/c

One line a label: the mean over its runs (seeds), with the range between the lowest and the highest shaded.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from absl import app, flags

from parasearch_jax.errors import UserError
from parasearch_jax.report import COLORS, figure_of, save
from parasearch_jax.writers import read_metrics

OUT = flags.DEFINE_string("out", "curves.png", "Where the plot is written.")

# (metric, title) of each panel, those that some run has.
PANELS = (
    ("reward/total", "reward of the sampled episodes"),
    ("rollout/dr_parallel", "parallel questions split (DR %)"),
    ("rollout/turns_parallel", "turns on parallel questions"),
    ("rollout/em", "EM of the sampled episodes"),
    ("perplexity", "perplexity of the stored episodes (SFT)"),
)
RESULTS = (("em", 100, "EM %"), ("dr", 1, "DR %"), ("turns", 1, "turns"))


def groups(args: Sequence[str]) -> dict[str, list[Path]]:
    """["GRPO=runs/a,runs/b"] -> {"GRPO": [runs/a, runs/b]}; a folder without a label is its own. UserError for none,
    and for one without metrics."""
    out: dict[str, list[Path]] = {}
    for arg in args:
        label, _, paths = arg.rpartition("=")
        out.setdefault(label or Path(paths).name, []).extend(Path(path) for path in paths.split(","))
    if not out:
        raise UserError("no run is given; write LABEL=workdir,workdir ...")
    for path in itertools.chain(*out.values()):
        if not read_metrics(path):
            raise UserError(f"{path} holds no metrics.jsonl with steps; give the work directory of a training run")
    return out


def curve(runs: Sequence[Sequence[Mapping]], key: str) -> tuple[list[int], list[list[float]]]:
    """The steps that every run has a finite value of `key` for, and the values of each of them over the runs."""
    tables = [{line["step"]: line[key] for line in lines if line.get(key) is not None} for lines in runs]
    steps = sorted(set.intersection(*map(set, tables)))
    return steps, [[table[step] for table in tables] for step in steps]


def plot(runs: Mapping[str, Sequence[Sequence[Mapping]]], path: Path) -> Path:
    """Draws PANELS for {label: the metrics of its runs}."""
    lines = [line for group in runs.values() for metrics in group for line in metrics]
    panels = [(key, title) for key, title in PANELS if any(key in line for line in lines)]
    figure, axes = figure_of(rows=len(panels), height=0.6 + 2.0 * len(panels))
    for ax, (key, title) in zip(axes, panels, strict=True):
        for (label, group), color in zip(runs.items(), itertools.cycle(COLORS), strict=False):
            steps, values = curve(group, key)
            ax.plot(steps, [statistics.fmean(v) for v in values], color=color, label=f"{label} ({len(group)})")
            ax.fill_between(steps, [min(v) for v in values], [max(v) for v in values], color=color, alpha=0.2, lw=0)
        ax.set_title(title, loc="left", fontsize=10)
    axes[0].legend(frameon=False)
    return save(figure, path)


def table(paths: Mapping[str, Sequence[Path]]) -> str:
    """The final evaluations in Markdown, a row a run, as results.json has them; a run without one is named."""
    kinds = ("single", "parallel", "sequential")
    rows = [["run", "seconds", *(f"{kind} {name}" for kind in kinds for _, _, name in RESULTS)]]
    for label, group in paths.items():
        for path in group:
            file = path / "results.json"
            if not file.exists():
                rows.append([f"{label} {path.name}", "not finished"] + [""] * (len(rows[0]) - 2))
                continue
            results = json.loads(file.read_text(encoding="utf-8"))
            cells = [
                f"{factor * results['evals']['final'][kind][key]:.2f}" if kind in results["evals"]["final"] else "-"
                for kind in kinds
                for key, factor, _ in RESULTS
            ]
            rows.append([f"{label} {path.name}", f"{results['seconds']:.0f}", *cells])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def main(argv: Sequence[str]) -> None:
    paths = groups(argv[1:])
    print(table(paths))
    print(plot({label: [read_metrics(path) for path in group] for label, group in paths.items()}, Path(OUT.value)))


if __name__ == "__main__":
    try:
        app.run(main)
    except UserError as error:
        sys.exit(f"error: {error}")
