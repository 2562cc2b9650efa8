"""Bytes of a run on one device as XLA compiles it: the real functions of train.py, for the run's mesh of virtual CPU
devices, from shapes with shardings. Nothing is allocated or run.

Functions that scan over the layers (score, update) are compiled at full depth, which costs no more than one layer.
Those that don't (prefill, decode, sync) are compiled at two small depths, from which follows what a layer adds.

Two things differ from a GPU's program, and both are set right here. Attention is "blocks", which holds about what
cuDNN's does (models/attention.py). And the CPU has no bfloat16: it would keep float32 copies of everything. So a bf16
run is compiled in float16, which has the same bytes and which the CPU takes as it is, but for the operands and results
of products: these it widens, and they are counted as the 2 bytes that they have on a GPU (`_counted`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from parasearch_jax.models import decoder
from parasearch_jax.plan import memory
from parasearch_jax.plan.buffers import Buffer, Program, compile_program
from parasearch_jax.plan.memory import Memory
from parasearch_jax.plan.run import Run
from parasearch_jax.rl.batch import Batch
from parasearch_jax.rl.critic import make_critic_update, make_values
from parasearch_jax.rl.learner import make_learner
from parasearch_jax.rl.optim import make_optimizer
from parasearch_jax.rl.update import make_score, make_update
from parasearch_jax.rollout import sampler
from parasearch_jax.rollout.stops import Stops
from parasearch_jax.sharding import layout, rules
from parasearch_jax.sharding.mesh import make_mesh

DEPTHS = (2, 4)  # of the functions that do not scan
STATES, KINDS = 64, 256  # of the stop automaton; its table is small


@dataclasses.dataclass(frozen=True)
class _Kinds:
    """Tells what a temporary of score or update is by its shape on one device."""

    vocab: int
    width: int  # D
    tokens: int  # R T
    layers: int
    shards: frozenset[int]  # sizes of the parameters' shards
    whole: frozenset[int]  # of a layer's matrices, gathered

    def __call__(self, buffer: Buffer) -> str:
        if buffer.size in self.shards:
            return "gradients"
        if self.vocab in buffer.shape:
            return "head gathered" if buffer.size == self.vocab * self.width else "log-prob chunk"
        if buffer.size in self.whole:
            return "layer gathered"
        if buffer.shape[:1] == (self.layers,) and buffer.size >= self.layers * self.tokens:
            return "kept activations"
        return "one layer at work"


def _kinds(run: Run, mesh: Mesh) -> _Kinds:
    shapes = decoder.param_shapes(run.model)
    placed = rules.placed(shapes, mesh)
    shard = lambda leaf: math.prod(leaf.sharding.shard_shape(leaf.shape))  # noqa: E731
    matrix = lambda leaf: leaf.ndim > 2  # noqa: E731  (with the axis of layers)
    layers = [leaf for leaf in jax.tree.leaves(placed["layers"]) if matrix(leaf)]
    rest = [leaf for name, leaf in placed.items() if name in ("embed", "head")]
    tp = run.mesh.tp
    return _Kinds(
        vocab=run.model.vocab_size // tp,
        width=run.model.hidden_size,
        tokens=run.learner.micro_rows // run.mesh.fsdp * run.tokens,
        layers=run.model.num_layers,
        shards=frozenset(map(shard, layers + rest)),
        whole=frozenset(math.prod(leaf.shape[1:]) // tp for leaf in layers),
    )


# Where float32 is meant. What is kept for the backward pass has the dtype that the program gives it.
FP32 = ("gradients", "head gathered", "log-prob chunk", "scores", "kept activations")
SENT = ("all", "reduce-scatter")  # names of what travels begin so; the CPU widens none of it


def _counted(run: Run, program: Program, kind: Callable[[Buffer], str]) -> Callable[[Buffer], float]:
    """Bytes of a temporary as a GPU holds it (see the top)."""

    def count(buffer: Buffer) -> float:
        fp32 = kind(buffer) in FP32 and buffer.name not in program.widened
        fp32 |= run.item == 4 or buffer.name.startswith(SENT)
        return buffer.bytes / 2 if buffer.dtype == "f32" and not fp32 else buffer.bytes

    return count


def for_cpu(run: Run) -> Run:
    """The run with a dtype and an attention of the same bytes, which a CPU has (see the top)."""
    dtype = "float16" if run.item == 2 else "float32"
    return dataclasses.replace(run, model=dataclasses.replace(run.model, dtype=dtype, attention="blocks"))


def by_compiler(run: Run) -> Memory:
    """Needs as many virtual devices as the mesh has (`jax_num_cpu_devices`)."""
    run, mesh = for_cpu(run), make_mesh(run.mesh)
    parts, at_work = dict.fromkeys(memory.PARTS, 0.0), {}
    with jax.set_mesh(mesh):
        _sampling(run, mesh, parts, at_work)
        _training(run, mesh, parts, at_work)
    if run.corpus.on_gpu:  # FAISS's own, beside JAX
        parts["FAISS index"] = (run.corpus.index_bytes or 0) / run.mesh.size
    return memory.total(parts, at_work)


# ----------------------------------------------------------------------------------------------------------- training


def _training(run: Run, mesh: Mesh, parts: dict[str, float], at_work: dict[str, float]) -> None:
    cfg, ucfg, ppo = run.model, run.learner, run.ppo
    if not run.steps:
        parts["policy, fp32"] = rules.bytes_per_device(rules.placed(decoder.param_shapes(cfg), mesh))
        return
    state = make_learner(cfg, run.algorithm, ucfg, run.optimizer, run.critic_optimizer, mesh).shapes
    reference = jax.eval_shape(lambda params: layout.cast(params, cfg.dtype), state["actor"]["params"])
    reference = rules.placed(reference, mesh) if run.reference else None
    kind = _kinds(run, mesh)
    batch = _batch(run, mesh)
    numbers = batch.rewards  # fp32 [B,T], as scores, advantages and masks are
    rows = jax.ShapeDtypeStruct((ucfg.micro_rows,), jnp.int32, sharding=NamedSharding(mesh, P()))

    # ---- Updates: the policy's and the critic's, one after the other; the largest micro-batch, then the step.
    refs = {"ref": numbers} if run.reference else {}
    data = {"batch": batch, "weights": numbers, "advantages": numbers, "old": numbers, **refs}
    made = [("actor", make_update(cfg, ucfg, make_optimizer(run.optimizer)), data)]
    if ppo:
        tx = make_optimizer(run.critic_optimizer)
        data = {"batch": batch, "steps": numbers, "values": numbers, "returns": numbers}
        made.append(("critic", make_critic_update(cfg, ucfg, tx, run.algorithm.value_clip), data))
    passes, steps = [], []
    for owner, step, given in made:
        grads, out, n = jax.eval_shape(step.begin, state[owner]["params"], given)
        grads, out = rules.placed(grads, mesh), jax.tree.map(lambda _: numbers, out)
        params = state[owner]["params"]
        passes.append(compile_program(step.accumulate.lower(params, grads, out, given, n, rows, tokens=run.tokens)))
        steps.append(compile_program(step.finish.lower(state[owner], grads, out, given, n)))
        summed = rules.bytes_per_device(grads)
        found = passes[-1].parts(kind, _counted(run, passes[-1], kind), until="kept activations")
        for name, size in found.items():
            parts[name] = max(parts[name], size + (summed if name == "gradients" else 0))
        peak = max(program.peak(_counted(run, program, kind)) for program in (passes[-1], steps[-1]))
        at_work["update"] = max(at_work.get("update", 0), summed + peak)

    # ---- Scores: of the policy, of the reference, and the critic's values.
    score = make_score(cfg, ucfg).micro
    scores = [compile_program(score.lower(state["actor"]["params"], numbers, batch, rows, tokens=run.tokens))]
    if run.reference:
        scores.append(compile_program(score.lower(reference, numbers, batch, rows, tokens=run.tokens)))
    if ppo:
        given = {"batch": batch, "steps": numbers}
        values = make_values(cfg, ucfg).micro
        scores.append(compile_program(values.lower(state["critic"]["params"], numbers, given, rows, tokens=run.tokens)))
    parts["scoring"] = at_work["score"] = max(program.peak(_counted(run, program, kind)) for program in scores)

    # ---- What is held, as these programs want it.
    arguments = [program.compiled.input_shardings[0][0] for program in steps]
    of_state = dict(zip(("actor", "critic"), arguments, strict=False))
    of_reference = scores[1].compiled.input_shardings[0][0] if run.reference else None
    _state_parts(parts, state, reference, of_state, of_reference)
    columns = 2 + run.reference + ppo + 2  # scores and advantages; what a pass says
    parts["batch and scores"] = rules.bytes_per_device(batch) + columns * rules.bytes_per_device(numbers)


def _state_parts(parts: dict[str, float], state: Any, reference: Any, of_state: Any, of_reference: Any) -> None:
    """`of_state` and `of_reference`: the shardings of the two."""
    for name, owner in (("actor", "policy"), ("critic", "critic")):
        if name in state:
            parts[f"{owner}, fp32"] = _bytes(state[name]["params"], of_state[name]["params"])
            parts[f"{owner}'s optimizer"] = _bytes(state[name]["opt"], of_state[name]["opt"])
    if reference is not None:
        parts["reference"] = _bytes(reference, of_reference)


def _bytes(shapes: Any, shardings: Any) -> float:
    def one(leaf, sharding):  # without one: the program does not read it
        return rules.bytes_per_device(leaf if sharding is None else leaf.update(sharding=sharding))

    return float(sum(jax.tree.leaves(jax.tree.map(one, shapes, shardings, is_leaf=lambda x: x is None))))


def _batch(run: Run, mesh: Mesh) -> Batch:
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, rules.ROWS))  # noqa: E731
    ids, masks, numbers = (array(t, run.rows, run.tokens) for t in ("int32", "float32", "float32"))
    of_row = array("int32", run.rows)
    return Batch(ids, ids, masks, numbers, numbers, of_row, of_row, of_row, array("bool", run.rows))


# ----------------------------------------------------------------------------------------------------------- sampling


def _sampling(run: Run, mesh: Mesh, parts: dict[str, float], at_work: dict[str, float]) -> None:
    """At two depths; what lies between them is taken for a straight line."""
    depths = DEPTHS if run.model.num_layers > max(DEPTHS) else (run.model.num_layers,)
    found = [_sampling_at(run, mesh, depth) for depth in depths]
    for name in found[0]:
        parts[name] = _extended(depths, [sizes[name] for sizes in found], run.model.num_layers)
    at_work["rollout"] = max(parts["prefill"], parts["decode step"])
    at_work["sync"] = parts["weights on their way"]


def _extended(depths: tuple[int, ...], sizes: list[float], layers: int) -> float:
    if len(depths) == 1:
        return sizes[0]
    of_layer = (sizes[1] - sizes[0]) / (depths[1] - depths[0])
    return sizes[1] + of_layer * (layers - depths[1])


def _sampling_at(run: Run, mesh: Mesh, depth: int) -> dict[str, float]:
    cfg = dataclasses.replace(run.model, num_layers=depth)
    slots, cells = run.rollout.slots, run.rollout.max_total_tokens
    trainer = rules.placed(decoder.param_shapes(cfg), mesh)
    to_sampler = functools.partial(layout.to_sampler, dtype=cfg.dtype)
    shapes = jax.eval_shape(to_sampler, trainer)
    params = rules.with_shardings(shapes, rules.sampler_shardings(shapes, mesh))
    state = jax.eval_shape(lambda: sampler.init_state(cfg, slots, cells, mesh))
    state = rules.with_shardings(state, sampler.state_shardings(cfg, mesh))
    whole = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))  # noqa: E731

    table, key = Stops(whole("int32", cfg.vocab_size), whole("int16", STATES, KINDS)), whole(jax.random.key(0).dtype)
    static, decoding = {"cfg": cfg, "mesh": mesh}, {"steps": run.rollout.chunk, "read": cells, "truncated": False}
    decode = compile_program(sampler.decode_chunk.lower(params, state, table, **decoding, **static))
    extend = compile_program(sampler.extend.lower(params, state, _feed(run, mesh), key, window=cells, **static))
    out = rules.sampler_shardings(shapes, mesh)
    sync = compile_program(jax.jit(to_sampler, out_shardings=out).lower(trainer))

    peak = lambda program: program.peak(_counted(run, program, functools.partial(_kind_of_sampling, run)))  # noqa: E731
    arguments = decode.compiled.input_shardings[0]
    return {
        "sampler's copy": _bytes(params, arguments[0]),
        "KV cache": _bytes(state.cache, arguments[1].cache),
        "prefill": peak(extend),
        "decode step": peak(decode),
        "weights on their way": peak(sync),
    }


def _kind_of_sampling(run: Run, buffer: Buffer) -> str:
    scores = {run.rollout.max_total_tokens, memory.fed(run)[1]} <= set(buffer.shape)
    return "scores" if scores or run.model.vocab_size in buffer.shape else ""


def _feed(run: Run, mesh: Mesh) -> dict[str, Any]:
    """The largest call of `extend`."""
    count, tokens = memory.fed(run)
    count *= run.mesh.fsdp
    array = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, rules.ROWS))
    return {
        **dict.fromkeys(("rows", "count", "start", "pending", "left", "top_k"), array((count,), jnp.int32)),
        **dict.fromkeys(("temperature", "top_p"), array((count,), jnp.float32)),
        "number": array((count,), jnp.uint32),
        "ids": array((count, tokens), jnp.int32),
    }
