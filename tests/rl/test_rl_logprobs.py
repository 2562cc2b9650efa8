"""Chunked log-probs against the full logits, in value and gradient; temperature; the index rule (T11)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parasearch_jax.models import decoder
from parasearch_jax.rl import policy_loss
from parasearch_jax.rl.logprobs import sequence_logprobs, token_logprobs

B, T, D, V = 3, 13, 8, 20


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(1)
    hidden = rng.normal(size=(B, T, D)).astype(np.float32)
    head = rng.normal(size=(V, D)).astype(np.float32)
    return jnp.array(hidden), jnp.array(head), jnp.array(rng.integers(0, V, (B, T)))


def full(hidden, head, targets, temperature):
    """The same from the whole [B, T, V] at once."""
    logp = jax.nn.log_softmax(hidden @ head.T / temperature)
    return jnp.take_along_axis(logp, targets[..., None], -1)[..., 0], -(jnp.exp(logp) * logp).sum(-1)


@pytest.mark.parametrize("chunk", [1, 4, 5, 13, 64])
def test_chunked_equals_full(inputs, chunk):
    hidden, head, targets = inputs
    weights = jnp.cos(jnp.arange(B * T).reshape(B, T))  # so that an exchange of tokens shows

    def scalar(fn, *args):
        def f(hidden, head):
            logprobs, entropy = fn(hidden, head, targets, *args)
            return (weights * logprobs).sum() + (weights**2 * entropy).sum(), (logprobs, entropy)

        return jax.value_and_grad(f, argnums=(0, 1), has_aux=True)(hidden, head)

    (_, expected), expected_grads = scalar(full, 0.7)
    (_, got), grads = scalar(token_logprobs, chunk, 0.7, True)
    for a, b in zip((*got, *grads), (*expected, *expected_grads), strict=True):
        assert a.shape == b.shape and a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_masked_equals_full_on_the_mask_and_reads_nothing_else(inputs, chunk, share):
    hidden, head, targets = inputs
    mask = np.random.default_rng(2).permutation(B * T).reshape(B, T) < share * B * T
    hidden_nan = jnp.where(mask[..., None], hidden, jnp.nan)
    weights = jnp.cos(jnp.arange(B * T).reshape(B, T))

    def scalar(fn, hidden, *args, **kwargs):
        def f(hidden, head):
            out = fn(hidden, head, targets, *args, **kwargs)
            logprobs, entropy = (jnp.where(mask, x, 0.0) for x in out)
            return (weights * logprobs).sum() + (weights**2 * entropy).sum(), (logprobs, entropy, out)

        return jax.value_and_grad(f, argnums=(0, 1), has_aux=True)(hidden, head)

    (_, (*expected, _)), expected_grads = scalar(full, hidden, 0.7)
    (_, (*got, out)), grads = jax.jit(lambda h, m: scalar(token_logprobs, h, chunk, 0.7, True, mask=m))(
        hidden_nan, jnp.array(mask, jnp.float32)
    )
    for a, b in zip((*got, *grads), (*expected, *expected_grads), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    for x in out:
        assert not x[~mask].any()


def test_only_chunks_that_hold_tokens_of_the_mask_are_computed(inputs, monkeypatch):
    hidden, head, targets = inputs
    computed, project = [], decoder.project

    def counting(h, head, *args):
        jax.debug.callback(lambda: computed.append(1))
        return project(h, head, *args)

    monkeypatch.setattr(decoder, "project", counting)
    logprobs = jax.jit(lambda mask: token_logprobs(hidden, head, targets, 4, mask=mask))
    for tokens, chunks in ((0, 0), (1, 1), (12, 1), (13, 2), (39, 4)):
        computed.clear()
        jax.block_until_ready(logprobs((jnp.arange(B * T) < tokens).reshape(B, T)))
        jax.effects_barrier()
        assert len(computed) == chunks


def test_entropy_has_a_gradient_only_when_asked(inputs):
    hidden, head, targets = inputs
    grad = jax.grad(lambda h, ask: token_logprobs(h, head, targets, 4, 1.0, ask)[1].sum())
    assert not grad(hidden, False).any()
    assert grad(hidden, True).any()


def test_half_precision_sums_the_gradient_of_the_head_in_fp32(inputs):
    hidden, head, targets = inputs
    grad = jax.grad(lambda w: token_logprobs(hidden.astype(jnp.bfloat16), w, targets, 1)[0].sum())(head)
    assert grad.dtype == jnp.float32
    expected = jax.grad(lambda w: full(hidden, w, targets, 1.0)[0].sum())(head)
    np.testing.assert_allclose(grad, expected, atol=0.15)  # bf16: 8 bits, 39 terms of size 1


def test_never_holds_all_logits(inputs):
    hidden, head, targets = inputs
    jaxpr = jax.make_jaxpr(jax.grad(lambda h: token_logprobs(h, head, targets, 4)[0].sum()))(hidden)
    assert f"f32[{B},{T},{V}]" not in str(jaxpr) and f"f32[4,{B},4,{V}]" not in str(jaxpr)
    assert f"f32[{B},4,{V}]" in str(jaxpr)  # the chunk itself: the pattern above would have matched


def test_t11_temperature():
    # Logits [2, 0] at temperature 0.5, token 0.
    logprobs, entropy = token_logprobs(jnp.array([[[1.0]]]), jnp.array([[2.0], [0.0]]), jnp.array([[0]]), 8, 0.5)
    np.testing.assert_allclose(logprobs, [[-0.018150]], atol=1e-6)
    p = 1 / (1 + np.exp(-4))
    np.testing.assert_allclose(entropy, [[-p * np.log(p) - (1 - p) * np.log(1 - p)]], atol=1e-6)
    with pytest.raises(ValueError, match="temperature 0"):
        token_logprobs(jnp.ones((1, 1, 1)), jnp.ones((1, 2)), jnp.zeros((1, 1), int), 8, 0.0)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_index_rule(cfg, params, batch, remat):
    """Index t holds log p(ids[t] | ids[:t]), computed here from the prefix alone."""
    args = (cfg, batch.ids, batch.positions, 0.8, 7, remat)
    got, entropy = jax.jit(lambda params: sequence_logprobs(params, *args))(params)
    assert not got[:, 0].any() and not entropy[:, 0].any()

    @jax.jit
    def prefix_logp(ids, t):
        hidden = decoder.forward(params, cfg, ids, batch.positions)
        return jax.nn.log_softmax(decoder.logits(params, cfg, hidden)[:, t - 1] / 0.8)

    for t in (1, 2, 9, batch.ids.shape[1] - 1):
        expected = prefix_logp(batch.ids.at[:, t:].set(0), t)
        np.testing.assert_allclose(got[:, t], expected[np.arange(len(got)), batch.ids[:, t]], atol=1e-5)
        np.testing.assert_allclose(entropy[:, t], -(jnp.exp(expected) * expected).sum(-1), atol=1e-5)


def test_logits_at_documents_and_padding_do_not_matter(cfg, params, batch):
    """The state at t predicts t + 1: wherever that is no policy token, the state may be anything."""
    hidden = jax.jit(lambda params: decoder.forward(params, cfg, batch.ids, batch.positions))(params)
    head, mask = decoder.head(params, cfg), batch.policy_mask[:, 1:]

    @jax.jit
    def loss(hidden):
        logprobs, _ = token_logprobs(hidden[:, :-1], head, batch.ids[:, 1:], 8)
        return policy_loss(logprobs, batch.logprobs[:, 1:], jnp.ones_like(mask), mask)[0]

    noise = jax.random.normal(jax.random.key(3), hidden.shape)
    unused = jnp.pad(mask == 0, [(0, 0), (0, 1)], constant_values=True)[..., None]
    plain, noisy = (jax.value_and_grad(loss)(h) for h in (hidden, jnp.where(unused, noise, hidden)))
    np.testing.assert_array_equal(plain[0], noisy[0])
    np.testing.assert_array_equal(plain[1], noisy[1])
    assert not jnp.where(unused, plain[1], 0).any()
    assert loss(jnp.where(unused, hidden, noise)) != plain[0]  # the other states do matter
