"""GRPO and PPO as learners: what they hand to the two updates, against numpy and the parts tested elsewhere."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parasearch_jax.errors import UserError
from parasearch_jax.models import decoder
from parasearch_jax.rl import gae, whiten
from parasearch_jax.rl.batch import build_batch, response_mask
from parasearch_jax.rl.learner import AlgorithmConfig, _gae_targets, make_learner
from parasearch_jax.rl.optim import OptimConfig
from parasearch_jax.rl.update import UpdateConfig

UCFG = UpdateConfig(micro_rows=2, logprob_chunk=24)
PPO = AlgorithmConfig("ppo", questions=8, updates=2, reward_kl=0.1)
GRPO = AlgorithmConfig("grpo", questions=2, samples=4)
ACTOR, CRITIC = OptimConfig(lr=1e-3), OptimConfig(lr=1e-2)


def run(cfg, params, batch, algorithm, steps=1, ucfg=UCFG, reference=None):
    learner = make_learner(cfg, algorithm, ucfg, ACTOR, CRITIC)
    state, lines = learner.init(params), []
    for _ in range(steps):
        scores, gap = learner.score(state, batch, reference)
        state, metrics = learner.update(state, batch, scores)
        lines.append(metrics | gap)
    return state, lines


def test_response_mask_is_what_follows_the_prompt(batch):
    """Rows are prompt, policy, docs, policy: everything behind the prompt; nothing where no id was sampled."""
    prompts = [3, 3, 3, 3, 5, 5, 5, 5]
    expected = np.zeros(batch.ids.shape)
    for b, (prompt, length) in enumerate(zip(prompts, np.asarray(batch.lengths), strict=True)):
        expected[b, prompt:length] = 1
    expected[6] = 0  # the row without policy tokens
    np.testing.assert_array_equal(response_mask(batch), expected)


@pytest.mark.parametrize("variant", ["strict", "released"])
def test_targets_of_ppo(batch, variant):
    """KL (k1) taken from the reward of policy tokens only; GAE and whitening over the steps of the variant."""
    algorithm = dataclasses.replace(PPO, variant=variant, gamma=0.9, lam=0.8)
    old, ref, values = jax.random.normal(jax.random.key(0), (3, *batch.ids.shape))
    steps = response_mask(batch) if variant == "released" else batch.policy_mask
    scores = {"old": old, "ref": ref, "values": values}
    dirty = {name: jnp.where(batch.policy_mask > 0, x, jnp.nan) for name, x in scores.items() if name != "values"}
    targets, metrics = _gae_targets(algorithm, batch, steps, dirty | {"values": values})
    mask = np.asarray(batch.policy_mask)
    paid = 0.1 * (np.asarray(old) - np.asarray(ref)) * mask
    advantages, returns = gae(np.asarray(batch.rewards) - paid, values, steps, 0.9, 0.8)
    np.testing.assert_allclose(targets["advantages"], whiten(advantages, steps), atol=1e-6)
    np.testing.assert_allclose(targets["returns"], returns, atol=1e-6)
    np.testing.assert_allclose(metrics["reward_kl"], paid.sum() / 8, rtol=1e-5)
    others = np.asarray(targets["returns"])[(mask == 0) & (np.asarray(response_mask(batch)) == 1)]
    assert others.any() == (variant == "released")  # documents are time steps there and only there


def test_two_updates_are_two_steps_of_both_optimizers(cfg, params, batch):
    state, (line,) = run(cfg, params, batch, PPO, reference=params)
    assert int(state["actor"]["step"]) == int(state["critic"]["step"]) == 2
    assert line["gap_max"] > 0 and 0 <= line["critic/explained_variance"] <= 1
    assert line["ratio_max"] >= line["ratio_mean"]
    once, _ = run(cfg, params, batch, dataclasses.replace(PPO, updates=1), reference=params)
    assert int(once["actor"]["step"]) == 1


def test_a_group_stays_in_one_update(cfg, params, episodes):
    """Two updates on two groups, the first of equal rewards: its update has gradient 0, the second's has not."""
    rewards = [({"total": 1.0 if i < 4 else i % 2}, ()) for i in range(8)]
    batch = jax.device_put(build_batch(episodes, rewards, (24,)))
    seen = []
    learner = make_learner(cfg, dataclasses.replace(GRPO, updates=2), UCFG, ACTOR)
    state = learner.init(params)
    scores, _ = learner.score(state, batch)
    before = np.asarray(state["actor"]["params"]["embed"])
    _, metrics = learner.update(state, batch, scores)
    seen.append(float(metrics["grad_norm"]))
    _, (whole,) = run(cfg, params, batch, GRPO)
    assert before.any() and seen[0] > 0 and whole["grad_norm"] > 0
    half = jax.tree.map(lambda x: x[4:], batch)
    _, (second,) = run(cfg, params, dataclasses.replace(half, group=half.group - 1), GRPO)
    np.testing.assert_allclose(seen[0], second["grad_norm"] / 2, rtol=1e-4)  # the mean of 0 and it


def test_padding_and_document_logits_change_nothing_with_ppo(cfg, params, batch):
    """Other ids in the padding: same parameters of actor and critic, to the last bits that sums differ in."""
    padding = jnp.arange(batch.ids.shape[1]) >= batch.lengths[:, None]
    other = dataclasses.replace(batch, ids=jnp.where(padding, 17, batch.ids))
    one, _ = run(cfg, params, batch, PPO, reference=params)
    two, _ = run(cfg, params, other, PPO, reference=params)
    for part in one:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), one[part]["params"], two[part]["params"])


@pytest.mark.parametrize("algorithm", [PPO, GRPO])
def test_a_second_step_traces_nothing_and_transfers_nothing(cfg, params, batch, algorithm, monkeypatch):
    traces = []
    real = decoder.forward
    monkeypatch.setattr(decoder, "forward", lambda *args, **kwargs: traces.append(1) or real(*args, **kwargs))
    learner = make_learner(cfg, algorithm, UCFG, ACTOR, CRITIC)
    state, counts = learner.init(params), []
    with jax.transfer_guard("disallow"):
        for _ in range(3):
            scores, _ = learner.score(state, batch, params)
            state, _ = learner.update(state, batch, scores)
            counts.append(len(traces))
    assert counts[0] > 0 and counts == [counts[0]] * 3


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ({"name": "pppo"}, r"algorithm.name is 'pppo'; use one of: grpo, ppo"),
        ({"name": "grpo", "samples": 1}, "GRPO compares"),
        ({"name": "grpo", "samples": 2, "reward_kl": 0.1}, "learner.kl_coef"),
        ({"name": "ppo", "updates": 0}, "algorithm.updates is 0"),
        ({"name": "ppo", "variant": "paper"}, "strict, released"),
    ],
)
def test_bad_settings_are_named(bad, told):
    with pytest.raises(UserError, match=told):
        AlgorithmConfig(**{"questions": 4} | bad)


def test_rows_that_do_not_divide_are_named(cfg, params, batch):
    with pytest.raises(ValueError, match="batch of 8 rows, 3 updates"):
        run(cfg, params, batch, dataclasses.replace(GRPO, updates=3))
