"""The plan: arithmetic against numbers worked out by hand, the compiled column against the rules, the command."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import jax
import jax.numpy as jnp
import parallel_base
import parallel_grpo
import parallel_tiny
import pytest
from jax.sharding import PartitionSpec as P

from parasearch_jax import plan
from parasearch_jax.errors import UserError
from parasearch_jax.models.decoder import DecoderConfig
from parasearch_jax.models.shapes import named_shape
from parasearch_jax.plan import compiled
from parasearch_jax.plan.advice import advise
from parasearch_jax.plan.buffers import compile_program
from parasearch_jax.plan.compiled import by_compiler
from parasearch_jax.plan.cost import cost, decode_step_bytes
from parasearch_jax.plan.devices import DEVICES, GIB, find_device
from parasearch_jax.plan.memory import AT_WORK, PARTS, PHASES, by_arithmetic, cell_bytes, total
from parasearch_jax.plan.report import Plan, page
from parasearch_jax.plan.run import model_shape, read_corpus, read_run
from parasearch_jax.retrieval.build import main as build
from parasearch_jax.sharding import rules
from parasearch_jax.sharding.mesh import MeshConfig

ROOT = Path(__file__).parents[1]
SMALL = DecoderConfig(
    vocab_size=96, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48
)


def changed(config, **leaves):
    for name, value in leaves.items():
        *sections, leaf = name.split("__")
        section = config
        for part in sections:
            section = section[part]
        section[leaf] = value
    return config


@pytest.fixture(scope="session")
def base():
    return read_run(parallel_base.get_config())


@pytest.fixture(scope="session")
def small():
    """GRPO without a reference of a small model in bf16, on four devices."""
    config = parallel_tiny.get_config("smoke")
    changed(config, mesh__fsdp=4, learner__micro_rows=8, learner__remat="full", learner__logprob_chunk=16)
    changed(config, learner__kl_coef=0.0)
    changed(config, rollout__slots=8, rollout__max_total_tokens=128, train__buckets=(128,))
    run = read_run(config)
    return dataclasses.replace(run, model=dataclasses.replace(SMALL, dtype="bfloat16"), rollout=dataclasses.replace(
        run.rollout, observation_tokens=64))  # fmt: skip


# ----------------------------------------------------------------------------------------------------- arithmetic


def test_arithmetic_of_7b_on_eight_devices(base):
    """Worked out by hand: 7.62e9 parameters, of which 152,064 x 3,584 in the head."""
    parts = by_arithmetic(base).parts
    parameters, head = 7.615e9, 152064 * 3584
    assert cell_bytes(base) == 57344
    expected = {
        "policy, fp32": 4 * parameters / 8,
        "policy's optimizer": 8 * parameters / 8,
        "critic, fp32": 4 * (parameters - head) / 8,
        "critic's optimizer": 8 * (parameters - head) / 8,
        "reference": 2 * parameters / 8,
        "sampler's copy": 2 * parameters,
        "KV cache": 7 * GIB,  # 256 / 8 slots of 4,096 tokens
        "gradients": 2 * 4 * parameters / 8,
        "kept activations": 28 * 8 * 4096 * 3584 * 2,
        "log-prob chunk": 2 * 8 * 128 * 152064 * 4,
    }
    for part, size in expected.items():
        assert parts[part] == pytest.approx(size, rel=1e-3), part
    training = sum(parts[part] for part in ("policy, fp32", "policy's optimizer"))
    assert 8 * training == pytest.approx(91.4e9, rel=1e-3)


def test_phases_hold_what_is_theirs(base):
    found = by_arithmetic(base)
    assert tuple(found.phases) == PHASES and set(found.parts) == set(PARTS)
    lasting = sum(size for part, size in found.parts.items() if PARTS[part] == PHASES)
    assert found.phases["sync"] == pytest.approx(lasting + found.parts["weights on their way"])
    assert found.phases["rollout"] == pytest.approx(lasting + found.parts["prefill"])
    work = {part: size for part, size in found.parts.items() if "update" in AT_WORK.get(part, ())}
    at_work = found.phases["update"] - lasting - found.parts["batch and scores"]
    assert work["gradients"] + work["kept activations"] < at_work < sum(work.values())  # not all at one time


def test_settings_change_what_they_should(base):
    def parts(**changes):
        return by_arithmetic(dataclasses.replace(base, **changes)).parts

    before = parts()
    bf16 = dataclasses.replace(base.optimizer, mu_dtype="bfloat16")
    assert parts(optimizer=bf16)["policy's optimizer"] == pytest.approx(6 / 8 * before["policy's optimizer"])
    half = dataclasses.replace(base.learner, micro_rows=32)
    assert parts(learner=half)["kept activations"] == before["kept activations"] / 2
    dots = dataclasses.replace(base.learner, remat="dots")
    assert parts(learner=dots)["kept activations"] > 10 * before["kept activations"]
    tp = parts(mesh=MeshConfig(2, 4))
    assert tp["sampler's copy"] == before["sampler's copy"] / 4 and tp["policy, fp32"] == before["policy, fp32"]
    grpo = by_arithmetic(read_run(parallel_grpo.get_config())).parts
    assert grpo["critic, fp32"] == grpo["critic's optimizer"] == 0
    no_kl = changed(parallel_grpo.get_config(), learner__kl_coef=0.0)
    assert by_arithmetic(read_run(no_kl)).parts["reference"] == 0 < grpo["reference"]


def test_an_index_on_the_gpus_is_shared_by_them(base):
    on_gpu = dataclasses.replace(base, corpus=dataclasses.replace(base.corpus, on_gpu=True))
    index = 21015324 * 768 * 4
    assert by_arithmetic(on_gpu).parts["FAISS index"] == pytest.approx(index / 8)
    assert by_arithmetic(on_gpu).peak == pytest.approx(by_arithmetic(base).peak + index / 8)


# ------------------------------------------------------------------------------------------------------------- cost


def test_cost_of_7b(base):
    """A decode step reads 7.07e9 weights in bf16 and 32 slots of 4,096 cells; an update is four forward passes, the
    last without the layers' last product (remat: nothing reads it)."""
    assert decode_step_bytes(base) == pytest.approx(2 * (7.615e9 - 152064 * 3584) + 7 * GIB, rel=1e-3)
    found = cost(base)
    assert found.decode_seconds == pytest.approx(decode_step_bytes(base) / 3.35e12)
    tokens, matrices = 512 * 4096, 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    attention = 28 * 2 * 2 * 28 * 128 * 4096 / 2 * tokens
    forward = 2 * matrices * tokens + attention
    down = 2 * 28 * 3584 * 18944 * tokens
    assert found.flops["update"] == pytest.approx(4 * (forward + 2 * 152064 * 3584 * tokens) - down, rel=1e-6)
    assert found.flops["update of the critic"] == pytest.approx(4 * forward - down, rel=1e-6)
    seconds = found.flops["update"] / (8 * 989e12 * 0.4)
    assert found.seconds["update"] == pytest.approx(seconds)
    five = dataclasses.replace(base, algorithm=dataclasses.replace(base.algorithm, samples=5))
    fed = 512 * (0.1 + 5 * 0.4) * 2048  # the prompt of a question once, documents for each sample
    assert cost(five).flops["prefill"] == pytest.approx(2 * matrices * fed + 5 * attention / 4, rel=1e-6)
    slower = cost(dataclasses.replace(base, device=find_device("A100")))
    assert slower.seconds["update"] == pytest.approx(seconds * 989 / 312)


def test_an_evaluation_holds_neither_optimizer_nor_critic_nor_reference(base):
    parts = {part: size for part, size in by_arithmetic(dataclasses.replace(base, steps=0)).parts.items() if size}
    assert set(parts) == {
        "policy, fp32",
        "sampler's copy",
        "KV cache",
        "prefill",
        "decode step",
        "weights on their way",
    }


def test_devices_are_found_by_name():
    assert find_device("v5e") is find_device("TPU v5e") is find_device("tpu-V5E") is DEVICES["tpu v5e"]
    with pytest.raises(UserError, match=r"B200.*H100, H200, A100"):
        find_device("B200")


# ----------------------------------------------------------------------------------------------------------- advice


def test_no_advice_is_given_that_does_not_hold(base):
    """What is told to suffice does, by the arithmetic; what alone suffices is told alone."""
    room = 0.9 * by_arithmetic(base).peak
    steps, enough = advise(base, room)
    assert enough and {step.leaf for step in steps} >= {"learner.micro_rows"}
    assert all(step.peak <= room for step in steps)
    by_leaf = {step.leaf: step for step in steps}
    learner = dataclasses.replace(base.learner, micro_rows=int(by_leaf["learner.micro_rows"].value))
    assert by_arithmetic(dataclasses.replace(base, learner=learner)).peak == by_leaf["learner.micro_rows"].peak

    on_32 = read_run(changed(parallel_base.get_config(), model__path="Qwen2.5-32B", mesh__fsdp=32))
    steps, enough = advise(on_32, 70 * GIB)
    assert enough and len(steps) > 1 and steps[-1].peak <= 70 * GIB < steps[0].peak
    assert not any(" devices" in step.price for step in steps)
    assert not advise(on_32, 1 * GIB)[1]


# --------------------------------------------------------------------------------------------------------- compiled


def test_what_a_program_holds():
    """Two products of [256,256] that both live until they are added: 512 KiB, and nothing else is as large."""

    def function(x):
        a, b = x @ x, x @ (x + 1)
        return jnp.tanh(a @ b) @ (b @ a)

    program = compile_program(jax.jit(function).lower(jax.ShapeDtypeStruct((256, 256), jnp.float32)))
    told = program.compiled.memory_analysis().temp_size_in_bytes
    assert 2 * 256 * 256 * 4 <= program.peak() <= told
    assert program.parts(lambda b: "all", lambda b: b.bytes, until="all") == {"all": program.peak()}


def test_half_precision_counts_as_such():
    """The CPU multiplies float32 copies of the weights, of which none is counted."""

    def function(x, v, w):
        return jax.nn.relu(x @ v) @ w

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float16) for shape in ((128, 512), (512, 512), (512, 512))]
    program = compile_program(jax.jit(function).lower(*shapes))
    assert program.compiled.memory_analysis().temp_size_in_bytes > 512 * 512 * 4  # such a copy is there
    assert not {b.name for b in program.temporaries if b.size == 512 * 512}
    assert program.peak() <= 3 * 128 * 512 * 4


@pytest.fixture(scope="session")
def small_compiled(small):
    return by_compiler(small)


def test_columns_agree_on_what_is_held(small, small_compiled):
    ours = by_arithmetic(small)
    for part in ("policy, fp32", "policy's optimizer", "sampler's copy", "KV cache", "kept activations"):
        assert ours.parts[part] == pytest.approx(small_compiled.parts[part], rel=0.1), part  # norms, biases
    assert set(small_compiled.phases) == set(ours.phases)


def test_a_replicated_matrix_shows_in_the_compiled_column(small, small_compiled, monkeypatch):
    replicated = (("layers/mlp/down", P()), *rules.RULES)
    monkeypatch.setattr(rules.spec_of, "__defaults__", (replicated,))
    parts, at_work = dict(small_compiled.parts), {}
    run, mesh = compiled.for_cpu(small), compiled.make_mesh(small.mesh)
    with jax.set_mesh(mesh):
        compiled._training(run, mesh, parts, at_work)
    found = total(parts, at_work)
    matrix = 3 * 48 * 32  # parameters of all layers' `down`
    for part, size in (("policy, fp32", 4), ("policy's optimizer", 8)):
        assert found.parts[part] - small_compiled.parts[part] == matrix * size * (1 - 1 / 4), part
    assert found.phases["update"] - small_compiled.phases["update"] >= matrix * (4 + 8) * (1 - 1 / 4)
    told = Plan(small, by_arithmetic(small), found).apart()
    assert {"policy, fp32", "policy's optimizer"} <= set(told)


def test_depths_lie_on_a_line(small):
    """Four layers from two and three: as four compiled."""
    run, mesh = compiled.for_cpu(small), compiled.make_mesh(small.mesh)
    two, three, four = (compiled._sampling_at(run, mesh, depth) for depth in (2, 3, 4))
    for part, size in four.items():
        assert compiled._extended((2, 3), [two[part], three[part]], 4) == pytest.approx(size, rel=0.1), part
    assert four["KV cache"] == 2 * two["KV cache"] > 0


# ---------------------------------------------------------------------------------------- what a configuration tells


def test_shapes_come_from_files_or_else_by_name(tmp_path, monkeypatch):
    shape = dataclasses.replace(SMALL, model_type="qwen2")
    (tmp_path / "config.json").write_text(json.dumps(shape.to_hf()))
    found, source = model_shape(str(tmp_path), "bfloat16")
    assert (found.num_layers, found.hidden_size, found.dtype) == (3, 32, "bfloat16") and "config.json" in source
    found, source = model_shape("models/Qwen2.5-7B-Instruct", "bfloat16")
    assert found == named_shape("qwen2.5-7b") and "by its name" in source
    assert model_shape("meta-llama/Meta-Llama-3.1-8B", "float32")[0].dtype == "float32"
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: str(tmp_path / file))
    assert model_shape("some/model", "float32")[1] == str(tmp_path / "config.json")
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"(?s)nobody/nothing.*config.json.*qwen2.5-7b"):
        model_shape("nobody/nothing", "float32")


def test_a_corpus_is_counted_or_left_out(tmp_path):
    config = parallel_tiny.get_config().retriever
    corpus, text = read_corpus(config), Path(config.corpus).read_bytes()
    assert corpus.passages == text.count(b"\n") and corpus.width == 32
    assert corpus.index_bytes == 4 * 32 * corpus.passages and corpus.text_bytes == len(text) + 200 * corpus.passages
    wiki = parallel_base.get_config().retriever
    assert read_corpus(wiki).index_bytes == 21015324 * 768 * 4
    assert read_corpus(changed(wiki, corpus="nowhere/x.jsonl")).index_bytes is None
    shape = {"vocab_size": 9, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"model_type": "bert", "intermediate_size": 8, "max_position_embeddings": 8}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert read_corpus(changed(wiki, encoder=str(tmp_path))).width == 24


def test_an_index_that_is_not_built_is_of_the_kind_that_its_path_says():
    """wiki-18: n (4 D + 8) and 18,337 centres; n (D / 8 + 8), centres and tables of codes; a graph of 32 links."""
    n, D, nlist, wiki = 21015324, 768, 18337, parallel_base.get_config().retriever
    expected = {
        "flat": 4 * n * D,
        "ivf": n * (4 * D + 8) + 4 * nlist * D,
        "ivfpq": n * (96 + 8) + 4 * D * (nlist + 256) + 4 * 256 * 96 * nlist,
        "hnsw": n * (4 * D + 276),
        "bm25": 0,  # on the disk
    }
    for kind, size in expected.items():
        corpus = read_corpus(changed(wiki, index=f"data/wiki-18/e5/{kind}"))
        assert (corpus.index_bytes, corpus.text_bytes) == (size, 0), kind
    held = read_corpus(changed(wiki, index=""))
    assert (held.index_bytes, held.text_bytes) == (expected["flat"], 14 * 10**9 + 200 * n)


def test_an_index_that_is_built_is_counted_by_its_manifest(tmp_path):
    config = parallel_tiny.get_config().retriever
    for kind, more in (("flat", []), ("ivf", ["--nlist=5"]), ("bm25", [])):
        encoder = [] if kind == "bm25" else ["--encoder=hashed", "--setting=dim=16"]
        build([f"--corpus={config.corpus}", f"--index={kind}", f"--out={tmp_path}", *encoder, *more])
    # What the configuration says besides is not what is opened.
    n, told = read_corpus(config).passages, {"corpus": "absent", "encoder": "", "dim": 512}
    sizes = {"flat": 64 * n, "ivf": (64 + 8) * n + 64 * 5, "bm25": 0}
    for kind, size in sizes.items():
        corpus = read_corpus(changed(config, index=str(tmp_path / kind), **told))
        assert (corpus.passages, corpus.index_bytes, corpus.text_bytes) == (n, size, 0), kind
        assert str(tmp_path / kind) in corpus.source


@pytest.mark.parametrize(
    ("leaves", "words"),
    [
        ({"mesh__fsdp": 3}, ["learner.micro_rows is 64", "mesh.fsdp is 3"]),
        ({"rollout__slots": 100}, ["rollout.slots is 100", "mesh.fsdp is 8"]),
        ({"machine__device": "abacus"}, ["machine.device", "'abacus'", "H100"]),
        ({"model__path": "abacus"}, ["abacus", "config.json", "qwen2.5-7b"]),
    ],
)
def test_what_can_be_no_run_is_told(leaves, words):
    with pytest.raises(UserError) as told:
        read_run(changed(parallel_base.get_config(), **leaves))
    assert all(word in str(told.value) for word in words), told.value


def test_a_mesh_that_the_model_does_not_allow_is_told(small):
    with pytest.raises(UserError, match=r"mesh.tp is 4, which does not divide 2"):
        by_compiler(dataclasses.replace(small, mesh=MeshConfig(1, 4)))


def test_memory_that_jax_takes(monkeypatch):
    config = parallel_base.get_config()
    assert plan.memory_fraction(config) == pytest.approx((79.6 - 3.5) / 79.6)
    shared = parallel_base.get_config()
    with shared.retriever.unlocked():
        shared.retriever.device = "gpu"
    index = 21015324 * 768 * 4 / 8 / GIB
    assert plan.memory_fraction(shared) == pytest.approx((79.6 - 3.5 - index) / 79.6)
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    plan.claim_memory(parallel_tiny.get_config())
    assert "XLA_CLIENT_MEM_FRACTION" not in os.environ
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    plan.claim_memory(config)
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.5"
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION")
    plan.claim_memory(config)
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.956"


# ---------------------------------------------------------------------------------------------------------- the page


def test_the_page_says_whether_it_fits_and_what_differs(base):
    ours = by_arithmetic(base)
    text = "\n".join(str(part) for part in page(Plan(base, ours, ours)))
    assert "FITS on H100" in text and "(*)" not in text and "NOT" not in text
    larger = dataclasses.replace(
        ours,
        parts=dict(ours.parts) | {"kept activations": 3 * ours.parts["kept activations"]},
        phases=dict(ours.phases) | {"update": ours.phases["update"] + 2 * ours.parts["kept activations"]},
    )
    text = "\n".join(str(part) for part in page(Plan(base, ours, larger)))
    assert "DOES NOT FIT on H100" in text and "(*) The columns differ by more than 20%" in text
    assert re.search(r"kept activations: 6.12 against 18.38", text)
    assert re.search(r"--config\.learner\.micro_rows=\d+ ", text)


def launch(*args, **more):
    command = [sys.executable, "launch.py", *args, "--plan"]
    env = os.environ | {"PYTHONPATH": ""}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, **more)


def test_the_command(tmp_path):
    done = launch("--config=configs/parallel_tiny.py:smoke", "--config.mesh.fsdp=2", f"--workdir={tmp_path}/work")
    assert done.returncode == 0, done.stderr
    for words in ("2 x H100", "policy, fp32", "FITS on H100", "3 steps of", "Assumed:", "Memory of the host"):
        assert words in done.stdout, words
    assert not (tmp_path / "work").exists()
    assert max(len(line) for line in done.stdout.splitlines()) < 180


def test_the_command_tells_a_bad_mesh_in_one_line():
    done = launch("--config=configs/parallel_tiny.py", "--config.mesh.tp=8")
    assert done.returncode != 0 and "Traceback" not in done.stderr + done.stdout
    assert "mesh.tp is 8" in done.stderr.strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["parallel_base", "parallel_grpo"])
def test_7b_fits_on_eight_cards_of_80_gb(name):
    """In at most 8 GB of this machine's memory."""
    code = (
        "import resource, sys, launch\n"
        "launch.parse(['launch.py', *sys.argv[1:]])\n"
        "from parasearch_jax import plan\n"
        "found = plan.print_plan(launch.CONFIG.value)\n"
        "assert found.room > 0, found.peak\n"
        "print('GB', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)"
    )
    command = [sys.executable, "-c", code, f"--config=configs/{name}.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "FITS on H100" in done.stdout
    assert float(re.search(r"GB ([\d.]+)", done.stdout)[1]) < 8
