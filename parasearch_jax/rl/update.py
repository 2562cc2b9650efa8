"""Scoring a batch and one optimizer step on it, both by micro-batches, each one jitted function.

Axes: B batch (rows), R rows of a micro-batch, M micro-batches (B = R M), T tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from parasearch_jax.errors import UserError
from parasearch_jax.models import decoder
from parasearch_jax.models.decoder import DecoderConfig
from parasearch_jax.rl.batch import Batch
from parasearch_jax.rl.logprobs import sequence_logprobs
from parasearch_jax.rl.losses import kl, masked_sum, policy_loss, token_count
from parasearch_jax.sharding import rules

State = dict  # {"params": tree, "opt": optax state, "step": int32 updates done, "skipped": int32 updates refused}
Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
    """What a step computes, and in what portions. The portions change memory and time, never the result."""

    clip_low: float = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2
    kl_coef: float = 0.0  # of the KL to the reference in the loss
    kl_kind: str = "k3"
    entropy_coef: float = 0.0  # of the entropy bonus
    micro_rows: int = 8  # rows of a micro-batch; must divide B
    temperature: float = 1.0  # the sampler's
    logprob_chunk: int = 128  # tokens of a row whose logits exist at one time
    remat: str = "none"  # what the backward pass computes again, of models.decoder.REMAT

    def __post_init__(self):
        if self.temperature <= 0:
            raise UserError(f"update: temperature is {self.temperature}; training needs sampled ids, set it > 0")
        if self.kl_kind not in ("k2", "k3"):
            raise UserError(f"update: kl_kind is {self.kl_kind!r}; as a loss only k2 and k3 have the right gradient")
        if self.remat not in decoder.REMAT:
            raise UserError(f"update: remat is {self.remat!r}; use one of: {', '.join(decoder.REMAT)}")
        for name in ("micro_rows", "logprob_chunk"):
            if getattr(self, name) < 1:
                raise UserError(f"update: {name} is {getattr(self, name)}, it must be >= 1")


def init_state(params, tx: optax.GradientTransformation) -> State:
    """State of an untrained model. Copies `params`: the update donates its state, the caller may keep a reference."""
    params = jax.tree.map(jnp.copy, params)
    return {
        "params": params,
        "opt": tx.init(params),
        "step": jnp.zeros((), jnp.int32),
        "skipped": jnp.zeros((), jnp.int32),
    }


def make_score(cfg: DecoderConfig, ucfg: UpdateConfig) -> Callable:
    """Jitted `score(params, batch) -> (logprobs, entropy)`, float32 [B, T], both 0 where policy_mask is 0."""

    def score_micro(params, micro: Batch):
        out = _logprobs(params, cfg, ucfg, micro)
        return tuple(jnp.where(micro.policy_mask > 0, x, 0.0) for x in out)

    @jax.jit
    @jax.named_scope("score")
    def score(params, batch: Batch):
        return join(jax.lax.map(lambda micro: score_micro(params, micro), split(batch, ucfg.micro_rows)))

    return score


def make_update(cfg: DecoderConfig, ucfg: UpdateConfig, tx: optax.GradientTransformation) -> Callable:
    """Jitted `update(state, batch, advantages, old_logprobs, ref_logprobs=None) -> (state, metrics)`; donates `state`.

    Arrays are float32 [B, T]; B must be a multiple of micro_rows. Gradients are summed in float32 over micro-batches of
    one global token denominator. A loss or gradient that is not finite leaves parameters and optimizer as they are and
    counts in `skipped`. `ref_logprobs` is needed for kl_coef > 0; without the coefficient it is only measured.
    Metrics, float32 scalars over policy tokens: loss, policy_loss, entropy, clip_fraction, approx_kl, ratio_mean,
    ratio_max, kl (with a reference), grad_norm (before clipping), update_norm, param_norm, and skipped (int32, all
    refused updates so far).
    """

    @jax.named_scope("update")
    def update(state: State, batch: Batch, advantages, old_logprobs, ref_logprobs=None):
        if ucfg.kl_coef and ref_logprobs is None:
            raise ValueError(f"update: kl_coef is {ucfg.kl_coef} but ref_logprobs is None; score the reference first")
        data = (batch, advantages, old_logprobs, ref_logprobs)
        denominator = token_count(batch.policy_mask)  # of the whole batch: the result must not depend on the split

        def micro_loss(params, micro):
            logprobs, entropy = _logprobs(params, cfg, ucfg, micro[0])
            return _loss(ucfg, logprobs, entropy, micro, denominator)[0], (logprobs, entropy)

        grads, (logprobs, entropy) = accumulate(micro_loss, state["params"], data, ucfg.micro_rows)
        _, metrics = _loss(ucfg, logprobs, entropy, data, denominator)
        state, norms = apply_gradients(tx, state, grads, metrics["loss"])
        return state, metrics | norms

    return jax.jit(update, donate_argnums=0)


def _loss(ucfg: UpdateConfig, logprobs, entropy, data, denominator) -> tuple[jax.Array, Metrics]:
    """Loss of a (micro-)batch: clipped policy loss, plus KL to the reference, minus entropy bonus."""
    batch, advantages, old_logprobs, ref_logprobs = data
    mask, clip = batch.policy_mask, (ucfg.clip_low, ucfg.clip_high)
    loss, metrics = policy_loss(logprobs, old_logprobs, advantages, mask, clip, denominator)
    metrics |= {"policy_loss": loss, "entropy": masked_sum(entropy, mask) / denominator}
    if ucfg.entropy_coef:
        loss -= ucfg.entropy_coef * metrics["entropy"]
    if ref_logprobs is not None:
        metrics["kl"] = masked_sum(kl(logprobs, ref_logprobs, ucfg.kl_kind, mask), mask) / denominator
        loss += ucfg.kl_coef * metrics["kl"] if ucfg.kl_coef else 0.0
    return loss, metrics | {"loss": loss}


def _logprobs(params, cfg: DecoderConfig, ucfg: UpdateConfig, micro: Batch):
    """Log-probs and entropies [R, T] of a micro-batch."""
    return sequence_logprobs(
        params,
        cfg,
        micro.ids,
        micro.positions,
        ucfg.temperature,
        ucfg.logprob_chunk,
        ucfg.remat,
        entropy_grad=ucfg.entropy_coef != 0,
    )


# ------------------------------------------------------------------------------ what policy and critic do alike


def accumulate(micro_loss: Callable, params, data, rows: int):
    """Gradient of the sum of `micro_loss(params, micro) -> (loss, out)` over the micro-batches of `data`, in float32,
    and `out` of all of them, joined to [B, T]."""

    def step(total, micro):
        grads, out = jax.grad(micro_loss, has_aux=True)(params, micro)
        total = jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, grads)
        return rules.constrain_tree(total), out

    zeros = rules.constrain_tree(jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params))
    grads, out = jax.lax.scan(step, zeros, split(data, rows))
    return grads, join(out)


def apply_gradients(tx: optax.GradientTransformation, state: State, grads, loss) -> tuple[State, Metrics]:
    """One step of the optimizer. If loss or gradient is not finite: the same state with one more skipped.

    Metrics: grad_norm (before clipping), update_norm, param_norm, skipped.
    """
    grad_norm = optax.tree.norm(grads)
    kept = {"params": state["params"], "opt": state["opt"]}
    updates, opt = tx.update(grads, state["opt"], state["params"])
    # All that is measured comes before `ok`, on which the writing waits: else XLA keeps copies of the parameters.
    update_norm = optax.tree.norm(updates)
    ok = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & jnp.isfinite(update_norm)
    new = {"params": optax.apply_updates(state["params"], updates), "opt": opt}
    state = rules.constrain_tree(jax.tree.map(lambda n, k: jnp.where(ok, n, k), new, kept)) | {
        "step": state["step"] + ok.astype(jnp.int32),
        "skipped": state["skipped"] + (~ok).astype(jnp.int32),
    }
    update_norm = jnp.where(ok, update_norm, 0.0)
    norms = {"grad_norm": grad_norm, "update_norm": update_norm, "param_norm": optax.tree.norm(state["params"])}
    return state, norms | {"skipped": state["skipped"]}


def split(tree, rows: int):
    """[B, ...] leaves as [M, R, ...]. Micro-batch m takes rows m, m + M, m + 2M ..., so that with B sharded in blocks
    every device holds its share of every micro-batch and no row moves."""

    def leaf(x):
        if x.shape[0] % rows:
            raise ValueError(f"batch of {x.shape[0]} rows, micro_rows {rows}: build the batch with rows={rows}")
        return x.reshape(rows, -1, *x.shape[1:]).swapaxes(0, 1)

    return jax.tree.map(leaf, tree)


def join(tree):
    """The inverse of `split`."""
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), tree)
