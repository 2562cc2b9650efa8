"""benchmarks/gpu.py: that it runs, and that the figures of its roofline and utilisation are counted right."""

import dataclasses
import functools
import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import gpu
import gpu_parts
import gpu_sizes
from gpu_sizes import Card

from parasearch_jax.models import decoder
from parasearch_jax.models.attention import causal_attention
from parasearch_jax.models.shapes import named_shape
from parasearch_jax.plan.cost import decode_step_bytes
from parasearch_jax.rl.logprobs import sequence_logprobs
from parasearch_jax.rollout import kv_cache
from parasearch_jax.sharding.layout import to_sampler

SCRIPT = Path(gpu.__file__)
UNTIED = dataclasses.replace(gpu_sizes.TOY, num_layers=3)
TIED = dataclasses.replace(UNTIED, tie_word_embeddings=True)
B, T = 2, 96  # two blocks of attention


HALF = """
import os, sys, time
print('{"machine": {"backend": "gpu", "card": "x", "jax": "1"}, "planned": ["a", "b", "c"]}')
print('{"what": "a", "median": 1.0}')
print('library chatter')
print('{"what": "b"', end='', flush=True)
print('CHECK failed: cudnn', file=sys.stderr, flush=True)
"""


def product_flops(jaxpr) -> int:
    """2 m n k of every matrix product in a jaxpr, those in a scan times its length: an independent count."""
    total = 0
    for equation in jaxpr.eqns:
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in jaxprs_in_params(equation.params):
            total += times * product_flops(inner)
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            depth = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * depth * math.prod(equation.outvars[0].aval.shape)
    return total


def count(function, *args) -> int:
    return product_flops(jax.make_jaxpr(function)(*args).jaxpr)


def of_attention(cfg, backward: bool) -> int:
    """Of one layer by blocks, which computes more pairs than the mask leaves, and scores again in the backward pass."""
    q = jax.ShapeDtypeStruct((B, T, cfg.num_heads, cfg.head_dim), cfg.dtype)
    k = jax.ShapeDtypeStruct((B, T, cfg.num_kv_heads, cfg.head_dim), cfg.dtype)
    attend = functools.partial(causal_attention, kind="xla")
    if not backward:
        return count(attend, q, k, k)
    return count(jax.grad(lambda q, k, v: attend(q, k, v).astype(jnp.float32).sum(), (0, 1, 2)), q, k, k)


def all_pairs(cfg) -> int:
    """FLOPs of attention over every pair of tokens, one layer and forward: twice what stands for a causal mask."""
    return B * sum(2 * 2 * cfg.num_heads * cfg.head_dim for _ in range(T) for _ in range(T))


@pytest.mark.parametrize("cfg", [UNTIED, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_flops_of_an_update_are_the_products_of_forward_and_backward(cfg, remat):
    """Attention apart: by blocks it computes more pairs than the mask leaves, and in the backward pass scores again."""
    ids = jax.ShapeDtypeStruct((B, T), jnp.int32)

    def loss(params, ids, positions):
        return sequence_logprobs(params, cfg, ids, positions, 1.0, T, remat)[0].sum()

    counted = count(jax.grad(loss), decoder.param_shapes(cfg), ids, ids)
    blocks = of_attention(cfg, backward=True) + (remat == "full") * of_attention(cfg, backward=False)
    products = counted - cfg.num_layers * blocks
    halves = cfg.num_layers * all_pairs(cfg) / 2
    if remat == "full":
        made = products + 4 * halves
        assert made <= gpu_sizes.computed_flops(planned(cfg)) <= 1.05 * made
    else:  # logits are made again whatever remat says; MFU does not count that either
        logits_again = 2 * B * T * cfg.hidden_size * cfg.vocab_size
        assert gpu_sizes.model_flops(planned(cfg)) == products - logits_again + 3 * halves
    assert gpu_sizes.attention_flops(B, T, cfg.num_heads, cfg.head_dim) == all_pairs(cfg) / 2


def planned(cfg):
    """A run whose update has B rows of T tokens."""
    sizes = dataclasses.replace(gpu_sizes.SMOKE, rows=B, tokens=T, micro_batches=1)
    return gpu_sizes.plan_run(cfg, sizes, B)


def test_flops_agree_with_the_compiler():
    """XLA's own count of the forward pass, which adds what is no product: some per cent."""
    cfg = dataclasses.replace(UNTIED, hidden_size=128, intermediate_size=384, head_dim=32)
    params = jax.eval_shape(to_sampler, decoder.param_shapes(cfg))
    ids = jax.ShapeDtypeStruct((B, T), jnp.int32)

    def forward(params, ids, positions):
        attend = lambda _, q, k, v: causal_attention(q, k, v, "xla")  # noqa: E731
        return decoder.logits(params, cfg, decoder.forward_layers(params, cfg, ids, positions, attend))

    compiled = jax.jit(forward).lower(params, ids, ids).compile().cost_analysis()["flops"]
    blocks = cfg.num_layers * (of_attention(cfg, backward=False) - all_pairs(cfg) / 2)
    ours = gpu_sizes.model_flops(planned(cfg)) / 3 + blocks
    assert ours <= compiled <= 1.1 * ours


def test_bytes_of_a_decode_step():
    """Of the arrays themselves: all weights but a lookup in the embedding, and half of the cells."""
    for cfg in (named_shape("qwen2.5-1.5b"), named_shape("qwen2.5-7b")):
        params = jax.eval_shape(functools.partial(to_sampler, dtype="bfloat16"), decoder.param_shapes(cfg))
        cache = jax.eval_shape(lambda cfg=cfg: kv_cache.init_cache(cfg, 32, 4096))
        nbytes = lambda tree: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))  # noqa: E731
        lookup = 0 if cfg.tie_word_embeddings else nbytes(params["embed"])
        held = nbytes(params) - lookup + nbytes(cache) / 2
        read = decode_step_bytes(gpu_sizes.plan_run(cfg, gpu_sizes.FULL, rows=8))
        assert read == pytest.approx(held, rel=1e-3)  # without norms and biases
    assert nbytes(cache) == 57_344 * 32 * 4096  # 7B: bytes of a token, as Qwen2.5's config.json has them


def test_run_that_fits():
    small, large = named_shape("qwen2.5-1.5b"), named_shape("qwen2.5-7b")
    fit = lambda cfg, gib: gpu_sizes.run_that_fits(cfg, gpu_sizes.FULL, gib * 2**30)  # noqa: E731
    whole = fit(large, 1000)
    assert (whole.learner.micro_rows, whole.model, whole.rows) == (8, large, 16)
    assert fit(small, 73.5).model == small
    assert fit(large, 16) is None  # the embedding and the head alone take more
    depths = [fit(large, gib).model.num_layers for gib in range(40, 240, 8)]
    assert depths == sorted(depths) and depths[0] < 4 and depths[-1] == 28
    for gib in (40, 73.5, 129):
        run = fit(large, gib)
        longer = dataclasses.replace(large, num_layers=run.model.num_layers + 1)
        more = gpu_sizes.plan_run(longer, gpu_sizes.FULL, run.learner.micro_rows)
        assert gpu_sizes.train_bytes(run) <= 0.95 * gib * 2**30 < gpu_sizes.train_bytes(more)


def test_a_card_is_known_by_its_name():
    device = lambda kind: type("Device", (), {"device_kind": kind, "memory_stats": lambda self: None})()  # noqa: E731
    peaks = {
        "NVIDIA H100 80GB HBM3": (989, 3350),
        "NVIDIA H100 PCIe": (756, 2000),
        "NVIDIA H200": (989, 4800),
        "NVIDIA A100-SXM4-40GB": (312, 1555),
        "NVIDIA A100-SXM4-80GB": (312, 2040),
        "NVIDIA L4": (121, 300),
        "NVIDIA L40S": (362, 864),
    }
    for kind, (tflops, bandwidth) in peaks.items():
        card = Card.of(device(kind))
        assert (card.peak, card.bandwidth) == pytest.approx((tflops * 1e12, bandwidth * 1e9)), kind
    assert Card.of(device("NVIDIA GH200 480GB")).peak is None  # not taken for an H200
    card = Card.of(device("NVIDIA H200"))
    assert card.utilisation(989e12, 2.0) == "50.0 % of 989 TFLOP/s"
    assert card.roofline(4.8e9, 2e-3) == "at least 1.00 ms at 4800 GB/s: 50 %"


@pytest.mark.parametrize(("until", "n"), [(math.inf, 5), (0.0, 1)], ids=["time left", "none left"])
def test_measurements_stop_when_the_time_is_over(until, n):
    calls = []
    row = gpu_parts.measure(lambda: calls.append(0), until, repeats=5, calls=3)
    assert row["n"] == n and len(calls) == 2 + 3 * n  # the first compiles, the second is not counted either
    assert row["lowest"] <= row["median"] <= row["highest"]


@pytest.mark.parametrize(("causal", "agrees"), [(True, True), (False, False)], ids=["right", "no mask"])
def test_a_wrong_cudnn_is_noticed(monkeypatch, causal, agrees):
    """JAX's own attention in the place of cuDNN's, with and without its mask."""

    def attend(q, k, v, kind):
        return ours(q, k, v, kind) if kind == "xla" else jax.nn.dot_product_attention(q, k, v, is_causal=causal)

    ours = causal_attention
    monkeypatch.setattr(gpu_parts, "causal_attention", attend)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    card = Card("NVIDIA H200", 1e11, 989e12, 4.8e12)
    for direction in ("forward", "forward+backward"):
        part = functools.partial(gpu_parts._attention, gpu_sizes.SMOKE, card, 64, direction, xla={}, until=0.0)
        part("xla")
        row = part("cudnn")
        assert row["agrees"] == agrees and ("DO NOT AGREE" in row["note"]) != agrees, row
        assert gpu.cudnn_fails([{"part": "attention", "what": f"T 64, {direction}, cudnn", **row}]) != agrees


def test_fewer_layers_where_the_card_is_full(monkeypatch):
    tried = []

    def update(run, sizes, card, whole, until):
        tried.append(run.model.num_layers)
        if run.model.num_layers > 15:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return {"layers": run.model.num_layers}

    monkeypatch.setattr(gpu_parts, "_update", update)
    card = Card("x", 129 * 2**30, None, None)
    row = gpu_parts._train(gpu_sizes.FULL, card, named_shape("qwen2.5-7b"), 0.0)
    assert row == {"layers": 15} and len(tried) == 2


@pytest.mark.slow
def test_every_part_runs_with_toy_shapes(tmp_path):
    out = tmp_path / "deep" / "gpu.md"
    command = [sys.executable, str(SCRIPT), "--smoke", f"--out={out}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.with_suffix(".jsonl").read_text().splitlines()]
    assert [row["part"] for row in rows] == ["attention"] * 4 + ["decode", "train", "run"], rows
    for row in rows:
        assert "cudnn" in row["what"] or row["lowest"] <= row["median"] <= row["highest"], row
        assert row["machine"]["jax"] == jax.__version__
    assert [row["note"] for row in rows if "cudnn" in row["what"]] == ["needs a GPU"] * 2
    lines = out.read_text().splitlines()
    assert len({line.count("|") for line in lines[2:]}) == 1 and len(lines) == 4 + len(rows)
    assert out.read_text().strip() in done.stdout


def test_a_part_without_time_is_named(tmp_path):
    out = tmp_path / "gpu.md"
    command = [sys.executable, str(SCRIPT), "--smoke", "--seconds=0", f"--out={out}"]
    assert subprocess.run(command, timeout=60).returncode == 1  # no figure at all
    rows = [json.loads(line) for line in out.with_suffix(".jsonl").read_text().splitlines()]
    assert [(row["part"], row["note"]) for row in rows] == [(p, "skipped: no time was left") for p in gpu.SHARES]


def test_without_a_gpu_one_line_says_so(tmp_path):
    command = [sys.executable, str(SCRIPT), f"--out={tmp_path / 'gpu.md'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "sees no GPU" in done.stderr and "--smoke" in done.stderr
    assert not (tmp_path / "gpu.md").exists()


@pytest.mark.parametrize(
    ("end", "seconds", "reason"),
    [
        ("os.abort()", 30.0, "failed: the process ended with -6: CHECK failed: cudnn"),
        ("time.sleep(60)", 1.0, "skipped: the part's 1 s were over"),
    ],
)
def test_a_part_that_is_cut_off_leaves_its_rows(tmp_path, monkeypatch, end, seconds, reason):
    """And what it had planned gets a row that says why."""
    (tmp_path / "gpu_parts.py").write_text(HALF + end)
    monkeypatch.setattr(gpu, "__file__", str(tmp_path / "gpu.py"))
    machine, rows, log = gpu.run_part("attention", seconds, [])
    assert machine["card"] == "x" and "CHECK failed" in log
    assert [row["what"] for row in rows] == ["a", "b", "c"] and rows[0]["median"] == 1.0
    assert [row["note"] for row in rows[1:]] == [reason] * 2


def test_a_wrong_or_failed_cudnn_is_not_trained_with():
    row = {"part": "attention", "what": "T 512, forward, cudnn"}
    assert not gpu.cudnn_fails([row | {"median": 1.0, "agrees": True}])
    assert gpu.cudnn_fails([row | {"median": 1.0, "agrees": False}])
    assert gpu.cudnn_fails([row | {"note": "failed: no valid engine"}])
