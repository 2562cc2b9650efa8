"""The numbers of results.json, recomputed by hand on four episodes."""

import pytest
from rollout.scripted import PROTOCOL, Fake, random_model

from parasearch_jax.data import Question
from parasearch_jax.evaluate import evaluate, rollout_metrics, summarize
from parasearch_jax.protocol import get_protocol
from parasearch_jax.rollout import Engine, Episode, Segment
from parasearch_jax.sharding.mesh import MeshConfig, make_mesh

PARALLEL = get_protocol("parallel")
DOCS = ("docs", "\n\n<information>Doc 1(Title: T) x <search>c ## d</search></information>\n\n")


def turn(action: str) -> tuple[str, str]:
    return "policy", f"<think>t</think>{action}"


EPISODES = [
    Episode.from_text([("prompt", "?"), turn("<search>a ## b</search>"), DOCS, turn("<answer>The Rome</answer>")]),
    Episode.from_text(
        [
            ("prompt", "?"),
            turn("<search>a</search>"),
            DOCS,
            turn("<search>a ## b ## c</search>"),
            DOCS,
            turn("<answer>in Rome</answer>"),
        ]
    ),
    Episode.from_text([("prompt", "?"), ("policy", "Rome"), ("notice", "no"), turn("<answer>Oslo</answer>")]),
    Episode.from_text([("prompt", "?"), turn("<search>a</search>"), DOCS, ("policy", "<search>b</search>")]),
]
QUESTIONS = [
    Question(str(i), "?", ("Rome",), kind, dataset)
    for i, (kind, dataset) in enumerate([("parallel", "x"), ("parallel", ""), ("single", "x"), ("sequential", "")])
]


def test_means_by_hand():
    subsets = summarize(EPISODES, QUESTIONS, PARALLEL)
    assert list(subsets) == ["all", "parallel", "single", "sequential", "x"]
    assert subsets["all"] == pytest.approx(
        {
            "n": 4,
            "em": 1 / 4,  # "The Rome" is Rome, "in Rome" is not
            "f1": (1 + 2 / 3) / 4,
            "cover_em": 2 / 4,
            "cover_em_bag": 2 / 4,
            "dr": 50.0,
            "dr_first": 25.0,  # the second episode splits its second search
            "dr_released": 75.0,  # the tags in a document count there: all episodes that saw one
            "turns": 9 / 4,
            "extra_calls": 0.0,
            "searches": 4 / 4,  # the unexecuted search of the last turn is none
            "sub_queries": (2 + 4 + 0 + 1) / 4,
            "valid_format": 2 / 4,
            "tokens_sampled": 0.0,  # made from text, without ids
            "tokens_read": 0.0,
        }
    )
    assert subsets["parallel"]["dr"] == 100.0 and subsets["single"]["dr"] == 0.0
    assert subsets["x"]["n"] == 2


def test_intervals_are_over_questions_and_hold_every_number():
    subsets = summarize(EPISODES, QUESTIONS, PARALLEL, intervals=True)
    for numbers in subsets.values():
        named = {key.removesuffix("_ci") for key in numbers if key.endswith("_ci")}
        assert named == set(numbers) - {"n"} - {f"{key}_ci" for key in named}
    found = subsets["all"]
    assert found["tool_productivity"] == 1 / 4  # one right answer, four searches
    for key in ("em", "dr", "turns", "searches"):
        low, high = found[f"{key}_ci"]
        assert low <= found[key] <= high and low < high
    assert found["dr_ci"] == [0.0, 100.0]  # of four questions
    assert subsets["single"]["em_ci"] == [0.0, 0.0]  # of one
    assert subsets["single"]["tool_productivity"] is None  # it never searched


def test_samples_of_a_question_are_drawn_together():
    """Twice the samples of the same questions are no second set of questions: the intervals stay."""
    once = summarize(EPISODES, QUESTIONS, PARALLEL, intervals=True)
    twice = summarize([*EPISODES, *EPISODES], [*QUESTIONS, *QUESTIONS], PARALLEL, intervals=True)
    assert twice["all"]["n"] == 8
    assert once["all"].pop("tool_productivity_ci") == [None, None]  # some of the draws have no search
    for key in set(once["all"]) - {"n"}:
        assert twice["all"][key] == pytest.approx(once["all"][key]), key


def test_r1_searchers_normaliser_is_a_choice():
    episode = Episode.from_text([("prompt", "?"), turn("<answer>u s</answer>")])
    question = Question("1", "?", ("U.S.",), "single")
    for name, expected in (("squad", 0.0), ("r1_searcher", 1.0)):
        numbers = summarize([episode], [question], PARALLEL, name)["all"]
        assert {numbers[key] for key in ("em", "f1", "cover_em", "cover_em_bag")} == {expected}


PROMPT = "Answer the question. For example, <answer> Beijing </answer>. Question: ?\n"


@pytest.mark.parametrize(
    ("pairs", "answer", "expected"),  # T01
    [
        ([("policy", "<think>t</think><answer> Paris </answer>")], "Paris", 1.0),
        ([("policy", "I do not know")], None, 0.0),
        ([turn("<search>a</search>"), ("docs", "<answer>Paris</answer>"), ("policy", "hm")], None, 0.0),
        ([("policy", "<think>Paris</think><answer>Rome</answer>")], "Rome", 0.0),
    ],
)
def test_the_answer_is_the_models_own(pairs, answer, expected):
    episode = Episode.from_text([("prompt", PROMPT), *pairs])
    assert episode.answer == answer
    for golds in (("Paris",), ("Paris", "Lyon")):
        assert summarize([episode], [Question("1", "?", golds, "single")], PARALLEL)["all"]["em"] == expected


def test_tokens_by_who_said_them():
    def said(source, count):
        return Segment(source, "x", (7,) * count)

    reading = Episode([said("prompt", 9), said("policy", 5)])  # an extra call
    segments = [said("prompt", 3), said("policy", 2), said("docs", 4), said("notice", 1), said("policy", 6)]
    numbers = summarize([Episode(segments, extra=[reading])], [QUESTIONS[0]], PARALLEL)["all"]
    assert (numbers["tokens_sampled"], numbers["tokens_read"], numbers["extra_calls"]) == (2 + 6 + 5, 4 + 1, 1)


def test_training_batches_have_the_same_numbers_flat():
    line = rollout_metrics(EPISODES, QUESTIONS, PARALLEL)
    assert line["rollout/dr_parallel"] == 100.0
    assert line["rollout/em"] == 0.25
    assert line["rollout/stop_answer"] == 0.75 and line["rollout/stop_turns"] == 0.25


@pytest.fixture(scope="module")
def dice():
    return random_model(boost=(2.5, 2.5, 1.2, 1.2), num_kv_heads=2, vocab_size=426)


def test_ten_questions_in_batches_of_four_on_two_devices_are_ten(dice):
    """None is dropped for a batch that is not full, none is counted twice; the episodes are those of one device."""
    questions = [Question(f"q{i}", text, ["x"], "single") for i, text in enumerate("abcdefghij")]
    limits = dict(slots=4, chunk=4, max_turns=3, max_turn_tokens=12, max_total_tokens=64, observation_tokens=30, topk=1)
    found = []
    for shape in (MeshConfig(2, 1), MeshConfig(1, 1)):
        engine = Engine(dice, seed=5, mesh=make_mesh(shape), **limits)
        try:
            subsets, episodes = evaluate(engine, questions, PROTOCOL, Fake())
        finally:
            engine.close()
        assert subsets["all"]["n"] == subsets["single"]["n"] == 10
        assert [episode.question_id for episode in episodes] == [question.id for question in questions]
        assert subsets["all"]["turns"] == sum(episode.turns for episode in episodes) / 10
        sampled = sum(len(s.ids) for episode in episodes for s in episode.segments if s.source == "policy")
        assert subsets["all"]["tokens_sampled"] == sampled / 10 > 0
        found.append([[segment.ids for segment in episode.segments] for episode in episodes])
    assert found[0] == found[1]


def test_every_episode_needs_its_question():
    with pytest.raises(ValueError):
        summarize(EPISODES, QUESTIONS[:3], PARALLEL)
