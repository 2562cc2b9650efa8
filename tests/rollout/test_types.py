"""Episodes: provenance, views, and building them again from stored text."""

import pytest
from protocol_cases import CASES

from parasearch_jax.rollout import Answer, Episode, Invalid, Search, Segment

DOCS = ("docs", "\n\n<information>Doc 1(Title: t) <answer>no</answer></information>\n\n")


def test_segments_refuse_what_does_not_fit_together():
    with pytest.raises(ValueError, match="'model' is none of prompt, policy"):
        Segment("model", "x")
    for ids, logprobs in [((1, 2), (-0.5,)), (None, (-0.5,)), ((1,), (-0.5, -0.5))]:
        with pytest.raises(ValueError, match="log-probs"):
            Segment("policy", "x", ids, logprobs)
    assert Segment("policy", "x", (1, 2), (-0.5, -0.5)).logprobs and Segment("docs", "x", (1, 2)).logprobs is None


def test_views_of_an_episode():
    pairs = [("prompt", "Q <search>p</search> <answer>p</answer>"), ("policy", "<search> a ## b</search>"), DOCS]
    pairs += [("policy", "hm"), ("notice", "<answer>notice</answer>"), ("policy", "<answer> yes </answer>")]
    episode = Episode.from_text(pairs)
    assert episode.actions == [
        Search(("a", "b"), (1, 0, len(pairs[1][1]))),
        Invalid((3, 0, 2)),
        Answer("yes", (5, 0, len(pairs[5][1]))),
    ]
    assert episode.searches == episode.actions[:1] and episode.answer == "yes" and episode.turns == 3
    assert episode.response == "".join(text for _, text in pairs[1:]) and episode.stop_reason == "answer"
    assert episode.length() == 0  # no ids


def test_only_policy_text_acts():
    """T01: tags in the prompt, in documents and in notices are neither action nor answer."""
    episode = Episode.from_text([("prompt", "<answer>Beijing</answer>"), ("policy", "I do not know"), DOCS])
    assert episode.answer is None and episode.actions == [Invalid((1, 0, 13))] and episode.stop_reason == "turns"
    assert Episode.from_text([("prompt", "x")]).answer is None


def test_a_search_counts_when_documents_follow():
    search = ("policy", "<search>a</search>")
    assert [type(a) for a in Episode.from_text([search, DOCS, search]).actions] == [Search, Invalid]
    assert [type(a) for a in Episode.from_text([search, ("notice", "no"), search, DOCS]).actions] == [Invalid, Search]


def test_every_case_of_the_table():
    for text, kind, payload, end in CASES:
        episode = Episode.from_text([("prompt", "p"), ("policy", text), DOCS])
        (action,) = episode.actions
        assert type(action) is {"search": Search, "answer": Answer, "invalid": Invalid}[kind], text
        assert action.span[0] == 1 and action.span[2] == end
        assert getattr(action, {"search": "queries", "answer": "text"}.get(kind, ""), None) == payload
    assert Episode.from_text([("policy", CASES[11][0]), DOCS]).dropped_queries == 1


def test_other_protocols():
    pairs = [("policy", "<search>a ## b</search>"), DOCS]
    assert Episode.from_text(pairs, protocol="search_r1").searches[0].queries == ("a ## b",)
