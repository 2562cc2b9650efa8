"""A step over many devices is the step over one, and its compiled form moves what it has to and nothing else."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parasearch_jax.checkpoint import Checkpoints
from parasearch_jax.models import decoder
from parasearch_jax.rl import build_batch, put_batch
from parasearch_jax.rl.learner import AlgorithmConfig, make_learner
from parasearch_jax.rl.optim import OptimConfig, make_optimizer
from parasearch_jax.rl.update import UpdateConfig, make_update
from parasearch_jax.rollout.types import Episode, Segment
from parasearch_jax.sharding import rules
from parasearch_jax.sharding.mesh import MeshConfig, make_mesh

# Untied, as 7B, with unused rows of the vocabulary. All sizes differ: shapes in compiled text tell what they are.
CFG = decoder.DecoderConfig(
    vocab_size=80,
    vocab_used=77,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
)
CHUNK, T, ROWS = 6, 24, 8
LR = 1e-4
OPTIMIZER = OptimConfig(lr=LR)
ALGORITHMS = {
    "ppo": (AlgorithmConfig("ppo", questions=16, updates=2, reward_kl=0.1), {}),
    "grpo": (AlgorithmConfig("grpo", questions=4, samples=4), {"kl_coef": 0.1, "entropy_coef": 0.01}),
}
MESHES = [(1, 1), (4, 1), (2, 2), (1, 2)]


@pytest.fixture(scope="module")
def batch():
    """16 rows of 4 questions: prompt, policy, documents, policy of unequal lengths."""
    rng, episodes = np.random.default_rng(0), []
    for i in range(16):
        sizes = {"prompt": 3, "policy": 4 + i % 3, "docs": 5 + i % 4}
        parts = [(name, sizes[name]) for name in ("prompt", "policy", "docs", "policy")]
        ids = [(name, tuple(rng.integers(1, CFG.vocab_used, n).tolist())) for name, n in parts]
        segments = [Segment(name, "", x, (-1.0,) * len(x) if name == "policy" else None) for name, x in ids]
        episodes.append(Episode(segments, question_id=f"q{i // 4}", sample=i % 4))
    return build_batch(episodes, [({"r": float(rng.normal())}, None) for _ in episodes], T, multiple=4)


@pytest.fixture(scope="module")
def params():
    params = decoder.init(CFG, jax.random.key(0))
    return {**params, "embed": params["embed"] * 10}


def update_config(**changes):
    return UpdateConfig(micro_rows=ROWS // 2, buckets=(T,), logprob_chunk=CHUNK, remat="full", **changes)


def step(mesh, name, params, batch):
    algorithm, changes = ALGORITHMS[name]
    learner = make_learner(CFG, algorithm, update_config(**changes), OPTIMIZER, OPTIMIZER, mesh)
    placed, cut = put_batch(batch, mesh), learner.cut(batch.lengths)
    scores, gap = learner.score(state := learner.init(params), placed, cut, learner.reference(params))
    state, metrics = learner.update(state, placed, cut, scores)
    return learner, state, metrics | gap


@pytest.fixture(scope="module")
def on_one(params, batch):
    """on_one(name) -> (state, metrics) of a step on one device."""
    mesh = make_mesh(MeshConfig())
    return functools.cache(lambda name: jax.device_get(step(mesh, name, params, batch)[1:]))


FAST = {("grpo", (2, 2))}
CASES = [(name, shape) for name in ALGORITHMS for shape in MESHES[1:]]


@pytest.mark.parametrize("name, shape", [pytest.param(*c, marks=[pytest.mark.slow] * (c not in FAST)) for c in CASES])
def test_an_update_is_the_same_on_every_mesh(name, shape, params, batch, on_one):
    learner, state, metrics = step(make_mesh(MeshConfig(*shape)), name, params, batch)
    expected, expected_metrics = on_one(name)
    moved = jax.tree.map(lambda new, old: np.abs(new - old).max(), expected["actor"]["params"], params)
    assert max(jax.tree.leaves(moved)) > 0.5 * LR  # the update is no small thing beside the tolerance
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-6), jax.device_get(state), expected)
    for key, value in expected_metrics.items():
        np.testing.assert_allclose(metrics[key], value, rtol=1e-4, atol=1e-5, err_msg=key)
    for leaf, shape in zip(jax.tree.leaves(state), jax.tree.leaves(learner.shapes), strict=True):
        assert leaf.sharding.is_equivalent_to(shape.sharding, leaf.ndim)


def test_without_a_mesh_as_on_one_device(params, batch, on_one):
    """What a notebook does."""
    algorithm, changes = ALGORITHMS["grpo"]
    learner = make_learner(CFG, algorithm, update_config(**changes), OPTIMIZER)
    state, placed, cut = learner.init(params), jax.device_put(batch), learner.cut(batch.lengths)
    state, _ = learner.update(state, placed, cut, learner.score(state, placed, cut, params)[0])
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-6), jax.device_get(state), on_one("grpo")[0]
    )


def test_a_second_step_compiles_nothing_and_transfers_only_explicitly(params, batch):
    mesh, compiled = make_mesh(MeshConfig(4, 1)), []
    learner, state, _ = step(mesh, "grpo", params, batch)
    reference, placed, cut = learner.reference(params), put_batch(batch, mesh), learner.cut(batch.lengths)

    def listen(event, seconds, **_):
        if "compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with jax.transfer_guard("disallow"):
            scores, _ = learner.score(state, placed, cut, reference)
            learner.update(state, placed, cut, scores)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled


def test_a_checkpoint_goes_to_any_mesh(params, batch, tmp_path):
    """Saved on two times two devices, taken up by one and by four: the same bits."""
    _, state, _ = step(make_mesh(MeshConfig(2, 2)), "ppo", params, batch)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, {})
    checkpoints.wait()
    algorithm, changes = ALGORITHMS["ppo"]
    for shape in [(1, 1), (4, 1)]:
        learner = make_learner(
            CFG, algorithm, update_config(**changes), OPTIMIZER, OPTIMIZER, make_mesh(MeshConfig(*shape))
        )
        restored, _ = checkpoints.restore(1, learner.shapes)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), jax.device_get(state))
        assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, learner.shapes)
    checkpoints.close()


def test_the_reference_is_a_copy_in_the_compute_dtype(params, batch):
    """bf16 matrices give the same log-probs as fp32 masters, which the forward pass rounds where it uses them."""
    mesh, cfg = make_mesh(MeshConfig(fsdp=2)), dataclasses.replace(CFG, dtype="bfloat16")
    learner = make_learner(cfg, ALGORITHMS["grpo"][0], update_config(), OPTIMIZER, mesh=mesh)
    state, reference, placed = learner.init(params), learner.reference(params), put_batch(batch, mesh)
    cut = learner.cut(batch.lengths)
    assert reference["layers"]["mlp"]["up"].dtype == jnp.bfloat16 and reference["norm"]["scale"].dtype == jnp.float32
    scores, _ = learner.score(state, placed, cut, reference)
    np.testing.assert_array_equal(scores["old"], scores["ref"])
    jax.tree.map(lambda x: x.delete(), state)  # as the update's donation does
    np.testing.assert_array_equal(learner.score(learner.init(params), placed, cut, reference)[0]["ref"], scores["ref"])


# ---------------------------------------------------------------------------------------------------- compiled text


def compiled_update(mesh, dtype="float32") -> str:
    cfg, tx, model = update_config(kl_coef=0.1), make_optimizer(OPTIMIZER), dataclasses.replace(CFG, dtype=dtype)
    learner = make_learner(model, ALGORITHMS["grpo"][0], cfg, OPTIMIZER, mesh=mesh)
    row = jax.ShapeDtypeStruct((16, T), jnp.float32, sharding=jax.NamedSharding(mesh, rules.ROWS))
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=row.sharding),
        build_batch([Episode([Segment("prompt", "", (1,))], question_id="q")], [({}, None)], T, multiple=16),
    )
    step = make_update(model, cfg, tx)
    data = {"batch": batch, "weights": row, "advantages": row, "old": row, "ref": row}
    rows = jax.ShapeDtypeStruct((ROWS // 2,), jnp.int32)
    with jax.set_mesh(mesh):
        params = learner.shapes["actor"]["params"]
        grads, out, n = jax.eval_shape(step.begin, params, data)
        grads, out = rules.placed(grads, mesh), dict.fromkeys(out, row)
        return step.accumulate.lower(params, grads, out, data, n, rows, tokens=T).compile().as_text()


def is_alone(line: str) -> bool:
    """Whether a collective is among one device: groups {{0},{1}}, [2,1]<=[2], or mesh['fsdp'=2,'tp'=1] {'tp'}."""
    if axes := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", axes[1]))
        return all(sizes[name] == "1" for name in re.findall(r"'(\w+)'", axes[2]))
    return bool(re.search(r"replica_groups=(\[\d+,1\]|\{\{\d+\}[,}])", line))


def collectives(text: str) -> list[tuple[str, list[tuple[int, ...]], str]]:
    """(kind, shapes of its results, the computation that it stands in: "ENTRY", or a loop's body), but for those among
    one device."""
    found, where = [], ""
    kinds = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"
    for line in text.splitlines():
        if head := re.match(r"(ENTRY|%[\w.\-]+) .*\{$", line):
            where = head[1]
        elif (call := re.search(rf"= (.*?) ({kinds})(-start)?\(", line)) and not is_alone(line):
            shapes = [tuple(map(int, dims.split(","))) for dims in re.findall(r"\[([\d,]+)\]", call[1])]
            found.append((call[2], shapes, where))
    return found


@pytest.mark.parametrize("shape", [(4, 1), (2, 2)])
def test_the_head_travels_once_and_no_logits_of_a_sequence_exist(shape):
    fsdp, tp = shape
    text = compiled_update(make_mesh(MeshConfig(*shape)))
    V, D = CFG.vocab_size // tp, CFG.hidden_size
    of_head = [(kind, where) for kind, shapes, where in collectives(text) if (V, D) in shapes]
    assert of_head == [("all-gather", "ENTRY")], of_head  # before the loop over chunks
    back = [shapes for kind, shapes, _ in collectives(text) if kind == "reduce-scatter" and (V, D // fsdp) in shapes]
    assert len(back) == 1
    logits = {tuple(map(int, dims.split(","))) for dims in re.findall(r"f32\[(\d+,\d+,\d+)\]", text)}
    logits = {dims for dims in logits if dims[-1] in (CFG.vocab_size, V)}
    rows = ROWS // 2 // fsdp
    assert logits == {(rows, CHUNK, V)}, logits


def test_each_layer_comes_to_its_rows_and_no_row_moves():
    """One layer at a time in the loop, whole and in the compute dtype; only for the embedding are activations moved."""
    text = compiled_update(make_mesh(MeshConfig(4, 1)), "float16")  # which a CPU, other than bf16, does not widen
    found = collectives(text)
    D, F = CFG.hidden_size, CFG.intermediate_size
    gathered = [where for kind, shapes, where in found if kind == "all-gather" and shapes == [(D, F)]]
    assert len(gathered) == 4 and "ENTRY" not in gathered  # gate and up, forward and once more for the backward pass
    assert len(re.findall(rf"= f16\[{D},{F}\]\S* all-gather\(", text)) == 4
    activations = {
        kind for kind, shapes, _ in found if any(T in dims and len(dims) > 2 and dims[-1] != 1 for dims in shapes)
    }
    assert activations == {"all-to-all"}, activations
