"""Registry, import paths, group rewards, and the errors for what the user can mend."""

import functools

import ml_collections
import pytest

from parasearch_jax.data import Question
from parasearch_jax.errors import UserError
from parasearch_jax.rewards import make_reward, register, score, wrap
from parasearch_jax.rewards.base import REGISTRY
from parasearch_jax.rollout import Episode

QUESTION = Question("q", "?", "Paris", "single")
EPISODE = Episode.from_text([("policy", "<think>t</think><answer>Paris</answer>")])


def by_path(episode, question, *, bonus=0.5):
    return {"right": float(episode.answer in question.golden_answers), "bonus": bonus}, [(0, 0.25)]


def broken(episode, question, *, value, kind="nan"):
    return {"x": value} if kind == "nan" else value


def test_import_path():
    path = f"{__name__}:by_path"
    assert make_reward(path)(EPISODE, QUESTION) == ({"right": 1.0, "bonus": 0.5}, [(0, 0.25)])
    assert score(path, EPISODE, QUESTION, bonus=2) == {"right": 1.0, "bonus": 2.0}
    assert make_reward({"name": path, "variant": "paper"}).params == {}


def test_registered_function_keeps_its_flags_under_its_path():
    register("mine", needs_kind=True)(by_path)
    assert make_reward(f"{__name__}:by_path").entry is REGISTRY["mine"]
    register("mine")(by_path)  # a notebook cell run twice
    assert not REGISTRY["mine"].needs_kind
    with pytest.raises(ValueError, match="'mine' is taken by"):
        register("mine")(broken)


def test_group_reward_gets_all_episodes_and_its_memory():
    @register("fewest", group=True)
    def fewest(episodes, question, memory, *, c=1.0):
        best = min([e.turns for e in episodes] + [memory.get(question.id, 99)])
        memory[question.id] = best
        return [{"em": 1.0, "tool": c * (best - e.turns)} for e in episodes]

    reward, memory = make_reward({"name": "fewest", "c": 2}), {}
    longer = Episode.from_text([("policy", "hm"), ("notice", "no"), ("policy", "<answer>Paris</answer>")])
    results = reward.score_group([longer, EPISODE], QUESTION, memory)
    assert [sum(parts.values()) for parts, _ in results] == [-1.0, 1.0] and memory == {"q": 1}
    assert reward.score_group([longer], QUESTION, memory)[0][0]["tool"] == -2.0
    assert reward(longer, QUESTION)[0]["tool"] == 0.0  # a group of one, nothing remembered


def test_score_group_of_a_plain_reward_is_one_by_one():
    reward = make_reward("parallel_search")
    assert reward.score_group([EPISODE, EPISODE], QUESTION, {}) == [reward(EPISODE, QUESTION)] * 2


def test_config_dict():
    config = ml_collections.ConfigDict({"name": "parallel_search", "variant": "released", "lambda_d": 0.0})
    reward = make_reward(config)
    assert reward(EPISODE, QUESTION)[0]["decomposition"] == 0.0
    assert config.name == "parallel_search"  # not emptied


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "no 'name'; use one of: em, .*parallel_search"),
        ("paralel_search", "reward 'paralel_search' is unknown; use one of: em, .*parallel_search"),
        (
            {"name": "parallel_search", "lamda_d": 1},
            "no parameter 'lamda_d'; known: variant, offset, .*lambda_d, .*alpha, unknown",
        ),
        ({"name": "parallel_search", "lambda_d": "1"}, "lambda_d is '1'; give a finite number"),
        ({"name": "parallel_search", "alpha": float("nan")}, "alpha is nan; give a finite number"),
        ({"name": "parallel_search", "variant": "papr"}, "no variant 'papr'; use one of: paper, released"),
        ({"name": "parallel_search", "offset": 1}, "offset is 1; use True .as released. or False"),
        ({"name": "parallel_search", "quirks": ["offset"]}, "no parameter 'quirks'"),
        ({"name": "otc_ppo", "variant": "released"}, "no parameter 'variant'; known: alpha, c"),
        ("no.such.module:f", "cannot be imported: No module named"),
        (f"{__name__}:absent", "cannot be imported: module .* has no attribute 'absent'"),
        (":f", "cannot be imported"),
        (".x:f", "cannot be imported"),
        (f"{__name__}:QUESTION", "is a Question, not a function"),
        ({"name": f"{__name__}:by_path", "bonsu": 1}, "no parameter 'bonsu'; known: bonus"),
        ({"name": f"{__name__}:by_path", "variant": "released"}, "no parameter 'variant'"),
        ({"name": f"{__name__}:by_path", "unknown": "single"}, "no parameter 'unknown'"),
        (f"{__name__}:broken", "needs parameter 'value', which has no default; set reward.value"),
    ],
)
def test_bad_configs_are_refused(config, message):
    with pytest.raises(UserError, match=message):
        make_reward(config)


def no_results(episodes, question, memory):
    return [{"x": 1.0}]


def group_with_nan(episodes, question, memory):
    return [{"x": 1.0}, {"y": float("nan")}]


def raises(episode, question):
    return {"x": question.meta["gold"]}


def beyond(episode, question):
    return {"x": 1.0}, [(0, 1.0), (1, 2.0)]


SECOND = Episode.from_text([("prompt", "Question: ?\n"), ("policy", "second text")])
SECOND.sample = 1


@pytest.mark.parametrize(
    ("fn", "group", "message"),
    [
        (functools.partial(broken, value=float("nan")), False, "sample 1: ValueError: part or step 'x' is nan"),
        (functools.partial(broken, value=float("inf")), False, "sample 1: ValueError: part or step 'x' is inf"),
        (functools.partial(broken, value="text"), False, "sample 1: TypeError: must be real number"),
        (
            functools.partial(broken, value=0.5, kind="no dict"),
            False,
            "sample 1: ValueError: it returned 0.5; return a dict",
        ),
        (raises, False, r"sample 1: KeyError: 'gold' \(.*test_reward_base.py:\d+\)"),
        (beyond, False, "sample 1: ValueError: it rewards action 1, but the episode has 1 actions"),
        (no_results, True, "its 2 samples: ValueError: it gave 1 results for 2 episodes"),
        (group_with_nan, True, "sample 1: ValueError: part or step 'y' is nan"),
        (lambda episodes, question, memory: 1 / 0, True, "its 2 samples: ZeroDivisionError: division by zero"),
    ],
)
def test_what_is_no_reward_is_told_with_the_question_and_the_text(fn, group, message):
    register("mine", group=group)(fn.func if isinstance(fn, functools.partial) else fn)
    episodes = [SECOND, SECOND] if group else [SECOND]
    with pytest.raises(UserError, match=f"reward 'mine' failed on question 'q', {message}") as told:
        wrap(fn).score_group(episodes, QUESTION, {})
    assert str(told.value).endswith("The text of sample 1:\nQuestion: ?\nsecond text")
    assert told.value.__cause__ is not None


def test_a_registered_function_keeps_its_flags_in_a_notebook():
    """`train(reward_fn=...)` takes it, or with parameters a `functools.partial` of it."""

    def counts(episodes, question, memory, *, weight=1.0):
        memory["seen"] = memory.get("seen", 0) + len(episodes)
        return [{"seen": weight * memory["seen"]} for _ in episodes]

    memory = {}
    assert wrap(register("counts", group=True)(counts)).score_group([EPISODE] * 2, QUESTION, memory)[0] == (
        {"seen": 2.0},
        [],
    )
    ours = wrap(functools.partial(counts, weight=0.5))
    assert ours.score_group([EPISODE], QUESTION, memory) == [({"seen": 1.5}, [])] and ours.entry.name == "counts"
    plain = wrap(functools.partial(by_path, bonus=2.0))
    assert plain(EPISODE, QUESTION) == ({"right": 1.0, "bonus": 2.0}, [(0, 0.25)]) and plain.entry.name == "by_path"


def test_quirks_are_those_of_the_variant_but_for_the_switches():
    @register("mine", quirks={"a": "does a", "b": "does b"})
    def mine(episode, question, *, quirks=frozenset(), weight=1.0):
        return {name: weight for name in sorted(quirks)}

    assert score("mine", EPISODE, QUESTION) == {}
    assert score("mine", EPISODE, QUESTION, "released", weight=2.0) == {"a": 2.0, "b": 2.0}
    assert score("mine", EPISODE, QUESTION, b=True) == {"b": 1.0}
    reward = make_reward({"name": "mine", "variant": "released", "a": False})
    assert reward(EPISODE, QUESTION)[0] == {"b": 1.0}
    assert reward.describe().split("\n  ") == [
        "reward mine (variant=released, weight=1.0)", "released: does b [b]", "as in the paper: a"]  # fmt: skip


def test_questions_that_lack_something_are_refused():
    register("mine", lacks=lambda q: "" if "key" in q.meta else "meta['key']")(by_path)
    reward = make_reward("mine")
    reward.check([Question("a", "?", "x", meta={"key": 1})])
    with pytest.raises(UserError, match=r"'mine' can't score 2 of 3 questions: the first, 'b', has no meta\['key'\]"):
        reward.check([Question("a", "?", "x", meta={"key": 1}), Question("b", "?", "x"), Question("c", "?", "x")])
