"""`Engine.session`: episodes that come one by one, as a server has them."""

import asyncio
import concurrent.futures
import itertools
import random
import threading
import zlib

import numpy as np
import pytest
from cases import LIMITS, SHORT, TOTAL, check, content, play, random_questions
from plain import ids
from scripted import PROTOCOL, Fake, byte_char, byte_tokenizer, until

from parasearch_jax.data import Question
from parasearch_jax.errors import UserError
from parasearch_jax.rollout import Engine, Episode, Invalid, job, sampler, shards
from parasearch_jax.rollout.sampler import Sampling
from parasearch_jax.rollout.slots import Run, Slots

HELD = LIMITS | dict(deterministic=False)


def wait(condition):
    asyncio.run(until(condition))


async def never(query):
    await asyncio.Event().wait()


def ask(session, letter, **more):
    return session.submit(f"{letter}\n", temperature=0.0, **more)


def logprobs(episode):
    return [x for segment in episode.segments for x in segment.logprobs or ()]


def quiet(engine):
    """Nothing of the session goes on: in the loop, or in a slot."""
    wait(lambda: not asyncio.all_tasks(engine.loop))
    return quiet_slots(engine)


def quiet_slots(engine):
    return not np.asarray(engine.shards._state.active).any()


# ----------------------------------------------------------------------------------------------------------- episodes


@pytest.mark.parametrize("deterministic", [True, False])
def test_episodes_that_come_at_any_time_are_those_of_a_rollout(dice, start, deterministic):
    """From three threads, in any order. Their numbers are those that the rollout draws."""
    questions = random_questions(6)
    running = start(dice, seed=4, **SHORT, deterministic=deterministic)
    want = running.rollout(questions, PROTOCOL, Fake(), samples=2)
    cases = list(itertools.product(range(6), range(2)))
    rng = random.Random(1)
    rng.shuffle(cases)
    pauses, futures = {case: rng.uniform(0, 0.03) for case in cases}, {}

    async def before(query):
        await asyncio.sleep(rng.uniform(0, 0.01))

    with running.session(PROTOCOL, Fake(before)) as session:

        def client(mine):
            for i, sample in mine:
                threading.Event().wait(pauses[i, sample])
                key = zlib.crc32(f"{questions[i].id}\n{sample}".encode())
                futures[i, sample] = session.submit(PROTOCOL.render_prompt(questions[i].text), key=key)

        threads = [threading.Thread(target=client, args=(cases[i::3],)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        got = [futures[i, sample].result(60) for i, sample in itertools.product(range(6), range(2))]
    assert quiet(running) and list(map(content, got)) == list(map(content, want))
    for episode, other in zip(got, want, strict=True):
        np.testing.assert_allclose(logprobs(episode), logprobs(other), atol=1e-5)
    check(got, dice.tokenizer, 192)


def test_numbers_come_from_seed_and_key_alone(dice, start):
    running = start(dice, **SHORT)

    def say(*keys):
        with running.session(PROTOCOL, Fake()) as session:
            return [future.result(60) for future in [session.submit("Who was a?\n", key=key) for key in keys]]

    a, b, c = say(1, 2, 1)
    assert ids(a) == ids(c) != ids(b) and a.question_id == "1" and a.protocol == PROTOCOL
    again, below, above = say(1, -1, 2**32 - 1)
    assert ids(again) == ids(a) and ids(below) == ids(above)


def test_what_is_told_is_what_the_episode_says(script, start):
    """In order, token by token, and in whole characters: é and 😀 of I are split over tokens."""
    running, letters = start(script, chunk=1), "ABCFIJ"
    told, threads = {letter: [] for letter in letters}, set()

    def listen(letter):
        def on_text(source, text):
            told[letter].append((source, text))
            threads.add(threading.current_thread().name)

        return on_text

    with running.session(PROTOCOL, Fake()) as session:
        futures = {letter: ask(session, letter, on_text=listen(letter)) for letter in letters}
        episodes = {letter: future.result(60) for letter, future in futures.items()}
    check(episodes.values(), script.tokenizer)
    assert {letter: content(e) for letter, e in episodes.items()} == dict(
        zip(letters, map(content, play(running, letters)), strict=True)
    )
    for letter, episode in episodes.items():
        said = [
            (source, "".join(text for _, text in pieces))
            for source, pieces in itertools.groupby(told[letter], key=lambda piece: piece[0])
        ]
        assert said == [(s.source, s.text) for s in episode.segments[1:]], letter
        assert all(text and "\ufffd" not in text for _, text in told[letter])
    assert [text for _, text in told["I"]] == ["<answer>", "é ", "😀</answer>"] and threads == {"engine"}


@pytest.mark.parametrize("seed", range(3))
def test_pieces_are_whole_characters_of_any_bytes(seed):
    """Characters of several bytes, and bytes that are none, token by token: what was told is never taken back."""
    rng, tokenizer = random.Random(seed), byte_tokenizer()
    parts = [text.encode() for text in ("é", "😀", "a", "</s", "中", "\u200d", "\u0301")]
    parts += [b"\xf0\x9f", b"\xc3", b"\x80"]
    saying = object.__new__(job.Job)
    saying.engine, saying.slots = Engine.__new__(Engine), Slots(1, 1)
    saying.engine.tokenizer, saying.active = tokenizer, {0}
    for _ in range(50):
        text, told = b"".join(rng.choices(parts, k=8)), []
        run = Run(Episode(), ("", []), 0, Sampling(), on_text=lambda _, piece, told=told: told.append(piece))
        saying.slots.runs[0] = run
        for byte in text:
            run.ids.append(tokenizer.convert_tokens_to_ids(byte_char(byte)))
            run.logprobs.append(0.0)
            if rng.random() < 0.7:  # at the end of a chunk
                saying._tell()
        whole = saying._close_turn(run)
        assert "".join(told) == whole == text.decode(errors="replace") and all(told)


def test_the_most_tokens_of_an_episode(dice, start):
    """Of all its turns together; up to there it is the one without a limit."""
    running = start(dice, seed=4, **SHORT)

    def say(*limits):
        with running.session(PROTOCOL, Fake()) as session:
            futures = [session.submit("Who was a?\n", key=key, max_tokens=most) for key in range(4) for most in limits]
            return [future.result(60) for future in futures]

    for whole, *cut in zip(*[iter(say(None, 1, 7, 30, 1000))] * 5, strict=True):
        for most, episode in zip((1, 7, 30, 1000), cut, strict=True):
            said = len(logprobs(episode))
            assert said <= most and ids(episode) == ids(whole)[: episode.length()]
            if content(episode) != content(whole):
                assert episode.stop_reason == "length" and said == most
                check([episode], dice.tokenizer, 192)
        assert content(cut[-1]) == content(whole)


# --------------------------------------------------------------------------------------------------- cancelled, refused


def test_a_cancelled_episode_gives_its_slot_to_one_that_waits(script, start):
    """All four slots are held by searches that never end; the fifth gets in behind the cancelled one."""
    running, retriever = start(script, **HELD), Fake(never)
    with running.session(PROTOCOL, retriever) as session:
        held = [ask(session, "B") for _ in range(4)]
        wait(lambda: len(retriever.calls) == 4)
        fifth, sixth = ask(session, "I"), ask(session, "B")
        assert not fifth.done() and held[2].cancel()
        assert fifth.result(60).answer == "é 😀"
        wait(lambda: len(retriever.calls) == 5)  # the sixth, in the same slot
        assert not any(future.done() for i, future in enumerate(held) if i != 2) and not sixth.done()
    assert quiet(running) and [e.answer for e in play(running, "IB")] == ["é 😀", "b"]


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_cancelled_loop_is_ended_on_the_device(script, start, deterministic):
    """As soon as it has said something."""
    running, loop, said = start(script, max_turn_tokens=1000, deterministic=deterministic), [], threading.Event()

    def on_text(source, text):
        assert said.wait(30) and loop[0].cancel()
        loop.append(text)

    with running.session(PROTOCOL, Fake()) as session:
        loop.append(ask(session, "F", on_text=on_text))
        said.set()
        with pytest.raises(concurrent.futures.CancelledError):
            loop[0].result(60)
        assert ask(session, "B").result(60).answer == "b"
        assert quiet_slots(running)
    assert len(loop) == 2 and len(loop[1]) < 200  # told once, of 256 tokens
    assert running.pop_stats()["tokens/sampled"] < 30


def test_one_that_waits_for_a_slot_can_be_cancelled(script, start):
    running, retriever = start(script, **HELD), Fake(never)
    with running.session(PROTOCOL, retriever) as session:
        held = [ask(session, "B") for _ in range(4)]
        wait(lambda: len(retriever.calls) == 4)
        waiting = [ask(session, letter) for letter in "BI"]
        assert waiting[0].cancel() and held[0].cancel()
        assert waiting[1].result(60).answer == "é 😀" and len(retriever.calls) == 4


def test_leaving_cancels_what_is_open(script, start):
    """Episodes that search, that decode and that wait: none is left open, and none is lost."""
    running, retriever, told = start(script, **HELD | dict(max_turn_tokens=1000)), Fake(never), []
    with running.session(PROTOCOL, retriever) as session:
        done = ask(session, "I").result(60)
        futures = [ask(session, letter) for letter in "BBBFBF"]
        wait(lambda: len(retriever.calls) == 3)
    episodes = [future.result(0) for future in futures]
    check([e for e in episodes if e.segments], script.tokenizer)
    reasons = {e.stop_reason for e in episodes}
    assert done.stop_reason == "answer" and reasons <= {"cancelled", "length"} and not told
    assert all(e.actions == [Invalid(e.actions[0].span)] for e in episodes[:3])
    assert quiet(running) and [e.answer for e in play(running, "IB")] == ["é 😀", "b"]
    late = ask(session, "I")
    with pytest.raises(RuntimeError, match="the engine's session has ended"):
        late.result(60)


def test_what_was_told_is_in_a_cancelled_episode(script, start, monkeypatch):
    """C's first turn ends in the chunk during which the session is left: its notice would be next."""
    running, told, real, left = start(script), [], shards.Shards.decode, threading.Event()

    def decode(*args):
        assert left.wait(30)
        return real(*args)

    real_cancel = job.Job.cancel

    def cancel(*args):
        real_cancel(*args)
        running.loop.call_soon_threadsafe(left.set)  # behind what it has told the loop

    monkeypatch.setattr(shards.Shards, "decode", decode)
    monkeypatch.setattr(job.Job, "cancel", cancel)
    with running.session(PROTOCOL, Fake()) as session:
        future = ask(session, "C", on_text=lambda *said: told.append(said))
    episode = future.result(0)
    assert episode.stop_reason == "cancelled" and told == [(s.source, s.text) for s in episode.segments[1:]]


def test_one_that_comes_while_the_session_is_left_is_not_begun(script, start, monkeypatch):
    running, real, left, late = start(script), shards.Shards.decode, threading.Event(), []

    def decode(*args):
        assert left.wait(30)
        return real(*args)

    real_cancel = job.Job.cancel

    def cancel(*args):
        real_cancel(*args)
        late.append(ask(session, "B"))
        running.loop.call_soon_threadsafe(left.set)

    monkeypatch.setattr(shards.Shards, "decode", decode)
    with running.session(PROTOCOL, Fake()) as session:
        early = ask(session, "F")
        monkeypatch.setattr(job.Job, "cancel", cancel)
    assert early.result(0).stop_reason == "cancelled"
    with pytest.raises(RuntimeError, match="the engine's session has ended"):
        late[0].result(30)


def test_prompts_without_room_and_wrong_settings_are_refused(script, start):
    running = start(script)
    with running.session(PROTOCOL, Fake()) as session:
        with pytest.raises(UserError, match=r"has 256 tokens.*max_total_tokens is 256"):
            session.submit("B" * TOTAL)
        with pytest.raises(UserError, match="empty"):
            session.submit("")
        for wrong in (dict(temperature=-1.0), dict(temperature=float("nan")), dict(top_p=0.0), dict(top_p=1.1)):
            with pytest.raises(UserError, match=next(iter(wrong))):
                session.submit("B\n", **wrong)
        for wrong in (-1, 0.5):
            with pytest.raises(UserError, match="top_k"):
                session.submit("B\n", top_k=wrong)
        for wrong in (0, -1):
            with pytest.raises(UserError, match=f"max_tokens is {wrong}"):
                session.submit("B\n", max_tokens=wrong)
        assert ask(session, "B").result(60).answer == "b" and not session._futures
    with pytest.raises(RuntimeError, match="has not begun"):
        running.session(PROTOCOL, Fake()).submit("B\n")


def test_closing_the_engine_ends_a_session_and_the_rollout_that_waits_for_it(script, start):
    running, retriever, found = start(script, **HELD), Fake(never), []
    with running.session(PROTOCOL, retriever) as session:
        asked = ask(session, "B")
        question = Question("q", "B", ["b"])
        waiting = threading.Thread(target=lambda: found.extend(running.rollout([question], PROTOCOL, Fake())))
        waiting.start()
        wait(lambda: running._jobs and retriever.calls)
        running.close()
        waiting.join(30)
        assert not waiting.is_alive() and asked.exception(0) is None
        assert [e.stop_reason for e in (asked.result(0), *found)] == ["cancelled"] * 2
    running.close()


# ------------------------------------------------------------------------------------------------------------- faults


def test_an_error_of_a_listener_ends_its_own_episode(script, start):
    running, told = start(script), []

    def broken(source, text):
        told.append(text)
        raise ZeroDivisionError

    with running.session(PROTOCOL, Fake()) as session:
        first, other = ask(session, "F", on_text=broken), ask(session, "B")
        with pytest.raises(ZeroDivisionError):
            first.result(60)
        assert other.result(60).answer == "b" and ask(session, "I").result(60).answer == "é 😀"
    assert len(told) == 1 and running.pop_stats()["tokens/sampled"] < LIMITS["max_turn_tokens"]


def test_a_retriever_that_raises_costs_a_notice(script, start):
    async def before(query):
        raise ConnectionError(query)

    running, told = start(script), []
    with running.session(PROTOCOL, Fake(before)) as session:
        episode = ask(session, "B", on_text=lambda *piece: told.append(piece)).result(60)
    assert episode.failed_searches == 1 and episode.answer == "b"
    assert episode.segments[2].text == PROTOCOL.failed() and ("notice", PROTOCOL.failed()) in told


def test_other_calls_wait_while_a_session_is_open(script, start):
    running, found = start(script), []

    def rollout():
        found.extend(e.version for e in play(running, "AB"))

    with running.session(PROTOCOL, Fake()) as session:
        assert ask(session, "I").result(60).version == 0
        threads = [
            threading.Thread(target=call, args=args, daemon=True)
            for call, args in ((running.sync, (script.params, 7)), (rollout, ()))
        ]
        for thread in threads:
            thread.start()
            thread.join(0.1)
        running.cancel()  # the rollout that waits, not the session
        assert ask(session, "B").result(60).answer == "b" and running.version == 0 and not found
    for thread in threads:
        thread.join(60)
    assert running.version == 7 and found == [7, 7]  # its weights, not those of when it was called


def test_a_session_waits_for_the_rollout_under_way(script, start):
    running, retriever, release = start(script), Fake(), threading.Event()

    async def before(query):
        await until(release.is_set)

    retriever.before, episodes = before, []
    rolling = threading.Thread(target=lambda: episodes.extend(play(running, "AB", retriever)), daemon=True)
    rolling.start()
    wait(lambda: retriever.calls)
    with running.session(PROTOCOL, Fake()) as session:
        future = ask(session, "I")
        with pytest.raises(concurrent.futures.TimeoutError):
            future.result(0.1)
        release.set()
        assert future.result(60).answer == "é 😀"
    rolling.join(60)
    assert [e.answer for e in episodes] == ["yes-a", "b"]


def test_a_failing_device_call_ends_all_that_is_open(script, start, monkeypatch):
    running, real, retriever = start(script, **HELD), sampler.decode_chunk, Fake(never)

    def broken(*args, **kwargs):
        real(*args, **kwargs)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"), running.session(PROTOCOL, retriever) as session:
        open_ones = [ask(session, letter) for letter in "BBBBI"]
        wait(lambda: len(retriever.calls) == 4)
        monkeypatch.setattr(sampler, "decode_chunk", broken)
        open_ones[0].cancel()  # the last gets in, and breaks it
        ended = concurrent.futures.wait(open_ones[1:], 30).done
        late = ask(session, "I")
        concurrent.futures.wait([late], 30)
    assert len(ended) == 4 and all("out of memory" in str(future.exception(0)) for future in (*open_ones[1:], late))
    monkeypatch.undo()
    with running.session(PROTOCOL, Fake()) as session:
        assert ask(session, "B").result(60).answer == "b"
    assert quiet(running)


# ----------------------------------------------------------------------------------------------------------- sampling


def test_each_episode_has_its_own_way_of_sampling(dice, start):
    """Of one prompt and key, in the slots of one session; top-k 1 and a tiny top-p are greedy, whatever is beside."""
    running, prompt = start(dice, seed=4, **SHORT | dict(max_turns=0)), "Who was a?\n"
    ways = [dict(temperature=0.0), {}, dict(top_k=1), dict(top_p=1e-6), dict(temperature=0.4), dict(top_k=9, top_p=0.7)]

    def alone(way):
        with running.session(PROTOCOL, Fake()) as session:
            return session.submit(prompt, key=3, **way).result(60)

    want = [alone(way) for way in ways]
    with running.session(PROTOCOL, Fake()) as session:
        futures = [session.submit(prompt, key=3, **way) for way in ways * 2]
        got = [future.result(60) for future in futures]
    assert [content(e) for e in got] == [content(e) for e in want * 2]
    greedy, plain, *others = map(ids, want)
    assert others[:2] == [greedy, greedy] and plain != greedy
    assert len({tuple(row) for row in (greedy, plain, *others[2:])}) == 4
    for i, episode in enumerate(got):
        np.testing.assert_allclose(logprobs(episode), logprobs(want[i % len(ways)]), atol=1e-5)
