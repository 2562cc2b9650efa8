"""StepSearch's reward: answer, keys and steps, against values computed by hand or by other code."""

import dataclasses
import math

import numpy as np
import pytest
from reward_cases import ASK, RIGHT, SAW, THINK, WRONG, episode

from parasearch_jax.data import Question
from parasearch_jax.errors import UserError
from parasearch_jax.protocol.search_r1 import SEARCH_R1
from parasearch_jax.rewards import make_reward, score
from parasearch_jax.rewards.step_search import QUIRKS, step_values, tfidf_cosines
from parasearch_jax.rollout import Episode

GOLDS = ("Paris is capital of France.", "Rome lies on the Tiber river.")
KEYS = [["capital France", "France seat of government"], ["Tiber city"]]
META = {"search_keys": KEYS, "support_docs": [{"title": "T", "paragraph_text": text} for text in GOLDS]}
QUESTION = Question("q", "?", "Paris", meta=META)


def search(query):
    return ("policy", f"{THINK}<search>{query}</search>")


def docs(*texts):
    blocks = [SEARCH_R1.document(i, f"T{i} (x)", text) for i, text in enumerate(texts, 1)]
    return ("docs", SEARCH_R1.observation(blocks))


def scored(*pairs, variant="paper", **params):
    return make_reward({"name": "step_search", "variant": variant, **params})(episode(*pairs), QUESTION)


NOISE = "nothing useful here"
WHOLE = [search("capital France"), docs(GOLDS[0], NOISE), search("Tiber"), docs(GOLDS[0], GOLDS[1]), RIGHT]


def test_paper():
    parts, steps = scored(*WHOLE)
    assert parts == {"answer": 1.0, "format": 0.0, "key": pytest.approx(0.618 * (1 + 2 / 3) / 2)}
    # the first search brings one golden document of two; the second the other, and one of its two was seen before
    assert steps == [(0, pytest.approx(0.6 * 0.5)), (1, pytest.approx(0.6 * (0.5 - 0.5)))]
    parts, steps = scored(*WHOLE, gamma_key=1.0, scale=1.0)
    assert parts["key"] == pytest.approx(5 / 6) and steps[0] == (0, pytest.approx(0.5))


def test_steps_belong_to_executed_searches_by_their_action():
    pairs = [("policy", "hm"), ("notice", "<search>x</search>")]
    pairs += [search("a"), docs(NOISE), search("b"), docs(*GOLDS), RIGHT]
    assert scored(*pairs)[1] == [(1, pytest.approx(0.0)), (2, pytest.approx(0.6))]
    failed = [search("a"), ("notice", SEARCH_R1.failed()), search("b"), docs(GOLDS[0], GOLDS[0]), RIGHT]
    assert scored(*failed)[1] == [(0, 0.0), (1, pytest.approx(0.6 * (0.5 - 0.5)))]  # the same document twice in one


def test_a_gain_is_over_all_searches_before():
    pairs = [search("a"), docs(GOLDS[0]), search("b"), docs(NOISE), search("c"), docs("capital of France"), RIGHT]
    assert [value for _, value in step_values(episode(*pairs), QUESTION, False)] == pytest.approx([0.5, 0, 0])


@pytest.mark.parametrize(
    ("pairs", "formatted"),
    [
        ([ASK, SAW, RIGHT], True),
        ([RIGHT], False),  # no search
        ([ASK, SAW], False),
        ([ASK, SAW, RIGHT, ("notice", "no"), ("policy", "hm")], False),  # a stored one that goes on
        ([("policy", "<search>a</search>"), SAW, ("policy", "<answer>Paris</answer>")], False),  # no thought
        ([ASK, SAW, ("policy", THINK + "<answer>Paris</answer> or <answer>Rome</answer>")], False),
        ([ASK, ("docs", "<answer>x</answer>"), RIGHT], True),  # what the environment wrote
    ],
)
def test_format_of_the_paper_takes_the_answers_part_alone(pairs, formatted):
    parts, _ = scored(*pairs)
    assert parts["answer"] + parts["format"] == (1.0 if formatted else 0.0)
    assert parts["format"] == (0.0 if formatted else -parts["answer"])


# ------------------------------------------------------------------------------------------------------------- released


@pytest.mark.parametrize(
    ("pairs", "total", "searches"),
    [
        (WHOLE, 1 + 0.618 * (1 + 2 / 3) / 2, 2),
        ([ASK, docs(NOISE), WRONG], 0.0, 1),
        ([RIGHT], 1.0, 0),  # no search is asked for
        ([ASK, docs(NOISE), ("policy", "hm")], -1.0, 0),
        ([ASK, docs(NOISE), ("policy", RIGHT[1] + " and more")], -1.0, 0),
        ([ASK, docs(NOISE), ("policy", RIGHT[1] + "\n<|im_end|>")], 1.0, 1),
        ([("policy", WRONG[1] + RIGHT[1])], 1.0, 0),
    ],
)
def test_released(pairs, total, searches):
    parts, steps = scored(*pairs, variant="released")
    assert sum(parts.values()) == pytest.approx(total) and len(steps) == searches


def test_released_steps_are_one_and_scale_times():
    assert scored(*WHOLE, variant="released")[1][0] == (0, pytest.approx(1.6 * 0.5))
    assert scored(*WHOLE, variant="released", double_step=False)[1][0] == (0, pytest.approx(0.6 * 0.5))


def totals(*pairs, question=QUESTION, **params):
    parts, steps = make_reward({"name": "step_search", **params})(episode(*pairs), question)
    return sum(parts.values()), sum(value for _, value in steps)


LATER = [search("capital France"), docs(NOISE), search("France"), docs(NOISE), RIGHT]


@pytest.mark.parametrize(
    ("quirk", "pairs", "paper", "switched"),  # total of the parts
    [
        ("last_answer", [ASK, docs(NOISE), ("policy", WRONG[1] + RIGHT[1])], 0.0, 0.0),
        ("minus_one", [RIGHT], 0.0, 1.0),
        ("minus_one", [ASK, docs(NOISE), ("policy", "hm")], 0.0, -1.0),
        ("text_queries", [("policy", "hm"), ("notice", "<search>Tiber city</search>"), ASK, SAW, RIGHT], 1.0, 1.309),
        ("last_query", LATER, 1 + 0.309, 1 + 0.309 * 2 / 3),  # the weaker one stands
    ],
)
def test_quirks_of_the_parts(quirk, pairs, paper, switched):
    assert totals(*pairs)[0] == pytest.approx(paper)
    assert totals(*pairs, **{quirk: True})[0] == pytest.approx(switched)


def test_the_last_answer_is_a_switch():
    """On top of `minus_one`, which asks for no other format."""
    pairs = [ASK, docs(NOISE), ("policy", WRONG[1] + RIGHT[1])]
    assert totals(*pairs, minus_one=True)[0] == 0.0 and totals(*pairs, minus_one=True, last_answer=True)[0] == 1.0


def test_squads_tokens_are_a_switch():
    question = dataclasses.replace(QUESTION, golden_answers=("A",))
    pairs = [ASK, docs(NOISE), ("policy", THINK + "<answer>A</answer>")]
    assert totals(*pairs, question=question)[0] == 1.0
    assert totals(*pairs, question=question, squad_f1=True)[0] == 0.0


def test_the_fit_is_a_switch():
    near = [search("a"), docs("Paris and the Seine"), RIGHT]
    (_, alone), (_, together) = totals(*near), totals(*near, fit_per_document=True)
    cosine = [tfidf_cosines("paris and seine", ["paris is capital of france", "rome lies on tiber river"], fit)[0]
              for fit in (False, True)]  # fmt: skip
    assert (alone, together) == pytest.approx([0.6 * c / 2 for c in cosine]) and alone != pytest.approx(together)


def test_every_quirk_has_its_test():
    assert set(QUIRKS) == {"last_answer", "squad_f1", "minus_one", "text_queries", "last_query", "fit_per_document",
                           "double_step"}  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- TF-IDF


def by_numpy(text, golds, fit_with_text):
    """scikit-learn's TfidfVectorizer and cosine_similarity, as its manual gives them."""
    tokens = [[word for word in t.split() if len(word) > 1] for t in (text, *golds)]
    words = sorted({word for ts in tokens for word in ts})
    tf = np.array([[ts.count(word) for word in words] for ts in tokens], float)
    fitted = tf if fit_with_text else tf[1:]
    rows = tf * (np.log((1 + len(fitted)) / (1 + (fitted > 0).sum(0))) + 1)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows[1:] @ rows[0]


@pytest.mark.parametrize("fit_with_text", [False, True])
def test_tfidf(fit_with_text):
    rng = np.random.default_rng(0)
    for _ in range(20):
        make = lambda: " ".join(rng.choice(["aa", "bb", "cc", "dd", "ee", "f"], 8))  # noqa: E731
        text, golds = make(), [make() for _ in range(rng.integers(1, 4))]
        np.testing.assert_allclose(tfidf_cosines(text, golds, fit_with_text), by_numpy(text, golds, fit_with_text))
    assert tfidf_cosines("aa bb", ["aa bb", "cc"], fit_with_text) == pytest.approx([1, 0])
    assert tfidf_cosines("", ["aa"], fit_with_text) == tfidf_cosines("f", ["f"], fit_with_text) == [0.0]
    # two golden texts of one word each: weights of aa, bb are ln(3/2)+1 alone, ln(4/3)+1 and ln(4/3)+1 with "aa bb"
    assert tfidf_cosines("aa bb", ["aa", "bb"], fit_with_text) == pytest.approx([math.sqrt(0.5)] * 2)


# ----------------------------------------------------------------------------------------------------------------- data


@pytest.mark.parametrize(
    ("meta", "lacking"),
    [
        ({}, "search_keys"),
        ({"search_keys": []}, "search_keys"),
        ({"search_keys": "key"}, "search_keys"),
        ({"search_keys": ["key"]}, "search_keys"),
        ({"search_keys": [["key"], []]}, "search_keys"),
        ({"search_keys": [[1]]}, "search_keys"),
        ({"search_keys": KEYS}, "support_docs"),
        ({"search_keys": KEYS, "support_docs": []}, "support_docs"),
        ({"search_keys": KEYS, "support_docs": ["text"]}, "support_docs"),
        ({"search_keys": KEYS, "support_docs": [{"title": "T"}]}, "support_docs"),
    ],
)
def test_a_question_without_keys_or_documents_is_refused(meta, lacking):
    bad = Question("bad", "?", "x", meta=meta)
    reward = make_reward("step_search")
    with pytest.raises(UserError, match=rf"step_search' can't score 1 of 2 questions.*'bad', has no meta\['{lacking}'"):
        reward.check([QUESTION, bad])
    with pytest.raises(UserError, match=lacking):
        reward(episode(ASK, SAW, RIGHT), bad)
    reward.check([QUESTION])


def test_arrays_from_a_parquet_file_are_lists():
    keys = np.array([np.array(group, dtype=object) for group in KEYS], dtype=object)
    arrays = {"search_keys": keys, "support_docs": np.array(META["support_docs"], dtype=object)}
    question = dataclasses.replace(QUESTION, meta=arrays)
    make_reward("step_search").check([question])
    assert totals(*WHOLE, question=question) == pytest.approx(totals(*WHOLE))


def test_documents_are_read_in_the_form_of_the_episodes_protocol():
    class Numbered(type(SEARCH_R1)):
        def document(self, number, title, text):
            return f"Doc {number}<## Title: {title} ##> {text}\n"

    numbered = Numbered("numbered", SEARCH_R1.prompt, separator=None)
    blocks = [numbered.document(i, "T", text) for i, text in enumerate(GOLDS)]
    pairs = [search("a"), ("docs", numbered.observation(blocks)), RIGHT]
    assert step_values(Episode.from_text(pairs, numbered), QUESTION, False) == [(0, pytest.approx(1.0))]
    assert step_values(Episode.from_text(pairs), QUESTION, False) == [(0, 0.0)]  # no document in that form


def test_score_is_the_parts():
    assert set(score("step_search", episode(*WHOLE), QUESTION)) == {"answer", "format", "key"}
