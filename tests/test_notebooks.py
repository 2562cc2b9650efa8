"""The notebooks: kept without outputs, valid, and run from a fresh kernel in their small setting."""

import json
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="notebooks: pip install -r requirements-dev.txt")

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert {path.stem for path in NOTEBOOKS} >= {"reward_variants", "rollout_walkthrough"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_kept_without_outputs(path):
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    for cell in book.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
            compile(cell.source, path.name, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_in_a_fresh_kernel(path, monkeypatch):
    from nbclient import NotebookClient

    monkeypatch.setenv("PARASEARCH_NOTEBOOK", "smoke")
    book = nbformat.read(path, as_version=4)
    book.cells.append(nbformat.v4.new_code_cell(LOOKS[path.stem]))
    NotebookClient(book, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
    out = "".join(o.get("text", "") for o in book.cells[-1].outputs)
    assert json.loads(out)["fine"] is True


LOOKS = {  # what a run must have left behind
    "reward_variants": (
        "import json\n"
        "lines = {label: read_metrics(RUNS / label) for label in FUNCTIONS}\n"
        "fine = all(len(each) == STEPS for each in lines.values()) and len(rows) == 2 * len(names)\n"
        "fine &= all(np.isfinite(line['reward/total']) for each in lines.values() for line in each)\n"
        "fine &= results['mine']['method'] == 'brief' and results['ParallelSearch']['method'] == 'parallel_search'\n"
        "print(json.dumps({'fine': bool(fine)}))"
    ),
    "rollout_walkthrough": (
        "import json\n"
        "fine = state == table.accept and mask.sum() == batch.policy_mask[row].sum() and difference.max() < 1e-4\n"
        "print(json.dumps({'fine': bool(fine)}))"
    ),
}
