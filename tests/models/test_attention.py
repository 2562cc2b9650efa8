"""The kinds of causal attention compute one thing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parasearch_jax.models.attention import causal_attention


def inputs(T, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=(2, T, heads, 8)), jnp.float32) for heads in (6, 2, 2))


@pytest.mark.parametrize("T", [5, 16, 41])  # less than a block, one, several and a part
def test_blocks_equal_xla(T):
    def loss(q, k, v, kind):
        return (causal_attention(q, k, v, kind) ** 3).sum()

    qkv = inputs(T)
    np.testing.assert_allclose(causal_attention(*qkv, "blocks"), causal_attention(*qkv, "xla"), rtol=1e-5, atol=1e-5)
    gradients = [jax.grad(loss, argnums=(0, 1, 2))(*qkv, kind) for kind in ("blocks", "xla")]
    for ours, expected in zip(*gradients, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)


def test_blocks_never_hold_all_scores():
    """Forward and backward of 2 rows, 6 heads, T 256 would hold fp32 scores of 2 x 6 x 256 x 256 x 4 bytes = 3 MiB."""
    step = jax.jit(jax.grad(lambda q, k, v: causal_attention(q, k, v, "blocks").sum(), argnums=(0, 1, 2)))
    temporary = step.lower(*inputs(256)).compile().memory_analysis().temp_size_in_bytes
    assert temporary < 2 * 6 * 256 * 256 * 4
