"""Bytes of a run on one device by arithmetic: from shapes alone, knowing nothing of rules.py and of no compiler.

Axes: P parameters, L layers, D model, N heads, K kv-heads, H head dim, F ffn, V vocab; R rows of a micro-batch and S
slots on one device, T tokens of a row, C cells of a slot. The formulas leave out what is below a percent (norms,
biases, ids, masks).

A step's phases follow one another, and what a phase holds for itself is gone in the next:

    rollout   prefill, decode
    score     log-probs of policy and reference, values
    update    critic and policy, one after the other; in each the peak is either behind the last layer (`head`) or in a
              layer's backward pass (`layer`)
    sync      new weights for the sampler; its old ones have gone
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from parasearch_jax.plan.run import Run
from parasearch_jax.rollout.sizes import Sizes

PHASES = ("rollout", "score", "update", "sync")

# Part of the memory -> the phases in which it is there, from their beginning to their end.
HELD: dict[str, tuple[str, ...]] = {
    "policy, fp32": PHASES,
    "policy's optimizer": PHASES,
    "critic, fp32": PHASES,
    "critic's optimizer": PHASES,
    "reference": PHASES,
    "sampler's copy": PHASES,
    "KV cache": PHASES,
    "FAISS index": PHASES,
    "batch and scores": ("score", "update"),
}
STATE = tuple(HELD)[:4]  # what a checkpoint holds
# Part -> the phase that it belongs to, for a while: not all parts of a phase are there at one time.
AT_WORK: dict[str, tuple[str, ...]] = {
    "prefill": ("rollout",),
    "decode step": ("rollout",),
    "scoring": ("score",),
    "gradients": ("update",),
    "kept activations": ("update",),
    "one layer at work": ("update",),
    "layer gathered": ("update",),
    "head gathered": ("update",),
    "log-prob chunk": ("update",),
    "weights on their way": ("sync",),
}
PARTS = HELD | AT_WORK


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device: of each part its own largest, and of each phase what it holds at its peak, all told."""

    parts: Mapping[str, float]
    phases: Mapping[str, float]

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=self.phases.get)

    @property
    def peak(self) -> float:
        return self.phases[self.peak_phase]


def total(parts: Mapping[str, float], at_work: Mapping[str, float]) -> Memory:
    """`at_work`: the most bytes that a phase has at work at one time, for each phase of the run."""
    held = {phase: sum(parts[part] for part, phases in HELD.items() if phase in phases) for phase in PHASES}
    return Memory(parts, {phase: held[phase] + at_work[phase] for phase in PHASES if phase in at_work})


def matrices(run: Run) -> dict[str, int]:
    """Parameters of the matrices: of one layer, and of the embedding or the head."""
    m = run.model
    layer = m.hidden_size * (2 * m.num_heads + 2 * m.num_kv_heads) * m.head_dim
    return {"layer": layer + 3 * m.hidden_size * m.intermediate_size, "vocab": m.vocab_size * m.hidden_size}


def by_arithmetic(run: Run) -> Memory:
    m, tp, item, count = run.model, run.mesh.tp, run.item, matrices(run)
    backbone = m.num_layers * count["layer"] + count["vocab"]
    policy, critic = backbone + (0 if m.tie_word_embeddings else count["vocab"]), backbone
    shard = lambda parameters: parameters / run.mesh.size  # noqa: E731
    slots, cells = run.rollout.slots / run.mesh.fsdp, run.rollout.max_total_tokens

    # ---- Held.
    parts = dict.fromkeys(PARTS, 0.0)
    parts["policy, fp32"] = 4 * shard(policy)
    if run.steps:
        parts["policy's optimizer"] = (4 + _moment(run.optimizer)) * shard(policy)
    if run.ppo:
        parts["critic, fp32"] = 4 * shard(critic)
        parts["critic's optimizer"] = (4 + _moment(run.critic_optimizer)) * shard(critic)
    if run.reference:
        parts["reference"] = item * shard(policy)
    parts["sampler's copy"] = item * policy / tp
    parts["KV cache"] = slots * cells * cell_bytes(run) / tp
    if run.corpus.on_gpu:
        parts["FAISS index"] = shard(run.corpus.index_bytes or 0)

    # ---- At work.
    parts |= _rollout(run, slots)
    if run.mesh.fsdp > 1:  # the head, cast and gathered
        parts["weights on their way"] = item * (count["vocab"] / tp + shard(count["vocab"]))
    at_work = {"rollout": max(parts["prefill"], parts["decode step"]), "sync": parts["weights on their way"]}
    if run.steps:
        numbers = 5 + 2 + run.reference + run.ppo + 2  # [B,T] of the batch, scores, advantages, what a pass says
        parts["batch and scores"] = 4 * numbers * run.rows / run.mesh.fsdp * run.tokens
        parts |= _update(run, shard(policy))
        parts["scoring"] = at_work["score"] = _scoring(run)
        layer = parts["layer gathered"] + parts["one layer at work"] + _head(run)
        head = parts["head gathered"] + parts["log-prob chunk"]
        at_work["update"] = parts["gradients"] + parts["kept activations"] + max(layer, head)
    return total(parts, at_work)


def cell_bytes(run: Run) -> int:
    """Of one token in the cache: keys and values of all layers."""
    m = run.model
    return 2 * m.num_layers * m.num_kv_heads * m.head_dim * run.item


def _moment(optimizer) -> int:
    return 2 if optimizer.mu_dtype == "bfloat16" else 4


def _head(run: Run) -> float:
    """The output matrix, whole and fp32, gathered for a whole pass; on one 'fsdp' row it is the parameter itself."""
    return 4 * matrices(run)["vocab"] / run.mesh.tp if run.mesh.fsdp > 1 else 0


def _chunk(run: Run) -> float:
    """Logits fp32 [R,chunk,V] of one device."""
    rows = run.learner.micro_rows / run.mesh.fsdp
    return 4 * rows * min(run.learner.logprob_chunk, run.tokens) * run.model.vocab_size / run.mesh.tp


def _widths(run: Run) -> tuple[int, float, float]:
    """D; (N + 2K) H and F of one device."""
    m, tp = run.model, run.mesh.tp
    return m.hidden_size, (m.num_heads + 2 * m.num_kv_heads) * m.head_dim / tp, m.intermediate_size / tp


def _update(run: Run, shard: float) -> dict[str, float]:
    m, tp, item, count = run.model, run.mesh.tp, run.item, matrices(run)
    tokens, (D, qkv, F) = run.learner.micro_rows / run.mesh.fsdp * run.tokens, _widths(run)
    whole = item * count["layer"] / tp
    split = run.mesh.fsdp > 1
    kept, at_work = {  # bytes of a token: in every layer, and in the one whose gradients are being made
        # The layer's input. Gate, up, their product, the gradients of two of them; the residual stream, q, k, v, the
        # norms' outputs, and gradients of these.
        "full": (item * D, item * (5 * F + 9 * D)),
        # The results of products with weights.
        "dots": (item * (2 * D + qkv + 2 * F), item * (3 * F + 10 * D)),
        # What any gradient needs, norms in fp32.
        "none": (item * (3 * D + qkv + 6 * F) + 4 * 4 * D, item * (3 * F + 9 * D)),
    }[run.learner.remat]
    weights = whole if split and run.learner.remat == "none" else 0  # each layer's, gathered, stay too
    return {
        "gradients": 4 * shard * 2,  # the sum, and the micro-batch's that is added to it
        "kept activations": m.num_layers * (tokens * kept + weights),
        "one layer at work": tokens * at_work,
        "layer gathered": 2 * whole,  # and its gradients, before they are scattered
        # The output matrix, and of its gradient the sum and what a chunk adds.
        "head gathered": _head(run) + (4 + item) * count["vocab"] / tp if split else 0,
        "log-prob chunk": 2 * _chunk(run),  # the logits and their gradient
    }


def _scoring(run: Run) -> float:
    """A forward pass: gate and up; or the logits."""
    tokens, (D, _, F) = run.learner.micro_rows / run.mesh.fsdp * run.tokens, _widths(run)
    layer = tokens * (2 * F + 2 * D) * run.item + matrices(run)["layer"] / run.mesh.tp * run.item
    return _head(run) + max(layer, tokens * D * run.item + _chunk(run))


def _rollout(run: Run, slots: float) -> dict[str, float]:
    """A call with documents, each against a full cache, its scores in fp32; and a step for all slots."""
    m, tp, (D, _, F) = run.model, run.mesh.tp, _widths(run)
    cells = run.rollout.max_total_tokens
    rows, of_row = fed(run)
    tokens = rows * of_row
    scores = 2 * 4 * tokens * m.num_heads / tp * cells  # before and behind the mask
    read = cells * m.num_kv_heads / tp * m.head_dim * run.item  # keys, or values, of a slot in one layer
    mlp = tokens * 3 * F * run.item
    return {
        "prefill": max(scores + rows * read, mlp) + tokens * 3 * D * run.item,
        "decode step": slots * read + 4 * slots * m.vocab_size,  # and the logits fp32
    }


def fed(run: Run) -> tuple[int, int]:
    """Rows of a device and their tokens in the largest call of `extend`: observations."""
    limits = run.rollout
    sizes = Sizes(limits.slots // run.mesh.fsdp, limits.max_total_tokens, limits.observation_tokens, False)
    return sizes.rows(sizes.lengths[-1]), sizes.lengths[-1]
