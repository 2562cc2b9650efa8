"""An algorithm as three functions on a state: `init`, `score` (what a step starts from), `update`.

    state     {"actor": State} with GRPO, {"actor": State, "critic": State} with PPO   (State: rl/update.py)
    scores    {"old", "ref", "values": float32 [B, T]}, those that the algorithm needs; SFT needs none

Axes: B batch (rows), T tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from parasearch_jax.errors import UserError
from parasearch_jax.models.decoder import DecoderConfig, param_shapes
from parasearch_jax.rl import portions
from parasearch_jax.rl.advantages import dr_grpo, gae, grpo, reinforce, reinforce_pp, rloo, whiten
from parasearch_jax.rl.batch import Batch, response_mask
from parasearch_jax.rl.critic import init_critic, make_critic_update, make_values
from parasearch_jax.rl.losses import adaptive_kl, kl, masked_mean, masked_sum, sampler_gap, truncated_weights
from parasearch_jax.rl.optim import OptimConfig, make_optimizer
from parasearch_jax.rl.portions import Portion
from parasearch_jax.rl.update import (
    Metrics,
    UpdateConfig,
    init_state,
    loss_weights,
    make_score,
    make_sft_update,
    make_update,
)
from parasearch_jax.sharding import layout, rules

COMPARING = ("grpo", "dr_grpo", "rloo")  # the samples of a question; the reward counts whole
PENALISED = ("ppo", "reinforce", "reinforce_pp")  # these can take the KL from the reward
NAMES = ("ppo", *COMPARING, *PENALISED[1:], "sft")
OF_SAMPLING = {"samples": 1, "temperature": 1.0, "reward_kl": 0.0, "bypass": False}  # with "sft" as here


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig:
    """What a step draws and how rewards become advantages (rl/advantages.py). With "sft" there are none: a step draws
    stored episodes (sft.py)."""

    name: str  # one of NAMES
    questions: int  # of a step; of "sft" its episodes
    samples: int = 1  # episodes of each question
    temperature: float = 1.0
    updates: int = 1  # optimizer steps a batch, each on its own share of the rows
    variant: str = "strict"  # PPO: time steps are policy tokens; "released": documents and notices are steps too
    std: str = "sample"  # GRPO: of the group's rewards, "sample" or "population"
    baseline: str = (
        "group"  # reinforce, reinforce_pp: taken off; "group", the mean of the question's samples, or "none"
    )
    gamma: float = 1.0  # PPO, reinforce, reinforce_pp
    lam: float = 1.0  # PPO
    value_clip: float = 0.5
    reward_kl: float = 0.0  # coefficient of log p - log p_ref, taken from the reward of each policy token
    kl_target: float = 0.0  # of log p - log p_ref: reward_kl is where its coefficient starts, and follows; 0: fixed
    kl_horizon: int = 10_000  # episodes
    bypass: bool = False  # the sampler's log-probs are the old ones: no pass over the batch for them
    mask_documents: bool = True  # False: documents and notices are learned like the policy's own tokens (an ablation)

    def __post_init__(self):
        choices = ("strict", "released"), ("sample", "population"), ("group", "none")
        allowed = {"name": NAMES, **dict(zip(("variant", "std", "baseline"), choices, strict=True))}
        for field, values in allowed.items():
            if getattr(self, field) not in values:
                raise UserError(f"algorithm.{field} is {getattr(self, field)!r}; use one of: {', '.join(values)}")
        for field in ("questions", "samples", "updates", "kl_horizon"):
            if getattr(self, field) < 1:
                raise UserError(f"algorithm.{field} is {getattr(self, field)}, it must be >= 1")
        for field, value in OF_SAMPLING.items() if self.name == "sft" else ():
            if getattr(self, field) != value:
                raise UserError(f"algorithm.{field} is {getattr(self, field)}, which sft has not: leave it at {value}")
        compares = self.name in COMPARING or (self.name in PENALISED[1:] and self.baseline == "group")
        if compares and self.samples < 2:
            raise UserError(
                f"algorithm.samples is {self.samples}; {self.name} compares the samples of a question, give >= 2"
            )
        if self.reward_kl and self.name not in PENALISED:
            raise UserError(
                f"algorithm.reward_kl is {self.reward_kl}, which {self.name} has not: set learner.kl_coef instead"
            )
        if self.kl_target and not self.reward_kl:
            raise UserError(
                f"algorithm.kl_target is {self.kl_target} and reward_kl is 0: give the coefficient to start from"
            )
        if self.bypass and not self.mask_documents:
            raise UserError(
                "algorithm.bypass needs mask_documents: the sampler has no log-probs of documents to take as old ones"
            )


class Learner(NamedTuple):
    """The functions of an algorithm; all arrays stay on the devices."""

    shapes: Any  # the state as ShapeDtypeStructs, with a mesh also how it lies there
    init: Callable  # (params) -> state, with copies of them
    reference: Callable  # (params) -> a copy as the reference computes with it, in the compute dtype
    cut: Callable  # (lengths of a batch's rows, numpy) -> the portions of its updates, list[Portion]
    score: Callable  # (state, batch, cut, reference or None) -> (scores, metrics)
    update: Callable  # (state, batch, cut, scores) -> (state, metrics); donates the state


def make_learner(
    cfg: DecoderConfig,
    algorithm: AlgorithmConfig,
    ucfg: UpdateConfig,
    optimizer: OptimConfig,
    critic_optimizer: OptimConfig | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Learner:
    """The learner of `algorithm`; PPO needs `critic_optimizer`.

    With a mesh the state is laid out by sharding/rules.py, and batches come from `rl.put_batch`. Metrics are those of
    `make_update`, with several updates their mean (ratio_max: the largest; skipped: the last); the sampler's gap; PPO's
    critic under "critic/".
    """
    if mesh is not None and ucfg.micro_rows % mesh.shape["fsdp"]:
        raise UserError(
            f"learner.micro_rows is {ucfg.micro_rows}, mesh.fsdp is {mesh.shape['fsdp']}: give micro-batches of a "
            "multiple of mesh.fsdp rows"
        )
    actor_tx, ppo, adaptive = make_optimizer(optimizer), algorithm.name == "ppo", algorithm.kl_target > 0
    sft = algorithm.name == "sft"
    logprobs, update_actor = make_score(cfg, ucfg), (make_sft_update if sft else make_update)(cfg, ucfg, actor_tx)
    if ppo:
        critic_tx, values = make_optimizer(critic_optimizer), make_values(cfg, ucfg)
        update_critic = make_critic_update(cfg, ucfg, critic_tx, algorithm.value_clip)
    gap = jax.jit(lambda old, batch: sampler_gap(old, batch.logprobs, batch.policy_mask))
    learned = jax.jit(lambda batch: batch if algorithm.mask_documents else _with_documents(batch))
    steps = jax.jit(response_mask if algorithm.variant == "released" else lambda batch: batch.policy_mask)
    targets = jax.jit(functools.partial(_targets, algorithm, ucfg))
    share = jax.jit(functools.partial(_share, ucfg))

    def start(params):
        state = {"actor": init_state(params, actor_tx)}
        if ppo:
            state["critic"] = init_state(init_critic(params), critic_tx)
        return state | ({"kl_coef": jnp.float32(algorithm.reward_kl)} if adaptive else {})

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

    def cut(lengths: np.ndarray) -> list[Portion]:
        multiple = 1 if mesh is None else mesh.shape["fsdp"]
        shares = portions.portions(lengths, algorithm.updates, ucfg.buckets, ucfg.micro_rows, multiple)
        return portions.put(shares, mesh)

    def score(state, batch: Batch, cut: list[Portion], reference=None):
        if sft:
            return {}, {}
        micros, sampled = [micro for portion in cut for micro in portion.micros], batch
        batch, scores, metrics = learned(batch), {"old": batch.logprobs}, {}
        if not algorithm.bypass:
            scores["old"] = logprobs(state["actor"]["params"], batch, micros)
            metrics = gap(scores["old"], sampled)
        if reference is not None:
            scores["ref"] = logprobs(reference, batch, micros)
        if ppo:
            data = {"batch": batch, "steps": steps(batch)}
            scores["values"] = values(state["critic"]["params"], data, micros)
        return scores, metrics

    def update(state, batch: Batch, cut: list[Portion], scores):
        sampled, batch = batch, learned(batch)
        coef = state.get("kl_coef")
        goals, metrics = ({}, {}) if sft else targets(batch, sampled, steps(batch), scores, coef)
        actor, critic, seen = state["actor"], state.get("critic"), []
        for portion in cut:
            data = share({"batch": batch, "steps": steps(batch)} | goals | scores, portion.members)
            of_critic = {}
            if ppo:
                of_values = {name: data[name] for name in ("batch", "steps", "values", "returns")}
                critic, of_critic = update_critic(critic, of_values, portion.micros)
            of_policy = {name: x for name, x in data.items() if name not in ("steps", "values", "returns")}
            actor, of_actor = update_actor(actor, of_policy, portion.micros)
            seen.append(of_actor | {f"critic/{name}": x for name, x in of_critic.items()})
        state = (
            {"actor": actor}
            | ({"critic": critic} if ppo else {})
            | ({"kl_coef": metrics["kl_coef"]} if adaptive else {})
        )
        return state, metrics | _combined(seen)

    return Learner(shapes, *(_under(mesh, function) for function in (init, reference, cut, score, update)))


def _under(mesh: jax.sharding.Mesh | None, function: Callable) -> Callable:
    """`function` under `jax.set_mesh(mesh)`, which sharding/rules.py reads inside of jitted code."""
    if mesh is None:
        return function

    @functools.wraps(function)
    def run(*args):
        with jax.set_mesh(mesh):
            return function(*args)

    return run


def _with_documents(batch: Batch) -> Batch:
    """Documents and notices as if the policy had said them."""
    return dataclasses.replace(batch, policy_mask=response_mask(batch))


def _targets(
    algorithm: AlgorithmConfig, ucfg: UpdateConfig, batch: Batch, sampled: Batch, steps, scores, kl_coef
) -> tuple[dict, Metrics]:
    """What the updates of a batch aim at, [B, T]: advantages, returns with a critic, importance weights; and metrics.

    The KL to the reference (k1) is taken from the rewards before, where the algorithm has it. `sampled`: the batch with
    the mask of what was sampled."""
    goals, metrics, mask, penalty = {}, {}, batch.policy_mask, jnp.zeros(batch.ids.shape)
    if algorithm.reward_kl:
        divergence = kl(scores["old"], scores["ref"], "k1", mask)
        kl_coef = algorithm.reward_kl if kl_coef is None else kl_coef  # of the state, where it adapts
        penalty = kl_coef * divergence
        episodes = (batch.lengths > 0).sum()
        metrics["reward_kl"] = masked_sum(penalty, mask) / jnp.maximum(episodes, 1)  # what an episode pays
        if algorithm.kl_target:
            measured = masked_mean(divergence, mask)
            metrics["kl_coef"] = adaptive_kl(kl_coef, measured, algorithm.kl_target, algorithm.kl_horizon, episodes)
    rewards, of_group = batch.rewards - penalty, (batch.rewards, mask, batch.group)
    if algorithm.name == "ppo":
        advantages, goals["returns"] = gae(rewards, scores["values"], steps, algorithm.gamma, algorithm.lam)
        goals["advantages"] = whiten(advantages, steps)
        metrics["return_mean"] = masked_mean(goals["returns"], mask)
        metrics["advantage_mean"] = masked_mean(advantages, mask)
    elif algorithm.name == "reinforce":
        goals["advantages"] = reinforce(rewards, mask, batch.group, algorithm.baseline, algorithm.gamma)
    elif algorithm.name == "reinforce_pp":
        goals["advantages"] = reinforce_pp(*of_group, penalty, algorithm.baseline, algorithm.gamma)
    elif algorithm.name == "grpo":
        goals["advantages"] = grpo(*of_group, algorithm.std)
    else:
        goals["advantages"] = {"dr_grpo": dr_grpo, "rloo": rloo}[algorithm.name](*of_group)
    if ucfg.importance_cap:
        weights, seen = truncated_weights(scores["old"], sampled.logprobs, sampled.policy_mask, ucfg.importance_cap)
        goals["importance"] = jnp.where(sampled.policy_mask > 0, weights, 1.0)
        metrics |= seen
    return goals, metrics


def _share(ucfg: UpdateConfig, data: dict[str, Any], members: jax.Array) -> dict[str, Any]:
    """The data of an update: the rows [B] of other updates have no policy tokens and no time steps; and the weights of
    its tokens."""
    batch, of_row = data["batch"], members[:, None]
    batch = dataclasses.replace(batch, policy_mask=batch.policy_mask * of_row)
    return data | {"batch": batch, "steps": data["steps"] * of_row, "weights": loss_weights(ucfg, batch)}


@jax.jit
def _combined(seen: list[Metrics]) -> Metrics:
    """The metrics of a batch from those of its updates."""

    def one(name):
        values = jnp.stack([metrics[name] for metrics in seen])
        if name.endswith("skipped"):
            return values[-1]
        return values.max() if name == "ratio_max" else values.mean()

    return {name: one(name) for name in seen[0]}
