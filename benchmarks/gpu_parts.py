"""The parts of benchmarks/gpu.py, each run as a process of its own.

Axes: B rows, T tokens, N heads, K kv-heads, H head dim.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import gc
import importlib.metadata
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from gpu_sizes import (
    FULL,
    SMOKE,
    Card,
    Sizes,
    attention_flops,
    computed_flops,
    model_flops,
    plan_run,
    run_that_fits,
    train_bytes,
)

from parasearch_jax import rl
from parasearch_jax.models import decoder
from parasearch_jax.models.attention import causal_attention
from parasearch_jax.models.decoder import DecoderConfig
from parasearch_jax.plan.cost import decode_step_bytes
from parasearch_jax.plan.run import Run
from parasearch_jax.rl.learner import make_learner
from parasearch_jax.rollout import sampler
from parasearch_jax.rollout.stops import Stops
from parasearch_jax.sharding import rules
from parasearch_jax.sharding.layout import to_sampler
from parasearch_jax.sharding.mesh import MeshConfig, make_mesh

# ---------------------------------------------------------------------------------------------------------- measurement


def measure(once: Callable, until: float, repeats: int, per: int = 1, calls: int = 1) -> dict:
    """Milliseconds of `once() -> arrays` divided by `per`: {"unit", "median", "lowest", "highest", "n", "first"}.

    The first call compiles ("first", seconds), the second is not counted either. Then up to `repeats` measurements of
    `calls` calls in a row, as many as end before `until` (time.time), but one at least.
    """
    start = time.perf_counter()
    jax.block_until_ready(once())
    first = time.perf_counter() - start
    jax.block_until_ready(once())
    values = []
    while not values or (len(values) < repeats and time.time() + values[-1] * calls * per / 1e3 < until):
        start = time.perf_counter()
        for _ in range(calls):
            out = once()
        jax.block_until_ready(out)
        values.append(1e3 * (time.perf_counter() - start) / calls / per)
    figures = {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
    return {"unit": "ms", **figures, "n": len(values), "first": first}


# ------------------------------------------------------------------------------------------------------------ the parts
#
# A part yields (what, function(until) -> row). An exception becomes the row; its arrays are gone before the next one.


# Of the largest value. In bf16 `causal_attention` and JAX's own attention lie 0.006 apart on a CPU; a scale 3 % wrong
# gives 0.04, a mask off by one or a query that reads a wrong head above 0.5.
TOLERANCE = 0.02


def attention(sizes: Sizes, card: Card) -> Iterator[tuple[str, Callable]]:
    for T in sizes.lengths:
        for direction in ("forward", "forward+backward"):
            xla: dict = {}  # the result that cuDNN's is compared with
            for kind in ("xla", "cudnn"):
                what = f"T {T}, {direction}, {kind}"
                yield what, functools.partial(_attention, sizes, card, T, direction, kind, xla)


def _attention(sizes: Sizes, card: Card, T: int, direction: str, kind: str, xla: dict, until: float) -> dict:
    if kind == "cudnn" and jax.default_backend() != "gpu":
        return {"note": "needs a GPU"}
    N, K, H = sizes.heads
    B = sizes.attention_tokens // T
    shapes = [(B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H)]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    q, k, v, d = (jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, shapes, strict=True))
    attend = functools.partial(causal_attention, kind=kind)

    def backward(q, k, v, d):
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(d)

    forward = direction == "forward"
    run = jax.jit(lambda q, k, v, d: (attend(q, k, v),)) if forward else jax.jit(backward)
    row = measure(lambda: run(q, k, v, d), until, sizes.repeats, calls=sizes.calls)
    flops = attention_flops(B, T, N, H) * (1 if forward else 3)
    note = [f"B {B}, N {N}, K {K}, H {H}, bf16", card.utilisation(flops, row["median"] / 1e3)]
    result = [np.asarray(x, np.float32) for x in run(q, k, v, d)]
    if kind == "xla":
        xla |= {"result": result, "median": row["median"]}
    elif xla:
        apart = max(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(result, xla["result"], strict=True))
        row |= {"ratio": xla["median"] / row["median"], "apart": float(apart), "agrees": bool(apart < TOLERANCE)}
        verdict = "agree" if row["agrees"] else "DO NOT AGREE"
        note.append(f"{row['ratio']:.2f} times as fast as xla; they {verdict}: {apart:.2g} of the largest value apart")
    else:
        row["agrees"] = True
        note.append("nothing to compare with: xla failed")
    return row | {"note": "; ".join(note)}


def decode(sizes: Sizes, card: Card) -> Iterator[tuple[str, Callable]]:
    for name, cfg in sizes.models:
        yield f"{name}, {sizes.slots} slots, a step", functools.partial(_decode, sizes, card, cfg)


def _decode(sizes: Sizes, card: Card, cfg: DecoderConfig, until: float) -> dict:
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    shapes = jax.eval_shape(functools.partial(to_sampler, dtype=cfg.dtype), decoder.param_shapes(cfg))
    params = jax.device_put(random_like(shapes), rules.sampler_shardings(shapes, mesh))
    state = sampler.init_state(cfg, sizes.slots, sizes.cells, mesh)
    cache = jax.device_put(random_like(state.cache), sampler.state_shardings(cfg, mesh).cache)
    state = dataclasses.replace(state, cache=cache)
    read = decode_step_bytes(plan_run(cfg, sizes, sizes.rows))
    table = Stops(jnp.zeros(cfg.vocab_size, jnp.int32), jnp.zeros((2, 1), jnp.int16))  # no token ends a turn
    settings = {"cfg": cfg, "steps": sizes.steps, "read": sizes.window, "truncated": False, "mesh": mesh}

    def once():
        """A chunk that ends with the window full; the state is donated, so it goes round."""
        nonlocal state
        fresh = lambda value: jnp.full(sizes.slots, value)  # noqa: E731
        start = fresh(jnp.int32(sizes.window - sizes.steps))
        state = dataclasses.replace(state, length=start, left=fresh(jnp.int32(sizes.cells)), active=fresh(True))
        state, out = sampler.decode_chunk(params, state, table, **settings)
        return out

    row = measure(once, until, sizes.repeats, per=sizes.steps)
    out = once()
    if int(out["steps"].sum()) != sizes.steps or not np.isfinite(np.asarray(out["logprobs"])).all():
        raise RuntimeError(f"{out['steps']} steps of {sizes.steps}, log-probs {out['logprobs']}: not a decode step")
    note = f"{sizes.window:,} of {sizes.cells:,} cells, chunks of {sizes.steps}, reads {read / 1e9:.1f} GB; "
    return row | {"bytes": read, "note": note + card.roofline(read, row["median"] / 1e3)}


def random_like(shapes):
    """Arrays of these shapes and dtypes: matrices normal(0, 0.02), norm scales 1. One at a time, so that no second copy
    of the model in fp32 is ever there."""

    @functools.partial(jax.jit, static_argnames=("shape", "dtype"))
    def normal(key, *, shape, dtype):
        return 0.02 * jax.random.normal(key, shape, dtype)

    def one(path, leaf):
        if getattr(path[-1], "key", "") == "scale":
            return jnp.ones(leaf.shape, leaf.dtype)
        return normal(
            jax.random.key(zlib.crc32(jax.tree_util.keystr(path).encode())), shape=leaf.shape, dtype=leaf.dtype
        )

    return jax.tree_util.tree_map_with_path(one, shapes)


def train(sizes: Sizes, card: Card) -> Iterator[tuple[str, Callable]]:
    for name, cfg in sizes.models:
        cfg = dataclasses.replace(cfg, attention=sizes.attention)
        yield f"{name} shape, a step", functools.partial(_train, sizes, card, cfg)


def _train(sizes: Sizes, card: Card, cfg: DecoderConfig, until: float) -> dict:
    """As many layers as fit; when the arithmetic was too hopeful, fewer."""
    run = run_that_fits(cfg, sizes, card.memory)
    if run is None:
        return {"note": f"skipped: not one layer with its embedding fits in {card.memory / 2**30:.0f} GiB"}
    for share in (1.0, 0.75, 0.5):
        layers = max(1, int(share * run.model.num_layers))
        shorter = dataclasses.replace(run, model=dataclasses.replace(cfg, num_layers=layers))
        try:
            return _update(shorter, sizes, card, cfg.num_layers, until)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            print(f"{layers} layers: {error}", file=sys.stderr)
        gc.collect()
    raise MemoryError(f"out of memory even with {layers} of {cfg.num_layers} layers")


def _update(run: Run, sizes: Sizes, card: Card, whole: int, until: float) -> dict:
    cfg, mesh = run.model, make_mesh(run.mesh, jax.devices()[:1])
    learner = make_learner(cfg, run.algorithm, run.learner, run.optimizer, mesh=mesh)
    state = learner.init(jax.jit(decoder.init, static_argnums=0)(cfg, jax.random.key(0)))
    host_batch = random_batch(cfg, run.rows, run.tokens)
    batch, cut = rl.put_batch(host_batch, mesh), learner.cut(host_batch.lengths)
    scores, metrics = {"old": batch.logprobs}, {}

    def once():
        nonlocal state, metrics
        state, metrics = learner.update(state, batch, cut, scores)  # donates the state, so it goes round
        return state, metrics

    row = measure(once, until, sizes.repeats)
    if not math.isfinite(metrics["loss"]) or int(metrics["skipped"]):
        raise RuntimeError(f"the loss is {metrics['loss']}, {metrics['skipped']} updates were refused")
    seconds, peak = row["median"] / 1e3, (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    depth = "all" if cfg.num_layers == whole else cfg.num_layers
    note = [
        f"{depth} of {whole} layers, {sizes.micro_batches} x {run.learner.micro_rows} rows of {run.tokens:,} tokens",
        f"MFU {card.utilisation(model_flops(run), seconds)}, what remat makes again not counted",
        f"counted, as plans do: {card.utilisation(computed_flops(run), seconds)}",
        f"{run.rows * run.tokens / seconds:,.0f} tokens/s, attention {cfg.attention}",
    ]
    if peak:
        note.append(f"at most {peak / 2**30:.1f} GiB, {train_bytes(run) / 2**30:.1f} by the plan's arithmetic")
    counts = {"layers": cfg.num_layers, "model_flops": model_flops(run), "computed_flops": computed_flops(run)}
    return row | counts | {"peak_bytes": peak, "note": "; ".join(note)}


def random_batch(cfg: DecoderConfig, B: int, T: int) -> rl.Batch:
    """Full rows; the policy sampled their second half. The old log-probs are those of untrained weights, all tokens
    alike, so that ratios are near 1."""
    rng, vocabulary = np.random.default_rng(0), cfg.vocab_used or cfg.vocab_size
    mask = np.zeros((B, T), np.float32)
    mask[:, T // 2 :] = 1
    rewards = np.zeros((B, T), np.float32)
    rewards[:, -1] = rng.random(B)
    return rl.Batch(
        ids=rng.integers(0, vocabulary, (B, T)).astype(np.int32),
        positions=np.tile(np.arange(T, dtype=np.int32), (B, 1)),
        policy_mask=mask,
        logprobs=-math.log(vocabulary) * mask,
        rewards=rewards,
        lengths=np.full(B, T, np.int32),
        group=np.arange(B, dtype=np.int32) // 2,
        version=np.zeros(B, np.int32),
        truncated=np.zeros(B, bool),
    )


def run(sizes: Sizes, card: Card) -> Iterator[tuple[str, Callable]]:
    yield "parallel_tiny, 2 steps", lambda until: _run()


def _run() -> dict:
    """Few slots and lengths, so that few programs are compiled."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "configs"))
    import parallel_tiny

    from parasearch_jax.train import train

    config = parallel_tiny.get_config("smoke")
    config.train.steps, config.train.buckets = 2, (192,)
    config.rollout.update(slots=8, max_total_tokens=192)
    config.algorithm.update(questions=2, samples=4)
    config.learner.micro_rows = 8
    with tempfile.TemporaryDirectory() as folder:
        questions = Path(config.data.test).read_text().splitlines()
        config.data.test = str(Path(folder, "test.jsonl"))
        Path(config.data.test).write_text("\n".join(questions[:: len(questions) // 8]))
        start = time.perf_counter()
        with contextlib.redirect_stdout(sys.stderr):
            results = train(config, workdir=Path(folder, "work"))
        seconds = time.perf_counter() - start
        steps = [json.loads(line) for line in Path(folder, "work", "metrics.jsonl").read_text().splitlines()]
    losses, gap = [step["loss"] for step in steps], max(step["gap_max"] for step in steps)
    if not all(map(math.isfinite, (*losses, gap))):
        raise RuntimeError(f"losses {losses}, gap {gap}: not finite")
    exact = results["evals"]["initial"]["all"]
    note = [
        f"losses {', '.join(f'{loss:.4f}' for loss in losses)}",
        f"sampler and trainer at most {gap:.2g} apart (log p)",
        f"EM {100 * exact['em']:.0f} % of {exact['n']} questions before training",
    ]
    return {"unit": "s", "median": seconds, "lowest": seconds, "highest": seconds, "n": 1, "note": "; ".join(note)}


# ---------------------------------------------------------------------------------------------------------- the process

PARTS = {"attention": attention, "decode": decode, "train": train, "run": run}


def machine(device: jax.Device) -> dict:
    """Card, driver, date and versions."""
    packages = {p.metadata["Name"].lower(): p.version for p in importlib.metadata.distributions() if p.metadata["Name"]}
    cudnn = [f"{name} {version}" for name, version in packages.items() if name.startswith("nvidia-cudnn")]
    return {
        "card": device.device_kind,
        "backend": jax.default_backend(),
        "driver": driver(),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="minutes"),
        "jax": jax.__version__,
        "jaxlib": packages.get("jaxlib", "unknown"),
        "cuda": " ".join(device.client.platform_version.split()),
        "cudnn": ", ".join(sorted(cudnn)) or "no package",
        "python": sys.version.split()[0],
    }


def driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        return told.split("\n")[0].strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"


def say(line: dict) -> None:
    print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--end", type=float, required=True, help="time.time() at which it is ended")
    parser.add_argument("--attention", help="of the train step, where cuDNN's fails")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    sizes = SMOKE if args.smoke else FULL
    sizes = dataclasses.replace(sizes, attention=args.attention or sizes.attention)
    device = jax.devices()[0]
    items = list(PARTS[args.part](sizes, Card.of(device)))
    say({"machine": machine(device), "planned": [what for what, _ in items]})
    if jax.default_backend() != "gpu" and not args.smoke:
        return
    for i, (what, function) in enumerate(items):
        until = time.time() + (args.end - time.time()) / (len(items) - i)
        try:
            row = function(until)
        except Exception as error:  # whatever it is, it is this row's result, and the others are still wanted
            print(f"{what}: {error}", file=sys.stderr)
            row = {"note": f"failed: {type(error).__name__}: {str(error)[:300]}"}
        say({"what": what, **row})
        gc.collect()


if __name__ == "__main__":
    main()
