"""One transcript of every protocol, written by hand, against what the engine makes of a scripted policy.

Fake gives document i of a query the title t{i} and the text "{query}.".
"""

import dataclasses

import pytest
from scripted import Fake, scripted_model

from parasearch_jax.data import Question
from parasearch_jax.errors import UserError
from parasearch_jax.protocol import PROTOCOLS, get_protocol
from parasearch_jax.retrieval import open_retriever
from parasearch_jax.rollout import Answer, Engine, Episode, Invalid, Search
from parasearch_jax.toy.tokenizer import END

LIMITS = dict(slots=4, chunk=4, max_turns=3, max_turn_tokens=40, max_total_tokens=1024, observation_tokens=200, topk=1)


@dataclasses.dataclass
class Case:
    """`turns`: what the policy says, piece by piece; `segments`: the whole episode, its prompt first."""

    protocol: str
    turns: list
    segments: list
    asked: list = dataclasses.field(default_factory=list)
    actions: list = dataclasses.field(default_factory=list)
    answer: str | None = None
    stop: str = "answer"
    changes: dict = dataclasses.field(default_factory=dict)  # of the limits
    extra: list = dataclasses.field(default_factory=list)  # what extra calls say, by the marker Q in their prompt
    kind: str = "unknown"
    prompt: str = "{question}\n"


CASES = {
    "parallel": Case(
        "parallel",
        [["<think>t</think>", "<search>a ## b</search>"], ["no action", END], ["<answer> c </answer>"]],
        [
            ("prompt", "Z\n"),
            ("policy", "<think>t</think><search>a ## b</search>"),
            ("docs", "\n\n<information>Doc 1(Title: t0) a.\nDoc 1(Title: t0) b.</information>\n\n"),
            ("policy", "no action"),
            ("notice", "\nThat was no valid action. Search or answer.\n"),
            ("policy", "<answer> c </answer>"),
        ],
        asked=["a", "b"],
        actions=[Search, Invalid, Answer],
        answer="c",
    ),
    "search_r1": Case(
        "search_r1",
        [["<search>a ## b</search>"], ["<think>t</think>", "<answer>c</answer> more"]],
        [
            ("prompt", "Z\n"),
            ("policy", "<search>a ## b</search>"),
            ("docs", "\n\n<information>Doc 1(Title: t0) a ## b.\nDoc 2(Title: t1) a ## b.</information>\n\n"),
            ("policy", "<think>t</think><answer>c</answer> more"),
        ],
        asked=["a ## b"],
        actions=[Search, Answer],
        answer="c",
        changes={"topk": 2},
    ),
    "no_search": Case(
        "no_search",
        [["<think>t <search>a</search></think>", "<answer>c</answer>"]],
        [("prompt", "Z\n"), ("policy", "<think>t <search>a</search></think><answer>c</answer>")],
        actions=[Answer],
        answer="c",
        changes={"max_turns": 0},
    ),
    "no_search, no answer": Case(
        "no_search",
        [["<think>t</think>", " hm", END]],
        [("prompt", "Z\n"), ("policy", "<think>t</think> hm")],
        actions=[Invalid],
        stop="turns",
        changes={"max_turns": 0},
    ),
    "otc": Case(
        "otc",
        [["<search>a</search>"], ["<answer>c</answer>"]],
        [
            ("prompt", "Z\n"),
            ("policy", "<search>a</search>"),
            ("docs", "\n\n<observation>Doc 1(Title: t0) a.</observation>\n\n"),
            ("policy", "<answer>c</answer>"),
        ],
        asked=["a"],
        actions=[Search, Answer],
        answer="c",
    ),
    "step_search": Case(
        "step_search",
        [["<plan>p</plan>", "<search>a</search>"], ["hm", END], ["<answer>c</answer>"]],
        [
            ("prompt", "Z\n"),
            ("policy", "<plan>p</plan><search>a</search>"),
            ("docs", "\n\n<information>Doc 1<## Title: t0 ##> a.</information>\n\n"),
            ("policy", "hm"),
            ("notice", "\n<warning>That was no valid action: write one query or one answer in its tags.</warning>\n"),
            ("notice", "\n<warning>No search is left: answer now.</warning>\n"),
            ("policy", "<answer>c</answer>"),
        ],
        asked=["a"],
        actions=[Search, Invalid, Answer],
        answer="c",
        changes={"max_turns": 2},
    ),
    "r1_searcher": Case(
        "r1_searcher",
        [
            [" who? ", '<|begin_of_query|> "who  is"\nit ', "<|end_of_query|>"],
            ["so</think>\n\n", "<answer> c </answer>"],
        ],
        [
            ("prompt", "Z\n"),
            ("policy", ' who? <|begin_of_query|> "who  is"\nit <|end_of_query|>'),
            (
                "docs",
                "\n\n<|begin_of_documents|>\n(1)t0   who is it.\n(2)t1   who is it.\n<|end_of_documents|>\n\n",
            ),
            ("policy", "so</think>\n\n<answer> c </answer>"),
        ],
        asked=["who is it"],
        actions=[Search, Answer],
        answer="c",
        changes={"topk": 2},
    ),
    "r1_searcher, at the cap": Case(
        "r1_searcher",
        [["<|begin_of_query|>a<|end_of_query|>"], ["<|begin_of_query|>b<|end_of_query|>"]],
        [
            ("prompt", "Z\n"),
            ("policy", "<|begin_of_query|>a<|end_of_query|>"),
            ("docs", "\n\n<|begin_of_documents|>\n(1)t0   a.\n<|end_of_documents|>\n\n"),
            ("policy", "<|begin_of_query|>b<|end_of_query|>"),
            ("notice", "I don't know."),
        ],
        asked=["a"],
        actions=[Search, Invalid],
        stop="turns",
        changes={"max_turns": 1},
    ),
    "r1_searcher, an empty query": Case(
        "r1_searcher",
        [['<|begin_of_query|> "" <|end_of_query|>']],
        [("prompt", "Z\n"), ("policy", '<|begin_of_query|> "" <|end_of_query|>')],
        actions=[Invalid],
        stop="length",
    ),
    "r1_searcher, no answer": Case(
        "r1_searcher",
        [["I give up", END]],
        [("prompt", "Z\n"), ("policy", "I give up")],
        actions=[Invalid],
        stop="eos",
    ),
    "search_o1": Case(
        "search_o1",
        [
            ["hm <|begin_search_query|>Q a<|end_search_query|>"],
            ["again <|begin_search_query|> Q a <|end_search_query|>"],
            ["so \\boxed{x} no, ", "\\boxed{\\text{c}}", END],
        ],
        [
            ("prompt", "Z\n"),
            ("policy", "hm <|begin_search_query|>Q a<|end_search_query|>"),
            ("docs", "\n\n<|begin_search_result|>it is c<|end_search_result|>\n\n"),
            ("policy", "again <|begin_search_query|> Q a <|end_search_query|>"),
            (
                "notice",
                "\n\n<|begin_search_result|>This query was searched before; see its results above."
                "<|end_search_result|>\n\n",
            ),
            ("policy", "so \\boxed{x} no, \\boxed{\\text{c}}"),
        ],
        asked=["Q a"],
        actions=[Search, Invalid, Answer],
        answer="\\text{c}",
        extra=[["reading. Final Information", ": it is c", END]],
    ),
    "search_o1, searches used up": Case(
        "search_o1",
        [[f"<|begin_search_query|>Q {i}<|end_search_query|>"] for i in range(6)] + [["\\boxed{c}", END]],
        [
            ("prompt", "Z\n"),
            *(
                part
                for i in range(5)
                for part in (
                    ("policy", f"<|begin_search_query|>Q {i}<|end_search_query|>"),
                    ("docs", "\n\n<|begin_search_result|>it is c<|end_search_result|>\n\n"),
                )
            ),
            ("policy", "<|begin_search_query|>Q 5<|end_search_query|>"),
            (
                "notice",
                "\n\n<|begin_search_result|>All 5 searches are used up; go on without.<|end_search_result|>\n\n",
            ),
            ("policy", "\\boxed{c}"),
        ],
        asked=[f"Q {i}" for i in range(5)],
        actions=[Search] * 5 + [Invalid, Answer],
        answer="c",
        extra=[["Final Information", "**: it is c", END]],
        changes={"max_turns": 14},
        kind="single",
    ),
    "self_ask": Case(
        "self_ask",
        [["Follow up: who is a?\n"], ["Intermediate answer: b.\n", "So the final answer is: c", " \n"]],
        [
            ("prompt", "Z\n"),
            ("policy", "Follow up: who is a?\n"),
            ("docs", "Retrieved documents:\nDoc 1(Title: t0) who is a?.\nEnd of documents.\n"),
            ("policy", "Intermediate answer: b.\nSo the final answer is: c \n"),
        ],
        asked=["who is a?"],
        actions=[Search, Answer],
        answer="c",
    ),
    "iter_retgen": Case(
        "iter_retgen",
        [["maybe. So the answer is: a\n"], ["surely. So the answer is: c", END]],
        [
            ("prompt", ""),
            ("docs", "Doc 1(Title: t0) Z.\n"),
            ("notice", "Z\n"),
            ("policy", "maybe. So the answer is: a\n"),
            ("docs", "Doc 1(Title: t0) Z maybe. So the answer is: a.\n"),
            ("notice", "\nAnswer again, with these documents too.\nQuestion: Z\n"),
            ("policy", "surely. So the answer is: c"),
        ],
        asked=["Z", "Z maybe. So the answer is: a"],
        actions=[Search, Answer],
        answer="c",
        changes={"max_turns": 1},
        prompt="{documents}{question}\n",
    ),
    "ircot": Case(
        "ircot",
        [["first a.\n"], ["So the answer is: c", "\n and more"]],
        [
            ("prompt", "Read:\n"),
            ("docs", "Doc 1(Title: t0) Z.\n"),
            ("notice", "Z\n"),
            ("policy", "first a.\n"),
            ("docs", "Doc 1(Title: t0) first a..\n"),
            ("policy", "So the answer is: c\n and more"),
        ],
        asked=["Z", "first a."],
        actions=[Search, Answer],
        answer="c",
        prompt="Read:\n{documents}{question}\n",
    ),
    "rag": Case(
        "rag",
        [[" paris", " \n"]],
        [
            ("prompt", "Read:\n"),
            ("docs", "Doc 1(Title: t0) Z.\nDoc 2(Title: t1) Z.\n"),
            ("notice", "Z:"),
            ("policy", " paris \n"),
        ],
        asked=["Z"],
        actions=[Answer],
        answer="paris",
        changes={"topk": 2, "max_turns": 0},
        prompt="Read:\n{documents}{question}:",
    ),
    "direct": Case(
        "direct",
        [[" paris", END]],
        [("prompt", "Z\n"), ("policy", " paris")],
        actions=[Answer],
        answer="paris",
        changes={"max_turns": 0},
    ),
    "cot": Case(
        "cot",
        [["it is in france.\n", "So the answer is: paris", " \n"]],
        [("prompt", "Z\n"), ("policy", "it is in france.\nSo the answer is: paris \n")],
        actions=[Answer],
        answer="paris",
        changes={"max_turns": 0},
    ),
}


def test_every_protocol_has_a_transcript():
    assert {case.protocol for case in CASES.values()} == set(PROTOCOLS)


def run(case, retriever, slots=4, questions=1):
    scripts = {"Z": case.turns} | ({"Q": case.extra} if case.extra else {})
    model = scripted_model(scripts, size=300, width=40)
    engine = Engine(model, **(LIMITS | case.changes | {"slots": slots}))
    protocol = get_protocol(case.protocol, prompt=case.prompt)
    try:
        asked = [Question(str(i), "Z", ["c"], kind=case.kind) for i in range(questions)]
        return engine.rollout(asked, protocol, retriever, temperature=0.0), engine.pop_stats()
    finally:
        engine.close()


@pytest.mark.parametrize("name", CASES)
def test_transcript(name):
    case, retriever = CASES[name], Fake()
    (episode,), stats = run(case, retriever)
    assert [(s.source, s.text) for s in episode.segments] == case.segments
    assert retriever.asked == case.asked
    assert [type(action) for action in episode.actions] == case.actions
    assert (episode.answer, episode.stop_reason) == (case.answer, case.stop)
    assert len(episode.actions) == episode.turns
    calls = len(episode.searches) if case.extra else 0
    assert len(episode.extra) == calls == stats.get("calls/extra", 0)
    again = Episode.from_text(case.segments, get_protocol(case.protocol, prompt=case.prompt), "Z")
    if case.kind != "single":  # the kind is not in the text
        assert again.actions == episode.actions


def test_extra_calls_read_the_documents_and_share_the_slots():
    """Twelve episodes over two slots, of which one is kept for extra calls."""
    case = CASES["search_o1"]
    episodes, stats = run(case, Fake(), slots=2, questions=12)
    assert stats["calls/extra"] == 12
    for episode in episodes:
        assert [(s.source, s.text) for s in episode.segments] == case.segments
        (call,) = episode.extra
        assert [s.source for s in call.segments] == ["prompt", "policy"] and call.stop_reason == "eos"
        asked = call.segments[0].text
        assert "Q a" in asked and "Doc 1(Title: t0) Q a." in asked and "hm <|begin_search_query|>" in asked
        assert call.segments[1].text == "reading. Final Information: it is c"
    with pytest.raises(UserError, match=r"rollout.slots must be >= 2, it is 1"):
        run(case, Fake(), slots=1)


def test_a_failed_search_needs_no_extra_call():
    async def fail(query):
        raise ConnectionError

    (episode,), stats = run(CASES["search_o1"], Fake(before=fail))
    assert not episode.extra and "calls/extra" not in stats
    assert episode.segments[2] == dataclasses.replace(
        episode.segments[2],
        source="notice",
        text="\n\n<|begin_search_result|>The search failed. Search again or answer.<|end_search_result|>\n\n",
    )


def test_an_extra_call_that_is_too_long_is_no_end():
    case = dataclasses.replace(CASES["search_o1"], changes={"max_total_tokens": 340})
    (episode,), stats = run(case, Fake())
    assert (stats["calls/too_long"], stats.get("calls/extra", 0)) == (1, 0) and not episode.extra
    assert [s.source for s in episode.segments][:4] == ["prompt", "policy", "notice", "policy"]
    assert "The search failed." in episode.segments[2].text and episode.answer == "\\text{c}"


def test_an_agent_that_never_searches_needs_no_retriever():
    nothing = open_retriever({"kind": "none"})
    (episode,), _ = run(CASES["direct"], nothing)
    assert episode.answer == "paris" and nothing.info == {"kind": "none"}
    for retriever in (nothing, None):
        with pytest.raises(UserError, match=r"protocol 'rag' searches: give a retriever"):
            run(CASES["rag"], retriever)
    with pytest.raises(UserError, match="nothing can be searched"):
        nothing.search_sync(["q"], 1)


def test_documents_that_leave_no_room_are_refused():
    case = dataclasses.replace(CASES["rag"], changes={"topk": 1, "max_turns": 0, "max_total_tokens": 20})
    with pytest.raises(UserError, match=r"prompt of question '0' has \d+ tokens with its documents"):
        run(case, Fake())
