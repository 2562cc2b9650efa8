"""The shapes of calls: few for any engine, large enough, and the only ones that rollouts make."""

import re

import jax
import numpy as np
import pytest
from cases import content, random_questions
from scripted import PROTOCOL, Fake, random_model

from parasearch_jax.data import Question
from parasearch_jax.rollout import Engine, sampler, shards
from parasearch_jax.rollout.kv_cache import PAGE
from parasearch_jax.rollout.sizes import CALL_TOKENS, Sizes
from parasearch_jax.sharding.mesh import MeshConfig, make_mesh

MOST = 24
LIMITS = dict(slots=6, chunk=4, max_turns=2, max_turn_tokens=8, max_total_tokens=128, observation_tokens=110, topk=1)
ASCENDING = ("lengths", "reads", "long_windows", "prompts")


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("slots", [1, 2, 3, 8, 64, 511, 1000])
@pytest.mark.parametrize("observation", [1, 15, 16, 17, 100, 500, 511, 512, 2000, 10_000])
def test_few_and_large_enough(slots, observation, paged):
    for cells in (16, 17, 40, 63, 64, 65, 100, 128, 250, 320, 512, 1000, 1025, 4096, 5000, 8192):
        sizes = Sizes(slots, cells, observation, paged)
        assert sizes.count() <= MOST
        for name in ASCENDING:
            found = getattr(sizes, name)
            assert list(found) == sorted(set(found)) and found[0] > 0, (name, cells)
        assert sizes.long_windows[-1] == sizes.prompts[-1] == cells
        # The pending token and a whole observation: in one call, unless a slot is smaller.
        assert sizes.lengths[-1] >= min(observation + 1, cells)
        assert sizes.lengths[-1] < min(observation + 1, cells) + 16  # and not larger than that
        for length in sizes.lengths:
            rows = sizes.rows(length)
            assert 1 <= rows <= slots and (rows == 1 or rows * length <= CALL_TOKENS)
            assert rows == slots or (rows + 1) * length > CALL_TOKENS  # a call is full
        for n in {0, 1, cells // 3, cells - 4, cells - 1} - {-1, -2, -3}:
            if paged:
                pages = sum(-(-length // PAGE) for length in (n, *[cells // 2] * (slots - 1)))
                spare = -(-slots * -(-cells // PAGE) // 4)
                assert pages <= sizes.read([n, *[cells // 2] * (slots - 1)], 4) <= pages + spare
            else:
                held = min(n + 4, cells)  # of the longest, behind a chunk of 4
                assert held <= sizes.read([0, n, 0], 4) <= max(held + cells // 4, 64) + 64


@pytest.mark.parametrize("paged", [False, True])
def test_an_engine_of_the_default_size_uses_all_of_the_24(paged):
    assert Sizes(64, 4096, 500, paged).count() == MOST


@pytest.mark.parametrize("sizes", [Sizes(64, 4096, 500, True), Sizes(6, 128, 110, False), Sizes(1, 16, 1, True)])
def test_the_description_names_them_all(sizes):
    numbers = list(map(int, re.findall(r"\d+", sizes.describe())))
    assert numbers == [sizes.count(), *sizes.lengths, 0, *sizes.long_windows, *sizes.reads, *sizes.prompts]


# ------------------------------------------------------------------------------------------------------ what is called


def planned(sizes, count):
    """What calls may look like, of `count` shards: (function, rows, tokens or cells, what is read)."""
    slots = sizes.slots
    return (
        {("extend", count * sizes.rows(n), n, window) for n in sizes.lengths for window in (0, *sizes.long_windows)}
        | {("decode", count * slots, read, truncated) for read in sizes.reads for truncated in (False, True)}
        | {("copy", count * min(shards.COPY_ROWS, slots), cells) for cells in sizes.prompts}
        | {("release", count * slots)}
    )


@pytest.fixture
def calls(monkeypatch):
    """What the functions of the sampler are called with."""
    made = []

    def spy(name, describe):
        real = getattr(sampler, name)

        def function(*args, **kwargs):
            made.append(describe(*args, **kwargs))
            return real(*args, **kwargs)

        monkeypatch.setattr(sampler, name, function)

    spy("extend", lambda p, s, feed, key, *, window, **_: ("extend", *feed["ids"].shape, window))
    spy("decode_chunk", lambda p, s, t, *, read, truncated, **_: ("decode", len(s.length), read, truncated))
    spy("copy_prompts", lambda s, feed, key, *, cells, **_: ("copy", len(feed["rows"]), cells))
    spy("release", lambda s, kept: ("release", len(kept)))
    return made


@pytest.fixture(scope="module")
def dice():
    """Of a shape that no other test has, so that its programs can be counted."""
    return random_model(boost=(2.5, 2.5, 1.2, 1.2), num_layers=1, vocab_size=431)


def questions():
    """Prompts of 2 to 118 tokens: they fill a slot up to its end, and need several calls."""
    texts = ["a" * n for n in (1, 15, 33, 70, 117)]
    return [Question(f"q{i}", text, ["x"]) for i, text in enumerate(texts)] + random_questions(8)


@pytest.fixture
def compiled():
    """The names of what is compiled (or read from the persistent cache)."""
    names = []

    def listen(event, seconds, fun_name="", **_):
        if event.endswith("backend_compile_duration"):
            names.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("fsdp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rollout_calls_what_is_planned_and_compiles_no_more(dice, calls, compiled, fsdp):
    running = Engine(dice, mesh=make_mesh(MeshConfig(fsdp, 1)), **LIMITS)
    retriever = Fake(words=3)
    episodes = running.rollout(questions(), PROTOCOL, retriever, samples=4)
    episodes += running.rollout(questions(), PROTOCOL, Fake(words=40), samples=1, temperature=0.0)
    running.close()
    assert any(e.searches for e in episodes) and len({e.stop_reason for e in episodes}) > 1
    sizes = running.shards.sizes
    assert sizes == Sizes(6 // fsdp, 128, 110, True) and set(calls) <= planned(sizes, fsdp)
    assert {name for name, *_ in calls} == {"extend", "decode", "copy"}
    assert len({call[2:] for call in calls if call[0] == "extend"}) > 5  # the run had need of many of them
    names = {f"jit({name})" for name in ("extend", "decode_chunk", "copy_prompts", "release")}
    assert sum(name in names for name in compiled) == len(set(calls)) <= sizes.count() <= MOST


def test_long_prompts_come_in_pieces_and_say_the_same(dice, calls):
    """Two engines that differ in the length of a call's rows only: documents are short in both."""
    found = {}
    for observation in (60, 110):
        running = Engine(dice, **LIMITS | dict(observation_tokens=observation))
        calls.clear()
        episodes = running.rollout(questions(), PROTOCOL, Fake(), samples=3)
        stats = running.pop_stats()
        running.close()
        assert stats["observations/cut"] == 0 and stats["queries/sent"] > 5
        longest = max(len(e.segments[0].ids) for e in episodes)
        largest = running.shards.sizes.lengths[-1]
        fed = stats["tokens/prefilled"]
        found[observation] = episodes, largest < longest - 16, fed
    (short, pieces, fed), (whole, none, also_fed) = found[60], found[110]
    assert pieces and not none and fed == also_fed
    for episode, other in zip(short, whole, strict=True):
        assert content(episode) == content(other)
        for mine, others in zip(episode.segments, other.segments, strict=True):
            np.testing.assert_allclose(mine.logprobs or (), others.logprobs or (), atol=1e-5)


@pytest.mark.slow
def test_one_slot(dice, calls):
    """The smallest engine there is: one row of every length."""
    running = Engine(dice, **LIMITS | dict(slots=1, max_total_tokens=64, observation_tokens=40))
    episodes = running.rollout(random_questions(2), PROTOCOL, Fake(), samples=2)
    running.close()
    assert len(episodes) == 4 and set(calls) <= planned(Sizes(1, 64, 40, True), 1)
