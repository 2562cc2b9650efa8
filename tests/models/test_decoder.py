"""The decoder against Hugging Face's logits (golden) and against a forward pass in numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parasearch_jax.errors import UserError
from parasearch_jax.models import Model, decoder, load_model
from parasearch_jax.models.attention import cached_attention, causal_attention
from parasearch_jax.models.decoder import DecoderConfig, RopeScaling
from parasearch_jax.models.shapes import SHAPES, named_shape, parameter_count
from parasearch_jax.rl.logprobs import token_logprobs
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
    return norm(x, p["norm"]["scale"]) @ (p["embed"] if cfg.tie_word_embeddings else p["head"]).T


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


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen2_untied", "llama3_ropescaled"])
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


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen2_untied", "llama3_ropescaled"])
def test_half_precision_stays_near(golden, name):
    """bf16 compute against fp32: log-probs of the golden rows within 3e-2."""
    directory = golden(f"hf/{name}")
    expected = np.load(directory / "expected.npz")
    ids, lengths = expected["input_ids"], expected["lengths"]
    full, half = (
        jax.nn.log_softmax(load_model(directory, dtype=dtype).logits(ids, lengths)) for dtype in ("float32", "bfloat16")
    )
    valid = (np.arange(ids.shape[1] - 1) < lengths[:, None] - 1)[..., None]
    taken = [np.take_along_axis(np.asarray(x)[:, :-1], ids[:, 1:, None], -1)[valid] for x in (full, half)]
    assert 0 < np.abs(taken[0] - taken[1]).max() <= 3e-2


def test_scan_equals_loop_and_remat():
    params, (ids, positions) = random_params(TINY), batch(TINY)
    scanned = decoder.forward(params, TINY, ids, positions)
    sampler = to_sampler(params)
    looped = decoder.forward_layers(sampler, TINY, ids, positions, lambda i, *qkv: causal_attention(*qkv))
    np.testing.assert_allclose(scanned, looped, rtol=1e-5, atol=1e-5)

    def loss(params, remat):
        return (decoder.forward(params, TINY, ids, positions, remat) ** 2).mean()

    plain, *others = (jax.jit(jax.grad(loss), static_argnums=1)(params, remat) for remat in decoder.REMAT)
    for other in others:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), plain, other)


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
    ours = cached_attention(q[:, first : first + T], k.swapaxes(1, 2), v.swapaxes(1, 2), positions)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("T", [1, 2])
@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e30])
def test_garbage_in_unused_cells_is_harmless(T, garbage):
    """Rows of different lengths; the last row is idle (position -1: sees nothing) and must stay finite."""
    q, k, v = attention_inputs()
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    positions = jnp.array([[2, 3], [6, 7], [-1, -1]])[:, -T:]
    unused = jnp.arange(10)[:, None] > positions[:, -1][:, None, None, None]
    clean = cached_attention(q[:, :T], jnp.where(unused, 0, k), jnp.where(unused, 0, v), positions)
    dirty = cached_attention(q[:, :T], jnp.where(unused, garbage, k), jnp.where(unused, garbage, v), positions)
    np.testing.assert_array_equal(clean[:2], dirty[:2])
    assert np.isfinite(dirty).all()


def test_rope_is_computed_in_fp32():
    """T15: at position 4095 with first frequency 1; a position in bf16 would be 4096 and its cosine +0.804."""
    cos, sin = decoder.rope_tables(jnp.array([[4095]]), dataclasses.replace(TINY, dtype="bfloat16"))
    assert cos.dtype == sin.dtype == jnp.float32
    np.testing.assert_allclose([cos[0, 0, 0, 0], sin[0, 0, 0, 0]], [-0.0660, -0.9978], atol=1e-3)


def test_llama3_scaling_of_rope_written_out():
    """Long wavelengths are stretched, short ones stay, between them a line in (turns in the old context)."""
    cfg = dataclasses.replace(TINY, head_dim=16, rope_theta=5e5, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 128))
    plain = 5e5 ** -(np.arange(0, 16, 2) / 16)
    expected = []
    for frequency in plain:
        wavelength = 2 * np.pi / frequency
        if wavelength < 128 / 4:
            expected.append(frequency)
        elif wavelength > 128 / 1:
            expected.append(frequency / 8)
        else:
            smooth = (128 / wavelength - 1) / (4 - 1)
            expected.append((1 - smooth) * frequency / 8 + smooth * frequency)
    assert len({*(np.array(expected) / plain).round(4)}) > 2  # all three cases occur
    np.testing.assert_allclose(decoder.rope_frequencies(cfg), expected, rtol=1e-5)


def test_rows_past_the_tokenizer_take_no_probability():
    """Sampler and scorer alike: as if the matrix ended there."""
    cfg = dataclasses.replace(TINY, vocab_used=50)
    params, (ids, positions) = random_params(TINY), batch(TINY)
    hidden = decoder.forward(params, TINY, ids, positions)
    short = {**params, "head": params["head"][:50]}
    np.testing.assert_allclose(
        jax.nn.log_softmax(decoder.logits(params, cfg, hidden))[..., :50],
        jax.nn.log_softmax(decoder.logits(short, TINY, hidden)),
        atol=1e-5,
    )
    targets = jnp.minimum(ids, 49)
    got = token_logprobs(hidden, params["head"], targets, 5, 0.7, vocab_used=50)
    for a, b in zip(got, token_logprobs(hidden, short["head"], targets, 5, 0.7), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    grad = jax.grad(lambda w: token_logprobs(hidden, w, targets, 5, vocab_used=50)[0].sum())(params["head"])
    assert np.isfinite(grad).all() and not grad[50:].any() and grad[:50].any()


def test_named_shapes_have_the_models_parameters():
    """The counts that the hub states for the published weights."""
    counts = {name: parameter_count(cfg) for name, cfg in SHAPES.items()}
    assert counts == {
        "qwen2.5-0.5b": 494_032_768,
        "qwen2.5-1.5b": 1_543_714_304,
        "qwen2.5-3b": 3_085_938_688,
        "qwen2.5-7b": 7_615_616_512,
        "qwen2.5-14b": 14_770_033_664,
        "qwen2.5-32b": 32_763_876_352,
        "qwen2.5-72b": 72_706_203_648,
        "llama-3.1-8b": 8_030_261_248,
        "llama-3.1-70b": 70_553_706_496,
    }
    with pytest.raises(UserError, match=r"'qwen3'; use one of: qwen2\.5-0\.5b"):
        named_shape("qwen3")


def test_cudnn_is_asked_for_on_gpus_in_half_precision_only(monkeypatch):
    """What a GPU would run can't run here: only which function is called, and with what."""
    calls = []
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, k, v, **options: calls.append(options) or q)
    q, k = jnp.ones((1, 4, 4, 8)), jnp.ones((1, 4, 2, 8))
    causal_attention(q, k, k)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    causal_attention(q, k, k)  # fp32
    causal_attention(*(x.astype(jnp.bfloat16) for x in (q, k, k)), kind="xla")
    assert calls == []
    causal_attention(*(x.astype(jnp.bfloat16) for x in (q, k, k)))
    assert calls == [{"is_causal": True, "implementation": "cudnn"}]


def test_head_is_tied_or_its_own():
    """T13: no head in a tied tree; an untied one uses its head, not the embedding."""
    tied, untied = (decoder.init(cfg, jax.random.key(0)) for cfg in (TIED, TINY))
    assert "head" not in tied
    np.testing.assert_array_equal(decoder.head(tied, TIED), tied["embed"])
    np.testing.assert_array_equal(decoder.head(untied, TINY), untied["head"])
    assert np.abs(untied["head"] - untied["embed"]).max() > 0.01


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
    llama = dataclasses.replace(SHAPES["llama-3.1-8b"], dtype="float32")
    for cfg in (TINY, TIED, several, dataclasses.replace(TINY, eos_token_ids=(7,)), llama):
        assert DecoderConfig.from_hf(cfg.to_hf()) == cfg


@pytest.mark.parametrize(
    "change,named",
    [
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope type 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor, high_freq_factor, orig"),
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
