"""Our side of benchmarks/train_step.py: score and update by rl.learner, as train.py calls them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scripted_search
from train_step_job import ADAM, CLIP, CLIP_NORM, KL, REWARD_KL, VALUE_CLIP, Job

from parasearch_jax import rl
from parasearch_jax.models import load_model
from parasearch_jax.rl.learner import AlgorithmConfig, make_learner
from parasearch_jax.rl.logprobs import sequence_logprobs
from parasearch_jax.rl.optim import OptimConfig
from parasearch_jax.rl.update import UpdateConfig
from parasearch_jax.rollout import Engine
from parasearch_jax.rollout.types import Episode, Segment
from parasearch_jax.sharding.mesh import MeshConfig, make_mesh

MICRO_ROWS = 2
CHUNK = 96  # tokens of a row whose logits exist at one time; they are computed again in the backward pass
LOSSES = ("loss", "kl", "critic/loss")  # metrics that both sides must agree on, where they are there


def episodes(job: Job, grouped: bool) -> list[Episode]:
    """The job's rows, of one question or each of its own."""
    out, rng = [], np.random.default_rng(3)
    for b, (ids, row) in enumerate(zip(job.ids(), job.segments(), strict=True)):
        ends, parts = np.cumsum([n for _, n in row]), []
        for (source, n), end in zip(row, ends, strict=True):
            logprobs = tuple((-rng.random(n)).tolist()) if source == "policy" else None
            parts.append(Segment(source, "", tuple(ids[end - n : end].tolist()), logprobs))
        out.append(Episode(parts, question_id="one" if grouped else f"question {b}", sample=b if grouped else 0))
    return out


def build_batch(job: Job, grouped: bool) -> rl.Batch:
    rewards = [({"total": float(r)}, None) for r in job.rewards()]
    return rl.build_batch(episodes(job, grouped), rewards, job.tokens)


def rl_step(directory: str, case: str, job: Job, micro_rows: int = MICRO_ROWS, chunk: int = CHUNK) -> Callable:
    """`step() -> (losses, {part: seconds})` of a case, "grpo" or "ppo", on the model in `directory`."""
    ppo = case == "ppo"
    mesh = make_mesh(MeshConfig())
    model = load_model(directory, mesh)
    questions, samples = (job.rows, 1) if ppo else (1, job.rows)
    reward_kl, kl = (REWARD_KL, 0.0) if ppo else (0.0, KL)
    algorithm = AlgorithmConfig(case, questions, samples, value_clip=VALUE_CLIP, reward_kl=reward_kl)
    micro = {"micro_rows": micro_rows, "logprob_chunk": chunk}
    ucfg = UpdateConfig(clip_low=CLIP, clip_high=CLIP, kl_coef=kl, buckets=(job.tokens,), **micro)
    optimizer = OptimConfig(ADAM["lr"], weight_decay=ADAM["decay"], clip_norm=CLIP_NORM, b1=ADAM["b1"], b2=ADAM["b2"])
    learner = make_learner(model.config, algorithm, ucfg, optimizer, optimizer, mesh)
    return stepping(learner, model.params, build_batch(job, grouped=not ppo), mesh)


def stepping(learner, params, host_batch: rl.Batch, mesh) -> Callable:
    """As train.py, from the batch to the new state; the same batch in every step."""
    state, reference = learner.init(params), learner.reference(params)
    batch, cut = rl.put_batch(host_batch, mesh), learner.cut(host_batch.lengths)

    def step():
        nonlocal state
        start = time.perf_counter()
        scores, _ = jax.block_until_ready(learner.score(state, batch, cut, reference))
        scored = time.perf_counter()
        state, metrics = jax.block_until_ready(learner.update(state, batch, cut, scores))
        seconds = {"score": scored - start, "update": time.perf_counter() - scored}
        return [float(metrics[name]) for name in LOSSES if name in metrics], seconds

    return step


def plain(directory: str, job: Job) -> Callable:
    """The same of a next-token step."""
    model = load_model(directory)
    cfg, ids = model.config, jnp.asarray(job.ids())
    positions = jnp.broadcast_to(jnp.arange(job.tokens), ids.shape)
    tx = optax.adamw(ADAM["lr"], ADAM["b1"], ADAM["b2"], weight_decay=ADAM["decay"])

    def loss_of(params):
        logprobs, _ = sequence_logprobs(params, cfg, ids, positions, 1.0, CHUNK)
        return -logprobs.sum() / (job.rows * (job.tokens - 1))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params, opt):
        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, loss

    state = [jax.device_put(model.params), tx.init(model.params)]

    def step():
        start = time.perf_counter()
        *state[:], loss = jax.block_until_ready(update(*state))
        return [float(loss)], {"update": time.perf_counter() - start}

    return step


# -------------------------------------------------------------------------------------------------------- small world


def small_world(padded: bool, questions: int = 32) -> tuple[Callable, int]:
    """The step of configs/parallel_tiny.py on episodes that its base samples, and their tokens. With its train.buckets,
    or `padded` to the largest of them."""
    work = scripted_search.small_world(questions, deterministic=True)
    config = scripted_search.tiny_config()
    algorithm = AlgorithmConfig(**dict(config.algorithm) | {"questions": questions})
    buckets = tuple(sorted(config.train.buckets))[-1 if padded else 0 :]
    ucfg = UpdateConfig(**config.learner, buckets=buckets, temperature=algorithm.temperature)
    mesh = make_mesh(MeshConfig(**config.mesh))
    learner = make_learner(work.model.config, algorithm, ucfg, OptimConfig(**config.optimizer), mesh=mesh)
    engine = Engine(work.model, work.config, seed=config.seed)
    how = {"samples": algorithm.samples, "temperature": algorithm.temperature}
    sampled = engine.rollout(work.questions, work.protocol, work.retriever, **how)
    engine.close()
    rewards = np.random.default_rng(2).random(len(sampled))
    batch = rl.build_batch(sampled, [({"total": float(r)}, None) for r in rewards], max(buckets))
    return stepping(learner, work.model.params, batch, mesh), int(batch.lengths.sum())
