"""`Engine.cancel`, from anywhere and at any time, and `on_group`: what is handed on while a rollout is under way."""

import asyncio
import threading

import numpy as np
import pytest
from cases import SCRIPTS, SHORT, check, content, play, random_questions
from plain import ids
from scripted import PROTOCOL, Fake, until

from parasearch_jax.errors import UserError
from parasearch_jax.rollout import Engine, Invalid, Search, job, shards

SAMPLES = 2


def roll(engine, retriever=None, **changes):
    return engine.rollout(random_questions(6), PROTOCOL, retriever or Fake(), samples=SAMPLES, **changes)


@pytest.fixture(scope="module")
def undisturbed(dice):
    running = Engine(dice, **SHORT)
    yield roll(running)
    running.close()


def nothing_left(engine):
    asyncio.run(until(lambda: not asyncio.all_tasks(engine.loop)))
    return True


def check_same(episodes, want, exact):
    """`exact`: log-probs bit for bit, as deterministic mode has them."""
    assert [content(e) for e in episodes] == [content(e) for e in want]
    logprobs = lambda e: [x for segment in e.segments for x in segment.logprobs or ()]  # noqa: E731
    for episode, other in zip(episodes, want, strict=True):
        np.testing.assert_allclose(logprobs(episode), logprobs(other), atol=0 if exact else 1e-5, rtol=0)


def check_cancelled(episodes, want, tokenizer, exact=True, limit=192):
    """Whole episodes are those of the undisturbed run, the others begin as they do. How many were cancelled."""
    check([e for e in episodes if e.segments], tokenizer, limit)
    cut = [e.stop_reason == "cancelled" for e in episodes]
    for episode, other, cancelled in zip(episodes, want, cut, strict=True):
        assert (episode.question_id, episode.sample) == (other.question_id, other.sample)
        if not cancelled:
            check_same([episode], [other], exact)
            continue
        assert ids(episode) == ids(other)[: episode.length()] and ids(episode) != ids(other)
        executed = [i for i, action in enumerate(episode.actions) if isinstance(action, Search)]
        policy = [i for i, segment in enumerate(episode.segments) if segment.source == "policy"]
        assert all(episode.segments[policy[i] + 1].source in ("docs", "notice") for i in executed)
    return sum(cut)


# ------------------------------------------------------------------------------------------------------------- cancel


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("calls", [1, 3, 8, 20, 35])
def test_cancelled_between_two_chunks(dice, start, undisturbed, monkeypatch, calls, deterministic):
    """From the device's thread, at its n-th chunk."""
    running, real, made = start(dice, **SHORT, deterministic=deterministic), shards.Shards.decode, []

    def decode(*args):
        made.append(1)
        if len(made) == calls:
            running.cancel()
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(shards.Shards, "decode", decode)
        episodes = roll(running)
    cancelled = check_cancelled(episodes, undisturbed, dice.tokenizer, deterministic)
    assert cancelled and len(made) == calls  # not one chunk more
    assert calls < 35 or cancelled < len(episodes)  # some had ended
    assert nothing_left(running)
    check_same(roll(running), undisturbed, deterministic)


@pytest.mark.parametrize("deterministic", [True, False])
def test_cancelled_while_searches_are_out(dice, start, undisturbed, deterministic):
    """From the retriever, while it answers others and holds this one; the searches under way are cancelled."""
    running, asked, ended = start(dice, **SHORT, deterministic=deterministic), [], []

    async def before(query):
        asked.append(query)
        if len(asked) == 3:
            running.cancel()
        if len(asked) >= 3:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(query)

    episodes = roll(running, Fake(before))
    assert 0 < check_cancelled(episodes, undisturbed, dice.tokenizer, deterministic) < len(episodes)
    assert ended == asked[2:] and nothing_left(running)
    assert any(e.actions and isinstance(e.actions[-1], Invalid) and e.segments[-1].source == "policy" for e in episodes)
    check_same(roll(running), undisturbed, deterministic)


def test_cancelled_from_another_thread(dice, start, undisturbed):
    """Again and again, at any time; no thread is left."""
    before = threading.active_count()
    running = Engine(dice, **SHORT)
    for wait in (0, 0.003, 0.01, 0.02, 0.04):
        timer = threading.Timer(wait, running.cancel)
        timer.start()
        check_cancelled(roll(running), undisturbed, dice.tokenizer)
        timer.join()
    assert roll(running) == undisturbed and nothing_left(running)
    assert threading.active_count() == before + 2
    running.close()
    assert threading.active_count() == before


def test_the_notice_that_was_due_is_in_it(script, start, monkeypatch):
    """C's first turn ends in the chunk during which the rollout is cancelled."""
    running, real = start(script), shards.Shards.decode
    monkeypatch.setattr(shards.Shards, "decode", lambda *args: running.cancel() or real(*args))
    (episode,) = play(running, "C")
    check([episode], script.tokenizer)
    assert [s.source for s in episode.segments] == ["prompt", "policy", "notice"]
    assert episode.stop_reason == "cancelled" and episode.actions == [Invalid((1, 0, len("I do not know")))]


def test_the_rollout_under_way_is_cancelled_and_not_one_that_waits(script, start):
    running, arrived, found = start(script), threading.Event(), {}

    async def held(query):
        arrived.set()
        await asyncio.Event().wait()

    def work(name, retriever):
        found[name] = play(running, "AB", retriever)

    first = threading.Thread(daemon=True, target=work, args=("first", Fake(held)))
    first.start()
    assert arrived.wait(30)
    second = threading.Thread(daemon=True, target=work, args=("second", Fake()))
    second.start()
    asyncio.run(until(lambda: len(running._jobs) == 2))
    running.cancel()
    first.join(30)
    second.join(30)
    assert [e.stop_reason for e in found["first"]] == ["cancelled"] * 2
    assert [e.answer for e in found["second"]] == ["yes-a", "b"]


def test_without_a_rollout_there_is_nothing_to_cancel(script, start):
    running = start(script)
    want = [content(e) for e in play(running, "AB")]
    running.cancel()
    running.cancel()
    assert [content(e) for e in play(running, "AB")] == want
    with pytest.raises(UserError):
        running.generate([""])
    running.cancel()
    assert running.generate(["F\n"], max_new_tokens=5, temperature=0.0)[0].stop_reason == "length"
    running.close()
    running.cancel()


def test_generate_is_cancelled_too(script, start, monkeypatch):
    running, real = start(script), shards.Shards.decode
    monkeypatch.setattr(shards.Shards, "decode", lambda *args: running.cancel() or real(*args))
    (episode,) = running.generate(["F\n"], max_new_tokens=100, temperature=0.0)
    assert episode.stop_reason == "cancelled" and len(episode.segments[1].ids) == 4 and not episode.actions


# ----------------------------------------------------------------------------------------------------------- on_group


def test_groups_in_question_order_while_others_decode(script, start):
    """E's search is held until the groups before it have been handed on; then it goes on for some turns."""
    running, handed = start(script, deterministic=False), []

    async def before(query):
        if query == "e0":
            await until(lambda: len(handed) == 3)

    def on_group(i, episodes):
        handed.append((i, list(map(content, episodes)), threading.current_thread().name))

    letters = "GABE"
    episodes = play(running, letters, Fake(before), samples=SAMPLES, on_group=on_group)
    assert not any(e.failed_searches for e in episodes)  # the wait never ran into its limit
    assert [(i, said) for i, said, _ in handed] == [
        (i, [content(e) for e in episodes[SAMPLES * i : SAMPLES * i + SAMPLES]]) for i in range(len(letters))
    ]
    assert {name for *_, name in handed} == {"groups_0"}  # neither the loop's thread nor the device's
    assert [e.stop_reason for e in episodes[-SAMPLES:]] == ["turns"] * SAMPLES


@pytest.mark.parametrize("deterministic", [True, False])
def test_groups_that_end_in_any_order_are_handed_on_in_theirs(dice, start, undisturbed, deterministic):
    running, handed = start(dice, **SHORT, deterministic=deterministic), []
    episodes = roll(running, on_group=lambda i, group: handed.append((i, list(group))))
    assert handed == [(i, episodes[SAMPLES * i : SAMPLES * i + SAMPLES]) for i in range(6)]
    assert not deterministic or episodes == undisturbed  # nor is the rollout another one


def test_a_slow_on_group_holds_no_episode(script, start):
    """It waits for the others' ends."""
    running, finished = start(script), []
    real = job.Job._finish
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job.Job, "_finish", lambda self, *args: finished.append(1) or real(self, *args))
        play(running, SCRIPTS, on_group=lambda i, _: asyncio.run(until(lambda: len(finished) == len(SCRIPTS))))


def test_what_on_group_raises_cancels_the_rollout(dice, start, undisturbed, monkeypatch):
    """Nothing is handed on behind it, and the error comes out."""
    running, called, chunks, real = start(dice, **SHORT), [], [], shards.Shards.decode
    broke = threading.Event()

    def decode(*args):
        if called:  # the device waits until the error is out, so that the test knows what comes behind it
            assert broke.wait(30)
            chunks.append(1)
        return real(*args)

    real_cancel = job.Job.cancel

    def cancel(self, *args):
        real_cancel(self, *args)
        broke.set()

    def on_group(i, episodes):
        called.append(i)
        raise ZeroDivisionError(f"group {i}")

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError, match="group 0"):
        patch.setattr(shards.Shards, "decode", decode)
        patch.setattr(job.Job, "cancel", cancel)
        roll(running, on_group=on_group)
    assert called == [0] and len(chunks) <= 1
    assert nothing_left(running) and roll(running) == undisturbed


def test_nothing_is_handed_on_behind_an_error(script, start):
    """Groups that had ended when it came are not handed on either."""
    running, called, finished, real = start(script), [], [], job.Job._finish

    def on_group(i, episodes):
        called.append(i)
        asyncio.run(until(lambda: len(finished) == 3))
        raise ZeroDivisionError

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(job.Job, "_finish", lambda self, *args: finished.append(real(self, *args)))
        play(running, "IBA", on_group=on_group)
    assert called == [0]


def test_cancelled_groups_are_not_handed_on(script, start):
    """A, B and I have ended, E is held: it is cancelled from on_group, behind which the whole ones still come."""
    running, handed = start(script, deterministic=False), []

    async def before(query):
        if query == "e0":
            await asyncio.Event().wait()

    def on_group(i, episodes):
        handed.append(i)
        if i == 1:
            running.cancel()

    a, b, e, last = play(running, "ABEI", Fake(before), on_group=on_group)
    assert handed == [0, 1, 3] and (a.answer, b.answer, e.stop_reason) == ("yes-a", "b", "cancelled")
    assert e.actions == [Invalid(e.actions[0].span)] and [s.source for s in e.segments] == ["prompt", "policy"]
    assert last.stop_reason == "answer"


def test_on_group_may_use_the_engine(script, start):
    """It runs beside the rollout, so what it asks for comes after it."""
    running, said = start(script), []
    play(running, "AB", on_group=lambda i, _: said.append(running.generate(["I\n"], 5, 0.0)[0].segments[1].text[:8]))
    assert said == ["<answer>"] * 2


def test_an_error_of_the_rollout_comes_out_behind_on_group(script, start, monkeypatch):
    running, handed = start(script), threading.Event()

    def broken(self, *args):
        assert handed.wait(30)
        raise AttributeError("observe")

    with monkeypatch.context() as patch, pytest.raises(AttributeError, match="observe"):
        patch.setattr(job.Job, "_observe", broken)
        play(running, "IA", on_group=lambda i, _: handed.set())
    assert [e.answer for e in play(running, "IA")] == ["é 😀", "yes-a"]
