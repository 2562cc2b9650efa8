"""The report: numbers before and after with their intervals, and plots of whatever the metrics hold."""

import json

import pytest
from test_episodes_page import make_record

from parasearch_jax import report
from parasearch_jax.episodes_page import episodes_html
from parasearch_jax.report import write_report
from parasearch_jax.writers import read_episodes, write_episodes


def make_metrics(n=5):
    line = {"reward/total": 0.5, "reward/outcome": 0.4, "loss": 0.1, "kl": 0.01, "rollout/em_single": 0.9}
    line |= {"rollout/tokens": 90.0, "rollout/tokens_sampled": 40.0, "rollout/stop_length": 0.25}
    line |= {f"rollout/{m}_{k}": 2.0 for m in ("dr", "turns") for k in ("parallel", "sequential", "single")}
    line |= {"seconds/decode": 4.0, "seconds/update": 2.0, "seconds/total": 6.5, "phase": "train"}
    return [{"step": i + 1} | line for i in range(n)]


def evals(em, dr):
    row = {"n": 300, "em": em, "f1": em, "dr": dr, "turns": 2.98, "valid_format": 0.7, "dr_first": None}
    row |= {"em_ci": [em - 0.0212, em + 0.03], "dr_ci": [dr - 1.5, dr + 2], "f1_ci": [None, None]}
    return {"all": row, "parallel": row | {"n": 100}}


RESULTS = {
    "config": "parallel_tiny", "model": "toy/base", "method": "parallel_search", "variant": "paper", "seconds": 250.2,
    "retriever": {"kind": "faiss", "corpus_sha256": "abc", "topk": 3},
    "evals": {"initial": evals(0.86, 31), "final": evals(0.9, 97.3)},
}  # fmt: skip


def test_report_with_everything(tmp_path):
    write_episodes(tmp_path / "episodes" / "initial.jsonl", [make_record()])
    records = read_episodes(tmp_path / "episodes" / "initial.jsonl")
    path = write_report(tmp_path, RESULTS, make_metrics(), records, records)
    text = path.read_text()
    assert "| parallel | 100 | 86.0 -> 90.0 | 86.0 -> 90.0 | 31.0 -> 97.3 | - -> - | 2.98 -> 2.98 |" in text
    assert "retriever: kind faiss, corpus_sha256 abc, topk 3" in text and "episodes.html" in text
    assert "| parallel | 100 | 83.9 to 89.0 -> 87.9 to 93.0 | - -> - | 29.5 to 33.0 -> 95.8 to 99.3 |" in text
    assert "parasearch_jax.paired WORKDIR/episodes/initial.jsonl WORKDIR/episodes/final.jsonl" in text
    names = ["evaluation", "reward", "dr", "turns", "em", "lengths", "losses", "seconds"]
    assert sorted(p.stem for p in (tmp_path / "report").iterdir()) == sorted(names)
    for name in names:
        assert f"(report/{name}.png)" in text
        assert (tmp_path / "report" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "episodes.html").read_text() == episodes_html(records, records, name="parallel_tiny")


def test_report_of_an_evaluation_alone(tmp_path):
    results = json.loads(json.dumps(RESULTS)) | {"evals": {"final": evals(0.9, 97.3)}}
    text = write_report(tmp_path, results, (), (), [make_record()]).read_text()
    assert "| parallel | 100 | 87.9 to 93.0 | - | 95.8 to 99.3 |" in text and "## Training" not in text
    assert "paired" not in text and "Trajectories: [episodes.html]" in text
    assert "->" not in text.split("(evaluation only")[0] and "| parallel | 100 | 90.0 |" in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["episodes.html", "report", "report.md"]
    assert [p.name for p in (tmp_path / "report").iterdir()] == ["evaluation.png"]


def test_results_without_intervals(tmp_path):
    row = {"n": 3, "em": 0.5}
    text = write_report(tmp_path, RESULTS | {"evals": {"final": {"all": row}}}).read_text()
    assert "| all | 3 | 50.0 |" in text and "intervals" not in text


def points(monkeypatch, tmp_path, evals):
    """{(panel, side): [(value, lower, upper), ...]} of the plot of an evaluation, as matplotlib holds it."""
    figures = []
    monkeypatch.setattr(report, "save", lambda figure, path: figures.append(figure) or path)
    report._draw_evaluation(tmp_path, evals)
    out = {}
    for ax in figures[0].axes:
        for dots, lines in zip(ax.lines, ax.collections, strict=True):
            ends = {line[0][0]: sorted(y for _, y in line.tolist()) for line in lines.get_segments() if len(line)}
            rows = zip(dots.get_xdata(), dots.get_ydata(), strict=True)
            out[ax.get_ylabel(), dots.get_label()] = [(value, *ends.get(place, ())) for place, value in rows]
    return out


def test_the_evaluation_is_drawn_with_its_intervals(monkeypatch, tmp_path):
    drawn = points(monkeypatch, tmp_path, RESULTS["evals"])
    assert list(drawn) == [(p, s) for p in ("EM %", "DR %", "turns") for s in ("before", "after")]
    assert drawn["EM %", "before"] == [pytest.approx((86, 83.88, 89))] * 2
    assert drawn["DR %", "after"] == [pytest.approx((97.3, 95.8, 99.3))] * 2
    assert drawn["turns", "after"] == [(2.98,), (2.98,)]  # which have none


@pytest.mark.parametrize("metrics", [[{"step": 1}], [{"step": 1, "kl": None, "nonfinite": {"kl": "nan"}}]])
def test_plots_take_what_is_there(tmp_path, metrics):
    write_report(tmp_path, RESULTS, metrics)
    assert sorted(p.stem for p in (tmp_path / "report").iterdir()) == ["evaluation"] + ["losses"] * ("kl" in metrics[0])


def test_a_value_that_was_not_finite_is_a_gap(tmp_path):
    from parasearch_jax.report import _column, _series

    metrics = [{"step": 1, "reward/a": 1.0}, {"step": 2, "reward/a": None}, {"step": 3, "reward/b": 2}]
    assert [v == v for v in _column(metrics, "reward/a")] == [True, False, False]
    assert list(_series(metrics, "reward/")) == ["a", "b"]


def test_half_a_character_does_not_end_the_report(tmp_path):
    record = make_record() | {"question": "half \udce2"}
    write_report(tmp_path, RESULTS, (), [record], [record])
    assert "half ?" in (tmp_path / "episodes.html").read_text()
