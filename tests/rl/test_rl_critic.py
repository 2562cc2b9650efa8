"""PPO's critic on a tiny real decoder: the index rule, a gradient written out, and that it learns."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from steps import update_critic
from steps import values as values_of

from parasearch_jax.models import decoder
from parasearch_jax.rl.batch import response_mask
from parasearch_jax.rl.critic import explained_variance, init_critic, values
from parasearch_jax.rl.optim import OptimConfig, make_optimizer
from parasearch_jax.rl.update import UpdateConfig, init_state

UCFG = UpdateConfig(micro_rows=2)
SGD = optax.sgd(1.0)


@pytest.fixture(scope="module")
def critic(params):
    """A critic with a head that is not 0."""
    critic = init_critic(params)
    kernel = jax.random.normal(jax.random.key(3), critic["value"]["kernel"].shape) / 6
    return critic | {"value": {"kernel": kernel, "bias": jnp.float32(0.3)}}


@pytest.fixture(scope="module")
def inputs(batch):
    old, returns = jax.random.normal(jax.random.key(4), (2, *batch.ids.shape))
    return batch, batch.policy_mask, 0.3 * old, returns


def gradient(cfg, critic, ucfg, inputs):
    state, metrics = update_critic(cfg, ucfg, SGD, 0.5, init_state(critic, SGD), *inputs)
    return jax.tree.map(jnp.subtract, critic, state["params"]), metrics


def assert_close(a, b, tolerance=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


def test_starts_at_zero_on_a_copy_without_the_output_matrix(cfg, batch):
    untied = dataclasses.replace(cfg, tie_word_embeddings=False)
    critic = init_critic(decoder.init(untied, jax.random.key(0)))
    assert "head" not in critic["backbone"]
    assert not values_of(untied, UCFG, critic, batch, batch.policy_mask).any()


def test_value_of_a_token_does_not_know_the_token(cfg, critic, batch):
    """Index rule: values[t] depends on the tokens before t only, and on all of those."""
    before = values(critic, cfg, batch.ids, batch.positions)
    t = 5
    after = values(critic, cfg, batch.ids.at[:, t].set((batch.ids[:, t] + 1) % 50), batch.positions)
    np.testing.assert_array_equal(before[:, : t + 1], after[:, : t + 1])
    assert (before[:, t + 1] != after[:, t + 1]).all() and not before[:, 0].any()


def test_values_are_hidden_states_times_the_head(cfg, critic, params, batch):
    hidden = np.asarray(decoder.forward(params, cfg, batch.ids, batch.positions))
    expected = np.zeros(batch.ids.shape)
    expected[:, 1:] = hidden[:, :-1] @ np.asarray(critic["value"]["kernel"]) + 0.3
    scored = values_of(cfg, UCFG, critic, batch, batch.policy_mask)
    np.testing.assert_allclose(scored, expected * batch.policy_mask, atol=1e-5)


def test_gradient_against_the_loss_written_out(cfg, critic, inputs):
    batch, mask, old, returns = inputs

    def loss(critic):
        new = values(critic, cfg, batch.ids, batch.positions)
        clipped = jnp.clip(new, old - 0.5, old + 0.5)
        return 0.5 * (mask * jnp.maximum((new - returns) ** 2, (clipped - returns) ** 2)).sum() / mask.sum()

    value, written_out = jax.jit(jax.value_and_grad(loss))(critic)
    grads, metrics = gradient(cfg, critic, UCFG, inputs)
    assert_close(grads, written_out)
    np.testing.assert_allclose(metrics["loss"], value, atol=1e-6)
    assert 0 < metrics["value_clip_fraction"] < 1


@pytest.mark.parametrize("change", [{"micro_rows": 8}, {"remat": "full"}])
def test_portions_change_nothing(cfg, critic, inputs, change):
    assert_close(
        gradient(cfg, critic, dataclasses.replace(UCFG, **change), inputs), gradient(cfg, critic, UCFG, inputs)
    )


def test_what_is_masked_changes_nothing(cfg, critic, inputs):
    batch, mask, *arrays = inputs
    padding = jnp.arange(batch.ids.shape[1]) >= batch.lengths[:, None]
    other = dataclasses.replace(batch, ids=jnp.where(padding, 17, batch.ids))
    dirty = [jnp.where(mask > 0, x, jnp.nan) for x in arrays]
    assert_close(gradient(cfg, critic, UCFG, (other, mask, *dirty)), gradient(cfg, critic, UCFG, inputs), 1e-7)


def test_a_step_that_is_not_finite_is_refused(cfg, critic, inputs):
    batch, mask, old, returns = inputs
    returns = returns.at[0, int(jnp.argmax(mask[0]))].set(jnp.inf)
    grads, metrics = gradient(cfg, critic, UCFG, (batch, mask, old, returns))
    assert metrics["skipped"] == 1 and not any(g.any() for g in jax.tree.leaves(grads))


def test_learns_the_returns(cfg, params, batch):
    """Returns that the row gives away (its length): most of their variance is explained after some steps."""
    mask = response_mask(batch)
    returns = mask * batch.lengths[:, None] / 10.0
    tx = make_optimizer(OptimConfig(lr=1e-2))
    state, explained = init_state(init_critic(params), tx), []
    for _ in range(40):
        state, metrics = update_critic(cfg, UCFG, tx, 100.0, state, batch, mask, jnp.zeros_like(returns), returns)
        explained.append(float(metrics["explained_variance"]))
    assert explained[0] == pytest.approx(0, abs=1e-6) and explained[-1] > 0.8


def test_explained_variance_against_numpy():
    v, r = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
    mask = np.array([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], np.float32)
    keep = mask == 1
    expected = 1 - (r - v)[keep].var() / r[keep].var()
    dirty = np.where(keep, v, np.nan)
    np.testing.assert_allclose(explained_variance(dirty, np.where(keep, r, np.nan), mask), expected, rtol=1e-5)
    assert explained_variance(v, np.ones_like(r), mask) == 0
