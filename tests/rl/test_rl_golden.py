"""The released code's numbers: Search-R1's PPO and GRPO maths on two batches (`released` settings), all of the file.

attn marks a row's response with its documents, info the policy tokens of it.
"""

import functools

import jax
import numpy as np
import pytest

from parasearch_jax.rl import gae, grpo, kl, policy_loss, value_loss, whiten
from parasearch_jax.rl.losses import token_weights

INPUTS = {"attn", "info", "rewards", "values", "old", "new", "ref", "vpred", "length", "group", "adv", "returns"}
GAE = {(1.0, 1.0): "1.0_1.0", (0.99, 0.95): "0.99_0.95"}
KL = {"k1": "kl", "k2": "mse", "k3": "low_var_kl", "k3+": "low_var_kl"}
LOSSES = {"policy_loss", "clipfrac", "ppo_kl", "value_loss", "value_clipfrac"}
OUTPUTS = {f"gae_{out}_{name}" for out in ("adv", "ret") for name in GAE.values()} | {f"kl_{n}" for n in KL.values()}


@pytest.fixture(params=["a", "b"])
def core(request, golden):
    """The arrays of one of the two batches."""
    with np.load(golden("ppo_core.npz")) as arrays:
        prefix = request.param + "_"
        return {name.removeprefix(prefix): arrays[name] for name in arrays.files if name.startswith(prefix)}


def near(got, expected, mask=1.0):
    np.testing.assert_allclose(np.asarray(got) * mask, expected * mask, atol=1e-5)


def test_every_array_of_the_file_is_used(core):
    assert set(core) == INPUTS | OUTPUTS | LOSSES | {"grpo_adv"}
    np.testing.assert_array_equal(core["length"], core["attn"].sum(-1))


@pytest.mark.parametrize("setting", GAE)
def test_gae_and_whitening(core, setting):
    """Every token of the response is a time step: the attention mask in place of ours."""
    mask, name = core["attn"], GAE[setting]
    advantages, returns = jax.jit(gae)(core["rewards"], core["values"], mask, *setting)
    near(returns, core[f"gae_ret_{name}"], mask)
    near(jax.jit(whiten)(advantages, mask), core[f"gae_adv_{name}"], mask)


@pytest.mark.parametrize("mask", ["attn", "info"])
def test_grpo(core, mask):
    """On policy tokens alone the advantages are the same, as none of the rewards lies on a document."""
    near(jax.jit(grpo)(core["rewards"], core[mask], core["group"]), core["grpo_adv"], core[mask])


def test_policy_loss(core):
    loss, metrics = jax.jit(policy_loss)(core["new"], core["old"], core["adv"], core["info"])
    near(loss, core["policy_loss"])
    near(metrics["clip_fraction"], core["clipfrac"])
    near(metrics["approx_kl"], core["ppo_kl"])


def test_value_loss(core):
    loss, metrics = jax.jit(value_loss)(core["vpred"], core["values"], core["returns"], core["info"])
    near(loss, core["value_loss"])
    near(metrics["value_clip_fraction"], core["value_clipfrac"])


def test_released_weights_of_one_micro_batch_are_the_released_mean(core):
    mask = core["info"]
    weights = token_weights(mask, "released", micro=np.zeros(len(mask), np.int32))
    policy, value = (jax.jit(f) for f in (policy_loss, value_loss))
    near(policy(core["new"], core["old"], core["adv"], mask, weights=weights)[0], core["policy_loss"])
    near(value(core["vpred"], core["values"], core["returns"], mask, weights=weights)[0], core["value_loss"])


@pytest.mark.parametrize("kind", KL)
def test_kl(core, kind):
    near(jax.jit(functools.partial(kl, kind=kind))(core["new"], core["ref"]), core[f"kl_{KL[kind]}"])
