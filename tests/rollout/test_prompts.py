"""A group's prompt is fed once; its other samples get a copy of the cells."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from scripted import PROTOCOL, Fake, random_model

from parasearch_jax.data import Question
from parasearch_jax.models.decoder import DecoderConfig
from parasearch_jax.rollout import Engine, Episode, job, sampler, stops
from parasearch_jax.rollout.sampler import Sampling
from parasearch_jax.rollout.slots import Run, Slots
from parasearch_jax.sharding import rules
from parasearch_jax.sharding.mesh import MeshConfig, make_mesh

LIMITS = dict(chunk=4, max_turns=2, max_turn_tokens=12, max_total_tokens=64, observation_tokens=30, topk=1)
SAMPLES, TEXTS = 4, ["who was a", "when did b end", "c", "where is d"]


def mesh_of(fsdp, tp=1):
    return make_mesh(MeshConfig(fsdp, tp))


@pytest.fixture(scope="module")
def dice():
    return random_model(boost=(2.5, 2.5, 1.2, 1.2))


def roll(model, fsdp, slots, samples=SAMPLES, texts=TEXTS):
    """(episodes, what the engine counted)"""
    running = Engine(model, seed=3, mesh=mesh_of(fsdp), slots=slots, **LIMITS)
    questions = [Question(f"q{i}", text, ["x"]) for i, text in enumerate(texts)]
    episodes = running.rollout(questions, PROTOCOL, Fake(), samples=samples)
    running.close()
    return episodes, running.pop_stats()


def tokens(episodes, source):
    return sum(len(s.ids) for e in episodes for s in e.segments if s.source == source)


def fed_anew(run):
    """A prompt that is no other's."""
    run.prompt = tuple(list(run.prompt))
    return run


@pytest.fixture(scope="module")
def apart(dice):
    """Episodes of which each had its prompt fed."""
    with pytest.MonkeyPatch.context() as patch:
        real = Slots._place
        patch.setattr(Slots, "_place", lambda self, shard, run: real(self, shard, fed_anew(run)))
        episodes, stats = roll(dice, 1, 16)
    fed = sum(tokens(episodes, source) for source in ("prompt", "docs", "notice"))
    assert stats["tokens/prefilled"] == fed and tokens(episodes, "docs") and tokens(episodes, "notice")
    return episodes


@pytest.mark.parametrize("fsdp, slots", [(1, 1), (1, 3), (1, 16), (2, 2), (2, 16)])
def test_a_prompt_is_fed_once_however_few_slots(dice, apart, monkeypatch, fsdp, slots):
    """Over a whole rollout, with the episodes of separate prompts. Members that come late take over from one that has
    decoded and read documents, or the slot of one that has ended."""
    placed, real = [], Slots._place

    def spy(self, shard, run):
        taken = dict(self.runs)
        living = {slot for slot, other in taken.items() if other.prompt is run.prompt}
        slot, run = real(self, shard, run)
        assert run.source in {None, slot, *living} and slot not in taken
        placed.append("fed" if run.source is None else "same slot" if run.source == slot else "copied")
        return slot, run

    monkeypatch.setattr(Slots, "_place", spy)
    episodes, stats = roll(dice, fsdp, slots)
    prompts = tokens(episodes[::SAMPLES], "prompt")  # all of a group are in one shard
    assert stats["tokens/prefilled"] == prompts + tokens(episodes, "docs") + tokens(episodes, "notice")
    assert placed.count("fed") == len(TEXTS) and len(placed) == len(TEXTS) * SAMPLES
    assert ("copied" in placed) == (slots > fsdp) and ("same slot" in placed) == (slots < 16)
    for episode, want in zip(episodes, apart, strict=True):
        assert [(s.source, s.ids) for s in episode.segments] == [(s.source, s.ids) for s in want.segments]
        assert (episode.actions, episode.stop_reason) == (want.actions, want.stop_reason)
        for mine, others in zip(episode.segments, want.segments, strict=True):
            np.testing.assert_allclose(mine.logprobs or (), others.logprobs or (), atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_every_slot_gets_the_cells_of_its_prompt(seed):
    """The placing alone: groups of any size, episodes that end in any order; the cells of a shard are a list of names.

    As on the device, what is fed stands there before anything is copied, and copies read what stood there before them.
    """
    rng, n = np.random.default_rng(seed), 6
    placing, groups = Slots(2, n), [(f"p{i}", [7, 8]) for i in range(40)]
    for prompt, size in zip(groups, rng.integers(1, 10, len(groups)), strict=True):
        placing.add([Run(Episode(), prompt, 0, Sampling()) for _ in range(size)])
    cells, fed, copied = [None] * 2 * n, [], 0
    while (placed := list(placing.admit())) or placing.runs:
        for slot, run in placed:
            if run.source is None:
                cells[slot] = run.prompt
                fed.append(run.prompt)
        before = list(cells)
        for slot, run in placed:
            if run.source is not None:
                assert run.source // n == slot // n
                cells[slot], copied = before[run.source], copied + 1
        assert all(cells[slot] is run.prompt for slot, run in placing.runs.items())
        for slot in rng.permutation(list(placing.runs))[: rng.integers(1, n)].tolist():
            placing.release(slot)
    assert fed == sorted(fed, key=groups.index) and len(fed) == len(groups) and copied > len(groups)


def test_a_prompt_of_one_token(dice):
    """It is pending from the start: nothing of it lies in the cache."""
    running = Engine(dice, slots=3, **LIMITS)
    prompt = "x", dice.tokenizer("x")["input_ids"]
    apart, together = ([Run(Episode(sample=i), prompt, i, Sampling()) for i in range(3)] for _ in "ab")
    assert len(prompt[1]) == 1
    for groups in ([job.Group([run]) for run in apart], [job.Group(together)]):
        running._finish(job.Job(running, None, None, step=0, turn_tokens=9), groups)
    running.close()
    assert [run.episode.segments[1].ids for run in together] == [run.episode.segments[1].ids for run in apart]


def test_groups_of_any_size_share_a_program(dice):
    roll(dice, 1, 16, texts=["a"])
    before = sampler.copy_prompts._cache_size()
    for samples in (2, 9, 20):
        roll(dice, 1, 16, samples=samples, texts=["a", "bc"])
    assert sampler.copy_prompts._cache_size() == before


# ---------------------------------------------------------------------------------------------------- the copy itself

CFG = DecoderConfig(
    vocab_size=84,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=24,
    eos_token_ids=(0,),
)
SLOTS, CELLS, COPIED = 8, 256, 16


def rows_of(fsdp):
    """[(slot, source)] for the call, of the whole run; the last row of a shard is padding."""
    return {1: [(0, 5), (7, 5), (2, 2), None], 2: [(1, 3), None, (6, 4), None]}[fsdp]


@pytest.mark.parametrize("fsdp", [1, 2])
def test_a_copy_leaves_the_neighbours_alone(fsdp):
    mesh, per_shard, rng = mesh_of(fsdp), SLOTS // fsdp, np.random.default_rng(0)
    state = sampler.init_state(CFG, SLOTS, CELLS, mesh)
    state.cache = jax.tree.map(lambda x: jax.device_put(rng.normal(size=x.shape), x.sharding), state.cache)
    state.length = jax.device_put(np.arange(10, 10 + SLOTS, dtype=np.int32), state.length.sharding)
    before = jax.device_get({"cache": state.cache, "length": state.length, "active": state.active})
    pairs = rows_of(fsdp)
    local = [(p[0] % per_shard, p[1] % per_shard) if p else (per_shard, 0) for p in pairs]
    feed = {
        "rows": [slot for slot, _ in local],
        "source": [source for _, source in local],
        "count": [9] * len(local),
        "pending": [60 + i for i in range(len(local))],
        "left": [5] * len(local),
        "number": [60 + i for i in range(len(local))],
        "top_k": [3] * len(local),
    }
    feed = {k: np.asarray(v, np.int32) for k, v in feed.items()}
    feed |= dict.fromkeys(("temperature", "top_p"), np.full(len(local), 0.5, np.float32))
    feed = {k: jax.device_put(v, NamedSharding(mesh, rules.ROWS)) for k, v in feed.items()}
    after = sampler.copy_prompts(state, feed, jax.random.key(4), cells=COPIED, mesh=mesh)
    sources = dict(filter(None, pairs))
    for old, new in zip(jax.tree.leaves(before["cache"]), jax.tree.leaves(after.cache), strict=True):
        want = old.copy()
        for slot, source in sources.items():
            want[slot, :, :COPIED] = old[source, :, :COPIED]
        np.testing.assert_array_equal(new, want)
    numbers = {pair[0]: i for i, pair in enumerate(pairs) if pair}
    for slot in range(SLOTS):
        i = numbers.get(slot)
        assert after.length[slot] == (before["length"][slot] if i is None else 9)
        assert bool(after.active[slot]) == (i is not None)
        if i is not None:
            assert (after.token[slot], after.left[slot], after.state[slot]) == (60 + i, 5, stops.START)
            assert after.key[slot] == jax.random.fold_in(jax.random.key(4), 60 + i)
            assert (after.temperature[slot], after.top_p[slot], after.top_k[slot]) == (0.5, 0.5, 3)


@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (2, 2)])
def test_a_copy_stays_in_its_shard_and_in_its_place(shape):
    """No collective, and the cache is written where it lies."""
    mesh = mesh_of(*shape)
    split = NamedSharding(mesh, rules.ROWS)
    struct = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
    state = jax.eval_shape(lambda: sampler.init_state(CFG, SLOTS, CELLS, mesh))
    state = jax.tree.map(struct, state, sampler.state_shardings(CFG, mesh))
    row = jax.ShapeDtypeStruct((shape[0],), jnp.int32, sharding=split)
    feed = dict.fromkeys(("rows", "source", "count", "pending", "left", "number", "top_k"), row)
    feed |= dict.fromkeys(("temperature", "top_p"), row.update(dtype=jnp.float32))
    key = jax.ShapeDtypeStruct((), state.key.dtype, sharding=NamedSharding(mesh, P()))
    program = sampler.copy_prompts.lower(state, feed, key, cells=COPIED, mesh=mesh).compile()
    assert not re.search("all-gather|all-reduce|all-to-all|reduce-scatter|collective", program.as_text())
    memory, layer = program.memory_analysis(), SLOTS * CELLS * 2 * 8 * 4 // (shape[0] * shape[1])
    assert memory.alias_size_in_bytes >= 2 * CFG.num_layers * layer
    assert memory.temp_size_in_bytes < layer
