"""Advantages: hand values (T08), loops in numpy, groups in any order, rows and tokens that do not count."""

import functools

import jax
import numpy as np
import pytest
from estimators import advantages_of

from parasearch_jax.rl import dr_grpo, gae, grpo, reinforce, reinforce_pp, rloo, whiten
from parasearch_jax.rl.advantages import tied_groups


def of_rows(estimator, rewards, group, live=None, **options):
    """Advantages of one-token rows."""
    mask = np.ones((len(rewards), 1)) if live is None else np.array(live, float)[:, None]
    compute = jax.jit(functools.partial(estimator, **options))
    return np.asarray(compute(np.array(rewards, np.float32)[:, None], mask, np.array(group)))[:, 0]


# ----------------------------------------------------------------------------------------------------------- groups


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
    np.testing.assert_allclose(of_rows(grpo, rewards, group, std=std), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [(dr_grpo, [0.75, 0.5, -0.25, -0.25, -0.25]), (rloo, [1, 0.5, -1 / 3, -1 / 3, -1 / 3])],
)
def test_mean_of_the_group_and_of_the_others_by_hand(estimator, expected):
    """A group of four with one success, and a group of one (second row), which keeps its reward."""
    np.testing.assert_allclose(of_rows(estimator, [1, 0.5, 0, 0, 0], [2, 0, 2, 2, 2]), expected, atol=1e-6)


@jax.jit
def grouped(rewards, mask, group):
    """{name: advantages} of what compares a row with its group."""
    args = rewards, mask, group
    return {
        "grpo": grpo(*args),
        "grpo population": grpo(*args, std="population"),
        "dr_grpo": dr_grpo(*args),
        "rloo": rloo(*args),
        "reinforce group": reinforce(*args, "group"),
        "reinforce_pp": reinforce_pp(*args),
    }


def on_last_token(rewards):
    return np.pad(np.array(rewards, np.float32)[:, None], [(0, 0), (3, 0)])


LAST_BIT = [0.35] * 6 + [np.nextafter(np.float32(0.35), np.float32(1))]
SEVEN = np.repeat([1.0, 0.0], [7, 1])[:, None] * np.ones(4)  # a mask
PARTS = np.array([[0.1] * 3 + [0.05], [0.35, 0, 0, 0], [0.7, -0.35, 0, 0], [0.3, 0.05, 0, 0]], np.float32)


@pytest.mark.parametrize("rewards", [[0.35] * 7, [-7.3] * 7, [0] * 7, LAST_BIT])
def test_t08_equal_rewards_give_exactly_zero(rewards):
    """Seven times the same on the last token, also with a difference in the last bit; an eighth row is not there."""
    for name, got in grouped(on_last_token([*rewards, 1]), SEVEN, np.zeros(8, int)).items():
        assert not np.asarray(got).any(), name


def test_t08_equal_rewards_from_different_parts_give_exactly_zero():
    """Seven times 0.35, whose sums differ by rounding. (To REINFORCE it means something where a part lies.)"""
    rewards = PARTS[[0, 1, 2, 3, 0, 1, 2, 3]]
    assert len(set(rewards.sum(-1).tolist())) > 1
    for name, got in grouped(rewards, SEVEN, np.zeros(8, int)).items():
        assert np.asarray(got).any() == (name == "reinforce group"), name


def test_the_floor_bounds_a_small_spread():
    """1e-5 is more than rounding, so it counts, but is not blown up to the size of a real difference."""
    got = of_rows(grpo, [0.35, 0.35001], [0, 0])
    np.testing.assert_allclose(got, [-0.05, 0.05], rtol=0.05)


@pytest.fixture(scope="module")
def mixed():
    """Groups of 4, 3, 2, 1 and 1 live rows in mixed order, with a dead row in the first and the third; rewards on
    several tokens; NaN wherever the mask is 0."""
    rng = np.random.default_rng(0)
    group = np.array([5, 0, 5, 3, 0, 5, 9, 3, 5, 0, 5, 8, 3], np.int32)
    mask = (rng.random((13, 6)) < 0.6).astype(np.float32)
    mask[:, 3] = 1
    mask[[5, 7]] = 0
    rewards = np.where(rng.random((13, 6)) < 0.4, rng.normal(size=(13, 6)), 0).astype(np.float32)
    penalty, values = (0.1 * rng.normal(size=(2, 13, 6))).astype(np.float32)
    rewards, penalty, values = (np.where(mask, x, np.nan) for x in (rewards, penalty, values))
    return {"rewards": rewards, "values": values, "mask": mask, "group": group, "penalty": penalty}


def by_loops(rewards, mask, group, penalty, gamma, combine):
    """[B, T] by loops over rows and tokens: combine(reward, those of the group, what is to come, penalty to come)."""
    out = np.zeros(mask.shape)
    whole = np.nansum(np.where(mask > 0, rewards, 0), -1)
    for b in range(len(mask)):
        steps = [t for t in range(mask.shape[1]) if mask[b, t]]
        mates = [whole[i] for i in range(len(mask)) if group[i] == group[b] and mask[i].any()]
        for i, t in enumerate(steps):
            ahead = [(gamma ** (j - i), k) for j, k in enumerate(steps) if j >= i]
            to_come = sum(g * rewards[b, k] for g, k in ahead)
            out[b, t] = combine(whole[b], np.array(mates), to_come, sum(g * penalty[b, k] for g, k in ahead))
    return out


def std_of(mates, ddof):
    return max(mates.std(ddof=ddof), 1e-4) + 1e-6 if len(mates) > 1 else 1 + 1e-6


def mean_of(mates):
    return mates.mean() if len(mates) > 1 else 0.0


def mean_of_others(r, mates):
    return (mates.sum() - r) / (len(mates) - 1) if len(mates) > 1 else 0.0


LOOPS = {
    "grpo": lambda r, mates, ahead, kl: (r - mean_of(mates)) / std_of(mates, 1),
    "grpo population": lambda r, mates, ahead, kl: (r - mean_of(mates)) / std_of(mates, 0),
    "dr_grpo": lambda r, mates, ahead, kl: r - mean_of(mates),
    "rloo": lambda r, mates, ahead, kl: r - mean_of_others(r, mates),
    "reinforce": lambda r, mates, ahead, kl: ahead,
    "reinforce group": lambda r, mates, ahead, kl: ahead - mean_of(mates),
    "reinforce_pp": lambda r, mates, ahead, kl: r - mean_of(mates) - kl,
    "reinforce_pp none": lambda r, mates, ahead, kl: r - kl,
}


@jax.jit
def discounted(rewards, mask, group, penalty):
    """The estimators that discount, with gamma 0.9; the others as they are."""
    args = rewards, mask, group
    return grouped(*args) | {
        "reinforce": reinforce(*args, gamma=0.9),
        "reinforce group": reinforce(*args, "group", 0.9),
        "reinforce_pp": reinforce_pp(*args, penalty, gamma=0.9),
        "reinforce_pp none": reinforce_pp(*args, penalty, "none", gamma=0.9),
    }


@pytest.mark.parametrize("name", LOOPS)
def test_against_loops(mixed, name):
    args = [mixed[key] for key in ("rewards", "mask", "group", "penalty")]
    expected = by_loops(*args, 0.9, LOOPS[name])
    if name.startswith("reinforce_pp"):
        expected = released_normalisation(expected, mixed["mask"])
    np.testing.assert_allclose(discounted(*args)[name], expected, atol=2e-6)


def released_normalisation(advantages, mask):
    """R1-Searcher's: sums over all slots, of which documents and padding hold 0, divided by the policy tokens."""
    mean = advantages.sum() / mask.sum()
    variance = (mask * (advantages - mean) ** 2).sum() / mask.sum()
    return mask * (advantages - mean) / np.sqrt(variance)


def test_rewards_count_where_they_lie_for_reinforce_alone():
    """The example of its docstring, with a mate of reward 0.9: group mean 1.2. What comes after a step reward is not
    credited with it; the estimators that compare whole episodes do not ask where it lay."""
    rewards = np.array([[0, 0.5, 0, 1], [0, 0, 0, 0.9]], np.float32)
    mask, group = np.array([[1, 1, 0, 1], [1, 0, 0, 1]], np.float32), np.zeros(2, int)
    np.testing.assert_allclose(jax.jit(reinforce)(rewards, mask, group)[0], [1.5, 1.5, 0, 1], atol=1e-6)
    elsewhere = np.array([[1.5, 0, 0, 0], [0, 0, 0, 0.9]], np.float32)
    here, there = grouped(rewards, mask, group), grouped(elsewhere, mask, group)
    np.testing.assert_allclose(here.pop("reinforce group")[0], [0.3, 0.3, 0, -0.2], atol=1e-6)
    for name, got in here.items():
        np.testing.assert_allclose(got, there[name], atol=1e-6, err_msg=name)
        assert np.ptp(np.asarray(got)[0, [0, 1, 3]]) == 0


def test_groups_in_any_row_order_and_by_any_number(mixed):
    """Also interleaved: the order of rows, and which number a group has, change no row's advantage."""
    order, names = np.random.default_rng(1).permutation(13), np.random.default_rng(2).permutation(13).astype(np.int32)
    compute = jax.jit(advantages_of)
    plain = compute(**mixed)
    shuffled = compute(**{key: x[order] for key, x in (mixed | {"group": names[mixed["group"]]}).items()})
    for name, expected in plain.items():
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(shuffled[name], expected[order], atol=2e-6, err_msg=name)


def test_rows_of_mask_zero_take_part_in_no_group():
    got = of_rows(grpo, [1, 9, 0, 0], [0, 0, 0, 1], live=[1, 0, 1, 0])
    np.testing.assert_allclose(got, [0.7071, 0, -0.7071, 0], atol=1e-4)


def test_an_all_masked_batch_gives_zeros(mixed):
    none = mixed | {"mask": np.zeros_like(mixed["mask"])}
    assert not any(np.asarray(x).any() for x in jax.jit(advantages_of)(**none).values())


def test_share_of_tied_groups():
    """Of the groups 0 (all 1), 1 (1 and 0) and 2 (all 0, but for rounding) two are tied; 3 has one row, 4 none."""
    rewards = np.array([1, 1, 1, 0, 0, 1e-8, 0, 7, 5], np.float32)[:, None]
    group, mask = np.array([0, 1, 0, 1, 2, 2, 2, 3, 4]), np.array([[1.0]] * 8 + [[0]])
    share = jax.jit(tied_groups)
    np.testing.assert_allclose(share(rewards, mask, group), 2 / 3, rtol=1e-6)
    assert share(rewards, 0 * mask, group) == 0


def test_unknown_settings_are_named():
    args = np.eye(4)[:, :2], np.ones((4, 2)), np.array([0, 0, 1, 1])
    with pytest.raises(ValueError, match="std 'none'"):
        grpo(*args, std="none")
    for estimator in (reinforce, reinforce_pp):
        with pytest.raises(ValueError, match="baseline 'mean'"):
            estimator(*args, baseline="mean")


# -------------------------------------------------------------------------------------------------------------- GAE


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
    advantages, _ = jax.jit(gae)(np.array([[0, 0, 0, 1, 0, 0]], np.float32), np.zeros_like(mask), mask, 0.5, 1.0)
    np.testing.assert_allclose(advantages, [[0.25, 0.5, 0, 1, 0, 0]])


def test_without_values_and_discount_the_advantage_is_the_return_to_go():
    mask = np.ones((1, 4), np.float32)
    advantages, returns = gae(np.array([[0.5, 0, 0, 1]], np.float32), np.zeros_like(mask), mask)
    np.testing.assert_allclose(advantages, [[1.5, 1, 1, 1]])
    np.testing.assert_allclose(returns, advantages)


def test_whitening_of_one_token_of_none_and_of_garbage():
    x = np.array([[3.0, np.nan, 5.0]], np.float32)
    sample, population = jax.jit(whiten), jax.jit(functools.partial(whiten, std="population"))
    np.testing.assert_allclose(sample(x, np.array([[1.0, 0, 1]])), [[-np.sqrt(0.5), 0, np.sqrt(0.5)]], atol=1e-6)
    np.testing.assert_allclose(population(x, np.array([[1.0, 0, 1]])), [[-1, 0, 1]], atol=1e-6)
    for mask in ([[1.0, 0, 0]], [[0.0, 0, 0]]):
        np.testing.assert_array_equal(sample(x, np.array(mask)), np.zeros((1, 3)))


def test_whitening_does_not_amplify_rounding():
    """Eleven times 0.35 has a mean that differs from 0.35 in the last bit."""
    x = np.full((1, 11), 0.35, np.float32)
    assert x.sum() / np.float32(11) != x[0, 0]
    assert not np.asarray(jax.jit(whiten)(x, np.ones_like(x))).any()
