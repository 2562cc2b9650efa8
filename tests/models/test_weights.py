"""Hugging Face layout in and out: equal per tensor, and every mismatch named."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_decoder import TIED, TINY, random_params
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast

from parasearch_jax.errors import UserError
from parasearch_jax.models import load_model
from parasearch_jax.models.weights import load_config, load_params, save_model


@pytest.fixture
def saved(tmp_path):
    save_model(tmp_path, TINY, random_params(TINY), None)
    return tmp_path


def tamper(directory, change):
    """Rewrites model.safetensors with `change` applied to its dict of tensors."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("cfg", [TINY, TIED], ids=["untied", "tied"])
def test_save_and_load_are_inverse(tmp_path, cfg):
    params = random_params(cfg)
    save_model(tmp_path, cfg, params, None)
    assert load_config(tmp_path) == cfg
    jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path, cfg), params)


def test_bfloat16_storage_rounds_once(tmp_path):
    params = random_params(TINY)
    save_model(tmp_path, TINY, params, None, dtype="bfloat16")
    rounded = jax.tree.map(lambda x: np.asarray(jax.numpy.asarray(x, "bfloat16"), np.float32), params)
    jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path, TINY), rounded)
    with pytest.raises(UserError, match="float16"):
        save_model(tmp_path, TINY, params, None, dtype="float16")


def test_layout_is_hugging_face(saved):
    """q_proj is [out, in] with head n in rows nH..(n+1)H, o_proj takes the heads in the same order."""
    params, tensors = random_params(TINY)["layers"]["attn"], load_file(saved / "model.safetensors")
    q, o = (tensors[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qo")
    assert q.shape == (48, 24) and o.shape == (24, 48)
    np.testing.assert_array_equal(q[16:24], params["q"][1, :, 2].T)
    np.testing.assert_array_equal(o[:, 16:24], params["o"][1, 2].T)
    hf = AutoConfig.from_pretrained(saved)
    assert (hf.model_type, hf.num_hidden_layers, hf.rope_parameters["rope_theta"]) == ("qwen2", 3, 10000.0)


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen2_untied"])
def test_golden_round_trip(golden, tmp_path, name):
    """What transformers wrote comes back tensor by tensor, under the same names."""
    directory = golden(f"hf/{name}")
    cfg = load_config(directory)
    save_model(tmp_path, cfg, load_params(directory, cfg), None)
    theirs, ours = (load_file(d / "model.safetensors") for d in (directory, tmp_path))
    assert theirs.keys() == ours.keys()
    for key, tensor in theirs.items():
        np.testing.assert_array_equal(ours[key], tensor)


def test_sharded_checkpoint(saved):
    tensors = load_file(saved / "model.safetensors")
    names = sorted(tensors)
    halves = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, saved / file)
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    (saved / "model.safetensors").unlink()
    jax.tree.map(np.testing.assert_array_equal, load_params(saved, TINY), random_params(TINY))
    (saved / "model-2.safetensors").unlink()
    with pytest.raises(UserError, match=r"lacks model-2\.safetensors"):
        load_params(saved, TINY)


def test_mismatches_are_named(saved):
    name = "model.layers.2.mlp.up_proj.weight"
    original = load_file(saved / "model.safetensors")
    for change, message in [
        (lambda t: t.pop(name), f"lacks tensors: {name}"),
        (lambda t: t.pop("lm_head.weight"), "lacks tensors: lm_head.weight"),
        (lambda t: t.update({"model.layers.3.extra": np.zeros(2)}), "unexpected tensors: model.layers.3.extra"),
        (lambda t: t.update({name: original[name].T.copy()}), rf"'{name}' has shape \[24, 40\].*asks for \[40, 24\]"),
    ]:
        save_file(original, saved / "model.safetensors")
        tamper(saved, change)
        with pytest.raises(UserError, match=message):
            load_params(saved, TINY)


def test_tied_model_may_repeat_its_embedding_as_head(tmp_path):
    save_model(tmp_path, TIED, random_params(TIED), None)
    tamper(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    assert "head" not in load_params(tmp_path, TIED)
    tamper(tmp_path, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))
    with pytest.raises(UserError, match=r"unexpected tensors: lm_head\.weight"):
        load_params(tmp_path, TIED)


def test_generation_config_adds_end_tokens(saved):
    (saved / "generation_config.json").write_text('{"eos_token_id": [5, 3]}')
    assert load_config(saved).eos_token_ids == (5, 3)


def year_tokenizer():
    """Byte-level BPE whose pre-tokenizer keeps a year whole, where Qwen's own splits it into digits."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab | {"19": 256, "84": 257, "1984": 258}, [("1", "9"), ("8", "4"), ("19", "84")]))
    year = pre_tokenizers.Split(Regex(r"\d{4}"), "isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence([year, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")


def test_tokenizer_json_is_taken_as_it_stands(saved):
    """AutoTokenizer would put the pre-tokenizer of the model type in its place."""
    save_model(saved, TINY, random_params(TINY), year_tokenizer())
    tokenizer = load_model(saved).tokenizer
    assert tokenizer("1984")["input_ids"] == [258] == year_tokenizer()("1984")["input_ids"]
    assert tokenizer.eos_token == "<|end|>" and tokenizer.eos_token_id == 259
    assert tokenizer("a<|end|>")["input_ids"][-1] == 259
    (saved / "tokenizer_config.json").unlink()
    assert load_model(saved).tokenizer("1984")["input_ids"] == [258]


def test_load_model_from_model_or_work_directory(tmp_path):
    params = random_params(TINY)
    save_model(tmp_path / "model", TINY, params, year_tokenizer())
    (tmp_path / "config.json").write_text('{"train": {"steps": 3}}')  # the run's, not the model's
    for path in (tmp_path, tmp_path / "model"):
        model = load_model(path, dtype="bfloat16")
        assert model.config.dtype == "bfloat16"
        assert model.tokenizer("1984")["input_ids"] == [258] and model.tokenizer.is_fast
        jax.tree.map(np.testing.assert_array_equal, model.params, params)


def test_load_model_replicates_over_a_mesh(saved):
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    params = load_model(saved, mesh).params
    assert all(x.sharding.is_fully_replicated and len(x.devices()) == 2 for x in jax.tree.leaves(params))


def test_load_model_errors_name_the_path(saved, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(UserError, match="no/such/model does not exist"):
        load_model("no/such/model")
    with pytest.raises(UserError, match=r"neither model\.safetensors"):
        load_model(empty)
    with pytest.raises(UserError, match=r"No tokenizer\.json in"):
        _ = load_model(saved).tokenizer
    (saved / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        load_model(saved)
    (saved / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json does not exist"):
        load_model(saved)
