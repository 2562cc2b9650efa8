"""What model.path may name, and what each wrong name is told."""

import json
import shutil

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from test_decoder import TIED, TINY, random_params
from test_weights import year_tokenizer

from parasearch_jax.checkpoint import Checkpoints
from parasearch_jax.errors import UserError
from parasearch_jax.models import load_model
from parasearch_jax.models.paths import ModelPath, lacks, model_files, resolve
from parasearch_jax.models.weights import save_model
from parasearch_jax.sharding.mesh import MeshConfig, make_mesh

HUB = "org/tiny-1.5B_x"


def equal(params, others):
    jax.tree.map(np.testing.assert_array_equal, params, others)


@pytest.fixture
def base(tmp_path):
    save_model(tmp_path / "base", TINY, random_params(TINY), year_tokenizer())
    return tmp_path / "base"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty cache, offline."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def cached(hub, base):
    """The model in the cache as the hub's client lays it out; the snapshot's folder."""
    repository = hub / f"models--{HUB.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    shutil.copytree(base, repository / "snapshots" / ("a" * 40))
    return repository / "snapshots" / ("a" * 40)


def state(params):
    zeros = jax.tree.map(jnp.zeros_like, params)
    actor = {"params": jax.tree.map(jnp.asarray, params), "opt": (zeros, {"mu": zeros}), "step": jnp.int32(3)}
    return {"actor": actor | {"skipped": jnp.int32(0)}, "critic": {"params": {"value": jnp.ones(7)}}}


@pytest.fixture
def run(tmp_path, base):
    """A work directory with the checkpoints 10 and 20, whose policies are random_params 10 and 20."""
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    for step in (10, 20):
        checkpoints.save(step, state(random_params(TINY, step)), {"step": step})
    checkpoints.close()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"model": {"path": str(base), "dtype": "float32"}}))
    return tmp_path / "run"


# ------------------------------------------------------------------------------------------------------- on this disk


def test_directory_and_finished_run(base, tmp_path):
    assert resolve(base) == resolve(str(base)) == ModelPath(base)
    shutil.copytree(base, tmp_path / "work" / "model")
    (tmp_path / "work" / "config.json").write_text('{"model": {"path": "gone"}}')
    (tmp_path / "work" / "checkpoints").mkdir()
    assert resolve(tmp_path / "work") == ModelPath(tmp_path / "work" / "model")


def test_shards_without_their_index_are_told_from_no_weights(base):
    (base / "model.safetensors").rename(base / "model-00001-of-00002.safetensors")
    assert resolve(base) == ModelPath(base)
    with pytest.raises(UserError, match=r"lacks model\.safetensors"):
        load_model(base)


def test_gguf_by_name_or_alone_in_a_directory(tmp_path):
    file = tmp_path / "one.gguf"
    file.touch()
    assert resolve(file) == resolve(tmp_path) == ModelPath(file) and resolve(file).is_gguf
    (tmp_path / "two.gguf").touch()
    with pytest.raises(UserError, match=r"holds one\.gguf, two\.gguf: name one"):
        resolve(tmp_path)
    assert resolve(file) == ModelPath(file)


def test_errors_say_what_is_accepted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").touch()
    for path, message in {
        tmp_path: "holds neither model.safetensors nor a .gguf file nor a run's checkpoints",
        tmp_path / "notes.txt": "is a file, and no .gguf",
        "./org/name": "./org/name does not exist",
        "a/b/c": "a/b/c does not exist",
        "org/name.gguf": "org/name.gguf does not exist",
    }.items():
        with pytest.raises(UserError) as told:
            resolve(path)
        assert message in str(told.value) and "Accepted: a directory with config.json" in str(told.value)


# -------------------------------------------------------------------------------------------------------- checkpoints


def test_last_checkpoint_of_a_run_with_the_base_s_tokenizer(run, base, monkeypatch):
    monkeypatch.chdir(run.parent)
    equal(load_model("run").params, random_params(TINY, 20))
    assert resolve(run) == ModelPath(base, run / "checkpoints" / "20")
    model = load_model(run, dtype="bfloat16")
    equal(model.params, random_params(TINY, 20))
    assert model.config.dtype == "bfloat16" and model.config.vocab_size == TINY.vocab_size
    assert model.tokenizer("1984")["input_ids"] == [258]


def test_only_the_policy_is_asked_for(run, monkeypatch):
    """The optimizer is twice the policy, and the critic another one."""
    asked, real = [], ocp.args.PyTreeRestore
    monkeypatch.setattr(ocp.args, "PyTreeRestore", lambda **kwargs: asked.append(kwargs["item"]) or real(**kwargs))
    load_model(run)
    assert len(asked) == 1 and list(asked[0]) == ["actor"] and list(asked[0]["actor"]) == ["params"]


def test_checkpoint_goes_where_it_is_asked_to(run):
    params = load_model(run, make_mesh(MeshConfig(fsdp=2))).params
    assert params["layers"]["attn"]["q"].sharding.spec == jax.P(None, "fsdp", "tp", None)
    equal(params, random_params(TINY, 20))


def test_incomplete_checkpoints_are_passed_over(run):
    (run / "checkpoints" / "30" / "state").mkdir(parents=True)
    assert resolve(run).checkpoint.name == "20"
    assert (run / "checkpoints" / "30").exists()  # another run's directory is left as it is
    for step in ("10", "20"):
        shutil.rmtree(run / "checkpoints" / step)
    with pytest.raises(UserError, match="holds no complete checkpoint yet"):
        resolve(run)


def test_a_run_whose_base_is_a_run(run, tmp_path, base):
    second = tmp_path / "second"
    shutil.copytree(run, second)
    (second / "config.json").write_text(json.dumps({"model": {"path": str(run)}}))
    assert resolve(second) == ModelPath(base, second / "checkpoints" / "20")


def test_looking_for_what_is_lacking_downloads_no_base(run, hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    (run / "config.json").write_text(json.dumps({"model": {"path": HUB}}))
    assert "started from org/tiny" in lacks(run) and "none to be had" not in lacks(run)


def test_what_a_checkpoint_needs_is_named(run, base):
    config = (run / "config.json").read_text()
    (run / "config.json").write_text("{}")
    with pytest.raises(UserError, match="does not say which model the run started from"):
        resolve(run)
    (run / "config.json").write_text(config)
    save_model(base, TIED, random_params(TIED), None)
    with pytest.raises(UserError, match=r"checkpoints/20 does not fit.*head \[61, 24\] \(expected None\)"):
        load_model(run)
    shutil.rmtree(base)
    with pytest.raises(UserError, match=rf"run that started from {base}.*can't be had: {base} does not exist"):
        resolve(run)


# ---------------------------------------------------------------------------------------------------------------- hub


def test_hub_name_from_the_cache_while_offline(hub, base):
    snapshot = cached(hub, base)
    assert resolve(HUB) == resolve(HUB, download=False) == ModelPath(snapshot)
    equal(load_model(HUB).params, random_params(TINY))
    assert lacks(HUB) == ""


def test_what_lies_here_goes_before_the_hub(hub, base, tmp_path):
    cached(hub, base)
    shutil.copytree(base, tmp_path / HUB)
    assert resolve(HUB).base.resolve() == (tmp_path / HUB).resolve()


def test_absent_while_offline(hub):
    with pytest.raises(UserError) as told:
        load_model(HUB)
    for word in (HUB, "HF_HUB_OFFLINE is set", str(hub), f"`hf download {HUB}`", "Accepted: "):
        assert word in str(told.value)
    assert lacks(HUB) == f"there is no {HUB} here, none in the hub's cache {hub}"


def test_hub_out_of_reach(hub, base, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(UserError, match=r"none to be had from the Hugging Face hub \(LocalEntryNotFoundError: "):
        resolve(HUB)
    snapshot = cached(hub, base)
    assert resolve(HUB) == ModelPath(snapshot)


def test_only_files_of_a_model_are_fetched(hub, base, monkeypatch):
    """`snapshot_download` continues a broken download by itself; what it is asked for is ours to say."""
    asked = {}
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **kwargs: asked.update(kwargs, name=name) or str(base)
    )
    assert lacks(HUB) == "" and asked["local_files_only"] is True
    assert resolve(HUB) == ModelPath(base) and asked["name"] == HUB and asked["local_files_only"] is False
    names = ["config.json", "model-00001-of-00002.safetensors", "chat_template.jinja", "consolidated.safetensors",
             "pytorch_model.bin", "onnx/config.json", "original/params.json", "README.md"]  # fmt: skip
    patterns = {key: asked[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(huggingface_hub.utils.filter_repo_objects(names, **patterns)) == names[:3]


# ---------------------------------------------------------------------------------------------- what belongs to a model


def test_model_files(base, run, hub, tmp_path):
    for name in ("README.md", "chat_template.jinja", "generation_config.json"):
        (base / name).write_text("{}")
    small = ["chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert [file.name for file in model_files(base)] == sorted([*small, "model.safetensors"])
    assert model_files(base) == sorted(model_files(base))
    from_run = model_files(run)
    assert [file.name for file in from_run[: len(small)]] == small
    assert from_run[len(small) :] and all("checkpoints/20/state" in str(file) for file in from_run[len(small) :])
    (tmp_path / "x.gguf").touch()
    assert model_files(tmp_path / "x.gguf") == [tmp_path / "x.gguf"]
    snapshot = cached(hub, base)
    assert {file.parent for file in model_files(HUB)} == {snapshot}


def test_lacks_names_the_files(base, run, tmp_path):
    assert lacks(base) == lacks(run) == ""
    (base / "tokenizer.json").unlink()
    for path in (base, run):
        assert lacks(path) == f"{base} (without tokenizer.json)"
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (base / "model.safetensors").rename(base / shards["a"])
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert lacks(base) == f"{base} (without tokenizer.json, model-2.safetensors)"
    assert lacks(tmp_path / "none") == f"{tmp_path / 'none'} does not exist"
    (tmp_path / "x.gguf").touch()
    assert lacks(tmp_path / "x.gguf") == ""
