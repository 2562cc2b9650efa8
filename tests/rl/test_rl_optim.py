"""AdamW against numpy, warm-up, clipping, and what is not decayed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parasearch_jax.errors import UserError
from parasearch_jax.rl.optim import OptimConfig, decayed, learning_rate, make_optimizer


def test_warm_up_moves_from_the_first_update():
    rates = [float(learning_rate(OptimConfig(lr=0.8, warmup_steps=4))(i)) for i in range(6)]
    np.testing.assert_allclose(rates, [0.2, 0.4, 0.6, 0.8, 0.8, 0.8], rtol=1e-6)
    np.testing.assert_allclose(learning_rate(OptimConfig(lr=0.8))(jnp.array(0)), 0.8)


def test_three_steps_against_numpy():
    cfg = OptimConfig(lr=0.1, warmup_steps=2, weight_decay=0.3, clip_norm=1.0, b1=0.8, b2=0.95)
    tx = make_optimizer(cfg)
    rng = np.random.default_rng(0)
    params = {"mlp": {"up": jnp.array(rng.normal(size=(2, 3)))}, "norm": {"scale": jnp.ones(3)}}
    expected = {k: np.array(jax.tree.leaves(v)[0]) for k, v in params.items()}
    state, m, v = tx.init(params), dict.fromkeys(expected, 0.0), dict.fromkeys(expected, 0.0)
    for i in range(3):
        g = {k: rng.normal(size=x.shape).astype(np.float32) * 3 for k, x in expected.items()}
        updates, state = tx.update({"mlp": {"up": g["mlp"]}, "norm": {"scale": g["norm"]}}, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        norm = np.sqrt(sum((x**2).sum() for x in g.values()))
        for k, x in expected.items():
            clipped = g[k] * min(1, 1 / norm)
            m[k] = 0.8 * m[k] + 0.2 * clipped
            v[k] = 0.95 * v[k] + 0.05 * clipped**2
            step = (m[k] / (1 - 0.8 ** (i + 1))) / (np.sqrt(v[k] / (1 - 0.95 ** (i + 1))) + 1e-8)
            expected[k] = x - 0.1 * min(1, (i + 1) / 2) * (step + (0.3 * x if k == "mlp" else 0))
    np.testing.assert_allclose(params["mlp"]["up"], expected["mlp"], atol=1e-5)
    np.testing.assert_allclose(params["norm"]["scale"], expected["norm"], atol=1e-5)


def test_first_moment_in_bf16():
    """Half the bytes of one moment; steps are those of fp32 within what bf16 rounds away (8 bits)."""
    params, found = {"mlp": {"up": jnp.zeros((4, 5))}}, {}
    for dtype in ("float32", "bfloat16"):
        tx, state = make_optimizer(OptimConfig(lr=0.1, weight_decay=0.0, mu_dtype=dtype)), None
        state, rng = tx.init(params), np.random.default_rng(0)
        moved = params
        for _ in range(3):
            grads = jax.tree.map(lambda x: jnp.array(rng.normal(size=x.shape)), params)  # noqa: B023
            updates, state = tx.update(grads, state, moved)
            moved = jax.tree.map(jnp.add, moved, updates)
        moments = state[1][0]
        assert {x.dtype.name for x in jax.tree.leaves(moments.mu)} == {dtype}
        assert {x.dtype.name for x in jax.tree.leaves(moments.nu)} == {"float32"}
        found[dtype] = np.array(moved["mlp"]["up"])
    assert 0 < np.abs(found["bfloat16"] - found["float32"]).max() < 0.1 * 3 * 2**-7
    with pytest.raises(UserError, match="mu_dtype is 'half'"):
        OptimConfig(lr=0.1, mu_dtype="half")


def test_norms_and_biases_are_not_decayed(params):
    names = {"/".join(k.key for k in path): leaf for path, leaf in jax.tree.leaves_with_path(decayed(params))}
    kept = {name for name, decays in names.items() if not decays}
    biases = {f"layers/attn/{x}_bias" for x in "qkv"}
    assert kept == {"norm/scale", "layers/attn_norm/scale", "layers/mlp_norm/scale"} | biases
    assert names["embed"] and names["layers/attn/q"] and names["layers/mlp/down"]


@pytest.mark.parametrize("bad", [{"lr": 0.0}, {"lr": 0.1, "clip_norm": 0.0}, {"lr": 0.1, "warmup_steps": -1}])
def test_bad_settings_are_named(bad):
    with pytest.raises(UserError, match="it must be"):
        OptimConfig(**bad)


def test_the_released_warm_up_begins_at_0():
    rates = [learning_rate(OptimConfig(lr=2.0, warmup_steps=4, zero_start=zero)) for zero in (False, True)]
    assert [[float(rate(count)) for count in (0, 1, 3, 4, 9)] for rate in rates] == [
        [0.5, 1.0, 2.0, 2.0, 2.0],
        [0.0, 0.5, 1.5, 2.0, 2.0],
    ]
    assert learning_rate(OptimConfig(lr=2.0, zero_start=True))(0) == 2.0  # no warm-up
