"""GRPO's advantages: hand values (T08), the released code's (golden), groups in any order, rows that do not count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parasearch_jax.rl import grpo


def advantages(rewards, group, live=None, **options):
    """Advantages of one-token rows."""
    mask = np.ones((len(rewards), 1)) if live is None else np.array(live, float)[:, None]
    return np.asarray(grpo(np.array(rewards, np.float32)[:, None], mask, np.array(group), **options))[:, 0]


@pytest.mark.parametrize(
    ("rewards", "group", "std", "expected"),
    [
        ([1, 0, 0, 0], [0, 1, 0, 1], "sample", [0.7071, 0, -0.7071, 0]),
        ([1, 0, 0, 0], [0, 1, 0, 1], "population", [1, 0, -1, 0]),
        ([1, 0, 0, 0], [0, 0, 0, 0], "sample", [1.5, -0.5, -0.5, -0.5]),
        ([1, 0, 0, 0], [0, 0, 0, 0], "population", [1.7321, -0.5774, -0.5774, -0.5774]),
        ([0.5, 1, 0, 0], [2, 0, 0, 0], "sample", [0.5, 1.1547, -0.5774, -0.5774]),  # a group of one keeps its reward
    ],
)
def test_t08_hand_values(rewards, group, std, expected):
    np.testing.assert_allclose(advantages(rewards, group, std=std), expected, atol=1e-4)


@pytest.mark.parametrize("value", [1.0, 0.35, 0.1, -7.3, 0.0])
@pytest.mark.parametrize("n", [2, 7, 8])
def test_t08_equal_rewards_give_exactly_zero(value, n):
    assert not advantages([value] * n, [0] * n).any()


def test_t08_rewards_equal_but_for_the_last_bit_stay_small():
    rewards = np.full(7, 0.35, np.float32)
    rewards[3] = np.nextafter(rewards[3], np.float32(1))
    assert 0 < np.abs(advantages(rewards, [0] * 7)).max() < 1e-3


def test_released(golden):
    got = grpo(golden["rewards"], golden["attn"], golden["group"])
    np.testing.assert_allclose(got, golden["grpo_adv"], atol=1e-5)


def test_groups_in_any_row_order():
    rng = np.random.default_rng(0)
    rewards, group = rng.random((12, 5)), np.repeat([0, 1, 2], 4)
    mask = (rng.random((12, 5)) < 0.7).astype(float)
    mask[:, 2] = 1
    order, names = rng.permutation(12), np.array([2, 0, 1])
    plain = np.asarray(grpo(rewards, mask, group))
    mixed = np.asarray(grpo(rewards[order], mask[order], names[group][order]))
    np.testing.assert_allclose(mixed, plain[order], atol=1e-6)
    for g in range(3):  # against numpy, group by group
        scores = rewards[group == g].sum(-1)
        expected = (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6)
        np.testing.assert_allclose(plain[group == g], expected[:, None] * mask[group == g], atol=1e-5)


def test_rows_of_mask_zero_take_part_in_no_group():
    got = advantages([1, 9, 0, 0], [0, 0, 0, 1], live=[1, 0, 1, 0])
    np.testing.assert_allclose(got, [0.7071, 0, -0.7071, 0], atol=1e-4)


def test_under_jit_and_unknown_std():
    rewards, mask, group = jnp.eye(4)[:, :2], jnp.ones((4, 2)), jnp.array([0, 0, 1, 1])
    np.testing.assert_allclose(jax.jit(grpo)(rewards, mask, group), grpo(rewards, mask, group), atol=1e-6)
    with pytest.raises(ValueError, match="std 'none'"):
        grpo(rewards, mask, group, std="none")
