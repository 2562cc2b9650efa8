"""The jitted score and update on a tiny real decoder: same result however it is cut, refused when not finite."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from steps import data_of, micros, score, update

from parasearch_jax.errors import UserError
from parasearch_jax.models import decoder
from parasearch_jax.rl import grpo
from parasearch_jax.rl.batch import build_batch
from parasearch_jax.rl.optim import OptimConfig, make_optimizer
from parasearch_jax.rl.update import UpdateConfig, init_state, make_score, make_update

UCFG = UpdateConfig(micro_rows=2, logprob_chunk=10, kl_coef=0.1)
# Steps of plain gradient: the change of the parameters is the gradient itself, undistorted by Adam's division.
SGD = optax.sgd(1.0)
ADAM = make_optimizer(OptimConfig(lr=3e-3, warmup_steps=3))


@pytest.fixture(scope="module")
def expected(cfg, params, inputs):
    """Gradient and metrics in four micro-batches of two rows."""
    return gradient(cfg, params, UCFG, inputs)


@pytest.fixture(scope="module")
def inputs(cfg, params, batch):
    """(batch, advantages, old, ref): old log-probs a little off, so that clipping and KL have something to do."""
    logprobs = score(cfg, UCFG, params, batch)
    noise = 0.15 * jax.random.normal(jax.random.key(1), (2, *logprobs.shape))
    advantages = grpo(batch.rewards, batch.policy_mask, batch.group)
    return batch, advantages, logprobs + noise[0], logprobs + noise[1]


def gradient(cfg, params, ucfg, inputs):
    """Gradient tree and metrics of one update."""
    state, metrics = update(cfg, ucfg, SGD, init_state(params, SGD), *inputs)
    return jax.tree.map(jnp.subtract, params, state["params"]), metrics


def assert_close(a, b, tolerance):
    """Relative for what is above 1 (the norms among the metrics), absolute below."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


def test_score_follows_the_index_rule(cfg, params, batch):
    logprobs = score(cfg, UCFG, params, batch)
    logits = decoder.logits(params, cfg, decoder.forward(params, cfg, batch.ids, batch.positions))
    logp = jax.nn.log_softmax(logits)[:, :-1]
    mask = batch.policy_mask[:, 1:]
    expected = jnp.take_along_axis(logp, batch.ids[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(logprobs[:, 1:], expected * mask, atol=1e-5)
    assert not logprobs[:, 0].any()


def test_gradient_against_the_loss_written_out(cfg, params, inputs, expected):
    """The whole step in ten lines, from full logits, without chunks or micro-batches."""
    batch, advantages, old, ref = inputs
    mask = batch.policy_mask

    def loss(params):
        logits = decoder.logits(params, cfg, decoder.forward(params, cfg, batch.ids, batch.positions))
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits)[:, :-1], batch.ids[:, 1:, None], -1)[..., 0]
        logp = jnp.pad(logp, [(0, 0), (1, 0)])
        ratio, d = jnp.exp(logp - old), ref - logp
        clipped = jnp.minimum(advantages * ratio, advantages * jnp.clip(ratio, 0.8, 1.2))
        return (mask * (0.1 * (jnp.exp(d) - d - 1) - clipped)).sum() / mask.sum()

    value, written_out = jax.jit(jax.value_and_grad(loss))(params)
    grads, metrics = expected
    assert_close(grads, written_out, 1e-6)
    np.testing.assert_allclose(metrics["loss"], value, atol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(written_out), atol=1e-5)
    np.testing.assert_allclose(metrics["update_norm"], optax.tree.norm(written_out), atol=1e-5)
    assert 0 < metrics["clip_fraction"] < 1 and metrics["kl"] > 0


PORTIONS = [
    {"micro_rows": 8},
    {"micro_rows": 3},
    {"buckets": (9, 12, 24)},
    {"logprob_chunk": 128},
    {"remat": "full"},
    {"remat": "dots"},
]


@pytest.mark.parametrize("change", PORTIONS)
def test_portions_change_nothing(cfg, params, inputs, expected, change):
    got = gradient(cfg, params, dataclasses.replace(UCFG, **change), inputs)
    assert_close(got, expected, 1e-6)


def test_padding_changes_nothing(cfg, params, inputs, expected):
    """Other ids and NaNs in the padding, a longer padding, more rows of padding: same loss, same gradient."""
    batch, *arrays = inputs
    padding = jnp.arange(batch.ids.shape[1]) >= batch.lengths[:, None]
    other = dataclasses.replace(batch, ids=jnp.where(padding, 17, batch.ids))
    dirty = [jnp.where(batch.policy_mask > 0, x, jnp.nan) for x in arrays]
    assert_close(gradient(cfg, params, UCFG, (other, *dirty)), expected, 1e-7)

    def wider(x):  # two rows and nine tokens more
        return jnp.pad(x, [(0, 2), (0, 9)][: x.ndim])

    wide = jax.tree.map(wider, batch)
    wide = dataclasses.replace(wide, positions=jnp.broadcast_to(jnp.arange(wide.ids.shape[1]), wide.ids.shape))
    assert_close(gradient(cfg, params, UCFG, (wide, *map(wider, arrays))), expected, 1e-6)


def test_order_of_episodes_changes_nothing(cfg, params, episodes):
    """Rows permuted, groups interleaved: same loss and gradient."""

    def result(order):
        rewards = [({"total": (i * 0.37) % 1}, ()) for i in order]
        batch = jax.device_put(build_batch([episodes[i] for i in order], rewards, 24))
        old = score(cfg, UCFG, params, batch)
        return gradient(cfg, params, UCFG, (batch, grpo(batch.rewards, batch.policy_mask, batch.group), old, old))

    assert_close(result([5, 0, 7, 1, 4, 3, 6, 2]), result(range(8)), 1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_t11_unchanged_weights_have_ratio_one(cfg, params, inputs, temperature):
    ucfg = dataclasses.replace(UCFG, temperature=temperature, kl_coef=0.0)
    batch, advantages, *_ = inputs
    old = score(cfg, ucfg, params, batch)
    _, metrics = update(cfg, ucfg, SGD, init_state(params, SGD), batch, advantages, old)
    np.testing.assert_allclose([metrics["ratio_mean"], metrics["ratio_max"]], 1, atol=1e-5)
    np.testing.assert_allclose(metrics["approx_kl"], 0, atol=1e-5)
    assert metrics["clip_fraction"] == 0 and "kl" not in metrics


@pytest.mark.parametrize("slot", ["advantage", "old"])
def test_t07_step_that_is_not_finite_is_refused(cfg, params, inputs, slot):
    step = functools.partial(update, cfg, UCFG, ADAM)
    batch, advantages, old, ref = inputs
    state, _ = step(init_state(params, ADAM), *inputs)
    before = jax.tree.map(np.array, state)
    t = int(np.flatnonzero(batch.policy_mask[0])[0])
    bad = {"advantage": advantages, "old": old}
    bad[slot] = bad[slot].at[0, t].set(jnp.nan)
    state, metrics = step(state, batch, bad["advantage"], bad["old"], ref)
    for part in ("params", "opt", "step"):
        jax.tree.map(np.testing.assert_array_equal, state[part], before[part])
    assert (int(state["skipped"]), int(metrics["skipped"]), float(metrics["update_norm"])) == (1, 1, 0.0)
    state, metrics = step(state, *inputs)
    assert (int(state["skipped"]), int(state["step"])) == (1, 2) and metrics["update_norm"] > 0
    assert optax.tree.norm(jax.tree.map(jnp.subtract, state["params"], before["params"])) > 0


def test_all_masked_batch_changes_nothing(cfg, params, inputs):
    batch, *arrays = inputs
    empty = dataclasses.replace(batch, policy_mask=jnp.zeros_like(batch.policy_mask))
    grads, metrics = gradient(cfg, params, UCFG, (empty, *arrays))
    assert not any(g.any() for g in jax.tree.leaves(grads))
    assert metrics["loss"] == 0 and all(np.isfinite(m) for m in metrics.values())


def test_second_update_traces_nothing_and_transfers_nothing(cfg, params, inputs, monkeypatch):
    traces = []
    real = decoder.forward
    monkeypatch.setattr(decoder, "forward", lambda *args, **kwargs: traces.append(1) or real(*args, **kwargs))
    score, update = make_score(cfg, UCFG), make_update(cfg, UCFG, ADAM)
    state = init_state(params, ADAM)
    batch, advantages, _, ref = inputs
    counts, cut, data = [], micros(batch, UCFG), data_of(UCFG, batch, advantages, advantages, ref)
    with jax.transfer_guard("disallow"):
        for _ in range(3):
            old = score(state["params"], batch, cut)
            state, _ = update(state, data | {"old": old}, cut)
            counts.append(len(traces))
    assert counts[0] > 0 and counts == [counts[0]] * 3
    assert int(state["step"]) == 3


def test_state_is_donated_and_the_callers_parameters_are_not(cfg, params, inputs):
    state = init_state(params, SGD)
    update(cfg, UCFG, SGD, state, *inputs)
    assert all(x.is_deleted() for x in jax.tree.leaves(state["params"]))
    assert not any(x.is_deleted() for x in jax.tree.leaves(params))


def test_entropy_bonus_raises_the_entropy(cfg, params, inputs):
    batch, advantages, old, _ = inputs
    ucfg = dataclasses.replace(UCFG, kl_coef=0.0, entropy_coef=1.0)
    tx = optax.sgd(0.05)
    state, entropies = init_state(params, tx), []
    for _ in range(4):
        state, metrics = update(cfg, ucfg, tx, state, batch, 0 * advantages, old)
        entropies.append(float(metrics["entropy"]))
    assert entropies == sorted(entropies) and entropies[-1] > entropies[0]
    np.testing.assert_allclose(metrics["loss"], metrics["policy_loss"] - metrics["entropy"], atol=1e-6)


def test_updates_make_good_episodes_likelier(cfg, params, inputs):
    batch, advantages, _, ref = inputs
    state = init_state(params, ADAM)
    first = score(cfg, UCFG, state["params"], batch)
    for _ in range(10):
        old = score(cfg, UCFG, state["params"], batch)
        state, _ = update(cfg, UCFG, ADAM, state, batch, advantages, old, ref)
    last = score(cfg, UCFG, state["params"], batch)
    assert ((last - first) * advantages).sum() > 0


def test_what_does_not_fit_is_named(cfg, params, inputs):
    batch, advantages, old, _ = inputs
    with pytest.raises(ValueError, match=r"kl_coef is 0\.1 but there is no 'ref'"):
        update(cfg, UCFG, SGD, init_state(params, SGD), batch, advantages, old)
    for bad in ({"temperature": 0.0}, {"kl_kind": "k1"}, {"micro_rows": 0}, {"logprob_chunk": 0}):
        with pytest.raises(UserError, match=next(iter(bad))):
            UpdateConfig(**bad)
