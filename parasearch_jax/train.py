"""The training loop, top to bottom: rollout -> reward -> batch -> score -> update -> sync -> log -> eval -> save."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from parasearch_jax import rewards, rl
from parasearch_jax.checkpoint import Checkpoints
from parasearch_jax.data import Question, load_questions
from parasearch_jax.data.metrics import em
from parasearch_jax.errors import UserError
from parasearch_jax.evaluate import Subsets, evaluate, rollout_metrics
from parasearch_jax.models import load_model
from parasearch_jax.models.weights import save_model
from parasearch_jax.protocol import get_protocol
from parasearch_jax.report import write_report
from parasearch_jax.retrieval import open_retriever
from parasearch_jax.rl.optim import OptimConfig, make_optimizer
from parasearch_jax.rl.update import UpdateConfig, init_state, make_score, make_update
from parasearch_jax.rollout import Engine, Episode, RolloutConfig
from parasearch_jax.writers import (
    Console,
    MetricsWriter,
    episode_record,
    prepare_workdir,
    read_metrics,
    results_table,
    write_episodes,
    write_json,
)


def train(config: ConfigDict, reward_fn: Callable | None = None, workdir: str | Path | None = None) -> dict[str, Any]:
    """Evaluates, trains, evaluates again, and returns the content of results.json.

    `config` as configs/*.py make it. `reward_fn(episode, question) -> parts or (parts, steps)` takes the place of
    `config.reward` (a notebook's reward). `workdir` None: `runs/<name>/<time>`. Raises UserError for bad input.
    """
    start, timer = time.time(), Timer()

    # ---- Questions, reward, protocol, retriever, model: everything that can be wrong is read before the work begins.
    protocol = get_protocol(config.protocol.name, **_overrides(config.protocol))
    reward = rewards.make_reward(config.reward.to_dict()) if reward_fn is None else rewards.wrap(reward_fn)
    test_questions = load_questions(config.data.test)
    train_questions = load_questions(config.data.train) if config.train.steps else []
    reward.check(train_questions)
    _check_sizes(config, len(train_questions))
    model = load_model(config.model.path, dtype=config.model.dtype)
    workdir = prepare_workdir(workdir or Path("runs", config.name, time.strftime("%Y%m%d-%H%M%S")))
    write_json(workdir / "config.json", json.loads(config.to_json_best_effort()))
    console = Console(config.train.steps)
    console.print(f"{config.name}: {workdir}\n{reward.describe()}")
    retriever = open_retriever(config.retriever)

    # ---- Policy, optimizer, jitted functions. Configuration enters them as frozen dataclasses.
    rollout, grpo = RolloutConfig(**config.rollout, topk=config.retriever.topk), config.grpo
    updates = UpdateConfig(**config.learner, temperature=grpo.temperature)
    tx = make_optimizer(OptimConfig(**config.optimizer))
    state = init_state(model.params, tx)
    reference = model.params if updates.kl_coef else None
    score, update = make_score(model.config, updates), make_update(model.config, updates, tx)
    advantages = jax.jit(rl.grpo, static_argnames="std")
    engine = Engine(model, rollout, seed=config.seed)

    with contextlib.ExitStack() as stack:
        stack.callback(engine.close)
        stack.callback(retriever.close_sync)
        writer = stack.enter_context(contextlib.closing(MetricsWriter(workdir)))
        checkpoints = stack.enter_context(contextlib.closing(Checkpoints(workdir / "checkpoints")))
        stack.enter_context(console)

        # ---- Evaluation before training.
        evals: dict[str, Subsets] = {}
        first = "initial" if config.train.steps else "final"
        evals[first], before = _evaluate(engine, test_questions, protocol, retriever, workdir, first, console)
        after, memory = before, {}

        for step in range(1, config.train.steps + 1):
            # ---- Rollout: groups of episodes of one question, with the weights of the last sync.
            with timer("rollout"):
                drawn = draw(train_questions, config.seed, step - 1, grpo.questions)
                episodes = engine.rollout(
                    drawn, protocol, retriever, samples=grpo.samples, temperature=grpo.temperature, step=step
                )

            # ---- Reward, batch.
            with timer("reward"):
                scored = score_groups(reward, drawn, episodes, grpo.samples, memory)
                batch = rl.build_batch(episodes, scored, tuple(config.train.buckets), rows=updates.micro_rows)
                host_batch, batch = batch, jax.device_put(batch)

            # ---- Score: log-probs of the weights that the update starts from, and of the reference.
            with timer("score"):
                old, _ = score(state["params"], batch)
                ref = score(reference, batch)[0] if reference is not None else None
                advantage = advantages(batch.rewards, batch.policy_mask, batch.group, std=grpo.std)
                jax.block_until_ready((old, ref, advantage))

            # ---- Update, sync.
            with timer("update"):
                state, metrics = update(state, batch, advantage, old, ref)
                jax.block_until_ready(state)
            with timer("sync"):
                engine.sync(state["params"], version=step)

            # ---- Log.
            asked = [q for q in drawn for _ in range(grpo.samples)]
            line = {name: float(value) for name, value in metrics.items()}
            line |= reward_metrics(scored, host_batch) | rollout_metrics(episodes, asked, protocol)
            line |= engine_metrics(engine, rollout, timer.seconds) | timer.pop()
            writer.write(step, line)
            console.step(step, line)
            if step % config.train.episodes_every == 0:
                parts = [parts for parts, _ in scored]
                records = [episode_record(e, q, p) for e, q, p in zip(episodes, asked, parts, strict=True)]
                write_episodes(workdir / "episodes" / f"step_{step:06d}.jsonl", records)

            # ---- Evaluation and checkpoint.
            if step == config.train.steps:
                evals["final"], after = _evaluate(
                    engine, test_questions, protocol, retriever, workdir, "final", console
                )
            if step % config.train.save_every == 0 or step == config.train.steps:
                with timer("save"):
                    checkpoints.save(step, state, {"step": step, "seed": config.seed, "memory": memory})

        # ---- What is left of the run: model, results, report, table.
        if config.train.steps:
            save_model(workdir / "model", model.config, state["params"], model.tokenizer)
    results = {
        "config": config.name,
        "model": str(config.model.path),
        "method": config.method if reward_fn is None else reward.entry.name,
        "variant": config.reward.get("variant", "paper"),
        "retriever": retriever.info,
        "evals": evals,
        "seconds": time.time() - start,
    }
    write_json(workdir / "results.json", results)
    write_report(workdir, results, read_metrics(workdir), before if config.train.steps else (), after)
    console.print(results_table(evals.get("initial"), evals["final"]))
    console.print(f"{results['seconds']:.0f} s. Report: {workdir / 'report.md'}, {workdir / 'episodes.html'}")
    return results


def _check_sizes(config: ConfigDict, questions: int) -> None:
    """What would otherwise show only when a batch is drawn or an episode grows long."""
    if not config.train.steps:
        return
    if config.grpo.questions > questions:
        raise UserError(
            f"grpo.questions is {config.grpo.questions}, but {config.data.train} holds {questions} questions: lower it "
            "(a question asked twice in a step gives the same samples twice)"
        )
    if max(config.train.buckets) < config.rollout.max_total_tokens:
        raise UserError(
            f"train.buckets end at {max(config.train.buckets)}, but an episode may have rollout.max_total_tokens = "
            f"{config.rollout.max_total_tokens}: add a bucket of that size (episodes are never cut)"
        )


def draw(questions: Sequence[Question], seed: int, step: int, count: int) -> list[Question]:
    """The questions of a step, a function of (seed, step): every epoch is a permutation of its own, none is skipped."""
    places = range(step * count, (step + 1) * count)
    orders: dict[int, np.ndarray] = {}
    out = []
    for place in places:
        epoch, i = divmod(place, len(questions))
        if epoch not in orders:
            orders[epoch] = np.random.default_rng([seed, epoch]).permutation(len(questions))
        out.append(questions[orders[epoch][i]])
    return out


def score_groups(
    reward: rewards.Reward, questions: Sequence[Question], episodes: Sequence[Episode], samples: int, memory: dict
) -> list[tuple[dict[str, float], list[tuple[int, float]]]]:
    """(parts, steps) of every episode; `episodes` holds `samples` of each question in turn.

    `memory` belongs to group rewards, over the whole run.
    """
    scored = []
    for i, question in enumerate(questions):
        group = episodes[i * samples : (i + 1) * samples]
        scored += reward.score_group(group, question, memory)
    return scored


def reward_metrics(scored: Sequence[tuple[dict[str, float], Any]], batch: rl.Batch) -> dict[str, float]:
    """Means of the parts and of the total, and the share of groups in which all totals are equal (no gradient)."""
    names = list(dict.fromkeys(name for parts, _ in scored for name in parts))
    out = {f"reward/{name}": float(np.mean([parts.get(name, 0.0) for parts, _ in scored])) for name in names}
    totals = np.asarray(batch.rewards).sum(-1)[: len(scored)]
    groups = np.asarray(batch.group)[: len(scored)]
    flat = [np.ptp(totals[groups == g]) == 0 for g in np.unique(groups)]
    return out | {"reward/total": float(totals.mean()), "rollout/groups_without_spread": float(np.mean(flat))}


def engine_metrics(engine: Engine, rollout: RolloutConfig, seconds: dict[str, float]) -> dict[str, float]:
    """What the engine counted, and its occupancy: tokens kept / (decode steps x slots).

    Splits the phase "rollout" of `seconds` into prefill, decode, wait and schedule (what the host did in between).
    """
    stats = engine.pop_stats()
    phases = {phase: stats.pop(f"seconds/{phase}", 0.0) for phase in ("prefill", "decode", "wait")}
    seconds |= phases | {"schedule": seconds.pop("rollout") - sum(phases.values())}
    steps = stats.get("decode_steps", 0)
    return stats | {"rollout/occupancy": stats.get("tokens/sampled", 0) / max(steps * rollout.slots, 1)}


def _evaluate(engine, questions, protocol, retriever, workdir, name, console) -> tuple[Subsets, list[dict]]:
    subsets, episodes = evaluate(engine, questions, protocol, retriever)
    engine.pop_stats()
    records = [
        episode_record(e, q, em=em(e.answer, q.golden_answers)) for e, q in zip(episodes, questions, strict=True)
    ]
    write_episodes(workdir / "episodes" / f"{name}.jsonl", records)
    console.print(f"{name} evaluation: EM {100 * subsets['all']['em']:.1f} % of {len(questions)} questions")
    return subsets, records


def _overrides(section: ConfigDict) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key != "name" and value is not None}


class Timer:
    """Seconds of each phase since the last `pop`: `with timer("update"): ...`."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str):
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def pop(self) -> dict[str, float]:
        """{"seconds/update": ..., "seconds/total": their sum}."""
        seconds, self.seconds = self.seconds, {}
        return {f"seconds/{phase}": value for phase, value in seconds.items()} | {
            "seconds/total": sum(seconds.values())
        }
