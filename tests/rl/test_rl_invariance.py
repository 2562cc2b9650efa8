"""What must not change a loss or its gradient: the logits of documents, padding, the order of rows, the numbers of
groups, the split into micro-batches and buckets. For each estimator with each kind of token weights at once.

The gradient is taken by the logits: what a model would get. Axes: E estimators x kinds, B rows, T tokens, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from estimators import KINDS, advantages_of

from parasearch_jax.rl import kl, policy_loss, token_weights, value_loss
from parasearch_jax.rl.losses import token_count, truncated_weights, weighted_sum

B, T, V = 8, 10, 5
LENGTHS = np.array([10, 7, 9, 4, 10, 0, 6, 8])


@pytest.fixture(scope="module")
def case():
    """Rows of prompt (2), policy, documents, policy; row 5 is only padding; rewards on two policy tokens."""
    rng = np.random.default_rng(0)
    mask = np.zeros((B, T), np.float32)
    for b, n in enumerate(LENGTHS):
        first = min(2 + int(rng.integers(1, 3)), n)
        mask[b, 2:first], mask[b, n - min(n, int(rng.integers(1, 4))) : n] = 1, 1
    old, sampler, ref, values, noise = rng.normal(-1.5, 0.3, (5, B, T)).astype(np.float32)
    rewards = np.zeros((B, T), np.float32)
    for b in np.flatnonzero(LENGTHS):
        at = np.flatnonzero(mask[b])
        rewards[b, at[0]], rewards[b, at[-1]] = 0.3 * rng.random(), rng.random()
    return {
        "logits": rng.normal(size=(B, T, V)).astype(np.float32),
        "ids": rng.integers(0, V, (B, T)).astype(np.int32),
        "new_values": values + noise,
        **{"old": old, "sampler": sampler, "ref": ref, "values": values, "rewards": rewards, "mask": mask},
        "group": np.array([0, 0, 1, 1, 0, 3, 1, 2], np.int32),
        "micro": np.array([0, 0, 1, 1, 2, 2, 3, 3], np.int32),
    }


def plan(case):
    """What is made once for the whole batch: {name: [E, B, T]} advantages, weights, and the token count."""
    mask = case["mask"]
    penalty = 0.05 * kl(case["old"], case["ref"], "k1", mask)
    advantages = advantages_of(case["rewards"], case["values"], mask, case["group"], penalty).values()
    weights = [token_weights(mask, kind, 16, case["micro"]) for kind in KINDS]
    pairs = [(a, w) for a in advantages for w in weights]
    return {
        "advantages": jnp.stack([a for a, _ in pairs]),
        "weights": jnp.stack([w for _, w in pairs]),
        "tokens": token_count(mask),
    }


def losses(logits, case, plan):
    """[E]: the whole loss of each, policy and critic, of the rows in `case`."""
    mask = case["mask"]
    logp = jax.nn.log_softmax(jnp.pad(logits[:, :-1], [(0, 0), (1, 0), (0, 0)]))  # index t speaks of token t
    logprobs = jnp.take_along_axis(logp, case["ids"][..., None], -1)[..., 0]
    entropy = -(jnp.exp(logp) * logp).sum(-1)
    importance, _ = truncated_weights(case["old"], case["sampler"], mask)

    def one(advantages, weights):
        options = dict(denominator=plan["tokens"], weights=weights)
        args = logprobs, case["old"], advantages, mask
        total, _ = policy_loss(*args, (0.2, 0.28), **options, dual_clip=3.0, importance=importance)
        total += 0.1 * weighted_sum(kl(logprobs, case["ref"], "k3+", mask), weights)
        total -= 0.01 * weighted_sum(entropy, weights)
        critic, _ = value_loss(case["new_values"], case["values"], case["rewards"], mask, 0.5, **options)
        return total + critic

    return jax.vmap(one)(plan["advantages"], plan["weights"])


@jax.jit
def of_part(case, plan):
    """Losses [E] of the rows in `case`, and their gradients by the logits, [E, B, T, V]."""
    total, back = jax.vjp(lambda logits: losses(logits, case, plan), case["logits"])
    return total, jax.vmap(back)(jnp.eye(len(total)))[0]


@jax.jit
def of_whole(case):
    return of_part(case, plan(case))


@pytest.fixture(scope="module")
def expected(case):
    total, grads = map(np.asarray, of_whole(case))
    # Each loss is another one, and each has a gradient: what the tests compare is not nothing.
    assert np.abs(np.subtract.outer(total, total)[np.triu_indices(len(total), 1)]).min() > 1e-6
    assert (np.abs(grads).max((1, 2, 3)) > 1e-3).all()
    return total, grads


def same(got, expected):
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_no_logits_but_those_that_chose_a_policy_token_get_a_gradient(case, expected):
    """The logits at t - 1 choose token t. Exactly 0 elsewhere, as T06 wants."""
    chose = np.pad(case["mask"][:, 1:], [(0, 0), (0, 1)])
    touched = np.abs(expected[1]).max((0, 3)) > 0
    np.testing.assert_array_equal(touched, chose > 0)


@pytest.mark.parametrize("garbage", [7.0, np.nan, np.inf])
def test_documents_prompt_and_padding(case, expected, garbage):
    """Everything that speaks of a token which the policy did not sample may be anything."""
    outside = case["mask"] == 0
    chose = np.pad(case["mask"][:, 1:], [(0, 0), (0, 1)])
    names = ("old", "sampler", "ref", "values", "new_values", "rewards")
    dirty = case | {name: np.where(outside, np.float32(garbage), case[name]) for name in names}
    if np.isfinite(garbage):  # a gradient by logits goes through log_softmax, which belongs to the model
        dirty["logits"] = np.where(chose[..., None] == 0, case["logits"] + garbage * np.arange(V), case["logits"])
    dirty["logits"] = dirty["logits"].astype(np.float32)
    dirty["ids"] = np.where(outside, (case["ids"] + 1) % V, case["ids"])
    same(of_whole(dirty), expected)


def test_longer_padding(case, expected):
    def longer(x):
        return np.pad(x, [(0, 0), (0, 3)] + [(0, 0)] * (x.ndim - 2)) if x.ndim > 1 else x

    total, grads = of_whole({name: longer(x) for name, x in case.items()})
    same((total, grads[:, :, :T]), expected)
    assert not np.asarray(grads[:, :, T:]).any()


def test_rows_permuted_and_groups_interleaved(case, expected):
    """Also with other numbers for groups and micro-batches."""
    rng = np.random.default_rng(1)
    order, names = rng.permutation(B), rng.permutation(B).astype(np.int32)
    shuffled = case | {name: names[case[name]] for name in ("group", "micro")}
    total, grads = of_whole({name: x[order] for name, x in shuffled.items()})
    same((total, grads), (expected[0], expected[1][:, order]))


def test_micro_batches_in_buckets(case, expected):
    """Four micro-batches, two cut to the bucket of 7 tokens, under the weights of the whole: they add up to the batch
    that was neither split nor cut."""
    whole = jax.jit(plan)(case)
    total, grads = 0.0, np.zeros_like(expected[1])
    for rows, n in (([0, 4], 10), ([2, 7], 10), ([1, 6], 7), ([3, 5], 7)):
        part = {name: x[rows][:, :n] if x.ndim > 1 else x[rows] for name, x in case.items()}
        share = {name: x[:, rows, :n] if name != "tokens" else x for name, x in whole.items()}
        loss, grad = of_part(part, share)
        total += np.asarray(loss)
        grads[:, rows, :n] = grad
    same((total, grads), expected)


def test_with_unchanged_weights_every_ratio_is_one(case):
    mask = case["mask"]
    _, metrics = policy_loss(case["old"], case["old"], np.ones((B, T)), mask, dual_clip=3.0)
    assert {name: float(x) for name, x in metrics.items()} == {
        "clip_fraction": 0,
        "approx_kl": 0,
        "ratio_mean": 1,
        "ratio_max": 1,
        "dual_clip_fraction": 0,
    }
