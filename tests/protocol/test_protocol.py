"""Parsing of turns: the table of case T03, which the stop automaton shares, and Episode.from_text on top of it."""

import pytest
from protocol_cases import CASES, NINE, NO_STOP

from parasearch_jax.errors import UserError
from parasearch_jax.protocol import PROTOCOLS, get_protocol
from parasearch_jax.rollout import Answer, Episode, Invalid, Search

PARALLEL = get_protocol("parallel")
KIND = {Search: "search", Answer: "answer", Invalid: "invalid"}


def payload(action):
    return {"search": lambda: action.queries, "answer": lambda: action.text, "invalid": lambda: None}[
        KIND[type(action)]
    ]()


@pytest.mark.parametrize(("text", "kind", "expected", "end"), CASES)
def test_parse_table(text, kind, expected, end):
    parsed = PARALLEL.parse(text, segment=3)
    assert (KIND[type(parsed.action)], payload(parsed.action), parsed.end) == (kind, expected, end)
    segment, start, stop = parsed.action.span
    assert segment == 3 and 0 <= start <= stop == end


@pytest.mark.parametrize(("text", "kind", "expected", "end"), CASES)
def test_what_follows_the_end_does_not_matter(text, kind, expected, end):
    cut, longer = PARALLEL.parse(text[:end]), PARALLEL.parse(text)
    assert (cut.action, cut.end) == (longer.action, longer.end)


def test_span_covers_the_block():
    text = "<think>x</think> <search>junk <search> a ## b </search> tail"
    _, start, end = PARALLEL.parse(text).action.span
    assert text[start:end] == "<search> a ## b </search>"


def test_no_tag_ever_reaches_the_retriever():
    for text, *_ in CASES:
        action = PARALLEL.parse(text).action
        for query in action.queries if isinstance(action, Search) else ():
            assert query and query == query.strip() and "search>" not in query and "answer>" not in query


def test_queries_over_the_limit_are_counted():
    assert PARALLEL.parse(f"<search>{NINE}</search>").dropped_queries == 1
    assert PARALLEL.parse("<search>a ## b</search>").dropped_queries == 0
    two = get_protocol("parallel", max_queries=2).parse(f"<search>{NINE}</search>")
    assert two.action.queries == ("q0", "q1") and two.dropped_queries == 7


def test_no_stop_texts_hold_no_complete_block():
    assert all(isinstance(PARALLEL.parse(text).action, Invalid) for text in NO_STOP)


def test_search_r1_sends_one_query():
    assert get_protocol("search_r1").parse("<search> a ## b </search>").action.queries == ("a ## b",)


def test_prompts_hold_the_question_and_unknown_names_are_refused():
    for protocol in PROTOCOLS.values():
        assert protocol.render_prompt("Who {is} it?").count("Who {is} it?") == 1
    with pytest.raises(UserError, match=r"'paralel' is unknown.*parallel, r1_searcher, rag"):
        get_protocol("paralel")


def test_from_text_executes_a_search_only_before_documents():
    docs = ("docs", "<information>d</information>")
    pairs = [("prompt", "p"), ("policy", "<search>a##b</search>"), docs, ("policy", "<search>c</search>")]
    episode = Episode.from_text(pairs)
    assert [type(a) for a in episode.actions] == [Search, Invalid]
    assert episode.searches[0].queries == ("a", "b") and episode.answer is None
    assert (episode.stop_reason, episode.turns, episode.response) == ("turns", 2, "".join(t for _, t in pairs[1:]))
    answered = Episode.from_text([*pairs[:3], ("policy", "<answer> x </answer>")])
    assert (answered.stop_reason, answered.answer) == ("answer", "x")


def test_from_text_finds_no_action_outside_policy_text():
    block = "<search>a</search><answer>x</answer>"
    episode = Episode.from_text([("prompt", block), ("policy", "hm"), ("notice", block), ("docs", block)])
    assert [type(a) for a in episode.actions] == [Invalid] and episode.answer is None


def test_prompt_must_hold_the_question():
    with pytest.raises(UserError, match=r"prompt of protocol 'search_r1' is ''; it must hold \{question\}"):
        get_protocol("search_r1", prompt="")
    own = get_protocol("search_r1", prompt="{question} as {json: 1}")
    assert own.render_prompt("What is {x}?") == "What is {x}? as {json: 1}"
