"""The decoder against Hugging Face's logits (golden) and against a forward pass in numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parasearch_jax.errors import UserError
from parasearch_jax.models import Model, decoder, load_model
from parasearch_jax.models.attention import cached_attention, causal_attention
from parasearch_jax.models.decoder import DecoderConfig
from parasearch_jax.sharding.layout import stack_layers, to_sampler

TINY = DecoderConfig(
    vocab_size=61, hidden_size=24, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=8, intermediate_size=40
)
TIED = dataclasses.replace(TINY, tie_word_embeddings=True)


def random_params(cfg, seed=0):
    """Every leaf random, biases and norms too: a forgotten one must show."""
    rng = np.random.default_rng(seed)
    leaves, tree = jax.tree.flatten(decoder.param_shapes(cfg))
    return jax.tree.unflatten(tree, [rng.normal(0.1, 0.3, x.shape).astype(np.float32) for x in leaves])


def numpy_logits(params, cfg, ids):
    """One row [T] -> [T,V] in float64, written from the Qwen2 equations, head by head."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    half, T = cfg.head_dim // 2, len(ids)

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + cfg.rms_norm_eps) * scale

    def rotate(x):  # [T,H]: pairs (i, i + H/2) turn by t * theta^(-2i/H)
        angle = np.arange(T)[:, None] * cfg.rope_theta ** (-2 * np.arange(half) / cfg.head_dim)
        z = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angle)
        return np.concatenate([z.real, z.imag], -1)

    x = p["embed"][ids]
    for i in range(cfg.num_layers):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], p["layers"])
        a, y, out = layer["attn"], norm(x, layer["attn_norm"]["scale"]), 0
        for n in range(cfg.num_heads):
            m = n // (cfg.num_heads // cfg.num_kv_heads)  # kv-heads are repeated, not tiled: 0 0 0 1 1 1
            q = rotate(y @ a["q"][:, n] + a["q_bias"][n])
            k = rotate(y @ a["k"][:, m] + a["k_bias"][m])
            weights = np.exp(q @ k.T / np.sqrt(cfg.head_dim)) * np.tri(T)
            out = out + weights / weights.sum(-1, keepdims=True) @ (y @ a["v"][:, m] + a["v_bias"][m]) @ a["o"][n]
        x = x + out
        y, mlp = norm(x, layer["mlp_norm"]["scale"]), layer["mlp"]
        gate = y @ mlp["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ mlp["up"])) @ mlp["down"]
    return norm(x, p["norm"]["scale"]) @ (p["embed"].T if cfg.tie_word_embeddings else p["head"])


def batch(cfg, B=3, T=17, seed=1):
    ids = np.random.default_rng(seed).integers(0, cfg.vocab_size, (B, T)).astype(np.int32)
    return ids, np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))


@pytest.mark.parametrize("cfg", [TINY, TIED], ids=["untied", "tied"])
def test_forward_equals_numpy(cfg):
    params, (ids, _) = random_params(cfg), batch(cfg)
    ours = Model(cfg, params).logits(ids, [17, 17, 17])
    assert ours.dtype == jnp.float32
    for row, expected in zip(np.asarray(ours), ids, strict=True):
        np.testing.assert_allclose(row, numpy_logits(params, cfg, expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen2_untied"])
def test_golden_hugging_face(golden, name):
    directory = golden(f"hf/{name}")
    expected, model = np.load(directory / "expected.npz"), load_model(directory)
    ids, lengths = expected["input_ids"], expected["lengths"]
    valid = np.arange(ids.shape[1]) < lengths[:, None]
    ours = np.asarray(model.logits(ids, lengths))
    assert np.abs(ours - expected["logits"])[valid].max() <= 2e-4

    long_ids = expected["long_ids"]
    last = np.asarray(model.logits(long_ids, [long_ids.shape[1]]))[0, -1]
    assert np.abs(last - expected["long_last_logits"]).max() <= 5e-4

    rows = np.pad(ids, ((0, 0), (0, 16)))
    for step in range(16):  # greedy, without a cache
        at = lengths + step
        rows[np.arange(3), at] = np.asarray(model.logits(rows, at))[np.arange(3), at - 1].argmax(-1)
    greedy = np.stack([row[n : n + 16] for row, n in zip(rows, lengths, strict=True)])
    np.testing.assert_array_equal(greedy, expected["greedy_16"])


def test_scan_equals_loop_and_remat():
    params, (ids, positions) = random_params(TINY), batch(TINY)
    scanned = decoder.forward(params, TINY, ids, positions)
    sampler = to_sampler(params)
    looped = decoder.forward_layers(sampler, TINY, ids, positions, lambda i, *qkv: causal_attention(*qkv))
    np.testing.assert_allclose(scanned, looped, rtol=1e-5, atol=1e-5)

    def loss(params, remat):
        return (decoder.forward(params, TINY, ids, positions, remat) ** 2).mean()

    plain, remat = (jax.jit(jax.grad(loss), static_argnums=1)(params, flag) for flag in (False, True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), plain, remat)


def test_unstack_and_stack_are_inverse():
    params = random_params(TINY)
    sampler = to_sampler(params, "bfloat16")
    assert len(sampler["layers"]) == TINY.num_layers
    assert sampler["layers"][0]["mlp"]["up"].dtype == jnp.bfloat16
    assert sampler["layers"][0]["mlp_norm"]["scale"].dtype == jnp.float32  # as the trainer multiplies
    back = stack_layers(to_sampler(params)["layers"])
    jax.tree.map(np.testing.assert_array_equal, back, params["layers"])


def test_bf16_sampler_equals_bf16_trainer():
    """The sampler's cast weights are the values the trainer casts to where it uses them."""
    cfg = dataclasses.replace(TINY, dtype="bfloat16")
    params, (ids, positions) = random_params(cfg), batch(cfg)
    trainer = decoder.forward(params, cfg, ids, positions)
    sampler = to_sampler(params, "bfloat16")
    looped = decoder.forward_layers(sampler, cfg, ids, positions, lambda i, *qkv: causal_attention(*qkv))
    assert trainer.dtype == looped.dtype == jnp.bfloat16
    np.testing.assert_allclose(trainer.astype(np.float32), looped.astype(np.float32), atol=0.1)
    assert decoder.logits(sampler, cfg, looped).dtype == jnp.float32


def test_padding_changes_nothing():
    model, (ids, _) = Model(TINY, random_params(TINY)), batch(TINY, B=1, T=9)
    alone = np.asarray(model.logits(ids, [9]))[0]
    padded = np.full((2, 14), -100)  # not an id: what stands right of a length is never read
    padded[0, :9], padded[1] = ids[0], batch(TINY, B=1, T=14, seed=5)[0]
    np.testing.assert_allclose(np.asarray(model.logits(padded, [9, 14]))[0, :9], alone, rtol=1e-5, atol=1e-5)


def test_id_outside_vocabulary_is_named():
    with pytest.raises(UserError, match="61"):
        Model(TINY, random_params(TINY)).logits([[3, 61]], [2])


def attention_inputs(R=3, S=10, N=6, K=2, H=8, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    return [jax.random.normal(key, (R, S, heads, H)) for key, heads in zip(keys, (N, K, K), strict=True)]


@pytest.mark.parametrize("first,T", [(0, 10), (4, 3), (9, 1), (0, 1)])
def test_cached_attention_equals_causal(first, T):
    q, k, v = attention_inputs()
    expected = causal_attention(q, k, v)[:, first : first + T]
    positions = jnp.broadcast_to(jnp.arange(first, first + T), (3, T))
    ours = cached_attention(q[:, first : first + T], k, v, positions)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("T", [1, 2])
@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e30])
def test_garbage_in_unused_cells_is_harmless(T, garbage):
    """Rows of different lengths; the last row is idle (position -1: sees nothing) and must stay finite."""
    q, k, v = attention_inputs()
    positions = jnp.array([[2, 3], [6, 7], [-1, -1]])[:, -T:]
    unused = jnp.arange(10)[None, :, None, None] > positions[:, -1][:, None, None, None]
    clean = cached_attention(q[:, :T], jnp.where(unused, 0, k), jnp.where(unused, 0, v), positions)
    dirty = cached_attention(q[:, :T], jnp.where(unused, garbage, k), jnp.where(unused, garbage, v), positions)
    np.testing.assert_array_equal(clean[:2], dirty[:2])
    assert np.isfinite(dirty).all()


def test_rope_is_computed_in_fp32():
    """T15: at position 4095 with first frequency 1; a position in bf16 would be 4096 and its cosine +0.804."""
    cos, sin = decoder.rope_tables(jnp.array([[4095]]), dataclasses.replace(TINY, dtype="bfloat16"))
    assert cos.dtype == sin.dtype == jnp.float32
    np.testing.assert_allclose([cos[0, 0, 0, 0], sin[0, 0, 0, 0]], [-0.0660, -0.9978], atol=1e-3)


def test_head_is_tied_or_its_own():
    """T13: no head in a tied tree; an untied one uses its head, not the embedding."""
    tied, untied = (decoder.init(cfg, jax.random.key(0)) for cfg in (TIED, TINY))
    assert "head" not in tied
    np.testing.assert_array_equal(decoder.head(tied, TIED), tied["embed"].T)
    np.testing.assert_array_equal(decoder.head(untied, TINY), untied["head"])
    assert np.abs(untied["head"] - untied["embed"].T).max() > 0.01


def test_init():
    params = decoder.init(TINY, jax.random.key(0))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), decoder.param_shapes(TINY)
    )
    up = np.asarray(params["layers"]["mlp"]["up"])
    assert abs(up.std() - 0.02) < 0.001 and np.abs(up[0] - up[1]).max() > 0.01  # layers drawn apart
    assert (params["norm"]["scale"] == 1).all() and not params["layers"]["attn"]["q_bias"].any()


HF = {"model_type": "qwen2", "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 6,
      "num_key_value_heads": 2, "intermediate_size": 40, "hidden_act": "silu", "rope_theta": 5e5}  # fmt: skip


def test_config_reads_both_spellings_and_round_trips():
    new = {**HF, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    del new["rope_theta"]
    old = DecoderConfig.from_hf({**HF, "use_sliding_window": False, "sliding_window": 131072, "rope_scaling": None})
    assert old == DecoderConfig.from_hf(new)
    assert old.rope_theta == 5e5 and old.head_dim == 4 and old.qkv_bias
    several = dataclasses.replace(TIED, eos_token_ids=(1, 2), rope_theta=1e6)
    for cfg in (TINY, TIED, several, dataclasses.replace(TINY, eos_token_ids=(7,))):
        assert DecoderConfig.from_hf(cfg.to_hf()) == cfg


@pytest.mark.parametrize(
    "change,named",
    [
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope type 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, "rope type 'llama3'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_config_refuses_what_it_does_not_compute(change, named):
    with pytest.raises(UserError, match=named):
        DecoderConfig.from_hf({**HF, **change})


def test_llama_without_scaling_has_no_biases():
    cfg = DecoderConfig.from_hf({**HF, "model_type": "llama"})
    assert "q_bias" not in decoder.param_shapes(cfg)["layers"]["attn"]
    ids, _ = batch(cfg)
    assert np.isfinite(Model(cfg, decoder.init(cfg, jax.random.key(0))).logits(ids, [17] * 3)).all()
