"""The engine on meshes: the same episodes, no traffic of the cache, groups in one shard, weights that arrived."""

import collections
import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rollout.scripted import LOOP, PROTOCOL, Fake, random_model, scripted_model

from parasearch_jax.data import Question
from parasearch_jax.errors import UserError
from parasearch_jax.models import Model, decoder
from parasearch_jax.rollout import Answer, Engine, Invalid, Search, sampler, sizes, stops
from parasearch_jax.rollout.engine import _run_number
from parasearch_jax.rollout.probe import TOLERANCE, SyncError, make_probe
from parasearch_jax.rollout.shards import Shards
from parasearch_jax.rollout.sizes import Sizes
from parasearch_jax.sharding import layout, rules
from parasearch_jax.sharding.mesh import MeshConfig, make_mesh

LIMITS = dict(slots=8, chunk=4, max_turns=3, max_turn_tokens=12, max_total_tokens=64, observation_tokens=30, topk=1)
SAMPLES = 3


def mesh_of(fsdp, tp):
    return make_mesh(MeshConfig(fsdp, tp))


@pytest.fixture(scope="module")
def dice():
    return random_model(boost=(2.5, 2.5, 1.2, 1.2), num_kv_heads=2, vocab_size=426)  # tp = 2 divides both


@pytest.fixture
def start():
    """start(model, (fsdp, tp), **changes) -> Engine, closed at the end."""
    engines = []

    def make(model, shape, **changes):
        engines.append(Engine(model, seed=5, mesh=mesh_of(*shape), **(LIMITS | changes)))
        return engines[-1]

    yield make
    for each in engines:
        each.close()


def roll(engine, samples=SAMPLES):
    questions = [Question(f"q{i}", text, ["x"]) for i, text in enumerate("abcdef")]
    return engine.rollout(questions, PROTOCOL, Fake(), samples=samples)


# ---------------------------------------------------------------------------------------------------------- episodes


@pytest.fixture(scope="module")
def single(dice):
    """The episodes of one device, without a word of a mesh."""
    engine = Engine(dice, seed=5, **LIMITS)
    yield roll(engine)
    engine.close()


def test_what_is_fed_in_several_calls_is_the_same(dice, single, start, monkeypatch):
    """A call takes so many tokens at most: two rows of 16 here, and longer rows come in pieces."""
    rows, real = [], sampler.extend
    monkeypatch.setattr(sizes, "CALL_TOKENS", 32)
    monkeypatch.setattr(Sizes, "lengths", (16,))
    monkeypatch.setattr(
        sampler, "extend", lambda p, s, feed, *a, **k: rows.append(feed["ids"].shape) or real(p, s, feed, *a, **k)
    )
    got = roll(start(dice, (1, 1)))
    assert set(rows) == {(2, 16)}
    assert max(len(s.ids) for e in single for s in e.segments if s.source != "policy") > 17
    assert [[s.ids for s in e.segments] for e in got] == [[s.ids for s in e.segments] for e in single]


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (4, 1), (2, 2), (1, 2)])
def test_the_same_episodes_on_every_mesh(dice, single, start, shape):
    got = roll(start(dice, shape))
    assert {type(a) for e in single for a in e.actions} == {Search, Answer, Invalid}  # the comparison sees all of it
    for episode, want in zip(got, single, strict=True):
        assert (episode.question_id, episode.sample) == (want.question_id, want.sample)
        assert [(s.source, s.ids) for s in episode.segments] == [(s.source, s.ids) for s in want.segments]
        assert (episode.actions, episode.stop_reason) == (want.actions, want.stop_reason)
        for mine, others in zip(episode.segments, want.segments, strict=True):
            if mine.source == "policy":
                np.testing.assert_allclose(mine.logprobs, others.logprobs, atol=1e-5)


def test_a_second_rollout_traces_nothing_and_transfers_only_explicitly(dice, start):
    engine, seen = start(dice, (2, 2)), []
    first = roll(engine)

    def listen(event, seconds, **_):
        if "compile" in event or "trace" in event:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    jax.config.update("jax_transfer_guard", "disallow")  # of all threads
    try:
        assert roll(engine) == first
    finally:
        jax.config.update("jax_transfer_guard", "allow")
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not seen


def test_a_group_lives_in_one_shard_and_all_shards_work(dice, single, start, monkeypatch):
    """6 groups of 3 over 4 shards of 2 slots: none fits into its shard at once."""
    homes, real = collections.defaultdict(set), Shards.extend

    def spy(shards, rows, key):
        for row in rows:
            homes[row.number].add(row.slot // shards.slots)
        return real(shards, rows, key)

    monkeypatch.setattr(Shards, "extend", spy)
    roll(start(dice, (4, 1)))
    groups = [{frozenset(homes[_run_number(f"q{q}", i)]) for i in range(SAMPLES)} for q in range(6)]
    assert len(homes) == 6 * SAMPLES and all(len(group) == 1 for group in groups)
    assert {shard for (home,) in groups for shard in home} == {0, 1, 2, 3}


def test_a_shard_that_is_done_does_not_wait_for_the_others(start):
    """A loop in one shard, short episodes in the other: no step is made where nothing is active."""
    script = scripted_model({"F": [["f goes on ", LOOP]], "I": [["<answer>i", "</answer>"]]})
    engine = start(script, (2, 1), slots=2, max_turns=0)
    loop, short = engine.rollout([Question(x, x, ["x"]) for x in "FI"], PROTOCOL, Fake(), temperature=0.0)
    stats = engine.pop_stats()
    steps = [sum(len(s.ids) for s in e.segments if s.source == "policy") for e in (loop, short)]
    assert steps == [12, 2] and loop.stop_reason == "turns" and short.answer == "i"
    assert stats["tokens/sampled"] == stats["slot_steps"] == 12 + 2 and stats["decode_steps"] == 12


def test_slots_that_the_mesh_does_not_divide_are_refused(dice):
    with pytest.raises(UserError, match=r"rollout.slots is 6, mesh.fsdp is 4: give a multiple of mesh.fsdp"):
        Engine(dice, mesh=mesh_of(4, 1), slots=6)
    with pytest.raises(UserError, match=r"mesh.tp is 2, which does not divide 425"):
        Engine(random_model(num_kv_heads=2), mesh=mesh_of(1, 2), slots=6)


# ------------------------------------------------------------------------------------------------------ compiled text

CFG = decoder.DecoderConfig(
    vocab_size=84,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=24,
    eos_token_ids=(0,),
)
SLOTS, CELLS = 8, 64


def feed_of(row, tokens):
    """What `extend` takes, as shapes; `row`: int32, one number for each row."""
    numbers = dict.fromkeys(("rows", "count", "start", "pending", "left", "top_k"), row)
    chances = dict.fromkeys(("temperature", "top_p"), row.update(dtype=jnp.float32))
    more = {"number": row.update(dtype=jnp.uint32), "ids": row.update(shape=(*row.shape, tokens))}
    return numbers | chances | more


def compiled(mesh):
    """{name: compiled program} of all that runs during a rollout, from shapes alone."""
    struct = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
    split, whole = NamedSharding(mesh, rules.ROWS), NamedSharding(mesh, P())
    params = jax.eval_shape(layout.to_sampler, decoder.param_shapes(CFG))
    params = jax.tree.map(struct, params, rules.sampler_shardings(params, mesh))
    state = jax.eval_shape(lambda: sampler.init_state(CFG, SLOTS, CELLS, mesh))
    state = jax.tree.map(struct, state, sampler.state_shardings(CFG, mesh))
    row = jax.ShapeDtypeStruct((SLOTS,), jnp.int32, sharding=split)
    feed = feed_of(row, 16)
    key = jax.ShapeDtypeStruct((), state.key.dtype, sharding=whole)
    table = stops.build_stops(None, [b"x"] * CFG.vocab_size, (0,))
    table = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), table)
    static = dict(cfg=CFG, mesh=mesh)
    decode = functools.partial(sampler.decode_chunk.lower, params, state, table, steps=4, read=CELLS, **static)
    programs = {
        "first prefill": sampler.extend.lower(params, state, feed, key, window=0, **static),
        "extend": sampler.extend.lower(params, state, feed, key, window=CELLS, **static),
        "decode": decode(truncated=False),
        "decode, top-p": decode(truncated=True),
    }
    return {name: program.compile() for name, program in programs.items()}


COLLECTIVE = r" (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute|collective-broadcast)(-start)?\("


def collectives(text):
    """(line, elements of its largest operand or result) of every collective of a compiled module."""
    sizes, found = {}, []
    for line in text.splitlines():
        name, is_definition, rest = line.strip().removeprefix("ROOT ").partition(" = ")
        if not is_definition:
            continue
        shapes = re.match(r"\(.*?\)(?= )|\S+", rest)[0]
        sizes[name] = max(math.prod(map(int, s.split(","))) if s else 1 for s in re.findall(r"\[([\d,]*)\]", shapes))
        if re.search(COLLECTIVE, line):
            operands = re.findall(r"%[\w.-]+", re.split(COLLECTIVE, line)[3].partition(")")[0])
            found.append((line.strip(), max(sizes[x] for x in [name, *operands])))
    return found


@pytest.mark.parametrize("shape", [(4, 1), (2, 2)])
def test_no_collective_has_the_size_of_a_layers_cache(shape):
    """With 'fsdp' alone there is none at all; 'tp' sums activations and gathers a step's logits."""
    layer = SLOTS * CELLS * 2 * 8 // math.prod(shape)
    for name, program in compiled(mesh_of(*shape)).items():
        found = collectives(program.as_text())
        assert not [line for line, size in found if size >= layer], name
        assert bool(found) == (shape[1] > 1), name
        cache = 2 * CFG.num_layers * layer * 4
        assert program.memory_analysis().alias_size_in_bytes >= cache, f"{name} copies the cache"


def test_the_parser_of_collectives_sees_operands_results_and_tuples():
    text = """
  %a.1 = f32[4,8]{1,0} parameter(0)
  %big = (f32[2,3]{1,0}, bf16[64]{0}) all-gather-start(%a.1), dimensions={0}
  ROOT %r = f32[2]{0} reduce-scatter(f32[4,8]{1,0} %a.1), to_apply=%sum
  %n = f32[9999]{0} add(%a.1, %a.1), metadata={op_name="all-reduce("}
"""
    assert [size for _, size in collectives(text)] == [64, 32]


# ------------------------------------------------------------------------------------------------------------- probe


def changed(params, scale=1e-3):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: np.asarray(x) + scale * rng.normal(size=x.shape).astype(np.float32), params)


@pytest.mark.parametrize("shape, dtype", [((4, 1), "float32"), ((2, 2), "float32"), ((2, 2), "bfloat16")])
def test_the_probe_agrees_after_a_sync(dice, start, shape, dtype):
    model = Model(dataclasses.replace(dice.config, dtype=dtype), dice.params, dice.tokenizer)
    engine, mesh = start(model, shape), mesh_of(*shape)
    check = make_probe(model.config, mesh)
    assert check(model.params, 0, engine) <= TOLERANCE[dtype] / 2
    newer = changed(model.params)
    newer = jax.device_put(newer, rules.shardings(newer, mesh))
    engine.sync(newer, version=1)
    assert check(newer, 1, engine) <= TOLERANCE[dtype] / 2


def test_the_probe_fails_when_the_weights_are_not_those(dice, start):
    engine = start(dice, (2, 2))
    check = make_probe(dice.config, mesh_of(2, 2))
    with pytest.raises(SyncError, match=r"version 0 of the weights, the trainer version 1"):
        check(dice.params, 1, engine)
    with pytest.raises(SyncError, match=r"sampler \(version 0\) and trainer \(version 0\) differ"):
        check(changed(dice.params), 0, engine)
    synced = engine.shards.params
    engine.shards.params = synced | {"layers": synced["layers"][::-1]}
    with pytest.raises(SyncError, match="do not hold the same weights"):
        check(dice.params, 0, engine)
    broken = changed(dice.params, scale=np.nan)
    engine.sync(broken, version=2)
    with pytest.raises(SyncError, match="differ by nan"):
        check(broken, 2, engine)


def test_the_probe_asks_every_device(dice, start):
    """The copy of the last device alone is wrong."""
    mesh = mesh_of(4, 1)
    engine, check = start(dice, (4, 1)), make_probe(dice.config, mesh)
    check(dice.params, 0, engine)
    head = engine.shards.params["head"]
    parts = [shard.data for shard in head.addressable_shards]
    parts[-1] = parts[-1][::-1]
    engine.shards.params["head"] = jax.make_array_from_single_device_arrays(head.shape, head.sharding, parts)
    with pytest.raises(SyncError, match="do not hold the same weights"):
        check(dice.params, 0, engine)


@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (2, 2)])
def test_attention_of_a_gpu_is_each_devices_own(monkeypatch, shape):
    """Lowered for CUDA: with tp 1 cuDNN's call stands in the program as it is, and XLA need not ask how to split it;
    with tp 2 it is XLA's own attention."""
    checks = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(checks, "check_cudnn_version", lambda *_: 91000)
    monkeypatch.setattr(checks, "check_compute_capability", lambda *_: True)
    cfg, mesh = dataclasses.replace(SMALL_BF16, attention="cudnn"), mesh_of(*shape)
    params = jax.eval_shape(lambda: layout.to_sampler(decoder.init(cfg, jax.random.key(0)), cfg.dtype))
    state = jax.eval_shape(lambda: sampler.init_state(cfg, 8, 128, mesh))
    row = jax.ShapeDtypeStruct((8,), jnp.int32, sharding=NamedSharding(mesh, rules.ROWS))
    key = jax.ShapeDtypeStruct((), state.key.dtype, sharding=NamedSharding(mesh, P()))
    state = rules.with_shardings(state, sampler.state_shardings(cfg, mesh))
    params = rules.with_shardings(params, rules.sampler_shardings(params, mesh))
    traced = sampler.extend.trace(params, state, feed_of(row, 64), key, cfg=cfg, window=0, mesh=mesh)
    text = traced.lower(lowering_platforms=("cuda",))
    assert ("fmha" in text.as_text()) == (shape[1] == 1) and "Partitioning" not in text.as_text()


SMALL_BF16 = decoder.DecoderConfig(
    vocab_size=64,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=64,
    dtype="bfloat16",
)
