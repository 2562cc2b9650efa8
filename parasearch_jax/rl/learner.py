"""An algorithm as three functions on a state: `init`, `score` (what a step starts from), `update`.

    state     {"actor": State} with GRPO, {"actor": State, "critic": State} with PPO   (State: rl/update.py)
    scores    {"old", "ref", "values": float32 [B, T]}, those that the algorithm needs

Axes: B batch (rows), T tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from parasearch_jax.errors import UserError
from parasearch_jax.models.decoder import DecoderConfig, param_shapes
from parasearch_jax.rl.advantages import gae, grpo, whiten
from parasearch_jax.rl.batch import Batch, response_mask
from parasearch_jax.rl.critic import init_critic, make_critic_update, make_values
from parasearch_jax.rl.losses import kl, masked_mean, masked_sum, sampler_gap
from parasearch_jax.rl.optim import OptimConfig, make_optimizer
from parasearch_jax.rl.update import Metrics, UpdateConfig, init_state, make_score, make_update
from parasearch_jax.sharding import layout, rules


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig:
    """What a step draws and how rewards become advantages."""

    name: str  # "grpo" or "ppo"
    questions: int  # of a step
    samples: int = 1  # episodes of each question
    temperature: float = 1.0
    updates: int = 1  # optimizer steps a batch, each on its own share of the rows
    variant: str = "strict"  # PPO: time steps are policy tokens; "released": documents and notices are steps too
    std: str = "sample"  # GRPO: of the group's rewards, "sample" or "population"
    gamma: float = 1.0  # PPO
    lam: float = 1.0
    value_clip: float = 0.5
    reward_kl: float = 0.0  # PPO: coefficient of log p - log p_ref, taken from the reward of each policy token

    def __post_init__(self):
        allowed = {"name": ("grpo", "ppo"), "variant": ("strict", "released"), "std": ("sample", "population")}
        for field, values in allowed.items():
            if getattr(self, field) not in values:
                raise UserError(f"algorithm.{field} is {getattr(self, field)!r}; use one of: {', '.join(values)}")
        for field in ("questions", "samples", "updates"):
            if getattr(self, field) < 1:
                raise UserError(f"algorithm.{field} is {getattr(self, field)}, it must be >= 1")
        if self.name == "grpo" and self.samples < 2:
            raise UserError(f"algorithm.samples is {self.samples}; GRPO compares the samples of a question, give >= 2")
        if self.name == "grpo" and self.reward_kl:
            raise UserError(
                f"algorithm.reward_kl is {self.reward_kl}, which only PPO has; for GRPO set learner.kl_coef instead"
            )


class Learner(NamedTuple):
    """The functions of an algorithm; all arrays stay on the devices."""

    shapes: Any  # the state as ShapeDtypeStructs, with a mesh also how it lies there
    init: Callable  # (params) -> state, with copies of them
    reference: Callable  # (params) -> a copy as the reference computes with it, in the compute dtype
    score: Callable  # (state, batch, reference or None) -> (scores, metrics)
    update: Callable  # (state, batch, scores) -> (state, metrics); donates the state


def make_learner(
    cfg: DecoderConfig,
    algorithm: AlgorithmConfig,
    ucfg: UpdateConfig,
    optimizer: OptimConfig,
    critic_optimizer: OptimConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Learner:
    """The learner of `algorithm`; PPO needs `critic_optimizer`.

    With a mesh the state is laid out by sharding/rules.py, and batches come from `rl.put_batch`.
    A batch must have a multiple of `algorithm.updates * ucfg.micro_rows` rows. Metrics are those of `make_update`, with
    several updates their mean (ratio_max: the largest; skipped: the last); the sampler's gap; PPO's critic under
    "critic/".
    """
    if mesh is not None and ucfg.micro_rows % mesh.shape["fsdp"]:
        raise UserError(
            f"learner.micro_rows is {ucfg.micro_rows}, mesh.fsdp is {mesh.shape['fsdp']}: give micro-batches of a "
            "multiple of mesh.fsdp rows"
        )
    actor_tx, ppo = make_optimizer(optimizer), algorithm.name == "ppo"
    logprobs, update_actor = make_score(cfg, ucfg), make_update(cfg, ucfg, actor_tx)
    if ppo:
        critic_tx, values = make_optimizer(critic_optimizer), make_values(cfg, ucfg)
        update_critic = make_critic_update(cfg, ucfg, critic_tx, algorithm.value_clip)
    gap = jax.jit(lambda old, batch: sampler_gap(old, batch.logprobs, batch.policy_mask))
    steps = jax.jit(response_mask if algorithm.variant == "released" else lambda batch: batch.policy_mask)
    targets = jax.jit(_gae_targets if ppo else _grpo_targets, static_argnums=0)
    share = jax.jit(_share, static_argnums=1)

    def start(params):
        state = {"actor": init_state(params, actor_tx)}
        return state | {"critic": init_state(init_critic(params), critic_tx)} if ppo else state

    shapes = jax.eval_shape(start, param_shapes(cfg))
    if mesh is not None:
        shapes = rules.placed(shapes, mesh)
    places = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    start = jax.jit(start, out_shardings=places)
    copy = jax.jit(
        lambda params: jax.tree.map(jnp.copy, layout.cast(params, cfg.dtype)), out_shardings=places["actor"]["params"]
    )

    def here(params):
        return params if mesh is None else layout.place(params, places["actor"]["params"])

    def init(params):
        return start(here(params))

    def reference(params):
        return copy(here(params))

    def score(state, batch: Batch, reference=None):
        old, _ = logprobs(state["actor"]["params"], batch)
        scores = {"old": old}
        if reference is not None:
            scores["ref"], _ = logprobs(reference, batch)
        if ppo:
            scores["values"] = values(state["critic"]["params"], batch, steps(batch))
        return scores, gap(old, batch)

    def update(state, batch: Batch, scores):
        goals, metrics = targets(algorithm, batch, steps(batch), scores)
        actor, critic, seen = state["actor"], state.get("critic"), []
        for rows, goal, old in share((batch, goals, scores), algorithm.updates):
            of_critic = {}
            if ppo:
                critic, of_critic = update_critic(critic, rows, steps(rows), old["values"], goal["returns"])
            actor, of_actor = update_actor(actor, rows, goal["advantages"], old["old"], old.get("ref"))
            seen.append(of_actor | {f"critic/{name}": x for name, x in of_critic.items()})
        state = {"actor": actor} | ({"critic": critic} if ppo else {})
        return state, metrics | _combined(seen)

    return Learner(shapes, *(_under(mesh, function) for function in (init, reference, score, update)))


def _under(mesh: jax.sharding.Mesh | None, function: Callable) -> Callable:
    """`function` under `jax.set_mesh(mesh)`, which sharding/rules.py reads inside of jitted code."""
    if mesh is None:
        return function

    @functools.wraps(function)
    def run(*args):
        with jax.set_mesh(mesh):
            return function(*args)

    return run


def _grpo_targets(algorithm: AlgorithmConfig, batch: Batch, steps, scores) -> tuple[dict, Metrics]:
    return {"advantages": grpo(batch.rewards, batch.policy_mask, batch.group, algorithm.std)}, {}


def _gae_targets(algorithm: AlgorithmConfig, batch: Batch, steps, scores) -> tuple[dict, Metrics]:
    """Whitened advantages and returns, [B, T]. The KL to the reference (k1) is taken from the rewards before."""
    rewards, metrics, mask = batch.rewards, {}, batch.policy_mask
    if algorithm.reward_kl:
        penalty = algorithm.reward_kl * kl(scores["old"], scores["ref"], "k1", mask)
        rewards = rewards - penalty
        episodes = jnp.maximum((batch.lengths > 0).sum(), 1)
        metrics["reward_kl"] = masked_sum(penalty, mask) / episodes  # what an episode pays
    advantages, returns = gae(rewards, scores["values"], steps, algorithm.gamma, algorithm.lam)
    metrics |= {"return_mean": masked_mean(returns, mask), "advantage_mean": masked_mean(advantages, mask)}
    return {"advantages": whiten(advantages, steps), "returns": returns}, metrics


def _share(tree, updates: int) -> tuple:
    """[B, ...] leaves cut into `updates` blocks of rows. Rows lie by question, so that few groups lie in two blocks."""

    def block(x, i):
        if x.shape[0] % updates:
            raise ValueError(f"batch of {x.shape[0]} rows, {updates} updates: build it with a multiple of {updates}")
        size = x.shape[0] // updates
        return x[i * size : (i + 1) * size]

    return tuple(jax.tree.map(lambda x, i=i: block(x, i), tree) for i in range(updates))


@jax.jit
def _combined(seen: list[Metrics]) -> Metrics:
    """The metrics of a batch from those of its updates."""

    def one(name):
        values = jnp.stack([metrics[name] for metrics in seen])
        if name.endswith("skipped"):
            return values[-1]
        return values.max() if name == "ratio_max" else values.mean()

    return {name: one(name) for name in seen[0]}
