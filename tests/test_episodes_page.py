"""The page of episodes: its grey is the loss mask, its marks are the actions, its filters hide what they say; and in a
browser, where there is one, nothing of an episode's text runs and a phone need not scroll sideways."""

import base64
import hashlib
import json
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from parasearch_jax.data.types import Question
from parasearch_jax.episodes_page import episodes_html
from parasearch_jax.rollout.types import Episode, Segment
from parasearch_jax.writers import episode_record

VOID = ("meta", "br")


class Page(HTMLParser):
    """Collects each piece of text with the tags and classes around it."""

    def __init__(self, html, strict=True):
        super().__init__(convert_charrefs=True)
        self.open, self.texts, self.tags, self.attributes = [], [], [], []
        self.feed(html)
        self.close()
        assert not strict or self.open == [], "tags left open"

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
    marked = [data for data, classes in page.texts if "query" in classes and "text" in classes]
    assert marked == ["P birth", "search"]  # neither "<search>" itself, nor the documents', nor the unclosed one
    assert [data for data, c in page.texts if "final" in c and "text" in c] == ["P"]
    assert all("policy" in c for _, c in page.texts if ("query" in c or "final" in c) and "text" in c)
    texts = [data for data, classes in page.texts if "policy" in classes and "text" in classes]
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
    assert [v for k, v in page.attributes if k == "data-value"] == ["all", "parallel", "single"]
    assert "Shown: 4 of 6" in page.text("facts")


def test_page_is_self_contained():
    html = episodes_html([make_record()], [])
    names = {name for name, _ in Page(html).attributes}
    assert not names & {"src", "href", "srcset", "action"} and "@import" not in html and "url(" not in html


# ------------------------------------------------------------------------------------------ queries of each protocol


@pytest.mark.parametrize(
    ("protocol", "turn", "queries", "answer"),
    [
        ("parallel", "<think>a</think><search> b ## ## c ##</search>", ["b", "c"], "<answer> P </answer>"),
        ("parallel", "<search>search</search>", ["search"], "<answer>answer</answer>"),
        ("r1_searcher", '<|begin_of_query|> the "A  B" <|end_of_query|>', ['the "A  B"'], "<answer>P</answer>"),
        ("search_o1", "<|begin_search_query|>wall<|end_search_query|>", ["wall"], "so \\boxed{P {x}} it is"),
        ("self_ask", "Follow up: Follow a > b, up\n", ["Follow a > b, up"], "So the final answer is: P"),
        ("ircot", "P is in Q.\n", ["P is in Q."], "So the answer is: P\n"),
        ("iter_retgen", "a thought", ["a thought"], "So the answer is: P\n"),
    ],
)  # fmt: skip
def test_marks_of_other_protocols(protocol, turn, queries, answer):
    pairs = [("prompt", "Q"), ("policy", turn), ("docs", "D"), ("policy", answer)]
    episode = Episode.from_text(pairs, protocol=protocol, question="Who?")
    page = Page(episodes_html([], [episode_record(episode, Question("q", "Who?", ("P",), "single"))]))
    marks = [data for data, classes in page.texts if "query" in classes and "text" in classes]
    assert marks == queries
    assert [data for data, c in page.texts if "final" in c and "text" in c] == [episode.answer]
    assert page.text("text", "policy") == turn + answer
    notes = [value for name, value in page.attributes if name == "data-note"]
    assert notes == [f"{len(queries)} sub-queries" if len(queries) > 1 else "1 query"]


def test_separators_stand_out_and_invalid_turns_are_told():
    page = Page(episodes_html([make_record()], []))
    assert [data for data, classes in page.texts if "sep" in classes and "text" in classes] == [" ## "]
    assert [value for name, value in page.attributes if name == "data-note"] == ["2 sub-queries", "no valid action"]
    assert "POLICY2" in page.text("text", "invalid")


def test_extra_calls_are_shown_as_not_trained_on():
    episode = Episode.from_text([("prompt", "Q"), ("policy", "<answer>P</answer>")])
    episode.extra = [Episode([Segment("prompt", f"READ {EVIL}"), Segment("policy", "SAID")])]
    page = Page(episodes_html([], [episode_record(episode, Question("q", "Who?", ("P",), "single"))]))
    assert all("masked" in classes for text in ("READ", "SAID") for classes in page.classes_of(text))
    assert page.classes_of("SAID") and "extra model call 1 of 1, not trained on" in page.text()


def test_long_documents_are_folded_whole():
    documents = "word \u00e9 \x00 " * 500
    episode = Episode.from_text([("policy", "<search>q</search>"), ("docs", documents)])
    page = Page(episodes_html([], [episode_record(episode, Question("q", "Who?", ("P",), "single"))]))
    assert page.text("docs") == documents.replace("\x00", "\u2400")  # a browser would drop it
    assert "details" in page.tags and "more characters" in page.text("text")


# ------------------------------------------------------------------------------------------------- filters, selection


def outcome(qid, em, queries="a", kind="single"):
    return make_record(queries=queries, kind=kind, qid=qid) | {"em": em}


BEFORE = [outcome("rr", 1.0), outcome("wr", 0.0, "a", "parallel"), outcome("rw", 1.0, "a ## b"), outcome("ww", 0.0)]
AFTER = [outcome("rr", 1.0), outcome("wr", 1.0, "a ## b", "parallel"), outcome("rw", 0.0), outcome("ww", 0.0, "a ## b")]


def values(page, name):
    return [value for key, value in page.attributes if key == name]


def test_what_the_filters_go_by():
    page = Page(episodes_html(BEFORE, AFTER))
    assert values(page, "data-kind") == ["parallel", "single", "single", "single"]
    assert values(page, "data-result") == ["right gained", "right", "wrong lost", "wrong"]
    assert values(page, "data-split") == ["split began", "whole", "whole ended", "split began"]
    buttons = list(zip(values(page, "data-filter"), values(page, "data-value"), strict=True))
    assert buttons[:3] == [("kind", "all"), ("kind", "parallel"), ("kind", "single")]
    assert [v for f, v in buttons if f == "result"] == ["all", "right", "wrong", "gained", "lost"]
    assert [v for f, v in buttons if f == "split"] == ["all", "split", "whole", "began", "ended"]
    assert "Of all 4: 1 wrong → right, 1 right → wrong." in page.text("facts")


def test_filters_of_an_evaluation_alone():
    html = episodes_html([], AFTER, name="a <run>")
    page = Page(html)
    assert values(page, "data-result") == ["right", "right", "wrong", "wrong"]
    assert {"gained", "lost", "began", "ended"}.isdisjoint(values(page, "data-value"))
    assert "before" not in page.text() and page.text().count("a <run>: Episodes") == 2
    assert values(page, "class").count("episode ") == 4 and "pair two" not in values(page, "class")


def test_episodes_without_em_have_no_filter_by_answer():
    page = Page(episodes_html([], [make_record() | {"em": None}]))
    assert "result" not in values(page, "data-filter") and values(page, "data-result") == [""]


def test_one_id_in_two_data_sets_is_two_questions():
    records = [make_record(answer=name) | {"dataset": name} for name in ("nq", "popqa")]
    page = Page(episodes_html(records[::-1], records))
    finals = [data for data, c in page.texts if "final" in c and "episode" in c]
    assert finals == ["popqa", "popqa", "nq", "nq"]


def test_changed_answers_come_first_up_to_half():
    before = [outcome(f"q{i:02d}", 0.0) for i in range(20)]
    after = [outcome(f"q{i:02d}", float(i >= 12)) for i in range(20)]
    page = Page(episodes_html(before, after, per_kind=6))
    assert values(page, "data-result") == ["wrong"] * 3 + ["right gained"] * 3
    assert "Shown: 6 of 20, at most 6 of each kind; up to half of them are there because" in page.text("facts")


def test_two_hundred_long_episodes_stay_below_five_megabytes():
    policy = "<think>" + "thought & more " * 4000 + "</think><answer>P</answer>"
    records = []
    for i in range(100):
        episode = Episode.from_text([("prompt", "Q"), ("policy", policy)])
        kind = ("parallel", "single")[i >= 50]
        records.append(episode_record(episode, Question(str(i), "Who?", ("P",), kind), em=1.0))
    html = episodes_html(records, records, per_kind=50)
    assert 4_500_000 < len(html.encode()) < 5_000_000
    kinds = values(Page(html), "data-kind")
    assert abs(kinds.count("parallel") - kinds.count("single")) <= 1 and f"Shown: {len(kinds)} of 100" in html
    assert f"For {100 - len(kinds)} more the page has no room" in html


# --------------------------------------------------------------------------------------------------- in a browser

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# What the page is like when it has been loaded and clicked on; told to the page around it.
PROBE = """
const luminance = color => {
  const [r, g, b] = color.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const clear = color => color === "rgba(0, 0, 0, 0)";
const behind = e => !e ? "rgb(255, 255, 255)" : clear(getComputedStyle(e).backgroundColor) ?
  behind(e.parentElement) : getComputedStyle(e).backgroundColor;
const ratio = (a, b) => {
  const [x, y] = [luminance(a), luminance(b)].sort((p, q) => p - q);
  return (y + 0.05) / (x + 0.05);
};
addEventListener("load", () => {
  for (const selector of CLICKS) document.querySelector(selector).click();
  setTimeout(() => {
    const texts = [...document.body.querySelectorAll("*")].filter(e => e.offsetParent &&
      [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()));
    const ratios = texts.map(e => ratio(getComputedStyle(e).color, behind(e)));
    for (const e of document.querySelectorAll("[data-note]")) {
      const after = getComputedStyle(e, "::after");
      ratios.push(ratio(after.color, after.backgroundColor));
    }
    const shown = [...document.querySelectorAll(".question")].filter(q => q.offsetParent);
    const sides = [...shown[0]?.querySelectorAll(".episode") ?? []].map(e => e.getBoundingClientRect().left);
    parent.postMessage(JSON.stringify({
      width: innerWidth, scroll: document.documentElement.scrollWidth, title: document.title,
      contrast: Math.min(...ratios), shown: shown.map(q => q.querySelector(".gold").textContent),
      found: document.getElementById("found").textContent, sides,
      pressed: [...document.querySelectorAll("[aria-pressed=true]")].map(b => b.textContent),
      counts: [...document.querySelectorAll(".count")].map(c => +c.textContent),
      open: document.querySelectorAll("details[open]").length, hash: location.hash,
    }), "*");
  }, 100);
});
"""
AROUND = """<!DOCTYPE html><body>
<script>addEventListener("message", event => document.body.dataset.told = event.data);</script>
<iframe src="page.html{fragment}" width="{width}" height="900" style="border: 0"></iframe>"""


def look(tmp_path, html, width=1280, fragment="", clicks=(), guarded=True):
    """What PROBE tells of the page in a frame of that width: a window can't be as narrow as a phone."""
    probe = PROBE.replace("CLICKS", json.dumps(clicks))
    digest = base64.b64encode(hashlib.sha256(probe.encode()).digest()).decode()
    policy = "Content-Security-Policy"
    html = html.replace("script-src ", f"script-src 'sha256-{digest}' ") if guarded else html.replace(policy, "off")
    (tmp_path / "page.html").write_text(html.replace("</body>", f"<script>{probe}</script></body>"), encoding="utf-8")
    (tmp_path / "around.html").write_text(AROUND.format(fragment=fragment, width=width))
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={tmp_path}/profile",
        "--dump-dom",
    ]
    command = [BROWSER, *flags, "--virtual-time-budget=10000", (tmp_path / "around.html").as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    told = Page(dom, strict=False)
    return json.loads(dict(told.attributes)["data-told"])


in_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium on the path: the page is not looked at")


def hostile():
    text = "<script>document.title = 'ran'</script></script></style><img src=x onerror=\"document.title = 'ran'\">"
    wide = "w" * 500
    pairs = [
        ("prompt", text),
        ("policy", f"<think>{text}</think><search>{wide} ## \u0645\u0646 \U0001f98a</search>"),
        ("docs", f"{text} {wide} \u202e reversed"),
        ("policy", "nothing"),
        ("notice", "Search or answer."),
        ("policy", f"<answer>{wide}</answer>"),
    ]
    question = Question(f"id {text}", f"{text} {wide}", (text, wide), "parallel")
    return episode_record(Episode.from_text(pairs), question, {wide: 0.5, text: 0.5}, em=1.0)


@pytest.mark.slow
@in_browser
@pytest.mark.parametrize("guarded", [True, False])  # with the page's own policy, and by its escaping alone
def test_on_a_phone_nothing_runs_and_nothing_is_too_wide(tmp_path, guarded):
    page = look(tmp_path, episodes_html([hostile()], [hostile()]), 390, clicks=["#unfold"], guarded=guarded)
    assert page["title"] == "Episodes before and after training"
    assert (page["width"], page["scroll"]) == (390, 390)
    assert page["sides"][0] == page["sides"][1]  # below each other
    assert page["open"] == 2 and "<script>" in page["shown"][0]
    assert page["contrast"] >= 4.5


@pytest.mark.slow
@in_browser
def test_filters_in_a_browser(tmp_path):
    html = episodes_html(BEFORE, AFTER)
    page = look(tmp_path, html)
    assert len(page["shown"]) == 4 and page["found"] == "4 of 4 below" and page["sides"][0] < page["sides"][1]
    assert page["pressed"] == ["all (4)"] * 3 and page["scroll"] <= 1280 and page["contrast"] >= 4.5
    page = look(tmp_path, html, fragment="#kind=single&split=split")
    assert [text.endswith("ww") for text in page["shown"]] == [True] and page["found"] == "1 of 4 below"
    assert page["pressed"] == ["single (1)", "all (1)", "decomposed after (1)"]
    assert page["counts"] == [2, 1, 1, 1, 0, 1, 0, 0, 3, 1, 2, 1, 1]  # of each choice, under those of the other rows
    page = look(tmp_path, html, clicks=["[data-value=gained]", "[data-filter=kind][data-value=single]"])
    assert page["shown"] == [] and page["found"] == "no question fits"
    assert page["hash"] == "#kind=single&result=gained&split=all"
