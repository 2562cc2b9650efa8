"""Asynchronous mode against the deterministic one and against plain full passes. The claim (docs, design): the same ids
in at least 99 % of episodes in fp32, and where two episodes part, a random number within 1e-5 of the border between the
two tokens (greedy: their logits within 1e-5)."""

import asyncio
import dataclasses
import random

import jax
import pytest
import small_world
from cases import SHORT
from plain import episode_key, full_pass, ids, parting, play
from scripted import PROTOCOL, Fake, drawn_questions, random_model

from parasearch_jax.data import Question
from parasearch_jax.models import Model
from parasearch_jax.retrieval import Retriever
from parasearch_jax.rollout import Answer, Engine, Invalid, Search
from parasearch_jax.rollout.shards import Shards

SHARE, BORDER = 0.99, 1e-5
SEED, STEP = 5, 7
WIDE = SHORT | dict(slots=8)


class Late(Retriever):
    """The documents of another retriever, each after a random time of its own."""

    def __init__(self, retriever, seconds):
        self.retriever, self.seconds, self.rng = retriever, seconds, random.Random(0)

    async def search(self, queries, k):
        await asyncio.sleep(self.rng.uniform(0, self.seconds))
        return await self.retriever.search(queries, k)


def rollout(model, questions, protocol, retriever, temperature, **limits):
    running = Engine(model, seed=SEED, **limits)
    try:
        return running.rollout(questions, protocol, retriever, temperature=temperature, step=STEP)
    finally:
        running.close()


def forced(model, episodes, temperature, length):
    """Full passes over the rows of the episodes, 50 at a time."""
    keys = [episode_key(SEED, STEP, episode.question_id, episode.sample) for episode in episodes]
    rows = list(map(ids, episodes))
    for i in range(0, len(rows), 50):
        part = slice(i, i + 50)
        yield from (
            (episode, passed, row)
            for passed in [full_pass(model, rows[part], keys[part], length, greedy=temperature == 0)]
            for row, episode in enumerate(episodes[part])
        )


def partings(model, episodes, others, temperature, length):
    """How near to the border it was, for each of the episodes that differs."""
    found = [parting(*pair) for pair in zip(episodes, others, strict=True)]
    return [
        passed.distance(row, at[0] - 1, *at[1:])
        for (_, passed, row), at in zip(forced(model, episodes, temperature, length), found, strict=True)
        if at is not None
    ]


def partings_from_plain(model, protocol, questions, episodes, search, temperature, limits):
    """The same against the plain loop. As long as it goes the episode's way, one full pass over the episode knows what
    comes next behind each of its tokens."""
    near = []
    for (episode, passed, row), question in zip(
        forced(model, episodes, temperature, limits["max_total_tokens"]), questions, strict=True
    ):
        mine = ids(episode)

        def choose(said, passed=passed, row=row, mine=mine):
            assert said == mine[: len(said)] and len(said) < len(mine), "another environment, or it should go on"
            token = passed.token(row, len(said) - 1)
            if token != mine[len(said)]:
                raise Parted(passed.distance(row, len(said) - 1, token, mine[len(said)]))
            return token

        try:
            want = play(model, protocol, question, limits, choose, search)
        except Parted as parted:
            near.append(parted.args[0])
            continue
        assert ([(s.source, s.text) for s in episode.segments], mine, episode.stop_reason) == want
    return near


class Parted(Exception):
    """The plain loop takes another token than the episode: (distance,)"""


def hold(near, episodes):
    """The claim, for what `partings` gives."""
    assert len(near) <= (1 - SHARE) * len(episodes), f"{len(near)} of {len(episodes)} episodes differ: {near}"
    assert all(distance <= BORDER for distance in near), near


def seen(episodes):
    return {type(action) for episode in episodes for action in episode.actions}


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_claim_on_the_small_world(temperature):
    """200 episodes of the trained base, 1 to 64 slots, against the deterministic mode and the plain loop."""
    model, questions, protocol, retriever, config = small_world.load()
    questions, limits = questions[:200], dataclasses.asdict(config)
    length = limits["max_total_tokens"]
    want = rollout(model, questions, protocol, retriever, temperature, **limits)
    assert len(want) == 200 and {Search, Answer} <= seen(want)
    search = lambda query: retriever.search_sync([query], config.topk)[0]  # noqa: E731
    plainly = model, protocol, questions
    assert rollout(model, questions, protocol, Late(retriever, 0.02), temperature, **limits) == want
    hold(partings_from_plain(*plainly, want, search, temperature, limits), want)
    for slots, delay in ((64, 0.1), (24, 0.02), (7, 0.005)):
        changed = limits | dict(slots=slots, deterministic=False)
        got = rollout(model, questions, protocol, Late(retriever, delay), temperature, **changed)
        hold(partings(model, want, got, temperature, length), got)
        hold(partings_from_plain(*plainly, got, search, temperature, limits), got)


@pytest.fixture(scope="module")
def models(dice):
    """By temperature. Greedy episodes of most random weights go in circles; these have larger ones in their layers, and
    search."""
    steep = random_model(seed=5, boost=(3, 3, 3, 3))
    steep.params["layers"] = jax.tree.map(lambda x: 4 * x, steep.params["layers"])
    return {0.0: steep, 1.0: dice}


@pytest.fixture(scope="module")
def questions():
    return [Question(f"q{i}", text, ["x"]) for i, text in enumerate(drawn_questions(count=67)[:200])]


def fake_search(query):
    return [Fake().document(query, 0)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_claim_on_random_weights(models, questions, temperature):
    """200 episodes with every kind of action, 8 slots and 3."""
    model = models[temperature]
    want = rollout(model, questions, PROTOCOL, Fake(), temperature, **WIDE)
    assert seen(want) == {Search, Answer, Invalid} and len({e.stop_reason for e in want}) > 1
    changed = SHORT | dict(deterministic=False)
    got = rollout(model, questions, PROTOCOL, Late(Fake(), 0.02), temperature, **changed)
    hold(partings(model, want, got, temperature, 192), got)
    hold(partings_from_plain(model, PROTOCOL, questions, got, fake_search, temperature, SHORT), got)


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_devices_work_is_a_function_of_the_tokens_in_deterministic_mode_alone(
    models, questions, monkeypatch, deterministic
):
    """Which rows are appended with which, and what is read for a chunk; log-probs are the same bit for bit then."""
    calls = []

    def watch(name, describe):
        real = getattr(Shards, name)
        monkeypatch.setattr(Shards, name, lambda *args: calls.append(describe(*args)) or real(*args))

    watch("extend", lambda shards, rows, key: [(row.slot, row.start, len(row.ids)) for row in rows])
    watch("decode", lambda shards, table, steps, lengths, truncated: max(lengths.values()))

    def run(retriever):
        calls.clear()
        limits = SHORT | dict(deterministic=deterministic)
        return rollout(models[1.0], questions[:60], PROTOCOL, retriever, 1.0, **limits), list(calls)

    (want, at_once), (got, late) = run(Fake()), run(Late(Fake(), 0.02))
    assert (at_once == late) == deterministic and (not deterministic or got == want)


@pytest.mark.parametrize("temperature, unit", [(0.0, 2), (1.0, 0)])
def test_the_comparison_sees_other_weights(models, questions, temperature, unit):
    """One weight that is larger by 1e-3 in one of the modes."""
    model = models[temperature]
    params = jax.tree.map(lambda x: x, model.params)
    params["norm"]["scale"] = params["norm"]["scale"].at[unit].add(1e-3)
    other, changed = Model(model.config, params, model.tokenizer), WIDE | dict(deterministic=False)
    want = rollout(model, questions, PROTOCOL, Fake(), temperature, **WIDE)
    got = rollout(other, questions, PROTOCOL, Late(Fake(), 0.01), temperature, **changed)
    from_want = partings(model, want, got, temperature, 192)
    from_plain = partings_from_plain(model, PROTOCOL, questions, got, fake_search, temperature, SHORT)
    for near in (from_want, from_plain):
        assert max(near) > BORDER
        with pytest.raises(AssertionError):
            hold(near, got)
