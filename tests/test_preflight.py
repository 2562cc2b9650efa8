"""What a large run needs: each thing missing is named with its command, nothing missing is silence."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import parallel_base
import parallel_tiny
import pytest

from parasearch_jax.errors import UserError
from parasearch_jax.preflight import GIB, preflight

ROOT = Path(__file__).parents[1]


def touch(path: Path, text: str = "{}") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


@pytest.fixture
def config(tmp_path):
    """parallel_base on a machine that has all it asks for: one device, an encoder that exists, no index file."""
    config = parallel_base.get_config()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        touch(tmp_path / "model" / name)
    config.model.path = str(tmp_path / "model")
    config.data.train = f"nq={touch(tmp_path / 'nq.jsonl')},hotpotqa={touch(tmp_path / 'hotpotqa.jsonl')}"
    config.data.test = touch(tmp_path / "test.jsonl")
    config.retriever.update(corpus=touch(tmp_path / "corpus.jsonl"), encoder="hashed", index="")
    config.mesh.fsdp = 1
    config.machine.update(device_gib=0.0, host_gib=0.1)
    return config


def page(config) -> str:
    with pytest.raises(UserError) as told:
        preflight(config)
    return str(told.value)


def gpus(count: int, gib: float, kind: str = "NVIDIA H100 80GB HBM3", share: float = 0.75, process: int = 0):
    stats = {"bytes_limit": int(gib * share * GIB)}
    device = SimpleNamespace(platform="gpu", device_kind=kind, process_index=process, memory_stats=lambda: stats)
    return lambda: [device] * count


def test_silent_when_all_is_there(config):
    preflight(config)


def test_silent_for_a_configuration_that_asks_nothing_of_the_machine(config):
    config.machine.host_gib = 0.0
    config.model.path = "nowhere"  # the loader's own error is the better one
    preflight(config)
    preflight(parallel_tiny.get_config())


@pytest.mark.parametrize(
    ("leaf", "path", "command"),
    [
        ("model.path", "model", "hf download Qwen/Qwen2.5-7B --local-dir"),
        ("data.train", "hotpotqa.jsonl", "hf download RUC-NLPIR/FlashRAG_datasets"),
        ("data.test", "test.jsonl", "hf download RUC-NLPIR/FlashRAG_datasets"),
        ("retriever.corpus", "corpus.jsonl", "gunzip data/wiki-18/wiki-18.jsonl.gz"),
    ],
)
def test_an_absent_file_is_named_with_its_command(config, tmp_path, leaf, path, command):
    (tmp_path / path).rename(tmp_path / "away")
    told = page(config)
    assert leaf in told and str(tmp_path / path) in told and command in told
    others = {"model.path", "data.train", "data.test", "retriever.corpus", "devices", "host memory"} - {leaf}
    assert not [other for other in others if other in told]


def test_a_broken_download_names_the_absent_shards(config, tmp_path):
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    touch(tmp_path / "model" / "model.safetensors.index.json", json.dumps({"weight_map": shards}))
    told = page(config)
    assert shards["b"] in told and shards["a"] not in told
    touch(tmp_path / "model" / shards["b"])
    preflight(config)


def test_a_work_directory_is_a_model_too(config, tmp_path):
    config.model.path = str(tmp_path)  # holds model/
    preflight(config)


def test_an_evaluation_needs_no_training_set(config, tmp_path):
    (tmp_path / "nq.jsonl").unlink()
    assert "data.train" in page(config)
    config.train.steps = 0
    preflight(config)


def test_host_memory(config):
    config.machine.host_gib = 1e6
    assert "host memory" in page(config) and "of 1e+06 GiB" in page(config)


def test_a_cpu_is_no_accelerator(config):
    config.machine.device_gib = 1.0
    told = page(config)
    assert "devices" in told and "0 of 1 with 1 GiB each (JAX sees: " in told and " x cpu)" in told
    assert "pip install -r requirements-cuda12.txt" in told


@pytest.mark.parametrize(
    ("devices", "environment", "words"),
    [
        (gpus(8, 78.6), {}, []),
        (gpus(8, 78.6, share=0.9), {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".9"}, []),
        (gpus(8, 78.6, share=0.5), {"XLA_CLIENT_MEM_FRACTION": ".5"}, []),
        (gpus(8, 1.0, process=1), {}, []),  # another host's devices tell nothing
        (gpus(4, 78.6), {}, ["4 of 8 with 76 GiB each", "4 x NVIDIA H100 80GB HBM3"]),
        (gpus(8, 39.4, "NVIDIA A100-SXM4-40GB"), {}, ["device memory", "39 of 76 GiB", "8 x NVIDIA A100-SXM4-40GB"]),
    ],
)
def test_accelerators(config, monkeypatch, devices, environment, words):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(jax, "devices", devices)
    config.mesh.fsdp = 8
    config.machine.device_gib = 76.0
    if not words:
        preflight(config)
        return
    told = page(config)
    assert all(word in told for word in ["Missing on this machine", *words]), told


def test_an_index_is_the_folder_that_build_writes(config, tmp_path):
    config.retriever.index = str(tmp_path / "wiki" / "flat")
    (tmp_path / "wiki" / "flat").mkdir(parents=True)
    told = page(config)
    assert "retriever.index" in told and "python -m parasearch_jax.retrieval.build" in told and "--index=flat" in told
    touch(tmp_path / "wiki" / "flat" / "manifest.json")
    preflight(config)


def test_a_dense_encoder_is_a_model_directory(config, tmp_path):
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        touch(tmp_path / "e5" / name)
    config.retriever.encoder = str(tmp_path / "e5")
    preflight(config)
    (tmp_path / "e5" / "tokenizer.json").unlink()
    told = " ".join(page(config).split())  # the path may fill a line
    assert "e5 (without tokenizer.json)" in told and "hf download intfloat/e5-base-v2" in told


@pytest.mark.parametrize("name", ["parallel_base", "parallel_grpo"])
@pytest.mark.parametrize("arg", ["", "instruct,released", "eval"])
def test_one_page_with_everything_missing(name, arg, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = importlib.import_module(name).get_config(arg)
    told = page(config).splitlines()
    assert len(told) <= 40 and max(map(len, told)) <= 110
    assert told[0].startswith(config.name) and told[-1].startswith(
        "  python launch.py --config=configs/parallel_tiny.py"
    )
    for command in [config.setup[key] for key in ("machine", "model", "data", "corpus", "index", "encoder")]:
        assert [f"    {line}" for line in command.splitlines()] == [
            line for line in told if line[4:] in command.splitlines()
        ]


def test_the_command_tells_it_without_a_traceback():
    command = [sys.executable, "launch.py", "--config=configs/parallel_base.py"]
    env = os.environ | {"PYTHONPATH": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and "Traceback" not in done.stderr + done.stdout
    for word in (
        "error: parallel_base can't run here",
        "devices           0 of 8",
        "models/Qwen2.5-7B",
        "data/flashrag/hotpotqa/train.jsonl",
        "data/wiki-18/wiki-18.jsonl",
        "data/wiki-18/e5/flat",
        "python -m parasearch_jax.retrieval.build --corpus=data/wiki-18/wiki-18.jsonl",
        "python launch.py --config=configs/parallel_tiny.py:ppo",
    ):
        assert word in done.stderr, done.stderr
