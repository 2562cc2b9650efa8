"""Searches that fail, hang or are slow: deadlines, what the policy sees, and that nothing is left behind."""

import asyncio
import contextlib
import threading

import pytest
from scripted import END, PROTOCOL, Fake, scripted_model, until

from parasearch_jax.data import Question
from parasearch_jax.errors import UserError
from parasearch_jax.protocol import get_protocol
from parasearch_jax.rewards import score
from parasearch_jax.rollout import Answer, Engine, Episode, Invalid, RolloutConfig, Search
from parasearch_jax.rollout.searches import search_all

SCRIPTS = {
    "A": [["<think>a</think>", "<search>a1 ## a2</search>"], ["<think>n</think>", "<answer> yes-a</answer>"]],
    "B": [["<search>b1</search>"], ["<search>b2</search>"], ["<answer>b</answer>"]],
    "C": [["I do not know", END], ["<answer>c</answer>"]],
}
LIMITS = dict(slots=2, chunk=4, max_turns=3, max_turn_tokens=8, max_total_tokens=256, observation_tokens=120, topk=1)
SOON = 0.2  # the deadline of searches that never end; no test depends on what the machine does in that time


@pytest.fixture(scope="module")
def script():
    return scripted_model(SCRIPTS)


@pytest.fixture
def start(script):
    """start(**changes) -> Engine, closed at the end."""
    engines = []

    def make(**changes):
        engines.append(Engine(script, **(LIMITS | changes)))
        return engines[-1]

    yield make
    for each in engines:
        each.close()


def play(engine, retriever):
    return engine.rollout([Question(x, x, ["x"]) for x in SCRIPTS], PROTOCOL, retriever, temperature=0.0)


def content(episodes):
    return [([(s.source, s.text, s.ids) for s in e.segments], e.actions, e.stop_reason) for e in episodes]


def sources(episode):
    return [s.source for s in episode.segments]


def nothing_pending(engine):
    asyncio.run(until(lambda: not asyncio.all_tasks(engine.loop)))
    return True


# ------------------------------------------------------------------------------------------------------ one action


async def no_answer(query):
    await asyncio.Event().wait()


def test_each_sub_query_has_its_own_end():
    """One hangs, one raises, one takes its time; and one that won't be cancelled holds nobody."""
    stubborn = threading.Event()

    async def before(query):
        if query == "hangs":
            await no_answer(query)
        if query == "raises":
            raise ConnectionError("down")
        if query == "slow":
            await asyncio.sleep(SOON / 10)
        while query == "stubborn" and not stubborn.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    async def main():
        try:
            search = search_all(Fake(before), ["hangs", "raises", "fine", "slow", "stubborn"], 2, 5 * SOON)
            found = await asyncio.wait_for(search, 60)  # or there is no deadline
            await until(lambda: len(asyncio.all_tasks()) == 2, seconds=9)  # this one and the stubborn one
        finally:
            stubborn.set()
        await until(lambda: len(asyncio.all_tasks()) == 1)
        return found

    hangs, raises, fine, slow, held = asyncio.run(main())
    assert isinstance(hangs, TimeoutError) and "'hangs' within rollout.search_seconds=1" in str(hangs)
    assert isinstance(raises, ConnectionError) and isinstance(held, TimeoutError)
    assert [d.id for d in fine] == ["fine0", "fine1"] and [d.id for d in slow] == ["slow0", "slow1"]


@pytest.mark.parametrize("garbage", [None, [], [None], [["text"]], [[], []], "ab", 7])
def test_garbage_is_a_failure(garbage):
    class Odd(Fake):
        async def search(self, queries, k):
            return garbage

    (found,) = asyncio.run(search_all(Odd(), ["q"], 1, 30))
    assert isinstance(found, TypeError | ValueError)


def test_a_cancelled_action_ends_its_searches():
    ended = []

    async def before(query):
        try:
            await no_answer(query)
        finally:
            ended.append(query)

    async def main():
        retriever = Fake(before)
        task = asyncio.ensure_future(search_all(retriever, ["a", "b"], 1, 30))
        await until(lambda: len(retriever.calls) == 2)
        task.cancel()
        await until(lambda: len(asyncio.all_tasks()) == 1)
        assert task.cancelled()

    asyncio.run(main())
    assert sorted(ended) == ["a", "b"]


# ------------------------------------------------------------------------------------------------------ in a rollout


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_retriever_that_hangs_ends_no_rollout(start, deterministic):
    running = start(search_seconds=SOON, deterministic=deterministic)
    a, b, c = play(running, Fake(no_answer))
    assert sources(a) == ["prompt", "policy", "notice", "policy"] and sources(b)[2::2] == ["notice", "notice"]
    assert a.segments[2].text == PROTOCOL.failed() and PROTOCOL.failed_notice in PROTOCOL.failed()
    assert [[type(x) for x in e.actions] for e in (a, b, c)] == [
        [Search, Answer],
        [Search, Search, Answer],
        [Invalid, Answer],
    ]
    assert [e.failed_searches for e in (a, b, c)] == [2, 2, 0] and c.segments[2].text == PROTOCOL.notice
    stats = running.pop_stats()
    assert (stats["queries/sent"], stats["queries/failed"], stats["searches/failed"]) == (4, 4, 3)
    for episode in (a, b, c):  # a stored episode is scored as the one it was stored from
        assert Episode.from_text([(s.source, s.text) for s in episode.segments], PROTOCOL).actions == episode.actions
    assert nothing_pending(running)
    again = play(running, Fake())
    assert [e.answer for e in again] == ["yes-a", "b", "c"] and not any(e.failed_searches for e in again)
    assert content(again) == content(play(start(), Fake())) and nothing_pending(running)


def test_a_blocked_thread_is_left_alone(start):
    release, blocked = threading.Event(), []

    async def before(query):
        blocked.append(query)
        await asyncio.to_thread(release.wait)

    running = start(search_seconds=SOON)
    try:
        episodes = play(running, Fake(before))
        assert len(blocked) == 4 and [e.answer for e in episodes] == ["yes-a", "b", "c"]
        assert play(running, Fake())[0].failed_searches == 0 and nothing_pending(running)
    finally:
        release.set()


@pytest.mark.parametrize("deterministic", [True, False])
def test_slow_but_in_time_changes_nothing(start, deterministic):
    async def before(query):
        await asyncio.sleep(SOON / 4)

    running = start(search_seconds=60.0, deterministic=deterministic)
    slow = play(running, Fake(before))
    assert content(slow) == content(play(start(), Fake())) and nothing_pending(running)


def test_what_arrived_is_shown(start):
    async def before(query):
        if query == "a1":
            await no_answer(query)
        if query == "b2":
            raise ConnectionError

    running = start(search_seconds=SOON)
    a, b, _ = play(running, Fake(before))
    assert sources(a) == ["prompt", "policy", "docs", "policy"] and "a2." in a.segments[2].text
    assert "a1." not in a.segments[2].text and PROTOCOL.failed_notice not in a.segments[2].text
    assert sources(b) == ["prompt", "policy", "docs", "policy", "notice", "policy"]
    assert (a.failed_searches, b.failed_searches) == (1, 1) and running.pop_stats()["searches/failed"] == 1


def test_a_deadline_must_be_above_zero():
    for seconds in (0, -1.0, float("nan")):
        with pytest.raises(UserError, match=r"rollout\.search_seconds is"):
            RolloutConfig(search_seconds=seconds)


# ------------------------------------------------------------------------------------------------------------ rewards


@pytest.mark.parametrize("variant", ["paper", "released"])
def test_a_failed_search_earns_what_an_answered_one_does(variant):
    """The policy did the same; only the environment differs."""
    question, think = Question("q", "?", ["Paris"], kind="single"), "<think>t</think>"
    protocol = get_protocol("parallel")

    def earned(*reply):
        pairs = [("prompt", "?"), ("policy", f"{think}<search>a</search>"), reply]
        episode = Episode.from_text([*pairs, ("policy", f"{think}<answer>Paris</answer>")], protocol)
        return score("parallel_search", episode, question, variant=variant)

    answered = earned("docs", protocol.observation(["Doc 1(Title: t) x\n"]))
    assert earned("notice", protocol.failed()) == answered and answered["format"] == 0
    assert earned("notice", protocol.notice) != answered  # the comparison sees the difference


def test_the_notice_is_the_protocols():
    for name in ("parallel", "search_r1"):
        protocol = get_protocol(name, docs=("<found>", "</found>"), failed_notice="Try again.")
        assert protocol.failed() == "\n\n<found>Try again.</found>\n\n"
        pairs = [("policy", "<search>a</search>"), ("notice", protocol.failed())]
        assert [type(a) for a in Episode.from_text(pairs, protocol).actions] == [Search]
        assert [type(a) for a in Episode.from_text(pairs, name).actions] == [Invalid]
