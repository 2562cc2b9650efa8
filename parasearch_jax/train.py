"""The training loop, top to bottom: rollout -> reward -> batch -> score -> update -> sync -> log -> eval -> save."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from parasearch_jax import hosts, resume, rewards, rl
from parasearch_jax.data import Question, load_question_sets, overlap
from parasearch_jax.data.drawing import check_mix, draw
from parasearch_jax.errors import UserError
from parasearch_jax.evaluate import Evaluations, due_evaluations, load_held_out, rollout_metrics
from parasearch_jax.guards import Guard, GuardConfig
from parasearch_jax.models import load_model
from parasearch_jax.models.weights import save_model
from parasearch_jax.preflight import preflight
from parasearch_jax.protocol import get_protocol
from parasearch_jax.retrieval import Retriever, open_retriever
from parasearch_jax.rl.learner import AlgorithmConfig, make_learner
from parasearch_jax.rl.optim import OptimConfig
from parasearch_jax.rl.update import UpdateConfig
from parasearch_jax.rollout import Engine, RolloutConfig
from parasearch_jax.rollout.probe import make_probe
from parasearch_jax.scoring import Scorer, reward_metrics
from parasearch_jax.sharding.mesh import MeshConfig, make_mesh
from parasearch_jax.workdir import Workdir, params_sha256
from parasearch_jax.writers import Console, results_table, write_json


def train(
    config: ConfigDict,
    reward_fn: Callable | None = None,
    workdir: str | Path | None = None,
    profile: int | None = None,
) -> dict[str, Any]:
    """Evaluates, trains, evaluates again, and returns the content of results.json.

    `config` as configs/*.py make it. `reward_fn(episode, question) -> parts or (parts, steps)` takes the place of
    `config.reward` (a notebook's reward). A `workdir` that holds a part of this run is continued from its last complete
    checkpoint; None: a new one, `runs/<name>-<time>`. `profile`: the step whose `jax.profiler` trace is written there.
    Raises UserError for bad input. SIGTERM saves, then ends the process with 143. With several hosts (hosts.py) each
    calls this with the same arguments and gets the same results.
    """
    steps, timer = config.train.steps, Timer()

    # ---- Questions, reward, protocol, model: everything that can be wrong is read before the work begins.
    with hosts.together():
        resume.check_hosts(resume.describe(config, reward_fn))
        if config.algorithm.name == "sft":
            raise UserError(
                "algorithm.name is 'sft', which learns from stored episodes: call parasearch_jax.sft.finetune"
            )
        preflight(config)
        protocol = get_protocol(config.protocol.name, **overrides(config.protocol))
        reward = rewards.make_reward(config.reward.to_dict()) if reward_fn is None else rewards.wrap(reward_fn)
        questions = load_question_sets(config.data.train) if steps else []
        held_out = load_held_out(config)
        reward.check(questions)
        _check_settings(config, questions, profile)
        mesh = make_mesh(MeshConfig(**config.mesh))
    with hosts.together():
        model = load_model(config.model.path, mesh, config.model.dtype)

    with contextlib.ExitStack() as stack:
        path = workdir or hosts.from_first(lambda: f"runs/{config.name}-{time.strftime('%Y%m%d-%H%M%S')}")
        work = stack.enter_context(Workdir(path, config, reward_fn))
        stack.enter_context(hosts.lost_is_told())
        console = Console(steps, quiet=not hosts.is_first())
        console.print(f"{config.name}: {work.path}\n{reward.describe()}\n{protocol.describe(model.tokenizer)}")
        if steps:
            both = overlap.find_overlap(questions, held_out)
            hosts.on_first(lambda: write_json(work.path / "overlap.json", overlap.record(both)))
            console.print(overlap.describe(both))
        with hosts.together():
            retriever = open_retriever(config.retriever)
        stack.callback(retriever.close_sync)

        # ---- Policy, optimizers, jitted functions. Configuration enters them as frozen dataclasses.
        rollout = RolloutConfig(**config.rollout, topk=config.retriever.topk)
        algorithm = AlgorithmConfig(**config.algorithm)
        buckets = tuple(sorted(config.train.buckets))
        updates = UpdateConfig(**config.learner, buckets=buckets, temperature=algorithm.temperature)
        optimizer, critic_optimizer = OptimConfig(**config.optimizer), OptimConfig(**config.critic_optimizer)
        learner = make_learner(model.config, algorithm, updates, optimizer, critic_optimizer, mesh)
        reference = learner.reference(model.params) if steps and (updates.kl_coef or algorithm.reward_kl) else None
        engine = Engine(model, rollout, seed=config.seed, mesh=mesh)
        console.print(engine.shards.sizes.describe())
        probe = make_probe(model.config, mesh)
        stack.callback(engine.close)

        # ---- Where the run stands: at its last complete checkpoint, or at step 0.
        # An evaluation alone has no use for optimizers and critic.
        state, start, memory = work.restore(
            learner.shapes, lambda: learner.init(model.params) if steps else {"actor": {"params": model.params}}
        )
        model.params = None  # state, reference and engine have their own; these would stay for the whole run
        if (results := work.results()) is not None:
            return finished(work, results, console)
        if start:
            engine.sync(state["actor"]["params"], version=start)
            probe(state["actor"]["params"], start, engine)
            console.print(f"goes on behind step {start}")
        guard = Guard(GuardConfig(**config.guard), algorithm.samples, algorithm.updates, work.metrics())
        stack.enter_context(console)
        sigterm = stack.enter_context(resume.Sigterm())
        judge = reward if reward_fn is None else None  # a function of one's own may count its calls
        evaluations = Evaluations(config, held_out, engine, protocol, retriever, work, console, sigterm, judge)

        try:
            for step in dict.fromkeys((0, start)):
                evaluations.due(step)
            for step in profiled(range(start + 1, steps + 1), profile, work.path):
                # ---- Rollout: groups of episodes of one question, with the weights of the last sync. A group that has
                # ended is scored and made into rows while others decode.
                drawn = draw(questions, config.seed, step - 1, algorithm.questions, config.data.mix)
                scorer = Scorer(reward, drawn, algorithm.samples, memory)
                with sigterm.interrupts(), timer("rollout"):
                    sampling = {"samples": algorithm.samples, "temperature": algorithm.temperature, "step": step}
                    sampling["on_group"] = scorer if hosts.is_alone() else None
                    episodes = hosts.spread(lambda qs: engine.rollout(qs, protocol, retriever, **sampling), drawn)  # noqa: B023

                # ---- What is left of rewards, batch.
                with timer("reward"):
                    scored, host_rows = scorer.finish(episodes)
                    host_batch = rl.stack_rows(host_rows, max(updates.buckets), multiple=mesh.shape["fsdp"])
                    batch, cut = rl.put_batch(host_batch, mesh), learner.cut(host_batch.lengths)

                # ---- Score: log-probs of the weights that the update starts from and of the reference; PPO: values.
                with timer("score"):
                    scores, gap = learner.score(state, batch, cut, reference)
                    jax.block_until_ready(scores)

                # ---- Advantages and updates, then the engine gets the new weights.
                with timer("update"):
                    state, metrics = learner.update(state, batch, cut, scores)
                    jax.block_until_ready(state)
                with timer("sync"):
                    engine.sync(state["actor"]["params"], version=step)
                    gap["sync_probe"] = probe(state["actor"]["params"], step, engine)

                # ---- Log. The seconds of a save stand in the line of the step behind it.
                asked = [q for q in drawn for _ in range(algorithm.samples)]
                line = {name: float(value) for name, value in (metrics | gap).items()}
                line |= reward_metrics(scored, host_batch) | rollout_metrics(episodes, asked, protocol)
                line |= engine_metrics(engine, timer.seconds) | retriever_metrics(retriever) | timer.pop()
                signs, alarms = guard.look(line)
                work.log(step, line | {"alarms": float(len(signs))})
                console.step(step, line)
                for told in alarms:
                    console.print(f"ALARM at step {step}: {told}")
                if step % config.train.episodes_every == 0:
                    work.write_episodes(f"step_{step:06d}", episodes, asked, parts=[parts for parts, _ in scored])

                # ---- Checkpoint, then evaluation: a start after a kill makes up for what is missing. Where alarms end
                # a run, no step that shows a sign of harm is saved: the last good checkpoint is kept.
                work.check()
                guard.check(alarms, work.saved)
                due = step % config.train.save_every == 0 or due_evaluations(step, config)
                if due and not (signs and guard.stops and step < steps):
                    with timer("save"):
                        work.save(step, state, memory)
                evaluations.due(step)
        except resume.Terminated:
            work.save(engine.version, state, memory)
            console.print(f"SIGTERM: step {engine.version} is saved; the same command goes on from there")
            raise
        named = config.method, config.reward.get("variant", "paper")
        if reward_fn is not None:
            named = reward.entry.name, None
        return finish(config, work, model, state, evaluations.found, retriever, console, *named)


def finish(config, work, model, state, evals, retriever, console, method, variant) -> dict[str, Any]:
    """What is left of a run: the model, results.json, the report, the table."""
    params = state["actor"]["params"]
    if config.train.steps:
        save_model(work.path / "model", model.config, params, model.tokenizer)
    results = {
        "config": config.name,
        "model": str(config.model.path),
        "method": method,
        "variant": variant,
        "retriever": retriever.info,
        "evals": {name: found for name, found in evals.items() if found and not name.startswith("dev_")},
        "seconds": work.seconds(),
        "slots": config.rollout.slots * jax.process_count(),  # what seconds_per_question were measured with
        "normalizer": config.data.normalizer,
        "params_sha256": params_sha256(params),
    }
    results = hosts.from_first(lambda: results)
    work.finish(results)
    _print_results(work, results, console)
    return results


def finished(work: Workdir, results: dict[str, Any], console: Console) -> dict[str, Any]:
    """A run whose last step, evaluation and report are there: nothing is done again."""
    console.print("this run is finished; for a new one give another --workdir, or remove this one")
    _print_results(work, results, console)
    return results


def _print_results(work: Workdir, results: dict[str, Any], console: Console) -> None:
    console.print(results_table(results["evals"].get("initial"), results["evals"]["final"]))
    console.print(f"{results['seconds']:.0f} s. parameters sha256 {results['params_sha256']}")
    console.print(f"Report: {work.path / 'report.md'}, {work.path / 'episodes.html'}")


def _check_settings(config: ConfigDict, questions: Sequence[Question], profile: int | None) -> None:
    """What would otherwise show only when a batch is drawn, an episode grows long or an evaluation is due."""
    if profile is not None and not 1 <= profile <= config.train.steps:
        raise UserError(f"--profile is {profile}, the run has the steps 1 to {config.train.steps}; name one of them")
    if not config.train.steps:
        return
    if config.train.best not in ("em", "f1", "cover_em"):
        raise UserError(f"train.best is {config.train.best!r}; use one of: em, f1, cover_em")
    if config.algorithm.questions > len(questions):
        raise UserError(
            f"algorithm.questions is {config.algorithm.questions}, but {config.data.train} holds {len(questions)} "
            "questions: lower it (a question asked twice in a step gives the same samples twice)"
        )
    check_mix(config.data.mix, questions, config.algorithm.questions)
    if max(config.train.buckets) < config.rollout.max_total_tokens:
        raise UserError(
            f"train.buckets end at {max(config.train.buckets)}, but an episode may have rollout.max_total_tokens = "
            f"{config.rollout.max_total_tokens}: add a bucket of that size (episodes are never cut)"
        )


def engine_metrics(engine: Engine, seconds: dict[str, float]) -> dict[str, float]:
    """What the engines of all hosts counted, and their occupancy: tokens kept / (decode steps x slots).

    Splits the phase "rollout" of this host's `seconds` into prefill, decode, wait and schedule: what the host did in
    between, and its wait for the other hosts.
    """
    mine = engine.pop_stats()
    phases = {phase: mine.pop(f"seconds/{phase}", 0.0) for phase in ("prefill", "decode", "wait")}
    seconds |= phases | {"schedule": seconds.pop("rollout") - sum(phases.values())}
    counts = hosts.gather([mine])
    stats = {name: sum(host.get(name, 0) for host in counts) for host in counts for name in host}
    stats["decode_steps"] = max(host.get("decode_steps", 0) for host in counts)  # side by side, not in turn
    return stats | {"rollout/occupancy": stats.get("tokens/sampled", 0) / max(stats.pop("slot_steps", 0), 1)}


def retriever_metrics(retriever: Retriever) -> dict[str, float]:
    """What the retrievers of all hosts counted; of a local one also the share of queries that its cache answered."""
    counts = hosts.gather([retriever.pop_stats()])
    stats = {name: sum(host[name] for host in counts) for name in counts[0]}
    if "retriever/cache_hits" in stats:
        stats["retriever/cache_hit_rate"] = stats["retriever/cache_hits"] / max(stats["retriever/queries"], 1)
    return stats


def profiled(steps: Sequence[int], profile: int | None, workdir: Path) -> Iterator[int]:
    """The steps; what happens in step `profile` is traced into workdir/profile (TensorBoard, xprof, Perfetto)."""
    for step in steps:
        if step != profile or not hosts.is_first():
            yield step
            continue
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # every Python call would be an event
        with jax.profiler.trace(str(workdir / "profile"), profiler_options=options):
            yield step


def overrides(section: ConfigDict) -> dict[str, Any]:
    """The fields of a protocol that a configuration changes; an empty one is left as the protocol has it."""
    return {key: value for key, value in section.items() if key != "name" and value not in (None, "")}


class Timer:
    """Seconds of each phase since the last `pop`: `with timer("update"): ...`; the phases are named in a trace too."""

    PHASES = ("rollout", "reward", "score", "update", "sync", "save")

    def __init__(self):
        self.seconds = dict.fromkeys(self.PHASES, 0.0)

    @contextlib.contextmanager
    def __call__(self, phase: str):
        start = time.perf_counter()
        with jax.profiler.TraceAnnotation(phase):
            yield
        self.seconds[phase] += time.perf_counter() - start

    def pop(self) -> dict[str, float]:
        """{"seconds/update": ..., "seconds/total": their sum}."""
        seconds, self.seconds = self.seconds, dict.fromkeys(self.PHASES, 0.0)
        return {f"seconds/{phase}": value for phase, value in seconds.items()} | {
            "seconds/total": sum(seconds.values())
        }
