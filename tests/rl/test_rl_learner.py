"""GRPO and PPO as learners: what they hand to the two updates, against numpy and the parts tested elsewhere."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parasearch_jax.errors import UserError
from parasearch_jax.models import decoder
from parasearch_jax.rl import dr_grpo, gae, grpo, reinforce, reinforce_pp, rloo, whiten
from parasearch_jax.rl.batch import build_batch, response_mask
from parasearch_jax.rl.learner import AlgorithmConfig, _share, _targets, make_learner
from parasearch_jax.rl.optim import OptimConfig
from parasearch_jax.rl.update import UpdateConfig

UCFG = UpdateConfig(micro_rows=2, logprob_chunk=24, buckets=(24,))
PPO = AlgorithmConfig("ppo", questions=8, updates=2, reward_kl=0.1)
GRPO = AlgorithmConfig("grpo", questions=2, samples=4)
ACTOR, CRITIC = OptimConfig(lr=1e-3), OptimConfig(lr=1e-2)


def run(cfg, params, batch, algorithm, steps=1, ucfg=UCFG, reference=None):
    learner = make_learner(cfg, algorithm, ucfg, ACTOR, CRITIC)
    state, lines, cut = learner.init(params), [], learner.cut(np.asarray(batch.lengths))
    for _ in range(steps):
        scores, gap = learner.score(state, batch, cut, reference)
        state, metrics = learner.update(state, batch, cut, scores)
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
    targets, metrics = _targets(algorithm, UCFG, batch, batch, steps, dirty | {"values": values}, 0.1)
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
    batch = jax.device_put(build_batch(episodes, rewards, 24))
    seen = []
    learner = make_learner(cfg, dataclasses.replace(GRPO, updates=2), UCFG, ACTOR)
    state, cut = learner.init(params), learner.cut(np.asarray(batch.lengths))
    scores, _ = learner.score(state, batch, cut)
    before = np.asarray(state["actor"]["params"]["embed"])
    _, metrics = learner.update(state, batch, cut, scores)
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
    state, counts, cut = learner.init(params), [], learner.cut(np.asarray(batch.lengths))
    with jax.transfer_guard("disallow"):
        for _ in range(3):
            scores, _ = learner.score(state, batch, cut, params)
            state, _ = learner.update(state, batch, cut, scores)
            counts.append(len(traces))
    assert counts[0] > 0 and counts == [counts[0]] * 3


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ({"name": "pppo"}, r"algorithm.name is 'pppo'; use one of: ppo, grpo"),
        ({"name": "grpo", "samples": 1}, "grpo compares"),
        ({"name": "grpo", "samples": 2, "reward_kl": 0.1}, "learner.kl_coef"),
        ({"name": "ppo", "updates": 0}, "algorithm.updates is 0"),
        ({"name": "ppo", "variant": "paper"}, "strict, released"),
    ],
)
def test_bad_settings_are_named(bad, told):
    with pytest.raises(UserError, match=told):
        AlgorithmConfig(**{"questions": 4} | bad)


# ------------------------------------------------------------------------------------------------- every other choice

ESTIMATORS = {
    "grpo": (dict(std="population"), lambda r, *of: grpo(r, *of, "population")),
    "dr_grpo": ({}, dr_grpo),
    "rloo": ({}, rloo),
    "reinforce": (dict(baseline="none", gamma=0.9), lambda r, *of: reinforce(r, *of, "none", 0.9)),
    "reinforce_pp": (dict(gamma=0.9), lambda r, *of: reinforce_pp(r, *of, None, "group", 0.9)),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_targets_of_the_estimators(batch, name):
    changes, estimate = ESTIMATORS[name]
    algorithm = AlgorithmConfig(name, questions=2, samples=4, **changes)
    goals, _ = _targets(algorithm, UCFG, batch, batch, batch.policy_mask, {}, None)
    assert set(goals) == {"advantages"} and goals["advantages"].any()
    np.testing.assert_array_equal(goals["advantages"], estimate(batch.rewards, batch.policy_mask, batch.group))


@pytest.mark.parametrize("name", ["reinforce", "reinforce_pp"])
def test_the_kl_in_the_reward_of_reinforce(batch, name):
    """reinforce takes it off the rewards, so that the baseline knows of it; REINFORCE++ off what is still to come."""
    mask, group = batch.policy_mask, batch.group
    old, ref = jax.random.normal(jax.random.key(0), (2, *batch.ids.shape)) * mask
    algorithm = AlgorithmConfig(name, questions=2, samples=4, reward_kl=0.1)
    goals, metrics = _targets(algorithm, UCFG, batch, batch, mask, {"old": old, "ref": ref}, None)
    paid = 0.1 * (old - ref)
    whole = reinforce(batch.rewards - paid, mask, group, "group")
    want = whole if name == "reinforce" else reinforce_pp(batch.rewards, mask, group, paid)
    np.testing.assert_allclose(goals["advantages"], want, atol=1e-6)
    np.testing.assert_allclose(metrics["reward_kl"], (paid * mask).sum() / 8, rtol=1e-5)


def test_the_coefficient_follows_its_target(cfg, params, batch):
    """It is a part of the state, so of checkpoints; the next step's reward pays with it."""
    other = jax.tree.map(lambda x: x * 1.3, params)
    algorithm = dataclasses.replace(PPO, kl_target=1e-3, kl_horizon=16)
    state, lines = run(cfg, params, batch, algorithm, steps=2, reference=other)
    assert lines[0]["kl_coef"] != pytest.approx(0.1) and state["kl_coef"] == lines[1]["kl_coef"]
    direction = np.sign(lines[0]["reward_kl"] / 0.1 * 8 / batch.policy_mask.sum() - 1e-3)  # measured against the target
    np.testing.assert_allclose(lines[0]["kl_coef"], 0.1 * (1 + 0.2 * direction * 8 / 16), rtol=1e-5)
    assert "kl_coef" not in run(cfg, params, batch, PPO, reference=other)[0]


def test_bypass_takes_the_samplers_log_probs(cfg, params, batch):
    learner = make_learner(cfg, dataclasses.replace(GRPO, bypass=True), UCFG, ACTOR)
    state, cut = learner.init(params), learner.cut(np.asarray(batch.lengths))
    scores, gap = learner.score(state, batch, cut)
    assert not gap
    np.testing.assert_array_equal(scores["old"], batch.logprobs)
    _, metrics = learner.update(state, batch, cut, scores)
    assert abs(metrics["ratio_mean"] - 1) > 1e-3  # made-up log-probs are not the trainer's


def test_weights_for_the_gap(cfg, params, batch):
    """The loss of a token counts exp(trainer - sampler) times, 2 at most; a document, where it is learned, once."""
    ucfg = dataclasses.replace(UCFG, importance_cap=2.0)
    old = batch.logprobs + jnp.where(batch.policy_mask > 0, 0.3, 0.0)
    old = old.at[0, 4].add(3.0)
    goals, metrics = _targets(GRPO, ucfg, batch, batch, batch.policy_mask, {"old": old}, None)
    want = np.where(np.asarray(batch.policy_mask) > 0, np.exp(0.3), 1.0)
    want[0, 4] = 2.0
    np.testing.assert_allclose(goals["importance"], want, rtol=1e-5)
    assert metrics["importance_truncated"] == pytest.approx(1 / batch.policy_mask.sum())
    _, (line,) = run(cfg, params, batch, GRPO, ucfg=ucfg)
    _, (plain,) = run(cfg, params, batch, GRPO)
    assert line["importance_mean"] > 0 and line["grad_norm"] != pytest.approx(plain["grad_norm"])


def test_the_ablation_learns_documents_too(cfg, params, batch):
    """Everything behind the prompt is scored and has an advantage; the gap is still that of what was sampled."""
    learner = make_learner(cfg, dataclasses.replace(GRPO, mask_documents=False), UCFG, ACTOR)
    state, cut = learner.init(params), learner.cut(np.asarray(batch.lengths))
    scores, gap = learner.score(state, batch, cut)
    np.testing.assert_array_equal(scores["old"] != 0, response_mask(batch) > 0)
    _, metrics = learner.update(state, batch, cut, scores)
    _, (masked,) = run(cfg, params, batch, GRPO)
    assert gap["gap_max"] == masked["gap_max"] and metrics["grad_norm"] != pytest.approx(masked["grad_norm"])


def test_the_weights_of_an_update(batch):
    """Each kind on the rows of the second of two updates; the released micro-batches are counted within them."""
    members = jnp.asarray([0, 0, 0, 0, 1, 1, 1, 1], jnp.float32)
    counts = np.asarray(batch.policy_mask).sum(-1)[4:]  # of the rows: 7, 3, 0, 13
    data = {"batch": batch, "steps": batch.policy_mask}

    def weights(**changes):
        shared = _share(dataclasses.replace(UCFG, **changes), data, members)
        assert not shared["batch"].policy_mask[:4].any() and not shared["weights"][:4].any()
        return np.asarray(shared["weights"]).max(-1)[4:]

    live, width = np.array([1, 1, 0, 1]), batch.ids.shape[1]
    np.testing.assert_allclose(weights(), live / counts.sum(), rtol=1e-6)
    each = live / np.maximum(counts, 1) / 3
    np.testing.assert_allclose(weights(aggregation="sequence-mean"), each, rtol=1e-6)
    np.testing.assert_allclose(weights(aggregation="dr_grpo"), live / 3 / width, rtol=1e-6)
    first, second = counts[0] + counts[1], counts[3]  # two rows with tokens each
    released = [1 / 2 / first, 1 / 2 / first, 0, 1 / 2 / second]
    np.testing.assert_allclose(weights(aggregation="released", mean_rows=2), released, rtol=1e-6)


def test_truncated_episodes_leave_the_loss_and_not_their_group(batch):
    truncated = dataclasses.replace(batch, truncated=jnp.arange(8) == 5)
    data = {"batch": truncated, "steps": batch.policy_mask}
    kept, dropped = (
        _share(dataclasses.replace(UCFG, drop_truncated=drop), data, jnp.ones(8))["weights"] for drop in (False, True)
    )
    assert kept[5].any() and not dropped[5].any() and (dropped[4] > kept[4]).any()
    goals = [_targets(GRPO, UCFG, x, x, x.policy_mask, {}, None)[0]["advantages"] for x in (batch, truncated)]
    np.testing.assert_array_equal(*goals)


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ({"name": "rloo"}, "algorithm.samples is 1; rloo compares"),
        ({"name": "reinforce_pp"}, "reinforce_pp compares"),
        ({"name": "dr_grpo", "samples": 2, "reward_kl": 0.1}, "learner.kl_coef"),
        ({"name": "ppo", "kl_target": 0.1}, "give the coefficient to start from"),
        ({"name": "ppo", "bypass": True, "mask_documents": False}, "bypass needs mask_documents"),
        ({"name": "ppo", "baseline": "mean"}, "algorithm.baseline is 'mean'"),
    ],
)
def test_settings_that_do_not_go_together_are_named(bad, told):
    with pytest.raises(UserError, match=told):
        AlgorithmConfig(**{"questions": 4} | bad)


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ({"aggregation": "mean"}, "token-mean, sequence-mean"),
        ({"aggregation": "released"}, "mean_rows is 0"),
        ({"mean_rows": 8}, "mean_rows is 8"),
        ({"dual_clip": 0.9}, "above 1"),
    ],
)
def test_bad_settings_of_the_loss_are_named(bad, told):
    with pytest.raises(UserError, match=told):
        UpdateConfig(**bad)
