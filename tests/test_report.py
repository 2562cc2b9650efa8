"""The report: numbers before and after, plots of whatever the metrics hold, and a page whose grey is the loss mask."""

import json
from html.parser import HTMLParser

import pytest

from parasearch_jax.data.types import Question
from parasearch_jax.report import episodes_html, write_report
from parasearch_jax.rollout.types import Episode
from parasearch_jax.writers import episode_record, read_episodes, write_episodes

VOID = ("meta", "br")


class Page(HTMLParser):
    """Collects each piece of text with the tags and classes around it."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.open, self.texts, self.tags, self.attributes = [], [], [], []
        self.feed(html)
        self.close()
        assert self.open == [], "tags left open"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if not any(tag in ("style", "script") for tag, _ in self.open):
            classes = {name for _, attrs in self.open for name in attrs.get("class", "").split()}
            self.texts.append((data, classes))

    def text(self, *classes):
        return "".join(data for data, found in self.texts if found.issuperset(classes))

    def classes_of(self, string):
        return [classes for data, classes in self.texts if string in data]


EVIL = "<script>alert('x')</script>&amp;\"<b>"


def make_record(queries="P birth ## search", answer="P", kind="parallel", qid="q1", sample=0):
    """An episode whose documents hold tags and script, and whose second query is the word "search"."""
    pairs = [
        ("prompt", f"PROMPT {EVIL} <search>prompt example</search>"),
        ("policy", f"POLICY1 <think>{EVIL}</think><search>{queries}</search>"),
        ("docs", f"DOCS <information>P birth {EVIL}<search>not mine</search></information>"),
        ("policy", "POLICY2 <search>never closed"),
        ("notice", "NOTICE <answer>nobody</answer>"),
        ("policy", f"POLICY3 <answer> {answer} </answer>"),
    ]
    episode = Episode.from_text(pairs)
    episode.sample = sample
    question = Question(qid, f"Who? {EVIL}", (f"P {EVIL}",), kind)
    return episode_record(episode, question, {"outcome": 1.0, EVIL: -0.15}, em=1.0)


def test_all_text_is_escaped():
    record = make_record()
    html = episodes_html([record], [record])
    page = Page(html)
    assert page.tags.count("script") == 1 and "b" not in page.tags and "search" not in page.tags
    for source in ("prompt", "docs", "notice", "policy"):
        want = "".join(s["text"] for s in record["segments"] if s["source"] == source)
        got = page.text("before", source)
        assert got == want, source
    assert EVIL in page.text("parts") and EVIL in page.text("gold") and EVIL in page.text("question")


def test_masked_segments_and_only_they_are_grey():
    page = Page(episodes_html([make_record()], []))
    for name in ("PROMPT", "DOCS", "NOTICE"):
        assert [("masked" in c, "policy" in c) for c in page.classes_of(name)] == [(True, False)], name
    for name in ("POLICY1", "POLICY2", "POLICY3"):
        assert [("masked" in c, "policy" in c) for c in page.classes_of(name)] == [(False, True)], name
    assert "excluded from the loss" in page.text("legend", "masked")


def test_queries_and_answer_are_marked_by_provenance():
    page = Page(episodes_html([make_record()], []))
    marked = [data for data, classes in page.texts if "query" in classes and "before" in classes]
    assert marked == ["P birth", "search"]  # neither "<search>" itself, nor the documents', nor the unclosed one
    assert [data for data, c in page.texts if "final" in c and "before" in c] == ["P"]
    assert all("policy" in c for _, c in page.texts if ("query" in c or "final" in c) and "before" in c)
    texts = [data for data, classes in page.texts if "policy" in classes and "before" in classes]
    assert texts[texts.index("search") - 1] == " ## "


def test_pairs_by_question_and_sample():
    before = [make_record(answer=f"b{i}", sample=i) for i in range(2)] + [make_record(answer="only", qid="q2")]
    after = [make_record(answer=f"a{i}", sample=i) for i in (1, 0)]
    page = Page(episodes_html(before, after))
    finals = [(data, "before" in c) for data, c in page.texts if "final" in c and "episode" in c]
    assert finals == [("b0", True), ("a0", False), ("b1", True), ("a1", False), ("only", True)]
    assert page.text("after", "facts").count("no episode") == 1


def test_kinds_filter_and_limit():
    records = [make_record(kind=k, qid=f"{k}{i}") for k in ("single", "parallel") for i in range(3)]
    page = Page(episodes_html(records, records, per_kind=2))
    assert [v for k, v in page.attributes if k == "data-kind"] == ["parallel", "parallel", "single", "single"]
    assert [v for k, v in page.attributes if k == "data-show"] == ["all", "parallel", "single"]
    assert "Shown: 4 of 6" in page.text("facts")
    assert {v for k, v in page.attributes if k == "data-kind"} <= {v for k, v in page.attributes if k == "data-show"}


def test_page_is_self_contained():
    html = episodes_html([make_record()], [])
    names = {name for name, _ in Page(html).attributes}
    assert not names & {"src", "href", "srcset", "action"} and "@import" not in html and "url(" not in html


def make_metrics(n=5):
    line = {"reward/total": 0.5, "reward/outcome": 0.4, "loss": 0.1, "kl": 0.01, "rollout/em_single": 0.9}
    line |= {f"rollout/{m}_{k}": 2.0 for m in ("dr", "turns") for k in ("parallel", "sequential", "single")}
    line |= {"seconds/decode": 4.0, "seconds/update": 2.0, "seconds/total": 6.5, "phase": "train"}
    return [{"step": i + 1} | line for i in range(n)]


def evals(em, dr):
    row = {"n": 300, "em": em, "f1": em, "dr": dr, "turns": 2.98, "valid_format": 0.7, "dr_first": None}
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
    names = ["reward", "dr", "turns", "em", "losses", "seconds"]
    assert sorted(p.stem for p in (tmp_path / "report").iterdir()) == sorted(names)
    for name in names:
        assert f"(report/{name}.png)" in text
        assert (tmp_path / "report" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "episodes.html").read_text() == episodes_html(records, records)


def test_report_of_an_evaluation_has_no_plots(tmp_path):
    results = json.loads(json.dumps(RESULTS)) | {"evals": {"final": evals(0.9, 97.3)}}
    text = write_report(tmp_path, results).read_text()
    assert "->" not in text.split("(evaluation only")[0] and "| parallel | 100 | 90.0 |" in text
    assert [p.name for p in tmp_path.iterdir()] == ["report.md"]


@pytest.mark.parametrize("metrics", [[{"step": 1}], [{"step": 1, "kl": None, "nonfinite": {"kl": "nan"}}]])
def test_plots_take_what_is_there(tmp_path, metrics):
    write_report(tmp_path, RESULTS, metrics)
    assert sorted(p.stem for p in (tmp_path / "report").iterdir()) == (["losses"] if "kl" in metrics[0] else [])


def test_a_value_that_was_not_finite_is_a_gap(tmp_path):
    from parasearch_jax.report import _column, _series

    metrics = [{"step": 1, "reward/a": 1.0}, {"step": 2, "reward/a": None}, {"step": 3, "reward/b": 2}]
    assert [v == v for v in _column(metrics, "reward/a")] == [True, False, False]
    assert list(_series(metrics, "reward/")) == ["a", "b"]


def test_half_a_character_does_not_end_the_report(tmp_path):
    record = make_record() | {"question": "half \udce2"}
    write_report(tmp_path, RESULTS, (), [record], [record])
    assert "half ?" in (tmp_path / "episodes.html").read_text()
