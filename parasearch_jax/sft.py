"""Supervised fine-tuning on stored episodes, top to bottom: load -> evaluate -> draw, batch -> update -> log -> save ->
evaluate. For warm starts, and as the baseline next to RL (R1-Searcher's SFT, Search-R1's rejection sampling).

The loss is on what the policy said; prompt, documents and notices are read and not learned, unless
`algorithm.mask_documents` is False (the ablation).

Stored episodes hold texts. A row has the prompt that this model gets for the question (the configuration's protocol,
the model's chat template), and behind it every segment's text, encoded by itself as a rollout does with documents. So
episodes of another model can be learned from. Ids differ from the sampled ones where a model spelt a text otherwise
than its tokenizer would; and an end token, which no text shows, is not learned (turns end by their closing tags).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from parasearch_jax import hosts, resume, rl
from parasearch_jax.data import Question
from parasearch_jax.data.drawing import draw
from parasearch_jax.errors import UserError
from parasearch_jax.evaluate import Evaluations, due_evaluations, load_held_out
from parasearch_jax.guards import Guard, GuardConfig
from parasearch_jax.models import load_model
from parasearch_jax.preflight import preflight
from parasearch_jax.protocol import Protocol, get_protocol
from parasearch_jax.retrieval import open_retriever
from parasearch_jax.rl.learner import AlgorithmConfig, make_learner
from parasearch_jax.rl.optim import OptimConfig
from parasearch_jax.rl.update import UpdateConfig
from parasearch_jax.rollout import Engine, Episode, RolloutConfig, Segment
from parasearch_jax.sharding.mesh import MeshConfig, make_mesh
from parasearch_jax.stored import read_stored
from parasearch_jax.train import Timer, finish, finished, overrides, profiled
from parasearch_jax.workdir import Workdir
from parasearch_jax.writers import Console


class Phases(Timer):
    """Those of a step here."""

    PHASES = ("batch", "update", "sync", "save")


def finetune(config: ConfigDict, workdir: str | Path | None = None, profile: int | None = None) -> dict[str, Any]:
    """Evaluates, learns from `data.episodes`, evaluates again, and returns the content of results.json.

    A step learns from `algorithm.questions` episodes; `train.steps` of them make any number of epochs. Work directory,
    resuming, SIGTERM, several hosts and errors are as in `train.train`.
    """
    steps, timer = config.train.steps, Phases()

    # ---- Episodes, protocol, model: everything that can be wrong is read before the work begins.
    with hosts.together():
        resume.check_hosts(resume.describe(config))
        preflight(config)
        protocol = get_protocol(config.protocol.name, **overrides(config.protocol))
        if protocol.documents_first:
            raise UserError(
                f"protocol {protocol.name!r} has documents in its prompt, into which no stored ones are put: learn "
                "from episodes of another protocol"
            )
        held_out = load_held_out(config)
        records = read_stored(config.data.episodes) if steps else []
        _check_settings(config, records, held_out, profile)
        mesh = make_mesh(MeshConfig(**config.mesh))
    with hosts.together():
        model = load_model(config.model.path, mesh, config.model.dtype)

    with contextlib.ExitStack() as stack:
        path = workdir or hosts.from_first(lambda: f"runs/{config.name}-{time.strftime('%Y%m%d-%H%M%S')}")
        work = stack.enter_context(Workdir(path, config))
        stack.enter_context(hosts.lost_is_told())
        console = Console(steps, quiet=not hosts.is_first())
        console.print(f"{config.name}: {work.path}")
        with hosts.together():
            retriever = open_retriever(config.retriever)
        stack.callback(retriever.close_sync)

        # ---- Policy, optimizer, jitted functions; the engine is there for the evaluations, and encodes as they will.
        rollout = RolloutConfig(**config.rollout, topk=config.retriever.topk)
        algorithm, buckets = AlgorithmConfig(**config.algorithm), tuple(sorted(config.train.buckets))
        updates = UpdateConfig(**config.learner, buckets=buckets, temperature=algorithm.temperature)
        learner = make_learner(model.config, algorithm, updates, OptimConfig(**config.optimizer), mesh=mesh)
        engine = Engine(model, rollout, seed=config.seed, mesh=mesh)
        stack.callback(engine.close)
        with hosts.together():
            episodes = [to_episode(record, engine, protocol) for record in records]
            rows = [rl.make_row(episode, ({}, ())) for episode in episodes]
            _check_lengths(rows, max(buckets))
        if steps:
            console.print(_describe(rows, records, episodes, steps, algorithm.questions))

        # ---- Where the run stands: at its last complete checkpoint, or at step 0.
        state, start, _ = work.restore(
            learner.shapes, lambda: learner.init(model.params) if steps else {"actor": {"params": model.params}}
        )
        model.params = None  # state and engine have their own
        if (results := work.results()) is not None:
            return finished(work, results, console)
        if start:
            engine.sync(state["actor"]["params"], version=start)
            console.print(f"goes on behind step {start}")
        guard = Guard(GuardConfig(**config.guard), 1, algorithm.updates, work.metrics())
        stack.enter_context(console)
        sigterm = stack.enter_context(resume.Sigterm())
        evaluations = Evaluations(config, held_out, engine, protocol, retriever, work, console, sigterm)

        done = start
        try:
            for step in dict.fromkeys((0, start)):
                evaluations.due(step)
            for step in profiled(range(start + 1, steps + 1), profile, work.path):
                # ---- Draw, batch.
                with sigterm.interrupts(), timer("batch"):
                    drawn = draw(rows, config.seed, step - 1, algorithm.questions)
                    host_batch = rl.stack_rows(drawn, max(buckets), multiple=mesh.shape["fsdp"])
                    batch, cut = rl.put_batch(host_batch, mesh), learner.cut(host_batch.lengths)

                # ---- Update; the engine gets the new weights where an evaluation is due.
                with timer("update"):
                    state, metrics = learner.update(state, batch, cut, {})
                    jax.block_until_ready(state)
                    done = step
                if due_evaluations(step, config):
                    with timer("sync"):
                        engine.sync(state["actor"]["params"], version=step)

                # ---- Log. The seconds of a save stand in the line of the step behind it.
                line = {name: float(value) for name, value in metrics.items()}
                line |= {"epoch": step * algorithm.questions / len(rows), **_tokens(host_batch)} | timer.pop()
                signs, alarms = guard.look(line)
                work.log(step, line | {"alarms": float(len(signs))})
                console.step(step, line)
                for told in alarms:
                    console.print(f"ALARM at step {step}: {told}")

                # ---- Checkpoint, then evaluation, as in train.py.
                work.check()
                guard.check(alarms, work.saved)
                due = step % config.train.save_every == 0 or due_evaluations(step, config)
                if due and not (signs and guard.stops and step < steps):
                    with timer("save"):
                        work.save(step, state, {})
                evaluations.due(step)
        except resume.Terminated:
            work.save(done, state, {})
            console.print(f"SIGTERM: step {done} is saved; the same command goes on from there")
            raise
        return finish(config, work, model, state, evaluations.found, retriever, console, config.method, None)


def to_episode(record: dict, engine: Engine, protocol: Protocol) -> Episode:
    """A stored episode as this model reads it, see the top of this file. With log-probs of 0: none are needed."""
    text, ids = engine.prompt(protocol, record["question"])
    segments = [Segment("prompt", text, tuple(ids))]
    for segment in record["segments"][1:]:
        source, ids = segment["source"], tuple(engine.encode(segment["text"]))
        segments.append(Segment(source, segment["text"], ids, (0.0,) * len(ids) if source == "policy" else None))
    stop, sample = record.get("stop_reason", "answer"), record.get("sample", 0)
    return Episode(segments, stop_reason=stop, question_id=record["id"], sample=sample)


def _describe(rows, records, episodes: Sequence[Episode], steps: int, count: int) -> str:
    ids, learned = sum(len(row.ids) for row in rows), sum(row.policy_mask.sum() for row in rows)
    pairs = zip(episodes, records, strict=True)
    other = sum(episode.segments[0].text != record["segments"][0]["text"] for episode, record in pairs)
    lines = [f"{len(rows)} episodes of {ids} tokens, {learned:.0f} of them the policy's",
             f"{count} a step: {steps} steps are {steps * count / len(rows):.1f} epochs"]  # fmt: skip
    return "\n".join(lines + [f"{other} were stored under another prompt than this model gets"] * bool(other))


def _tokens(batch: rl.Batch) -> dict[str, float]:
    return {"tokens/policy": float(batch.policy_mask.sum()), "tokens/read": float(batch.lengths.sum())}


def _check_settings(
    config: ConfigDict, records: Sequence[dict], held_out: dict[str, list[Question]], profile: int | None
) -> None:
    """What would otherwise show late, or never."""
    steps, count = config.train.steps, config.algorithm.questions
    if profile is not None and not 1 <= profile <= steps:
        raise UserError(f"--profile is {profile}, the run has the steps 1 to {steps}; name one of them")
    if config.train.best not in ("em", "f1", "cover_em"):
        raise UserError(f"train.best is {config.train.best!r}; use one of: em, f1, cover_em")
    if steps and count > len(records):
        raise UserError(
            f"algorithm.questions is {count}, but data.episodes hold {len(records)} episodes: lower it, or give more"
        )
    for split, questions in held_out.items():  # "nq/test_0" and "test_0": the prefix depends on the configuration
        asked = {(question.id.rpartition("/")[2], question.text) for question in questions}
        known = sum((record["id"].rpartition("/")[2], record["question"]) in asked for record in records)
        if known:
            raise UserError(
                f"{known} of the {len(records)} episodes in data.episodes answer questions of data.{split}, which the "
                "run is measured on: leave files like final.jsonl and initial.jsonl out (episodes/step_*.jsonl)"
            )


def _check_lengths(rows: Sequence[rl.Row], tokens: int) -> None:
    lengths = np.array([len(row.ids) for row in rows])
    if (lengths > tokens).any():
        raise UserError(
            f"{(lengths > tokens).sum()} of {len(rows)} episodes in data.episodes are longer than the largest of "
            f"train.buckets, {tokens} tokens; the longest has {lengths.max()}: add a bucket (episodes are never cut)"
        )
