r"""Episodes without training: what the steps of a run would sample if the model stayed as it is; for reject.py, sft.py.

    python launch.py --config=configs/parallel_tiny.py --sample      # writes runs/parallel_tiny_sample/episodes

A run's own episodes/step_*.jsonl are of a policy that changes; these are all of one.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict

from parasearch_jax import hosts, resume
from parasearch_jax.data import load_question_sets
from parasearch_jax.data.drawing import check_mix, draw
from parasearch_jax.data.metrics import em
from parasearch_jax.errors import UserError
from parasearch_jax.models import load_model
from parasearch_jax.preflight import preflight
from parasearch_jax.protocol import get_protocol
from parasearch_jax.retrieval import open_retriever
from parasearch_jax.rl.learner import AlgorithmConfig
from parasearch_jax.rollout import Engine, RolloutConfig
from parasearch_jax.sharding.mesh import MeshConfig, make_mesh
from parasearch_jax.train import overrides
from parasearch_jax.workdir import Workdir
from parasearch_jax.writers import METRICS, Console, write_json


def sample(config: ConfigDict, workdir: str | Path) -> list[Path]:
    """Writes episodes/sampled_000001.jsonl ... into `workdir`, a file for each of `train.steps` steps; their paths.

    Questions, samples of each, temperature and random numbers of a step are those of training's. A file is written
    whole or not at all, and one that is there is not made again: the same command goes on where it was killed, and with
    more `train.steps` adds to them. Raises UserError for bad input, and if the directory holds a training run.
    """
    with hosts.together():
        resume.check_hosts(resume.describe(config))
        preflight(config)
        protocol = get_protocol(config.protocol.name, **overrides(config.protocol))
        questions, algorithm = load_question_sets(config.data.train), AlgorithmConfig(**config.algorithm)
        steps = range(1, config.train.steps + 1)
        if not steps:
            raise UserError("train.steps is 0: give the number of steps to sample the episodes of")
        check_mix(config.data.mix, questions, algorithm.questions)
        mesh = make_mesh(MeshConfig(**config.mesh))
    with contextlib.ExitStack() as stack:
        work = stack.enter_context(Workdir(workdir, config))
        stack.enter_context(hosts.lost_is_told())
        hosts.on_first(lambda: _begin(work))
        files = [work.path / "episodes" / f"sampled_{step:06d}.jsonl" for step in steps]
        missing = hosts.from_first(lambda: [i for i, path in enumerate(files, 1) if not path.exists()])
        console = stack.enter_context(Console(quiet=not hosts.is_first()))
        console.print(f"{config.name}: {work.path}\n{len(missing)} of {len(files)} steps are left to sample")
        if not missing:
            return files

        with hosts.together():
            model = load_model(config.model.path, mesh, config.model.dtype)
            retriever = open_retriever(config.retriever)
        stack.callback(retriever.close_sync)
        engine = Engine(model, RolloutConfig(**config.rollout, topk=config.retriever.topk), seed=config.seed, mesh=mesh)
        stack.callback(engine.close)
        model.params = None  # the engine has its own
        sampling = {"samples": algorithm.samples, "temperature": algorithm.temperature}
        for step in missing:
            start = time.perf_counter()
            drawn = draw(questions, config.seed, step - 1, algorithm.questions, config.data.mix)
            episodes = hosts.spread(lambda qs: engine.rollout(qs, protocol, retriever, step=step, **sampling), drawn)  # noqa: B023
            asked = [question for question in drawn for _ in range(algorithm.samples)]
            exact = [em(e.answer, q.golden_answers) for e, q in zip(episodes, asked, strict=True)]
            work.write_episodes(f"sampled_{step:06d}", episodes, asked, em=exact)
            told = f"{len(episodes)} episodes | EM {100 * np.mean(exact):.1f} % | {time.perf_counter() - start:.1f} s"
            console.print(f"step {step:>{len(str(len(files)))}}/{len(files)} | {told}")
    return files


def _begin(work: Workdir) -> None:
    if (work.path / METRICS).exists():
        raise UserError(f"the work directory {work.path} holds a training run; give another --workdir")
    write_json(work.path / "config.json", work.run)
