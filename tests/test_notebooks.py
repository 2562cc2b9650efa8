"""The notebooks: kept without outputs; executed from a fresh kernel in their small setting."""

import json
import math
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("name", NAMES)
def test_is_kept_without_outputs_and_compiles(name):
    notebook = nbformat.read(FOLDER / name, as_version=4)
    nbformat.validate(notebook)
    for i, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None, f"cell {i}: strip the outputs"
            compile(cell.source, f"{name}, cell {i}", "exec")


def executed(name: str, tmp_path: Path, monkeypatch, expression: str):
    """Runs the notebook as a user's Jupyter does, a folder of its own for what it writes; what `expression` is then."""
    monkeypatch.setenv("PARASEARCH_NOTEBOOK", "smoke")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(FOLDER / name, as_version=4)
    last = f"import json\nprint(json.dumps({expression}, default=float))"
    notebook.cells.append(nbformat.v4.new_code_cell(last))
    NotebookClient(notebook, timeout=900, startup_timeout=300, resources={"metadata": {"path": str(FOLDER)}}).execute()
    return notebook, json.loads(notebook.cells[-1].outputs[-1].text)


@pytest.mark.slow
def test_reward_variants_trains_with_the_notebooks_reward_and_compares(tmp_path, monkeypatch):
    lines = "{name: read_metrics(path) for name, path in runs.items()}"
    values = f"[comparison, {lines}, {{name: list(total) for name, total in totals.items()}}, parts]"
    notebook, (comparison, metrics, totals, parts) = executed("reward_variants.ipynb", tmp_path, monkeypatch, values)
    head, *rows = comparison
    assert head == ["questions", "reward", "n", "EM %", "DR %", "turns"]
    assert [row[:3] for row in rows] == [
        [kind, name, 10] for kind in ("parallel", "sequential", "single") for name in ("mine", "ParallelSearch")
    ]
    assert all(len([float(x) for x in cell.split(" -> ")]) == 2 for row in rows for cell in row[3:])
    for name, part in (("mine", "reward/turns"), ("ParallelSearch", "reward/decomposition")):
        assert [line["step"] for line in metrics[name]] == [1, 2]
        assert all(math.isfinite(line[key]) for line in metrics[name] for key in (part, "loss", "reward/total"))
    # Every reward saw the same episodes: OTC never pays one whose EM is 0.
    assert len({len(total) for total in totals.values()}) == 1 and len(totals["em"]) == 64
    assert set(totals["em"]) == {0.0, 1.0}
    assert all(otc == 0 for exact, otc in zip(totals["em"], totals["OTC (PPO)"], strict=True) if not exact)
    assert [sum(episode.values()) for episode in parts["mine"]] == totals["mine"]
    assert any("image/png" in output.get("data", ()) for cell in notebook.cells for output in cell.get("outputs", ()))


@pytest.mark.slow
def test_rollout_walkthrough_follows_the_engine(tmp_path, monkeypatch):
    policy = "sum(len(s.ids) for e in episodes for s in e.segments if s.source == 'policy')"
    last_state = "state == automaton.accept, names[state]"
    values = f"[float(difference.max()), difference.size, {policy}, {last_state}, widest(episode)]"
    _, found = executed("rollout_walkthrough.ipynb", tmp_path, monkeypatch, values)
    difference, count, sampled, accepted, name, queries = found
    assert difference < 1e-4 and count == sampled > 0
    assert accepted and name == "end of the turn" and queries > 0


@pytest.mark.slow
def test_table4_reads_its_sweep(tmp_path, monkeypatch):
    values = "[len(settings), [len(seeds[0]) for seeds in settings.values()], lines[2:]]"
    notebook, (count, steps, rows) = executed("table4.ipynb", tmp_path, monkeypatch, values)
    assert (count, steps) == (2, [3, 3])
    # ParallelSearch, Eq. 3-7, at (0.15, 0.35): one split search, two plain ones or more, one plain search.
    assert rows[0] == "| 0.15 | 0.35 | 1 split | 2 plain, 3 plain | 1 plain |"
    assert any(
        "| 0.15 | 0.35 | 1 |" in str(output.get("data"))
        for cell in notebook.cells
        for output in cell.get("outputs", ())
    )
