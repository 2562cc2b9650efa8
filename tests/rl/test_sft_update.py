"""The supervised step: its loss against a loop of numpy, and what must not change it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from steps import micros

from parasearch_jax.errors import UserError
from parasearch_jax.models import Model, decoder
from parasearch_jax.rl import put_batch, update
from parasearch_jax.rl.batch import response_mask
from parasearch_jax.rl.learner import AlgorithmConfig, make_learner
from parasearch_jax.rl.optim import OptimConfig
from parasearch_jax.rl.update import UpdateConfig, init_state, loss_weights, make_sft_update
from parasearch_jax.sharding.mesh import MeshConfig, make_mesh

UCFG = UpdateConfig(micro_rows=2, logprob_chunk=10)
SFT = AlgorithmConfig("sft", questions=8)
SGD = optax.sgd(1.0)  # the change of the parameters is the gradient


compiled = functools.cache(make_sft_update)


def gradient(cfg, params, ucfg, batch, make=compiled):
    """(gradient tree, metrics) of one update."""
    data = {"batch": batch, "weights": loss_weights(ucfg, batch)}
    state, metrics = make(cfg, ucfg, SGD)(init_state(params, SGD), data, micros(batch, ucfg))
    return jax.tree.map(jnp.subtract, params, state["params"]), metrics


def same(got, expected, tolerance=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), got, expected)


@pytest.fixture(scope="module")
def expected(cfg, params, batch):
    return gradient(cfg, params, UCFG, batch)


@pytest.fixture(scope="module")
def probabilities(cfg, params, batch):
    """float64 [B, T, V]; [b, t] is the distribution that token t is from."""
    logits = np.asarray(Model(cfg, params).logits(batch.ids, batch.lengths), np.float64)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return np.roll(p / p.sum(-1, keepdims=True), 1, axis=1)


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean"])
def test_loss_is_the_loop(cfg, params, batch, probabilities, aggregation):
    ids, mask = np.asarray(batch.ids), np.asarray(batch.policy_mask)
    rows = [[-np.log(probabilities[b, t, ids[b, t]]) for t in np.flatnonzero(mask[b])] for b in range(len(ids))]
    surprise = np.concatenate(rows)
    loss = surprise.mean() if aggregation == "token-mean" else np.mean([np.mean(row) for row in rows if row])
    _, metrics = gradient(cfg, params, dataclasses.replace(UCFG, aggregation=aggregation), batch)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["perplexity"], np.exp(surprise.mean()), rtol=1e-5)
    of_policy = probabilities[mask > 0]
    np.testing.assert_allclose(metrics["entropy"], -(of_policy * np.log(of_policy)).sum(-1).mean(), rtol=1e-4)


@pytest.mark.slow
def test_gradient_against_the_loss_written_out(cfg, params, batch, expected):
    def loss(params):
        logits = decoder.logits(params, cfg, decoder.forward(params, cfg, batch.ids, batch.positions))
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits)[:, :-1], batch.ids[:, 1:, None], -1)[..., 0]
        return -(logp * batch.policy_mask[:, 1:]).sum() / batch.policy_mask.sum()

    written_out = jax.jit(jax.grad(loss))(params)
    same(expected[0], written_out)
    np.testing.assert_allclose(expected[1]["grad_norm"], optax.tree.norm(written_out), rtol=1e-5)


def test_documents_and_prompts_teach_nothing(cfg, params, batch, monkeypatch):
    """What the model says of tokens that the policy did not sample is made to depend on the weights, and of the prompts
    to be NaN: loss and gradient do not notice. Where documents are learned, they do."""
    documents = batch.policy_mask == 0  # id 49 stands there and nowhere else
    batch = dataclasses.replace(batch, ids=jnp.where(documents, 49, batch.ids % 49))
    clean, learned = gradient(cfg, params, UCFG, batch), dataclasses.replace(batch, policy_mask=response_mask(batch))
    before, make = gradient(cfg, params, UCFG, learned), functools.cache(make_sft_update)
    real = update.sequence_logprobs

    def dirty(params, cfg, ids, positions, *args, **kwargs):
        spoilt = jnp.where(positions < 3, jnp.nan, params["norm"]["scale"].sum())
        return tuple(jnp.where(ids == 49, x + spoilt, x) for x in real(params, cfg, ids, positions, *args, **kwargs))

    monkeypatch.setattr(update, "sequence_logprobs", dirty)
    same(gradient(cfg, params, UCFG, batch, make), clean, 1e-7)
    after = gradient(cfg, params, UCFG, learned, make)
    assert np.isfinite(after[1]["loss"]) and not np.isclose(after[1]["loss"], before[1]["loss"])


PORTIONS = [{"buckets": (9, 24)}, pytest.param({"micro_rows": 3, "remat": "full"}, marks=pytest.mark.slow)]


@pytest.mark.parametrize("change", PORTIONS)
def test_portions_change_nothing(cfg, params, batch, change):
    """Sequence-mean, whose weights differ from row to row."""
    ucfg = dataclasses.replace(UCFG, aggregation="sequence-mean")
    same(gradient(cfg, params, dataclasses.replace(ucfg, **change), batch), gradient(cfg, params, ucfg, batch))


def test_padding_changes_nothing(cfg, params, batch, expected):
    padding = jnp.arange(batch.ids.shape[1]) >= batch.lengths[:, None]
    other = dataclasses.replace(batch, ids=jnp.where(padding, 17, batch.ids))
    same(gradient(cfg, params, UCFG, other), expected, 1e-7)


def test_an_all_masked_batch_changes_nothing(cfg, params, batch):
    empty = dataclasses.replace(batch, policy_mask=jnp.zeros_like(batch.policy_mask))
    grads, metrics = gradient(cfg, params, UCFG, empty)
    assert not any(g.any() for g in jax.tree.leaves(grads))
    assert metrics["loss"] == 0 and metrics["perplexity"] == 1


# ------------------------------------------------------------------------------------------------------- as a learner


WHOLE = UpdateConfig(micro_rows=4, logprob_chunk=24, buckets=(24,))


def learned(cfg, params, batch, mesh=None, steps=1, algorithm=SFT, lr=1e-4):
    learner = make_learner(cfg, algorithm, WHOLE, OptimConfig(lr=lr), mesh=mesh)
    state, cut, lines = learner.init(params), learner.cut(np.asarray(batch.lengths)), []
    batch = batch if mesh is None else put_batch(jax.tree.map(np.asarray, batch), mesh)
    for _ in range(steps):
        assert learner.score(state, batch, cut) == ({}, {})  # nothing to score
        state, metrics = learner.update(state, batch, cut, {})
        lines.append(metrics)
    return jax.device_get((state, lines))


@pytest.fixture(scope="module")
def on_one(cfg, params, batch):
    return learned(cfg, params, batch)


@pytest.mark.parametrize("shape", [(2, 2), *(pytest.param(x, marks=pytest.mark.slow) for x in [(1, 1), (4, 1)])])
def test_meshes_change_nothing(cfg, params, batch, on_one, shape):
    state, (line,) = learned(cfg, params, batch, make_mesh(MeshConfig(*shape)))
    moved = jax.tree.map(lambda new, old: np.abs(new - old).max(), state["actor"]["params"], params)
    assert max(jax.tree.leaves(moved)) > 5e-5  # no small thing beside the tolerance
    same(state["actor"]["params"], on_one[0]["actor"]["params"])
    same(line, on_one[1][0], 1e-5)


@pytest.mark.slow
def test_it_learns_by_heart(cfg, params, batch):
    _, lines = learned(cfg, params, batch, steps=25, lr=1e-2)
    assert lines[-1]["perplexity"] < 0.2 * lines[0]["perplexity"]


def test_a_second_step_traces_nothing_and_transfers_nothing(cfg, params, batch, monkeypatch):
    traces, real = [], decoder.forward
    monkeypatch.setattr(decoder, "forward", lambda *args, **kwargs: traces.append(1) or real(*args, **kwargs))
    learner = make_learner(cfg, SFT, WHOLE, OptimConfig(lr=1e-4))
    state, cut, counts = learner.init(params), learner.cut(np.asarray(batch.lengths)), []
    with jax.transfer_guard("disallow"):
        for _ in range(3):
            state, _ = learner.update(state, batch, cut, {})
            counts.append(len(traces))
    assert counts[0] > 0 and counts == [counts[0]] * 3


def test_the_ablation_learns_documents_too(cfg, params, batch):
    whole = dataclasses.replace(batch, policy_mask=response_mask(batch))
    want = learned(cfg, params, whole)
    got = learned(cfg, params, batch, algorithm=dataclasses.replace(SFT, mask_documents=False))
    same(got, want, 1e-7)
    assert not np.isclose(got[1][0]["loss"], learned(cfg, params, batch)[1][0]["loss"])


@pytest.mark.parametrize("bad", [{"samples": 8}, {"temperature": 0.7}, {"reward_kl": 0.1}, {"bypass": True}])
def test_what_a_sampled_batch_has_is_refused(bad):
    (name,) = bad
    with pytest.raises(UserError, match=rf"algorithm\.{name} is .*which sft has not"):
        AlgorithmConfig("sft", questions=8, **bad)


@pytest.mark.parametrize("bad", [{"kl_coef": 0.1}, {"entropy_coef": 0.1}, {"dual_clip": 3.0}, {"importance_cap": 2.0}])
def test_terms_of_a_policy_loss_are_refused(cfg, bad):
    (name,) = bad
    with pytest.raises(UserError, match=f"{name} is .*a supervised loss has not"):
        make_learner(cfg, SFT, dataclasses.replace(UCFG, **bad), OptimConfig(lr=1e-3))
