"""Hugging Face layout in and out: equal per tensor, and every mismatch named."""

import dataclasses
import functools
import json
import tracemalloc

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_decoder import TIED, TINY, batch, random_params
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast

from parasearch_jax.errors import UserError
from parasearch_jax.models import load_model, weights
from parasearch_jax.models.decoder import DecoderConfig, RopeScaling
from parasearch_jax.models.weights import load_config, load_params, save_model
from parasearch_jax.sharding.mesh import MeshConfig, make_mesh

LLAMA = dataclasses.replace(
    TINY,
    model_type="llama",
    qkv_bias=False,
    rope_theta=5e5,
    rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
    eos_token_ids=(5, 7),
)
EVEN = dataclasses.replace(TINY, vocab_size=62, num_layers=4)  # axes that two devices can share


@pytest.fixture
def saved(tmp_path):
    save_model(tmp_path, TINY, random_params(TINY), None)
    return tmp_path


def tamper(directory, change):
    """Rewrites model.safetensors with `change` applied to its dict of tensors."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("cfg", [TINY, TIED, LLAMA], ids=["untied", "tied", "llama"])
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


@pytest.mark.parametrize("spelling", [4, 5])
def test_rope_scaling_in_the_spelling_of_each_transformers(tmp_path, spelling):
    save_model(tmp_path, LLAMA, random_params(LLAMA), None)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("rope_scaling", "rope_theta") if spelling == 5 else ("rope_parameters",):
        assert config.pop(key)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_config(tmp_path) == LLAMA
    rope = AutoConfig.from_pretrained(tmp_path).rope_parameters
    expected = {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    assert {key: rope[key] for key in expected} == expected


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen2_untied", "llama3_ropescaled"])
def test_golden_config_is_read_by_transformers_as_its_own(golden, tmp_path, name):
    """Same class, same value of every field that both files have."""
    directory = golden(f"hf/{name}")
    cfg = load_config(directory)
    save_model(tmp_path, cfg, load_params(directory, cfg), None)
    theirs, ours = (AutoConfig.from_pretrained(d) for d in (directory, tmp_path))
    assert type(theirs) is type(ours) and theirs.architectures == ours.architectures
    written = json.loads((tmp_path / "config.json").read_text())
    differ = {key for key, value in theirs.to_dict().items() if key in written and ours.to_dict()[key] != value}
    assert differ <= {"bos_token_id", "eos_token_id"}  # the first we don't use, the second is completed (below)


@pytest.mark.parametrize("cfg", [TINY, TIED, LLAMA], ids=["untied", "tied", "llama"])
def test_transformers_computes_the_same(tmp_path, cfg):
    torch = pytest.importorskip("torch", reason="transformers computes with torch, which no requirement brings")
    from transformers import AutoModelForCausalLM

    save_model(tmp_path, cfg, random_params(cfg), None)
    ids, _ = batch(cfg)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path)(torch.tensor(ids)).logits.numpy()
    ours = load_model(tmp_path).logits(ids, [ids.shape[1]] * len(ids))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen2_untied", "llama3_ropescaled"])
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


def test_large_models_are_written_to_several_files(tmp_path):
    params = random_params(EVEN)
    save_model(tmp_path, EVEN, params, None, file_bytes=8000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 5 and files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    content = {file.name: load_file(file) for file in files}
    sizes = {name: sum(x.nbytes for x in tensors.values()) for name, tensors in content.items()}
    assert all(size <= 8000 or len(content[name]) == 1 for name, size in sizes.items())
    assert index["weight_map"] == {tensor: name for name, tensors in content.items() for tensor in tensors}
    assert index["metadata"]["total_size"] == sum(sizes.values()) == sum(x.nbytes for x in jax.tree.leaves(params))
    jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path, EVEN), params)
    save_model(tmp_path, TINY, random_params(TINY), None)  # nothing of the larger one stays
    assert [file.name for file in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path, TINY), random_params(TINY))


def test_export_fetches_from_the_devices(tmp_path):
    params = random_params(EVEN)
    save_model(tmp_path, EVEN, jax.device_put(params, sharded(two_devices(), "embed", 1)), None)
    jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path, EVEN), params)


# ------------------------------------------------------------------------------------------------ parts of parameters


def two_devices():
    return jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def sharded(mesh, name, axis):
    """A tree of shardings: the leaves called `name` are split on `axis`, the others replicated."""

    def sharding(path, leaf):
        spec = [None] * len(leaf.shape)
        if path[-1].key == name:
            spec[axis] = "x"
        return jax.NamedSharding(mesh, jax.P(*spec))

    return jax.tree_util.tree_map_with_path(sharding, weights.param_shapes(EVEN))


AXES = [("embed", 0), ("embed", 1), ("head", 0), ("head", 1), ("scale", 0), ("q", 0), ("q", 1), ("q", 2), ("q", 3),
        ("k", 2), ("o", 0), ("o", 1), ("o", 2), ("o", 3), ("q_bias", 0), ("q_bias", 1), ("v_bias", 2), ("gate", 2),
        ("up", 1), ("down", 1), ("down", 2)]  # fmt: skip


@pytest.fixture(scope="module")
def even(tmp_path_factory):
    directory = tmp_path_factory.mktemp("even")
    save_model(directory, EVEN, random_params(EVEN), None)
    return directory


@pytest.mark.parametrize(("name", "axis"), AXES)
def test_split_over_devices_equals_whole(even, name, axis):
    """layers, heads, vocabulary, model, ffn: bit for bit what was saved, each device with its part."""
    shardings = sharded(two_devices(), name, axis)
    params = load_params(even, EVEN, shardings)
    expected = random_params(EVEN)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert jax.tree.map(lambda x: x.sharding, params) == shardings
    for leaf, whole in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, whole[shard.index])


def test_two_axes_and_one_sharding_for_all(even):
    mesh = jax.make_mesh((2, 1), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    params = load_params(even, EVEN, jax.NamedSharding(mesh, jax.P()))
    jax.tree.map(np.testing.assert_array_equal, params, random_params(EVEN))
    shardings = sharded(mesh, "q", 2)
    shardings["layers"]["attn"]["q"] = jax.NamedSharding(mesh, jax.P("y", None, "x"))
    jax.tree.map(np.testing.assert_array_equal, load_params(even, EVEN, shardings), random_params(EVEN))


@pytest.fixture
def reads(monkeypatch):
    """[(tensor, bytes)] of every part that is read from a file."""
    found, real = [], weights.open_tensors

    def counted(tensor, name, index):
        part = tensor.read(index)
        found.append((name, part.nbytes))
        return part

    def opened(directory, stack):
        return {
            name: dataclasses.replace(tensor, read=functools.partial(counted, tensor, name))
            for name, tensor in real(directory, stack).items()
        }

    monkeypatch.setattr(weights, "open_tensors", opened)
    return found


@pytest.mark.parametrize(
    ("name", "axis", "tensor"),
    [
        ("q", 2, "model.layers.3.self_attn.q_proj.weight"),
        ("q", 1, "model.layers.0.self_attn.q_proj.weight"),
        ("o", 1, "model.layers.1.self_attn.o_proj.weight"),
        ("head", 1, "lm_head.weight"),
        ("embed", 0, "model.embed_tokens.weight"),
    ],
)
def test_each_part_is_read_once_and_nothing_else(even, reads, name, axis, tensor):
    load_params(even, EVEN, sharded(two_devices(), name, axis))
    whole = {key: x.nbytes for key, x in load_file(even / "model.safetensors").items()}
    assert [size for key, size in reads if key == tensor] == [whole[tensor] // 2] * 2
    totals = {key: sum(size for other, size in reads if other == key) for key in whole}
    assert totals == whole  # replicas are not read twice


def test_a_layer_is_read_by_its_own_device(even, reads):
    load_params(even, EVEN, sharded(two_devices(), "gate", 0))
    assert [key.split(".")[2] for key, _ in reads if "gate_proj" in key] == ["0", "1", "2", "3"]
    jax.block_until_ready(load_params(even, EVEN, sharded(two_devices(), "gate", 1)))
    assert [key.split(".")[2] for key, _ in reads if "gate_proj" in key][4:] == ["0", "1", "2", "3"] * 2


def test_host_memory_is_that_of_one_part(tmp_path, monkeypatch):
    """A part and the tensor it is read from; JAX may let go of the part before it a little later. tracemalloc counts
    what numpy and safetensors allocate, not JAX's buffers."""
    cfg = DecoderConfig(
        vocab_size=3072, hidden_size=128, num_layers=6, num_heads=8, num_kv_heads=8, head_dim=64, intermediate_size=512
    )
    params = random_params(cfg)
    save_model(tmp_path, cfg, params, None)
    sizes = [x.nbytes for x in jax.tree.leaves(params)]  # nine of about 1.5 MB
    real, copy = weights._to_devices, jax.jit(jax.numpy.copy)  # on CPU JAX may go on using numpy's memory
    monkeypatch.setattr(weights, "_to_devices", lambda *args: jax.block_until_ready([copy(x) for x in real(*args)]))
    halves = jax.tree.map(
        lambda x: jax.NamedSharding(two_devices(), jax.P(*[None] * (x.ndim - 1), "x")), weights.param_shapes(cfg)
    )
    for shardings, part in ((None, max(sizes)), (halves, max(sizes) // 2)):
        load_params(tmp_path, cfg, shardings)  # compiles
        tracemalloc.start()
        load_params(tmp_path, cfg, shardings)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert part <= peak < 2.5 * part + 2 * max(sizes) / cfg.num_layers < sum(sizes) / 3


# -------------------------------------------------------------------------------------------------------- wrong files


def test_a_tensor_in_two_files_is_named(saved):
    tensors = load_file(saved / "model.safetensors")
    save_file(tensors, saved / "model-1.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, saved / "model-2.safetensors")
    weight_map = dict.fromkeys(tensors, "model-1.safetensors") | {"model.norm.weight": "model-2.safetensors"}
    (saved / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError, match=r"'model\.norm\.weight' stands in two files"):
        load_params(saved, TINY)


def test_mismatches_are_named(saved):
    name = "model.layers.2.mlp.up_proj.weight"
    original = load_file(saved / "model.safetensors")
    for change, message in [
        (lambda t: t.pop(name), f"lack tensors: {name}"),
        (lambda t: t.pop("lm_head.weight"), "lack tensors: lm_head.weight"),
        (lambda t: t.update({"model.layers.3.extra": np.zeros(2)}), "unexpected tensors: model.layers.3.extra"),
        (lambda t: t.update({name: original[name].T.copy()}), rf"'{name}' has shape \[24, 40\].*asks for \[40, 24\]"),
    ]:
        save_file(original, saved / "model.safetensors")
        tamper(saved, change)
        with pytest.raises(UserError, match=message):
            load_params(saved, TINY)


@pytest.mark.parametrize("rows", [8192, 16])
def test_tied_model_may_repeat_its_embedding_as_head(tmp_path, monkeypatch, rows):
    monkeypatch.setattr(weights, "_same", functools.partial(weights._same, rows=rows))  # by parts of so many rows
    save_model(tmp_path, TIED, random_params(TIED), None)
    tamper(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    assert "head" not in load_params(tmp_path, TIED)
    tamper(tmp_path, lambda t: t["lm_head.weight"].__setitem__((-1, -1), 0))
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


@pytest.mark.parametrize("fsdp, tp", [(4, 1), (2, 2), (1, 2)])
def test_load_model_lays_it_out_by_the_rules(even, tmp_path, fsdp, tp):
    """And the export of what lies on many devices is the same file."""
    mesh = make_mesh(MeshConfig(fsdp, tp))
    params = load_model(even, mesh).params
    jax.tree.map(np.testing.assert_array_equal, params, random_params(EVEN))
    assert params["layers"]["mlp"]["up"].sharding.spec == jax.P(None, "fsdp", "tp")
    assert params["embed"].addressable_shards[0].data.size == params["embed"].size // (fsdp * tp)
    save_model(tmp_path, EVEN, params, None)
    assert (tmp_path / "model.safetensors").read_bytes() == (even / "model.safetensors").read_bytes()


def test_a_mesh_of_other_axes_is_refused(even):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises(UserError, match=r"axes \('data',\).*make_mesh"):
        load_model(even, mesh)


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
