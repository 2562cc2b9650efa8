"""Losses, KL and the sampler gap: hand values (T07, T10), numpy, the released code's numbers (golden)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parasearch_jax.rl import kl, policy_loss, value_loss
from parasearch_jax.rl.losses import masked_mean, masked_sum, sampler_gap

NAN, INF = float("nan"), float("inf")


def row(*values):
    return jnp.array([values], jnp.float32)


def value_and_grad(logprobs, *args, **kwargs):
    f = jax.value_and_grad(lambda lp: policy_loss(lp, *args, **kwargs), has_aux=True)
    (loss, metrics), grad = f(logprobs)
    return float(loss), metrics, np.asarray(grad)


def test_t07_nan_in_a_masked_slot():
    loss, metrics, grad = value_and_grad(row(-1, -2), row(-1, NAN), row(0.5, 0.5), row(1, 0))
    assert loss == -0.5
    np.testing.assert_array_equal(grad, [[-0.5, 0]])
    assert all(np.isfinite(v) for v in metrics.values())


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_t07_all_masked(bad):
    loss, metrics, grad = value_and_grad(row(-1, bad), row(bad, -2), row(0.5, bad), row(0, 0))
    assert loss == 0 and not grad.any()
    assert all(np.isfinite(v) for v in metrics.values())
    assert all(np.isfinite(v) for v in sampler_gap(row(-1, bad), row(bad, -2), row(0, 0)).values())


def test_t07_nan_in_an_unmasked_slot_is_not_hidden():
    loss, _, _ = value_and_grad(row(-1, -2), row(-1, NAN), row(0.5, 0.5), row(1, 1))
    assert np.isnan(loss)


def test_masked_sum_and_mean():
    x, mask = row(1, NAN, 3), row(1, 0, 1)
    assert masked_sum(x, mask) == 4 and masked_mean(x, mask) == 2
    assert masked_mean(x, 0 * mask) == 0
    np.testing.assert_array_equal(jax.grad(masked_mean)(x, mask), [[0.5, 0, 0.5]])


def test_clip_by_hand():
    """Ratio 1.5 up, 0.5 down: the gain is clipped where the advantage pushes on, free where it pulls back."""
    up, down = np.log(1.5), np.log(0.5)
    new, advantages = row(up, up, down, down), row(1, -1, 1, -1)
    loss, metrics, grad = value_and_grad(new, row(0, 0, 0, 0), advantages, row(1, 1, 1, 1), clip=(0.2, 0.3))
    np.testing.assert_allclose(loss, (-1.3 + 1.5 - 0.5 + 0.8) / 4, atol=1e-6)
    np.testing.assert_allclose(grad, [[0, 1.5 / 4, -0.5 / 4, 0]], atol=1e-6)
    np.testing.assert_allclose(metrics["clip_fraction"], 0.5)
    np.testing.assert_allclose(metrics["approx_kl"], -(2 * up + 2 * down) / 4, atol=1e-6)
    np.testing.assert_allclose(metrics["ratio_mean"], 1.0, atol=1e-6)
    np.testing.assert_allclose(metrics["ratio_max"], 1.5, atol=1e-6)


def test_denominator_makes_micro_batches_add_up():
    rng = np.random.default_rng(0)
    new, old, adv = rng.normal(size=(3, 4, 6)).astype(np.float32)
    mask = (rng.random((4, 6)) < 0.6).astype(np.float32)
    whole, _ = policy_loss(new, old, adv, mask)
    pieces = [policy_loss(new[i], old[i], adv[i], mask[i], denominator=mask.sum())[0] for i in ([0], [1, 2, 3])]
    np.testing.assert_allclose(sum(pieces), whole, atol=1e-6)


def test_huge_log_ratio_is_bounded():
    loss, _, grad = value_and_grad(row(300), row(0), row(-1), row(1))
    assert np.isfinite(loss) and np.isfinite(grad).all()


def test_released_policy_loss(golden):
    loss, metrics = policy_loss(golden["new"], golden["old"], golden["adv"], golden["info"])
    np.testing.assert_allclose(loss, golden["policy_loss"], atol=1e-5)
    np.testing.assert_allclose(metrics["clip_fraction"], golden["clipfrac"], atol=1e-5)
    np.testing.assert_allclose(metrics["approx_kl"], golden["ppo_kl"], atol=1e-5)


@pytest.mark.parametrize(("kind", "name"), [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl")])
def test_released_kl(golden, kind, name):
    np.testing.assert_allclose(kl(golden["new"], golden["ref"], kind), golden[f"kl_{name}"], atol=1e-5)


def test_t10_k3_by_hand():
    np.testing.assert_allclose(kl(row(0, 0, 0), row(0.5, -0.5, 0)), [[0.148721, 0.106531, 0]], atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("difference", [200.0, -200.0])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_t10_large_difference_is_finite(kind, difference, dtype):
    policy, ref = row(0).astype(dtype), row(difference).astype(dtype)
    value, grad = jax.value_and_grad(lambda lp: kl(lp, ref, kind).sum())(policy)
    assert jnp.isfinite(value) and jnp.isfinite(grad).all()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_t10_masked_infinity_adds_nothing(kind):
    def total(lp):
        return masked_sum(kl(lp, row(-1.5, INF, NAN), kind, row(1, 0, 0)), row(1, 0, 0))

    value, grad = jax.value_and_grad(total)(row(-1, -INF, -1))
    np.testing.assert_allclose(value, kl(row(-1), row(-1.5), kind)[0, 0])
    assert grad[0, 0] != 0 and not grad[0, 1:].any()


def test_unknown_kl_is_named():
    with pytest.raises(ValueError, match="KL kind 'k9'"):
        kl(row(0), row(0), "k9")


def test_sampler_gap_against_numpy():
    rng = np.random.default_rng(0)
    trainer, sampler = rng.normal(size=(2, 3, 8)).astype(np.float32)
    mask = (rng.random((3, 8)) < 0.5).astype(np.float32)
    d = (trainer - sampler)[mask == 1]
    w = np.exp(d)
    got = sampler_gap(trainer, np.where(mask, sampler, NAN), mask)
    np.testing.assert_allclose(got["gap_mean"], np.abs(d).mean(), rtol=1e-5)
    np.testing.assert_allclose(got["gap_max"], np.abs(d).max(), rtol=1e-5)
    np.testing.assert_allclose(got["ess"], w.sum() ** 2 / (len(w) * (w**2).sum()), rtol=1e-5)
    np.testing.assert_allclose(sampler_gap(trainer, trainer, mask)["ess"], 1, rtol=1e-6)


# ------------------------------------------------------------------------------------------------------- value loss


def test_released_value_loss(golden):
    loss, metrics = value_loss(golden["vpred"], golden["values"], golden["returns"], golden["info"])
    np.testing.assert_allclose(loss, golden["value_loss"], atol=1e-5)
    np.testing.assert_allclose(metrics["value_clip_fraction"], golden["value_clipfrac"], atol=1e-5)


def test_value_clip_by_hand():
    """Old value 0, clip 0.5. Beyond the clip the loss is that of the clipped value where that is larger, without
    gradient: (1 -> target 2) counts (0.5 - 2)^2; (1 -> target 0) counts its own 1."""
    values, returns = row(1, 1, 0.25, NAN), row(2, 0, 1, 1)
    f = jax.value_and_grad(lambda v: value_loss(v, row(0, 0, 0, 0), returns, row(1, 1, 1, 0)), has_aux=True)
    (loss, metrics), grad = f(values)
    np.testing.assert_allclose(loss, 0.5 * (1.5**2 + 1 + 0.75**2) / 3, atol=1e-6)
    np.testing.assert_allclose(grad, [[0, 1 / 3, -0.75 / 3, 0]], atol=1e-6)
    np.testing.assert_allclose([metrics["value_clip_fraction"], metrics["value_mean"]], [1 / 3, 0.75], atol=1e-6)


def test_value_loss_of_an_all_masked_batch_is_nothing():
    f = jax.value_and_grad(lambda v: value_loss(v, row(NAN), row(INF), row(0))[0])
    loss, grad = f(row(NAN))
    assert loss == 0 and not grad.any()
