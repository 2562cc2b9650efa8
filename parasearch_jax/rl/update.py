"""Scoring a batch and one optimizer step on it, both by micro-batches (portions.py): a jitted function for each length
of them, and one that takes the step.

Axes: B batch (rows), T tokens; R rows and t tokens of a micro-batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax

from parasearch_jax.errors import UserError
from parasearch_jax.models import decoder
from parasearch_jax.models.decoder import DecoderConfig
from parasearch_jax.rl import portions
from parasearch_jax.rl.batch import Batch
from parasearch_jax.rl.logprobs import sequence_logprobs
from parasearch_jax.rl.losses import (
    kl,
    masked_sum,
    overlong_filter,
    policy_loss,
    token_count,
    token_weights,
    weighted_sum,
)
from parasearch_jax.rl.portions import Micro
from parasearch_jax.sharding import rules

State = dict  # {"params": tree, "opt": optax state, "step": int32 updates done, "skipped": int32 updates refused}
Metrics = dict[str, jax.Array]


AGGREGATIONS = ("token-mean", "sequence-mean", "dr_grpo", "released")


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
    """What a step computes, and in what portions. The portions change memory and time, never the result."""

    clip_low: float = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2
    kl_coef: float = 0.0  # of the KL to the reference in the loss
    kl_kind: str = "k3"
    entropy_coef: float = 0.0  # of the entropy bonus
    dual_clip: float = 0.0  # bound of the loss of a token with a negative advantage, in units of it; 0: none
    importance_cap: float = 0.0  # of the weights for the gap between sampler and trainer; 0: no weights
    aggregation: str = "token-mean"  # of the policy's loss, see losses.row_weights
    mean_rows: int = 0  # aggregation "released": rows of a micro-batch whose mean is taken
    drop_truncated: bool = False  # episodes that ended with `length` are no part of the loss
    micro_rows: int = 8  # rows of a micro-batch of the largest bucket
    buckets: tuple[int, ...] = ()  # tokens of a row of a micro-batch
    temperature: float = 1.0  # the sampler's
    logprob_chunk: int = 128  # tokens of a row whose logits exist at one time
    remat: str = "none"  # what the backward pass computes again, of models.decoder.REMAT

    def __post_init__(self):
        if self.temperature <= 0:
            raise UserError(f"update: temperature is {self.temperature}; training needs sampled ids, set it > 0")
        if self.kl_kind not in ("k2", "k3", "k3+"):
            raise UserError(f"update: kl_kind is {self.kl_kind!r}; use k2, k3 or k3+ (k1 has no gradient on average)")
        if self.aggregation not in AGGREGATIONS:
            raise UserError(f"update: aggregation is {self.aggregation!r}; use one of: {', '.join(AGGREGATIONS)}")
        if (self.aggregation == "released") != (self.mean_rows > 0):
            raise UserError(
                f"update: mean_rows is {self.mean_rows} with aggregation {self.aggregation!r}: the released means need "
                "the rows of their micro-batches (64 in its scripts), the others have none"
            )
        if self.dual_clip and self.dual_clip <= 1:
            raise UserError(f"update: dual_clip is {self.dual_clip}; give a number above 1 (3 is usual), or 0 for none")
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


def make_score(cfg: DecoderConfig, ucfg: UpdateConfig) -> Scoring:
    """`score(params, batch, micros) -> logprobs`, float32 [B, T], 0 where policy_mask is 0."""

    def of_micro(params, micro: Batch):
        logprobs, _ = _logprobs(params, cfg, ucfg, micro)
        return jnp.where(micro.policy_mask > 0, logprobs, 0.0)

    return scoring(of_micro)


def make_update(cfg: DecoderConfig, ucfg: UpdateConfig, tx: optax.GradientTransformation) -> Step:
    """`update(state, data, micros) -> (state, metrics)`; donates `state`.

    data: {"batch": Batch, "weights", "advantages", "old", "ref", "importance"}: float32 [B, T]; weights as
    `loss_weights` makes them for the whole update, "old" and "ref" log-probs, the last two where they are needed.
    Gradients are summed in float32 over micro-batches. A loss or gradient that is not finite leaves parameters
    and optimizer as they are and counts in `skipped`. "ref" is needed for kl_coef > 0; without the coefficient it is
    only measured. Metrics, float32 scalars over policy tokens: loss, policy_loss, entropy, clip_fraction, approx_kl,
    ratio_mean, ratio_max, kl (with a reference), grad_norm (before clipping), update_norm, param_norm, and skipped
    (int32, all refused updates so far).
    """

    def loss_of(data, out, tokens):
        return _loss(ucfg, out["logprobs"], out["entropy"], data, tokens)

    return stepping(_policy(cfg, ucfg), loss_of, _tokens, tx)


def make_sft_update(cfg: DecoderConfig, ucfg: UpdateConfig, tx: optax.GradientTransformation) -> Step:
    """`update(state, data, micros) -> (state, metrics)` of supervised learning; donates `state`.

    data: {"batch": Batch, "weights": float32 [B, T]}; the loss is the sum of weight times -log p(id) over policy ids,
    so prompts, documents and notices are read and not learned. Everything else as in `make_update`.
    Metrics: loss, perplexity (exp of the mean -log p of a policy id, whatever the weights) and entropy, next to the
    norms and `skipped`. Raises UserError for what only a sampled batch has.
    """
    for name in ("kl_coef", "entropy_coef", "dual_clip", "importance_cap"):
        if getattr(ucfg, name):
            raise UserError(f"update: {name} is {getattr(ucfg, name)}, which a supervised loss has not: set it to 0")

    def loss_of(data, out, tokens):
        mask, surprise = data["batch"].policy_mask, -out["logprobs"]
        loss = weighted_sum(surprise, data["weights"])
        perplexity = jnp.exp(masked_sum(surprise, mask) / tokens)
        return loss, {"loss": loss, "perplexity": perplexity, "entropy": masked_sum(out["entropy"], mask) / tokens}

    return stepping(_policy(cfg, ucfg), loss_of, _tokens, tx)


def _policy(cfg: DecoderConfig, ucfg: UpdateConfig) -> Callable:
    """What `stepping` runs of the policy."""

    def of_micro(params, micro):
        logprobs, entropy = _logprobs(params, cfg, ucfg, micro["batch"])
        return {"logprobs": logprobs, "entropy": entropy}

    return of_micro


def _tokens(data) -> jax.Array:
    return token_count(data["batch"].policy_mask)


def _loss(ucfg: UpdateConfig, logprobs, entropy, data, tokens) -> tuple[jax.Array, Metrics]:
    """Loss of a (micro-)batch: clipped policy loss, plus KL to the reference, minus entropy bonus; data["weights"]
    weigh the tokens. The metrics are means over the `tokens` of the whole."""
    mask, weights = data["batch"].policy_mask, data["weights"]
    loss, metrics = policy_loss(
        logprobs,
        data["old"],
        data["advantages"],
        mask,
        (ucfg.clip_low, ucfg.clip_high),
        tokens,
        weights,
        ucfg.dual_clip or None,
        data.get("importance"),
    )
    metrics |= {"policy_loss": loss, "entropy": masked_sum(entropy, mask) / tokens}
    if ucfg.entropy_coef:
        loss -= ucfg.entropy_coef * weighted_sum(entropy, weights)
    if ucfg.kl_coef and "ref" not in data:
        raise ValueError(f"update: kl_coef is {ucfg.kl_coef} but there is no 'ref'; score the reference first")
    if "ref" in data:
        divergence = kl(logprobs, data["ref"], ucfg.kl_kind, mask)
        metrics["kl"] = masked_sum(divergence, mask) / tokens
        loss += ucfg.kl_coef * weighted_sum(divergence, weights) if ucfg.kl_coef else 0.0
    return loss, metrics | {"loss": loss}


def loss_weights(ucfg: UpdateConfig, batch: Batch) -> jax.Array:
    """float32 [B, T]: what each policy token of the rows of an update weighs in its loss."""
    mask = batch.policy_mask
    if ucfg.drop_truncated:
        mask = overlong_filter(mask, batch.truncated)
    micro = None
    if ucfg.aggregation == "released":  # the rows of an update, so many at a time, in their order
        micro = (jnp.cumsum((mask > 0).any(-1)) - 1).clip(0) // ucfg.mean_rows
    return token_weights(mask, ucfg.aggregation, batch.ids.shape[1], micro)


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
        mask=micro.policy_mask,
    )


# ------------------------------------------------------------------------------ what policy and critic do alike


@dataclasses.dataclass(frozen=True)
class Scoring:
    """`score(params, data, micros) -> [B, T]`, made of jitted functions."""

    begin: Callable  # (data) -> zeros [B, T]
    micro: Callable  # (params, out, data, rows, *, tokens) -> out; donates it

    def __call__(self, params, data, micros: Sequence[Micro]) -> jax.Array:
        out = self.begin(data)
        for micro in micros:
            out = self.micro(params, out, data, micro.rows, tokens=micro.tokens)
        return out


def scoring(of_micro: Callable) -> Scoring:
    """From `of_micro(params, micro) -> [R, t]`."""

    @functools.partial(jax.jit, static_argnames="tokens", donate_argnames="out")
    @jax.named_scope("score")
    def score(params, out, data, rows, *, tokens):
        return portions.place(out, of_micro(params, portions.take(data, rows, tokens)), rows, tokens)

    return Scoring(jax.jit(_blank), score)


@dataclasses.dataclass(frozen=True)
class Step:
    """`step(state, data, micros) -> (state, metrics)` of the optimizer, which donates the state; made of jitted
    functions, of which `accumulate` is one program for each length of micro-batches."""

    begin: Callable  # (params, data) -> (zero gradients, what the model will say, tokens)
    accumulate: Callable  # (params, grads, out, data, n, rows, *, tokens) -> (grads, out); donates both
    finish: Callable  # (state, grads, out, data, n) -> (state, metrics); donates the state

    def __call__(self, state: State, data, micros: Sequence[Micro]) -> tuple[State, Metrics]:
        grads, out, n = self.begin(state["params"], data)
        for micro in micros:
            grads, out = self.accumulate(state["params"], grads, out, data, n, micro.rows, tokens=micro.tokens)
        return self.finish(state, grads, out, data, n)


def stepping(of_micro: Callable, loss_of: Callable, count: Callable, tx: optax.GradientTransformation) -> Step:
    """The step of a model and a loss.

    `of_micro(params, micro) -> {name: [R, t]}` runs the model; `loss_of(data, out, n) -> (loss, metrics)` is a sum over
    the tokens of `data`, whole or a micro-batch, divided by n = `count(data)` of the whole: so the loss is the sum of
    the micro-batches' losses, however the rows are cut. The metrics are those of the whole.
    """

    @functools.partial(jax.jit, static_argnames="tokens", donate_argnames=("grads", "out"))
    @jax.named_scope("update")
    def accumulate(params, grads, out, data, n, rows, *, tokens):
        micro = portions.take(data, rows, tokens)

        def loss(params):
            new = of_micro(params, micro)
            return loss_of(micro, new, n)[0], new

        more, new = jax.grad(loss, has_aux=True)(params)
        grads = jax.tree.map(lambda total, g: total + g.astype(jnp.float32), grads, more)
        return rules.constrain_tree(grads), portions.place(out, new, rows, tokens)

    @jax.jit
    def begin(params, data):
        said = jax.eval_shape(of_micro, params, data)
        zeros = rules.constrain_tree(jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params))
        return zeros, {name: _blank(data) for name in said}, count(data)

    @functools.partial(jax.jit, donate_argnames="state")
    @jax.named_scope("update")
    def finish(state, grads, out, data, n):
        loss, metrics = loss_of(data, out, n)
        state, norms = apply_gradients(tx, state, grads, loss)
        return state, metrics | norms

    return Step(begin, accumulate, finish)


def _blank(data) -> jax.Array:
    """float32 zeros [B, T]."""
    batch = data if isinstance(data, Batch) else data["batch"]
    return rules.rows(jnp.zeros(batch.ids.shape, jnp.float32))


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
