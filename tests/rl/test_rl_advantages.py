"""GRPO's advantages: hand values (T08), the released code's (golden), groups in any order, rows that do not count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parasearch_jax.rl import gae, grpo, whiten


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


# -------------------------------------------------------------------------------------------------------------- GAE


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95)])
def test_released_gae_and_whitening(golden, gamma, lam):
    """The released code takes every token of the response for a time step: the attention mask in place of ours."""
    mask = golden["attn"]
    advantages, returns = gae(golden["rewards"], golden["values"], mask, gamma, lam)
    np.testing.assert_allclose(returns * mask, golden[f"gae_ret_{gamma}_{lam}"] * mask, atol=1e-5)
    np.testing.assert_allclose(whiten(advantages, mask) * mask, golden[f"gae_adv_{gamma}_{lam}"] * mask, atol=1e-5)


def gae_of_one_row(rewards, values, gamma, lam):
    """Eq. 16 of the GAE paper for a row of nothing but time steps."""
    steps = len(rewards)
    following = np.append(values[1:], 0.0)
    deltas = rewards + gamma * following - values
    return np.array([sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, steps)) for t in range(steps)])


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.7)])
def test_environment_tokens_are_no_time_steps(gamma, lam):
    """Strict: the result is that of the policy tokens alone, and nothing at the others matters, NaN included."""
    rng = np.random.default_rng(0)
    mask = (rng.random((5, 12)) < 0.5).astype(np.float32)
    mask[0] = 0
    rewards, values = rng.normal(size=(2, 5, 12)).astype(np.float32)
    dirty = [np.where(mask, x, np.nan) for x in (rewards, values)]
    advantages, returns = jax.jit(gae)(*dirty, mask, gamma, lam)
    for b in range(5):
        at = np.flatnonzero(mask[b])
        expected = gae_of_one_row(rewards[b, at], values[b, at], gamma, lam)
        np.testing.assert_allclose(advantages[b, at], expected, atol=1e-5)
        np.testing.assert_allclose(returns[b, at], expected + values[b, at], atol=1e-5)
    assert not np.asarray(advantages)[mask == 0].any() and not np.asarray(returns)[mask == 0].any()


def test_terminal_reward_reaches_every_policy_token_when_the_row_ends_in_documents():
    """p p d p d d, reward 1 on the last policy token: one discount a policy token, none for documents."""
    mask = np.array([[1, 1, 0, 1, 0, 0]], np.float32)
    advantages, _ = gae(np.array([[0, 0, 0, 1, 0, 0]], np.float32), np.zeros_like(mask), mask, 0.5, 1.0)
    np.testing.assert_allclose(advantages, [[0.25, 0.5, 0, 1, 0, 0]])


def test_without_values_and_discount_the_advantage_is_the_return_to_go():
    mask = np.ones((1, 4), np.float32)
    advantages, returns = gae(np.array([[0.5, 0, 0, 1]], np.float32), np.zeros_like(mask), mask)
    np.testing.assert_allclose(advantages, [[1.5, 1, 1, 1]])
    np.testing.assert_allclose(returns, advantages)


def test_whitening_of_one_token_of_none_and_of_garbage():
    x = np.array([[3.0, np.nan, 5.0]], np.float32)
    np.testing.assert_allclose(whiten(x, np.array([[1.0, 0, 1]])), [[-np.sqrt(0.5), 0, np.sqrt(0.5)]], atol=1e-6)
    for mask in ([[1.0, 0, 0]], [[0.0, 0, 0]]):
        np.testing.assert_array_equal(whiten(x, np.array(mask)), np.zeros((1, 3)))
