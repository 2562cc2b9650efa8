"""OTC's rewards: the published values, and the running minimum of OTC-GRPO."""

import math

import pytest
from reward_cases import ASK, PARIS, RIGHT, SAW, SPLIT, WRONG, episode

from parasearch_jax.data import Question
from parasearch_jax.rewards import make_reward, score
from parasearch_jax.rewards.otc import nearness, saving


def after(searches, answer=RIGHT):
    return episode(*[ASK, SAW] * searches, answer)


@pytest.mark.parametrize(("m", "factor"), list(enumerate((1.0, 0.866, 0.707, 0.588, 0.5))))
def test_ppo(m, factor):
    assert saving(m, 4) == pytest.approx(factor, abs=5e-4)
    parts = score("otc_ppo", after(m), PARIS)
    assert parts == {"em": 1.0, "tool": pytest.approx(factor - 1, abs=5e-4)}
    assert score("otc_ppo", after(m, WRONG), PARIS) == {"em": 0.0, "tool": 0.0}
    assert sum(score("otc_ppo", after(m), PARIS, alpha=2.0).values()) == pytest.approx(2 * factor, abs=1e-3)


def test_ppo_counts_actions_and_takes_the_most_of_them():
    assert score("otc_ppo", episode(SPLIT, SAW, RIGHT), PARIS) == score("otc_ppo", after(1), PARIS)
    assert score("otc_ppo", after(3), PARIS, c=3.0)["tool"] == pytest.approx(math.cos(3 * math.pi / 9) - 1)


@pytest.mark.parametrize(
    ("m", "n", "factor"),
    [
        (2, 1, 0.866),
        (1, 2, 0.866),
        (0, 2, 0.0),
        (3, 0, 0.588),
        (0, 0, 1.0),
        (1, 1, 1.0),
        (4, 4, 1.0),
        (4, 1, 0.588),  # sin(4 pi / 5)
        (4, 2, 0.866),  # sin(2 pi / 3)
    ],
)
def test_grpo_factor(m, n, factor):
    assert nearness(m, n, 4) == pytest.approx(factor, abs=5e-4)


def totals(results):
    return pytest.approx([sum(parts.values()) for parts, _ in results], abs=5e-4)


def test_grpo_takes_the_fewest_calls_of_the_correct_ones_now_and_before():
    reward, memory = make_reward("otc_grpo"), {}
    group = [after(0, WRONG), after(2), after(4), after(3, WRONG)]
    assert totals(reward.score_group(group, PARIS, memory)) == [0, 1, 0.866, 0]  # the wrong one without a call is none
    assert memory == {"q": 2}
    assert totals(reward.score_group([after(1), after(4)], PARIS, memory)) == [1, 0.588]
    assert memory == {"q": 1}
    assert totals(reward.score_group([after(2), after(1, WRONG)], PARIS, memory)) == [0.866, 0]  # 1 is kept
    other = Question("other", "?", "Paris")
    assert totals(reward.score_group([after(0), after(2)], other, memory)) == [1, 0.707]
    assert memory == {"q": 1, "other": 0}


def test_grpo_pays_and_keeps_nothing_for_a_group_without_a_correct_answer():
    memory = {}
    results = make_reward({"name": "otc_grpo", "alpha": 2.0}).score_group(
        [after(0, WRONG), after(1, WRONG)], PARIS, memory
    )
    assert [parts for parts, _ in results] == [{"em": 0.0, "tool": 0.0}] * 2 and memory == {}
    assert score("otc_grpo", after(3), PARIS, alpha=2.0) == {"em": 1.0, "tool": 1.0}  # alone it is its own minimum
