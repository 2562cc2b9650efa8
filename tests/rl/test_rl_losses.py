"""Losses, their weights, KL, the sampler gap: hand values (T06, T07, T10), loops in numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parasearch_jax.rl import kl, policy_loss, token_weights, value_loss
from parasearch_jax.rl.losses import (
    adaptive_kl,
    masked_mean,
    masked_sum,
    overlong_filter,
    row_weights,
    sampler_gap,
    truncated_weights,
    weighted_sum,
)

NAN, INF = float("nan"), float("inf")


KINDS = ("token-mean", "sequence-mean", "dr_grpo", "released")


def row(*values):
    return np.array([values], np.float32)


@functools.cache
def compiled(clip, dual_clip):
    def loss(logprobs, *args, weights, importance):
        return policy_loss(logprobs, *args, clip, weights=weights, dual_clip=dual_clip, importance=importance)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def value_and_grad(*args, clip=(0.2, 0.2), dual_clip=None, weights=None, importance=None):
    (loss, metrics), grad = compiled(clip, dual_clip)(*args, weights=weights, importance=importance)
    return float(loss), metrics, np.asarray(grad)


def test_t06_only_sampled_tokens_have_a_gradient():
    """3 prompt, 4 sampled, 5 document, 2 sampled (the last one the end token), 2 pad."""
    mask = row(*map(int, "0001111000001100"))
    rng = np.random.default_rng(0)
    new, old, advantages = rng.normal(size=(3, 1, 16)).astype(np.float32)
    _, _, grad = value_and_grad(new, old, advantages, mask, clip=(10, 10))
    assert mask.sum() == 6 and grad[0, 13] != 0
    np.testing.assert_array_equal(grad != 0, mask > 0)


def test_t07_nan_in_a_masked_slot():
    loss, metrics, grad = value_and_grad(row(-1, -2), row(-1, NAN), row(0.5, 0.5), row(1, 0))
    assert loss == -0.5
    np.testing.assert_array_equal(grad, [[-0.5, 0]])
    assert all(np.isfinite(v) for v in metrics.values())


@jax.jit
def gap_and_importance(*args):
    return sampler_gap(*args), truncated_weights(*args)[1]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_t07_all_masked(bad):
    loss, metrics, grad = value_and_grad(row(-1, bad), row(bad, -2), row(0.5, bad), row(0, 0))
    assert loss == 0 and not grad.any()
    assert all(np.isfinite(v) for v in metrics.values())
    seen = gap_and_importance(row(-1, bad), row(bad, -2), row(0, 0))
    assert all(np.isfinite(v) for metrics in seen for v in metrics.values())


def test_t07_all_masked_with_every_option():
    garbage = row(NAN, INF)

    def total(lp):
        none = row(0, 0)
        weights = sum(token_weights(none, kind, length=9, micro=jnp.zeros(1, jnp.int32)) for kind in KINDS)
        loss, metrics = policy_loss(lp, garbage, garbage, none, weights=weights, dual_clip=3.0, importance=garbage)
        divergence = sum(weighted_sum(kl(lp, garbage, kind, none), weights) for kind in ("k1", "k2", "k3", "k3+"))
        return loss + divergence + weighted_sum(lp, weights), metrics

    (loss, metrics), grad = jax.jit(jax.value_and_grad(total, has_aux=True))(garbage)
    assert loss == 0 and not np.asarray(grad).any() and all(np.isfinite(v) for v in metrics.values())


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


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_policy_loss_against_a_loop(dual_clip):
    """Clip-higher, dual clip, importance and token weights at once, on ratios on both sides of every bound."""
    rng = np.random.default_rng(0)
    new, old, advantages = rng.normal(size=(3, 5, 8)).astype(np.float32)
    new *= 2
    mask = (rng.random((5, 8)) < 0.7).astype(np.float32)
    weights, importance = (rng.random((2, 5, 8)) * mask).astype(np.float32)
    total, bounded = 0.0, 0
    for b, t in np.argwhere(mask):
        a, r = advantages[b, t], np.exp(new[b, t] - old[b, t])
        gain = min(a * r, a * min(max(r, 0.8), 1.28))
        if dual_clip and a < 0 and gain < dual_clip * a:
            gain, bounded = dual_clip * a, bounded + 1
        total -= weights[b, t] * importance[b, t] * gain
    args = [np.where(mask, x, NAN) for x in (new, old, advantages)]
    options = dict(dual_clip=dual_clip, importance=np.where(mask, importance, NAN))
    loss, metrics, _ = value_and_grad(*args, mask, clip=(0.2, 0.28), weights=weights, **options)
    np.testing.assert_allclose(loss, total, rtol=1e-5)
    if dual_clip:
        assert bounded > 2
        np.testing.assert_allclose(metrics["dual_clip_fraction"], bounded / mask.sum(), rtol=1e-6)


def test_dual_clip_by_hand():
    """A ratio of 5: a negative advantage pays 5 without, 3 and no gradient with it; a positive one is as before."""
    new, old, mask = row(np.log(5), np.log(2), np.log(5)), row(0, 0, 0), row(1, 1, 1)
    loss, metrics, grad = value_and_grad(new, old, row(-1, -1, 1), mask, dual_clip=3.0)
    np.testing.assert_allclose(loss, (3 + 2 - 1.2) / 3, atol=1e-6)
    np.testing.assert_allclose(grad, [[0, 2 / 3, 0]], atol=1e-6)
    np.testing.assert_allclose(metrics["dual_clip_fraction"], 1 / 3)


def test_huge_log_ratio_is_bounded():
    loss, _, grad = value_and_grad(row(300), row(0), row(-1), row(1))
    assert np.isfinite(loss) and np.isfinite(grad).all()


@jax.jit
def every_kl(logprobs, ref, mask):
    """{kind: (values, gradient of their sum)}"""

    def one(kind):
        value, back = jax.vjp(lambda lp: kl(lp, ref, kind, mask), logprobs)
        return value, back(jnp.ones_like(value))[0]

    return {kind: one(kind) for kind in ("k1", "k2", "k3", "k3+")}


def test_t10_k3_by_hand():
    got = every_kl(row(0, 0, 0), row(0.5, -0.5, 0), row(1, 1, 1))["k3"][0]
    np.testing.assert_allclose(got, [[0.148721, 0.106531, 0]], atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_t10_large_difference_is_finite(dtype):
    policy, ref = row(0, 0, 0).astype(dtype), row(200, -200, 200).astype(dtype)
    for value, grad in every_kl(policy, ref, row(1, 1, 1)).values():
        assert np.isfinite(value).all() and np.isfinite(grad.astype(np.float32)).all()


def test_t10_masked_infinity_adds_nothing():
    got = every_kl(row(-1, -INF, -1), row(-1.5, INF, NAN), row(1, 0, 0))
    expected = {"k1": 0.5, "k2": 0.125, "k3": 0.106531, "k3+": 0.106531}
    for kind, (value, grad) in got.items():
        np.testing.assert_allclose(value, row(expected[kind], 0, 0), atol=1e-6)
        np.testing.assert_array_equal(np.asarray(grad) != 0, [[True, False, False]])


def test_k3_plus_has_the_value_of_k3_and_the_gradient_of_k2():
    d = row(-200, -3, -0.5, 0, 0.5, 3, 200)
    got = every_kl(d, 0 * d, np.ones_like(d))
    value, grad = got["k3+"]
    np.testing.assert_array_equal(value, got["k3"][0])
    assert np.abs(value).max() <= 10
    np.testing.assert_array_equal(grad, got["k2"][1])
    np.testing.assert_allclose(grad, np.clip(d, -20, 20))  # beyond the bound it pulls on, with a gradient of 20


def test_expected_gradients_of_the_estimators():
    """Over a distribution: that of k2 and k3+ is the gradient of KL(policy || reference), of k1 is 0, of k3 is not."""
    logits, ref = jnp.array([0.3, -1.0, 0.7]), jnp.array([-1.5, -0.8, -1.1])

    def exact(x):
        return (jax.nn.softmax(x) * (jax.nn.log_softmax(x) - ref)).sum()

    def expected(x):
        policy = jax.lax.stop_gradient(jax.nn.softmax(x))
        return {k: (policy * kl(jax.nn.log_softmax(x), ref, k)).sum() for k in ("k1", "k2", "k3", "k3+")}

    got, right = jax.jit(lambda x: (jax.jacrev(expected)(x), jax.grad(exact)(x)))(logits)
    for kind in ("k2", "k3+"):
        np.testing.assert_allclose(got[kind], right, atol=1e-6)
    np.testing.assert_allclose(got["k1"], 0, atol=1e-6)
    assert np.abs(got["k3"] - right).max() > 0.1


def test_unknown_kl_is_named():
    with pytest.raises(ValueError, match="KL kind 'k9'"):
        kl(row(0), row(0), "k9")


def test_sampler_gap_against_numpy():
    rng = np.random.default_rng(0)
    trainer, sampler = rng.normal(size=(2, 3, 8)).astype(np.float32)
    mask = (rng.random((3, 8)) < 0.5).astype(np.float32)
    d = (trainer - sampler)[mask == 1]
    w = np.exp(d)
    gap = jax.jit(sampler_gap)
    got = gap(trainer, np.where(mask, sampler, NAN), mask)
    np.testing.assert_allclose(got["gap_mean"], np.abs(d).mean(), rtol=1e-5)
    np.testing.assert_allclose(got["gap_max"], np.abs(d).max(), rtol=1e-5)
    np.testing.assert_allclose(got["ess"], w.sum() ** 2 / (len(w) * (w**2).sum()), rtol=1e-5)
    np.testing.assert_allclose(gap(trainer, trainer, mask)["ess"], 1, rtol=1e-6)


def test_adaptive_kl_by_hand():
    """Above the target it grows, below it shrinks, by at most a fifth of the batch's share of the horizon."""
    for measured, expected in ((0.011, 0.102), (0.1, 0.104), (0.0, 0.096), (0.01, 0.1), (NAN, 0.1), (INF, 0.1)):
        got = adaptive_kl(0.1, jnp.float32(measured), target=0.01, horizon=1000, n=200)
        np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert adaptive_kl(0.1, jnp.float32(0), target=0.01, horizon=10, n=2560) > 0


def test_truncated_weights_against_numpy():
    rng = np.random.default_rng(0)
    trainer, sampler = rng.normal(size=(2, 4, 8)).astype(np.float32)
    mask = (rng.random((4, 8)) < 0.6).astype(np.float32)
    ratio = np.exp(trainer - sampler)
    weigh = jax.jit(functools.partial(truncated_weights, cap=1.5))
    got, metrics = weigh(np.where(mask, trainer, NAN), np.where(mask, sampler, INF), mask)
    np.testing.assert_allclose(got, np.where(mask, np.minimum(ratio, 1.5), 0), rtol=1e-6)
    ratio = ratio[mask == 1]
    np.testing.assert_allclose(metrics["importance_mean"], np.minimum(ratio, 1.5).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["importance_max"], ratio.max(), rtol=1e-6)
    np.testing.assert_allclose(metrics["importance_truncated"], (ratio > 1.5).mean(), rtol=1e-6)
    assert 0 < metrics["importance_truncated"] < 1
    got, metrics = weigh(trainer + 300, sampler, mask)
    np.testing.assert_allclose(got, 1.5 * mask)
    np.testing.assert_allclose(metrics["importance_max"], np.exp(20), rtol=1e-5)


def test_truncated_weights_carry_no_gradient():
    """Made from the very log-probs that the loss is of, they scale its gradient and no more."""
    old, sampler, mask = row(-1, -1), row(-0.5, -1), row(1, 1)

    def loss(lp):
        return policy_loss(lp, old, row(1, -1), mask, importance=truncated_weights(lp, sampler, mask)[0])[0]

    np.testing.assert_allclose(jax.jit(jax.grad(loss))(old), row(-np.exp(-0.5) / 2, 1 / 2), rtol=1e-6)


# ------------------------------------------------------------------------------------------------------ aggregation


@pytest.fixture(scope="module")
def tokens():
    """Losses [7, 9] with NaN outside of the mask, the mask (rows of unequal length, one of none), the micro-batches."""
    rng = np.random.default_rng(0)
    mask = (rng.random((7, 9)) < np.array([0.9, 0.2, 0.5, 0.5, 0.9, 0.3, 0.6])[:, None]).astype(np.float32)
    mask[:, 4], mask[3] = 1, 0
    return np.where(mask, rng.normal(1, 1, (7, 9)), NAN).astype(np.float32), mask, np.array([2, 0, 2, 5, 0, 0, 2])


def by_loop(kind, losses, mask, micro):
    rows = [row[m > 0] for row, m in zip(losses, mask, strict=True)]
    live = [row for row in rows if len(row)]
    if kind == "token-mean":
        return np.concatenate(live).mean()
    if kind == "sequence-mean":
        return np.mean([row.mean() for row in live])
    if kind == "dr_grpo":
        return np.mean([row.sum() / 20 for row in live])
    parts = [np.concatenate([row for row, m in zip(rows, micro, strict=True) if m == i]) for i in set(micro)]
    return np.mean([part.mean() for part in parts if len(part)])


@jax.jit
def weighted(losses, mask, micro):
    """{kind: (loss, its gradient, weights of tokens, weights of rows)}"""

    def one(kind):
        weights = token_weights(mask, kind, length=20, micro=micro)
        return *jax.value_and_grad(weighted_sum)(losses, weights), weights, row_weights(mask.sum(-1), kind, 20, micro)

    return {kind: one(kind) for kind in KINDS}


def test_weights_against_loops(tokens):
    losses, mask, micro = tokens
    got = weighted(*tokens)
    for kind, (loss, grad, weights, rows) in got.items():
        np.testing.assert_allclose(loss, by_loop(kind, losses, mask, micro), rtol=1e-5)
        np.testing.assert_array_equal(weights, np.asarray(rows)[:, None] * mask)
        np.testing.assert_array_equal(grad, weights)
    values = [float(loss) for loss, *_ in got.values()]
    assert np.abs(np.subtract.outer(values, values)[np.triu_indices(4, 1)]).min() > 1e-3  # four things, not one


def test_weights_that_cannot_be_are_named():
    for kind, message in (("dr_grpo", "length is None"), ("released", "micro is None"), ("mean", "'mean' are none of")):
        with pytest.raises(ValueError, match=message):
            token_weights(row(1, 1), kind)


def test_overlong_filter_takes_rows_out_of_every_mean(tokens):
    losses, mask, micro = tokens
    truncated = np.array([0, 1, 0, 0, 1, 0, 0], bool)
    kept = overlong_filter(mask, truncated)
    for kind, (loss, *_) in weighted(losses, kept, micro).items():
        expected = by_loop(kind, losses[~truncated], mask[~truncated], micro[~truncated])
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert kept.dtype == mask.dtype


# ------------------------------------------------------------------------------------------------------- value loss


def test_value_clip_by_hand():
    """Old value 0, clip 0.5. Beyond the clip the loss is that of the clipped value where that is larger, without
    gradient: (1 -> target 2) counts (0.5 - 2)^2; (1 -> target 0) counts its own 1."""
    values, returns = row(1, 1, 0.25, NAN), row(2, 0, 1, 1)
    f = jax.value_and_grad(lambda v: value_loss(v, row(0, 0, 0, 0), returns, row(1, 1, 1, 0)), has_aux=True)
    (loss, metrics), grad = jax.jit(f)(values)
    np.testing.assert_allclose(loss, 0.5 * (1.5**2 + 1 + 0.75**2) / 3, atol=1e-6)
    np.testing.assert_allclose(grad, [[0, 1 / 3, -0.75 / 3, 0]], atol=1e-6)
    np.testing.assert_allclose([metrics["value_clip_fraction"], metrics["value_mean"]], [1 / 3, 0.75], atol=1e-6)


def test_value_loss_with_token_weights(tokens):
    losses, mask, micro = tokens
    rng = np.random.default_rng(1)
    old, returns = rng.normal(size=(2, 7, 9))
    each = 0.5 * np.maximum((losses - returns) ** 2, (np.clip(losses, old - 0.2, old + 0.2) - returns) ** 2)
    loss = jax.jit(lambda *args, weights: value_loss(*args, 0.2, weights=weights)[0])
    for kind, (_, _, weights, _) in weighted(*tokens).items():
        got = loss(losses, old, returns, mask, weights=weights)
        np.testing.assert_allclose(got, by_loop(kind, each, mask, micro), rtol=1e-5)


def test_value_loss_of_an_all_masked_batch_is_nothing():
    f = jax.value_and_grad(lambda v: value_loss(v, row(NAN), row(INF), row(0))[0])
    loss, grad = jax.jit(f)(row(NAN))
    assert loss == 0 and not np.asarray(grad).any()
