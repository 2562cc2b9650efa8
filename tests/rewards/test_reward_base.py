"""Registry, import paths, group rewards, and the errors for what the user can mend."""

import ml_collections
import pytest

from parasearch_jax.data import Question
from parasearch_jax.errors import UserError
from parasearch_jax.rewards import make_reward, register, score
from parasearch_jax.rewards.base import REGISTRY
from parasearch_jax.rollout import Episode

QUESTION = Question("q", "?", "Paris", "single")
EPISODE = Episode.from_text([("policy", "<think>t</think><answer>Paris</answer>")])


def by_path(episode, question, *, bonus=0.5):
    return {"right": float(episode.answer in question.golden_answers), "bonus": bonus}, [(0, 0.25)]


def broken(episode, question, *, value, kind="nan"):
    return {"x": value} if kind == "nan" else value


@pytest.fixture(autouse=True)
def registry():
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


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
        ({}, "no 'name'; use one of: parallel_search"),
        ("paralel_search", "reward 'paralel_search' is unknown; use one of: parallel_search"),
        (
            {"name": "parallel_search", "lamda_d": 1},
            "no parameter 'lamda_d'; known: variant, lambda_d, .*alpha, unknown",
        ),
        ({"name": "parallel_search", "lambda_d": "1"}, "lambda_d is '1'; give a finite number"),
        ({"name": "parallel_search", "alpha": float("nan")}, "alpha is nan; give a finite number"),
        ({"name": "parallel_search", "variant": "papr"}, "no variant 'papr'; use one of: paper, released"),
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


@pytest.mark.parametrize(("value", "kind"), [(float("nan"), "nan"), (float("inf"), "nan"), (0.5, "no dict")])
def test_results_that_are_no_rewards(value, kind):
    with pytest.raises(ValueError, match=r"must be finite|return a dict"):
        score(f"{__name__}:broken", EPISODE, QUESTION, value=value, kind=kind)
