"""The kinds of causal attention compute one thing, and so does attention over a cache, however many are fed at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parasearch_jax.models.attention import cached_attention, causal_attention


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


def plain_attention(q, k, v, positions):
    """Query by query in float64; 0 for a query at -1."""
    (R, T, N, H), (_, K, _, _), out = q.shape, k.shape, np.zeros(q.shape)
    for r, t, n in np.ndindex(R, T, N):
        cells = slice(0, positions[r, t] + 1)
        if positions[r, t] >= 0:
            keys, values = (np.asarray(x[r, n * K // N, cells], np.float64) for x in (k, v))
            weights = np.exp(keys @ np.asarray(q[r, t, n], np.float64) / H**0.5)
            out[r, t, n] = weights @ values / weights.sum()
    return out


@pytest.mark.parametrize("kind", ["auto", "blocks"])
@pytest.mark.parametrize("T", [1, 5, 32, 70])  # one, less than a block, one block, two and a part
def test_rows_fed_to_a_cache_see_what_is_left_of_them(T, kind):
    """At different starts, the second with padding behind, the last nothing but padding; garbage right of each."""
    rng = np.random.default_rng(T)
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in ((3, T, 6, 8), (3, 2, 90, 8), (3, 2, 90, 8)))
    starts, counts = np.array([[0], [11], [0]]), np.array([[T], [max(1, T - 3)], [0]])
    positions = np.where(np.arange(T) < counts, starts + np.arange(T), -1).astype(np.int32)
    for r in range(3):
        k[r, :, positions[r].max() + 1 :] = v[r, :, positions[r].max() + 1 :] = np.nan
    found = np.asarray(jax.jit(cached_attention, static_argnums=4)(q, k, v, positions, kind))
    np.testing.assert_allclose(found[positions >= 0], plain_attention(q, k, v, positions)[positions >= 0], atol=1e-5)
    assert np.isfinite(found).all()
