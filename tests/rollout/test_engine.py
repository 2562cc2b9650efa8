"""The engine: scripted episodes through the real model, cache and sampler, and random ones against a plain loop."""

import asyncio
import dataclasses
import logging
import threading

import jax
import numpy as np
import pytest
from cases import LIMITS, SCRIPTS, SHORT, TOTAL, ask, check, content, play, random_questions
from plain import ids, sequential
from scripted import PROTOCOL, Fake, random_model, until

from parasearch_jax.errors import UserError
from parasearch_jax.models import Model
from parasearch_jax.protocol import get_protocol
from parasearch_jax.rollout import Answer, Engine, Invalid, Search, job, kv_cache, sampler
from parasearch_jax.rollout.observation import build_observation, document_blocks
from parasearch_jax.rollout.shards import Shards

# ---------------------------------------------------------------------------------------------------------- episodes


def test_scripted_episodes(script, start):
    """Every kind of turn. 8 episodes over 4 slots, so slots are used again."""
    retriever, running = Fake(), start(script)
    episodes = play(running, SCRIPTS, retriever)
    check(episodes, script.tokenizer)
    by = dict(zip(SCRIPTS, episodes, strict=True))
    assert {k: [type(a) for a in e.actions] for k, e in by.items()} == {
        "A": [Search, Answer],
        "B": [Search, Answer],
        "C": [Invalid, Answer],
        "E": [Search] * 3 + [Invalid],
        "F": [Invalid, Answer],
        "G": [Search, Answer],
        "I": [Answer],
        "J": [Invalid, Search, Answer],
    }
    assert {k: e.answer for k, e in by.items() if k != "E"} == {
        "A": "yes-a", "B": "b", "C": "c", "F": "f", "G": "g", "I": "é 😀", "J": "j",
    }  # fmt: skip
    assert [e.stop_reason for e in episodes] == ["answer"] * 3 + ["turns"] + ["answer"] * 4
    assert by["A"].actions[0].queries == ("a1", "a2")
    assert [s.source for s in by["A"].segments] == ["prompt", "policy", "docs", "policy"]
    assert [s.source for s in by["C"].segments] == ["prompt", "policy", "notice", "policy"]
    assert by["C"].segments[1].ids[-1] == 0 and by["C"].segments[1].text == "I do not know"  # the end id is kept
    assert by["C"].segments[2].text == PROTOCOL.notice
    assert len(by["F"].segments[1].ids) == LIMITS["max_turn_tokens"]  # the turn's budget
    assert by["J"].actions[1].queries == ("j1",)


def test_t05_the_row_holds_what_was_sampled(script, start):
    """prompt ids + sampled ids + encode(document text alone) + sampled ids; a tag may end inside a token."""
    tokenizer = script.tokenizer
    (episode,) = play(start(script), "B")
    docs = "\n\n<information>Doc 1(Title: t0) b1.</information>\n\n"
    sampled = [[tokenizer.get_vocab()[p] for p in ps] for ps in (["<search>b", "1</search>ĊĊ"], ["<answer>b"])]
    sampled[1].append(tokenizer.get_vocab()["</answer>Ġandmore".replace("andmore", "andĠmore")])
    want = [tokenizer("B\n")["input_ids"], sampled[0], tokenizer(docs)["input_ids"], sampled[1]]
    assert [list(s.ids) for s in episode.segments] == want
    assert "".join(s.text for s in episode.segments) == (
        f"B\n<search>b1</search>\n\n{docs}<answer>b</answer> and more"
    ) == tokenizer.decode(ids(episode))  # fmt: skip
    assert tokenizer("<search>b1</search>\n\n")["input_ids"] != sampled[0]  # encoding the text again would differ


def test_log_probs_are_those_of_a_full_pass(dice, start):
    """Sampled ones at the temperature in use, over whole episodes with documents in between."""
    episodes = start(dice, **SHORT).rollout(random_questions(6), PROTOCOL, Fake(), samples=2, temperature=0.7)
    for episode in episodes:
        scaled = np.asarray(dice.logits([ids(episode) + [0] * (192 - episode.length())], [episode.length()]))[0] / 0.7
        logprobs, at = np.asarray(jax.nn.log_softmax(scaled)), 0
        for segment in episode.segments:
            if segment.source == "policy":
                want = logprobs[np.arange(at - 1, at - 1 + len(segment.ids)), segment.ids]
                np.testing.assert_allclose(segment.logprobs, want, atol=1e-5)
            at += len(segment.ids)
    assert sum(len(e.searches) for e in episodes) > 2 and any(e.answer is not None for e in episodes)


def test_sub_queries_are_sent_one_by_one_at_most_eight(script, start):
    retriever, running = Fake(), start(script)
    episodes = play(running, "GAE", retriever)
    assert [e.dropped_queries for e in episodes] == [3, 0, 0]
    want = [*(f"g{i}" for i in range(8)), "a1", "a2", *(f"e{i}" for i in range(3))]
    assert sorted(retriever.calls) == sorted([q] for q in want)  # e3, in the forced last turn, is not sent
    stats = running.pop_stats()
    assert stats["queries/sent"] == len(want) and not stats["queries/failed"]
    assert running.pop_stats() == {}


def test_the_last_generation_can_only_answer(script, start):
    retriever = Fake()
    (episode,) = play(start(script, max_turns=2), "E", retriever)
    assert [type(a) for a in episode.actions] == [Search, Search, Invalid] and episode.stop_reason == "turns"
    assert retriever.asked == ["e0", "e1"] and episode.segments[-1].source == "policy"
    (episode,) = play(start(script, max_turns=1), "B", retriever)
    assert episode.answer == "b" and episode.stop_reason == "answer"


def test_documents_in_query_order_within_the_budget(script, start):
    retriever = Fake(words=60)
    (episode,) = play(start(script, observation_tokens=100, topk=2), "A", retriever)
    documents = [[retriever.document(query, i) for i in range(2)] for query in ("a1", "a2")]
    blocks = document_blocks(PROTOCOL, documents)
    text, want, _ = build_observation(PROTOCOL, script.tokenizer, blocks, 100)
    assert episode.segments[2].text == text and list(episode.segments[2].ids) == want and len(want) <= 100
    assert 0 < text.index("a1") < text.index("Doc 1", 40) < text.index("a2")


# ------------------------------------------------------------------------------------------------------------ limits


def test_total_budget_ends_a_turn_with_length(script, start):
    """A loop that nothing else stops, beside an episode that goes on."""
    running = start(script, max_turn_tokens=1000)
    loop, other = play(running, "FE")
    check([loop, other], script.tokenizer)
    assert loop.stop_reason == "length" and loop.length() == TOTAL
    assert loop.actions == [Invalid((1, 0, len(loop.segments[1].text)))]
    assert content(other) == content(play(start(script), "E")[0])


def test_no_cell_is_written_twice_up_to_the_last_one(script, start, monkeypatch):
    """Bit for bit, call by call: what lies in the slots stays while a loop beside them fills its own."""
    running, looked = start(script, max_turn_tokens=1000), []

    def cells():  # copies: the next call gets these buffers
        state = running.shards._state
        return [np.array(x) for layers in state.cache.values() for x in layers], np.array(state.length)

    def watch(name):
        real = getattr(Shards, name)

        def call(shards, rows, *args):
            (before, length), kept = cells(), {}
            if name == "extend":
                kept = {row.slot: row.start for row in rows}
            out = real(shards, rows, *args)
            for old, new in zip(before, cells()[0], strict=True):
                for slot, n in enumerate(length):
                    n = kept.get(slot, n)
                    np.testing.assert_array_equal(old[slot, :, :n], new[slot, :, :n])
                    looked.append(n)
            return out

        monkeypatch.setattr(Shards, name, call)

    watch("extend")
    watch("decode")
    loop, *others = play(running, "FEAC")
    assert loop.stop_reason == "length" and loop.length() == TOTAL and max(looked) >= TOTAL - 5
    assert [e.stop_reason for e in others] == ["turns", "answer", "answer"] and len(looked) > 300


@pytest.mark.parametrize("room", range(0, 4))
def test_a_search_that_uses_up_the_budget_is_not_executed(script, start, room):
    """B's search is two tokens; behind it lies room for `room` more, and documents need more than that."""
    retriever = Fake()
    question = "B" + "." * (TOTAL - 2 - 2 - room)
    (episode,) = play(start(script), [question], retriever)
    check([episode], script.tokenizer)
    assert episode.stop_reason == "length" and episode.length() == TOTAL - room
    if room == 0:
        assert retriever.asked == [] and episode.searches == []


@pytest.mark.parametrize("spare", [-10, 0, 1, 2])
def test_a_notice_needs_room_for_itself_and_a_token(script, start, spare):
    """C's turn is two tokens and gets a notice; `spare` tokens are left behind it."""
    notice = len(script.tokenizer(PROTOCOL.notice)["input_ids"])
    (episode,) = play(start(script), ["C" + "." * (TOTAL - 2 - 2 - notice - spare)])
    check([episode], script.tokenizer)
    sources = [s.source for s in episode.segments]
    if spare < 1:
        assert sources == ["prompt", "policy"] and episode.stop_reason == "length"
    else:
        assert sources == ["prompt", "policy", "notice", "policy"] and len(episode.segments[3].ids) == spare
        assert episode.stop_reason == ("answer" if spare == 2 else "length") and episode.length() == TOTAL


def test_an_answer_in_the_last_token_counts(script, start):
    (episode,) = play(start(script), ["I" + "." * (TOTAL - 2 - 3)])
    assert episode.length() == TOTAL and episode.answer == "é 😀" and episode.stop_reason == "answer"


def test_a_prompt_without_room_is_refused_with_its_length(script, start):
    running = start(script)
    with pytest.raises(UserError, match=r"question 'B' has 257 tokens.*max_total_tokens is 256"):
        play(running, ["A", "B" + "." * (TOTAL - 1)])
    with pytest.raises(UserError, match="256 tokens"):
        play(running, ["B" + "." * (TOTAL - 2)])
    with pytest.raises(UserError, match="empty"):
        running.generate([""])
    assert play(running, ["B"])[0].answer == "b"


# -------------------------------------------------------------------------------------------------------- retrieval


def test_a_held_search_holds_nobody_else(script, start, monkeypatch):
    """Its future opens when all other episodes have finished: they finish, then the last one does."""
    finished, original = [], job.Job._finish

    def spy(self, slot, reason):
        finished.append(self.slots.runs[slot].episode.question_id)
        return original(self, slot, reason)

    monkeypatch.setattr(job.Job, "_finish", spy)

    async def before(query):
        if query == "a2":
            await until(lambda: len(finished) == len(SCRIPTS) - 1)

    episodes = play(start(script, deterministic=False, slots=4), SCRIPTS, Fake(before))
    assert finished[-1] == "A" and len(finished) == len(SCRIPTS)
    assert not any(e.failed_searches for e in episodes)  # the wait never ran into its limit
    assert [content(e) for e in episodes] == [content(e) for e in play(start(script), SCRIPTS)]


@pytest.mark.parametrize("deterministic", [True, False])
def test_sub_queries_of_an_action_are_in_flight_together(script, start, deterministic):
    """The retriever answers only when all of them have arrived."""
    here = set()

    async def before(query):
        here.add(query)
        partners = {"a1", "a2"} if query[0] == "a" else {f"g{i}" for i in range(8)}
        await until(lambda: partners <= here)

    episodes = play(start(script, deterministic=deterministic), "AG", Fake(before))
    assert [e.answer for e in episodes] == ["yes-a", "g"] and not any(e.failed_searches for e in episodes)


def test_searches_of_several_episodes_wait_at_once_in_deterministic_mode(script, start):
    here = set()

    async def before(query):
        here.add(query)
        await until(lambda: {"b1", "e0"} <= here)

    episodes = play(start(script), "BE", Fake(before))  # both search with their second token
    assert not any(e.failed_searches for e in episodes)


class Odd(Fake):
    """Gives what a retriever must not give."""

    async def search(self, queries, k):
        return {"a1": [], "a2": [[object()]], "b1": [[]]}[queries[0]]


def test_failed_sub_queries_cost_an_empty_block_and_a_failed_search_brings_a_notice(script, start, caplog):
    async def before(query):
        if query in ("a2", "b1"):
            raise ConnectionError(f"no {query}")

    running = start(script)
    with caplog.at_level(logging.WARNING):
        episodes = play(running, "ABC", Fake(before))
    check(episodes, script.tokenizer)
    assert [e.failed_searches for e in episodes] == [1, 1, 0]
    assert [e.answer for e in episodes] == ["yes-a", "b", "c"]
    assert episodes[0].segments[2].text == "\n\n<information>Doc 1(Title: t0) a1.</information>\n\n"
    assert [s.source for s in episodes[0].segments] == ["prompt", "policy", "docs", "policy"]
    assert [s.source for s in episodes[1].segments] == ["prompt", "policy", "notice", "policy"]
    assert episodes[1].segments[2].text == f"\n\n<information>{PROTOCOL.failed_notice}</information>\n\n"
    assert episodes[1].actions[0].queries == ("b1",)  # it was sent, so it counts
    stats = running.pop_stats()
    assert (stats["queries/failed"], stats["searches/failed"]) == (2, 1) and "no a2" in caplog.text
    episodes = play(running, "AB", Odd())
    assert [e.failed_searches for e in episodes] == [2, 0]
    assert [e.answer for e in episodes] == ["yes-a", "b"]
    assert episodes[0].segments[2].text == PROTOCOL.failed()
    assert episodes[1].segments[2].text == "\n\n<information></information>\n\n"  # nothing found is no failure


# ------------------------------------------------------------------------------------------- order, keys, equalities


def test_windows_of_the_cache_give_what_pages_do(dice, start):
    """The way of GPUs to read the cache, over whole episodes."""
    windows = Model(dataclasses.replace(dice.config, attention="blocks"), dice.params, dice.tokenizer)
    assert kv_cache.paged(dice.config) and not kv_cache.paged(windows.config)
    questions = random_questions(4)
    want, got = (
        start(model, **SHORT).rollout(questions, PROTOCOL, Fake(), samples=2, step=3) for model in (dice, windows)
    )
    assert [content(e) for e in got] == [content(e) for e in want]
    for mine, other in zip(got, want, strict=True):
        for a, b in zip(mine.segments, other.segments, strict=True):
            np.testing.assert_allclose(a.logprobs or (), b.logprobs or (), atol=1e-5)


def test_equals_a_plain_sequential_loop(dice, start):
    """Whole episodes, documents and notices included, token for token; for 3 slots and for 8, in any order."""
    questions = random_questions(6)
    got = start(dice, seed=5, **SHORT).rollout(questions, PROTOCOL, Fake(), samples=2, step=7)
    assert [(e.question_id, e.sample) for e in got] == [(q.id, i) for q in questions for i in range(2)]
    for i, episode in enumerate(got):
        want = sequential(dice, PROTOCOL, questions[i // 2], i % 2, lambda q: [Fake().document(q, 0)], 5, 7, SHORT)
        found = [(s.source, s.text) for s in episode.segments], ids(episode), episode.stop_reason
        assert found == want, (episode.question_id, episode.sample)
    check(got, dice.tokenizer, 192)
    kinds = {type(a) for e in got for a in e.actions}
    assert kinds == {Search, Answer, Invalid} and len({e.stop_reason for e in got}) > 1  # the comparison saw all of it

    wide = start(dice, seed=5, **SHORT | dict(slots=8))
    again = wide.rollout(questions[::-1], PROTOCOL, Fake(), samples=2, step=7)
    assert [(e.question_id, e.sample) for e in again] == [(q.id, i) for q in questions[::-1] for i in range(2)]
    key = lambda e: (e.question_id, e.sample)  # noqa: E731
    assert [content(e) for e in sorted(again, key=key)] == [content(e) for e in sorted(got, key=key)]
    assert wide.rollout(questions[::-1], PROTOCOL, Fake(), samples=2, step=7) == again  # log-probs too, bit for bit
    other = wide.rollout(questions, PROTOCOL, Fake(), samples=2, step=8)
    assert all(ids(a) != ids(b) for a, b in zip(other, got, strict=True))
    assert all(ids(got[i]) != ids(got[i + 1]) for i in range(0, 12, 2))  # samples of a question differ


def test_deterministic_mode_does_not_see_delays(dice, start):
    """Log-probs too, bit for bit: the shapes of the calls are a function of the tokens alone."""
    delays = np.random.default_rng(0)

    async def before(query):
        await asyncio.sleep(delays.uniform(0, 0.02))

    running = start(dice, **SHORT)
    plain = running.rollout(random_questions(6), PROTOCOL, Fake(), samples=2)
    assert running.rollout(random_questions(6), PROTOCOL, Fake(before), samples=2) == plain
    free = start(dice, **SHORT, deterministic=False).rollout(random_questions(6), PROTOCOL, Fake(before), samples=2)
    assert [content(e) for e in free] == [content(e) for e in plain]


def test_the_seed_and_new_weights_are_used(dice, start):
    questions = random_questions(2)
    first = start(dice, seed=1, **SHORT).rollout(questions, PROTOCOL, Fake())
    running = start(dice, seed=2, **SHORT)
    second = running.rollout(questions, PROTOCOL, Fake())
    assert all(ids(a) != ids(b) for a, b in zip(first, second, strict=True))
    running.sync(random_model(seed=9).params, version=3)
    third = running.rollout(questions, PROTOCOL, Fake())
    assert all(ids(a) != ids(b) for a, b in zip(second, third, strict=True)) and [e.version for e in third] == [3, 3]


def test_sync_waits_for_the_rollout_under_way(script, start):
    running, retriever, release = start(script), Fake(), threading.Event()

    async def before(query):
        await until(release.is_set)

    retriever.before, episodes = before, []
    rolling = threading.Thread(target=lambda: episodes.extend(play(running, "AB", retriever)))
    syncing = threading.Thread(target=running.sync, args=(script.params, 7))
    rolling.start()
    asyncio.run(until(lambda: retriever.calls))
    syncing.start()
    syncing.join(0.2)
    early = running.version
    release.set()
    rolling.join(60)
    syncing.join(60)
    assert (early, running.version) == (0, 7) and [e.version for e in episodes] == [0, 0]
    assert [e.answer for e in episodes] == ["yes-a", "b"]


def test_counts(script, start):
    """Every prompt and environment token is fed once, and no token is sampled behind the one that ends a turn."""
    running = start(script)
    episodes = play(running, SCRIPTS)
    fed = sum(len(s.ids) for e in episodes for s in e.segments if s.source != "policy")
    sampled = sum(len(s.ids) for e in episodes for s in e.segments if s.source == "policy")
    stats = running.pop_stats()
    assert stats["tokens/prefilled"] == fed and stats["tokens/sampled"] == sampled
    assert sampled / LIMITS["slots"] <= stats["decode_steps"] <= sampled
    assert stats["slot_steps"] == stats["decode_steps"] * LIMITS["slots"]
    assert {"seconds/prefill", "seconds/decode", "seconds/wait"} <= set(stats)


# ------------------------------------------------------------------------------------------- generate, loops, threads


def test_generate(script, start):
    running = start(script)
    plain, loop = running.generate(["I\n", "F\n"], max_new_tokens=9, temperature=0.0)
    assert plain.segments[1].text.startswith("<answer>é 😀</answer>") and not plain.actions  # tags stop nothing here
    assert [s.source for s in loop.segments] == ["prompt", "policy"]
    assert len(loop.segments[1].ids) == 9 and loop.stop_reason == "length"
    (ended,) = running.generate(["C\n"], temperature=0.0)
    assert ended.segments[1].text == "I do not know" and ended.stop_reason == "eos"


def test_nothing_to_do(script, start):
    assert play(start(script), "") == [] and start(script).generate([]) == []


def test_works_inside_a_running_loop(script, start):
    running = start(script)

    async def notebook():
        return play(running, "AB")

    assert [e.answer for e in asyncio.run(notebook())] == ["yes-a", "b"]


def test_two_engines_and_two_threads(script, start):
    one, two = start(script), start(script)
    want, found = [content(e) for e in play(one, "ABC")], {}

    def work(name, running):
        found[name] = [content(e) for e in play(running, "ABC")]

    threads = [threading.Thread(target=work, args=(i, r)) for i, r in enumerate((one, one, two))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found.get(i) for i in range(3)] == [want] * 3


def test_close_ends_the_threads(script):
    before = set(threading.enumerate())
    running = Engine(script, **LIMITS)
    play(running, "B")
    assert len(set(threading.enumerate()) - before) == 2
    running.close()
    assert set(threading.enumerate()) == before
    running.close()


def test_an_error_leaves_a_usable_engine(script, start, monkeypatch):
    """A fault in the middle of a rollout reaches the caller; the next rollout starts from a clean state."""

    def broken(*args):
        raise AttributeError

    running = start(script)
    want = [content(e) for e in play(running, "AB")]
    with monkeypatch.context() as patch, pytest.raises(AttributeError):
        patch.setattr(job, "build_observation", broken)
        play(running, "FAE")
    assert [content(e) for e in play(running, "AB")] == want


def test_a_second_rollout_compiles_nothing_and_transfers_only_explicitly(dice, start):
    running, compiled = start(dice, **SHORT), []

    def listen(event, seconds, **_):
        if "compile" in event:
            compiled.append(event)

    def roll():
        return running.rollout(random_questions(6), PROTOCOL, Fake(), samples=2)

    first = roll()
    sizes = sampler.extend._cache_size(), sampler.decode_chunk._cache_size()
    jax.monitoring.register_event_duration_secs_listener(listen)
    jax.config.update("jax_transfer_guard", "disallow")  # of all threads, as a context it would be this one's alone
    try:
        assert roll() == first
    finally:
        jax.config.update("jax_transfer_guard", "allow")
        jax.monitoring.unregister_event_duration_listener(listen)
    assert (sampler.extend._cache_size(), sampler.decode_chunk._cache_size()) == sizes and not compiled


def test_a_tokenizer_larger_than_the_model_is_refused(script, dice):
    import copy

    model = copy.copy(dice)
    model.tokenizer = copy.deepcopy(dice.tokenizer)
    model.tokenizer.add_tokens([f"<extra{i}>" for i in range(6)])
    with pytest.raises(UserError, match="Take the tokenizer that belongs to the model"):
        Engine(model, **LIMITS)


def test_other_protocols(script, start):
    running = start(script)
    running.rollout(ask("B"), get_protocol("search_r1", prompt="{question}\n"), Fake(), temperature=0.0)
    with pytest.raises(UserError, match="unknown"):
        running.rollout(ask("B"), "nope", Fake())


def test_a_chat_template_wraps_the_prompt(script, start, monkeypatch):
    def template(messages, add_generation_prompt, tokenize):  # the library's own needs jinja2
        assert add_generation_prompt and not tokenize
        return "".join(f"{m['role']}:{m['content']}" for m in messages) + "bot:"

    monkeypatch.setattr(script.tokenizer, "chat_template", "some")
    monkeypatch.setattr(script.tokenizer, "apply_chat_template", template)
    (episode,) = play(start(script), "B")
    assert episode.segments[0].text == "user:B\nbot:" and episode.answer == "b"
    check([episode], script.tokenizer)


@pytest.mark.parametrize("held", [True, False])
def test_an_interrupted_rollout_does_not_disturb_the_next(script, start, monkeypatch, held):
    """Ctrl-C while a search is out, and while the device is at work."""
    running, real, arrived, cancelled = start(script), asyncio.run_coroutine_threadsafe, threading.Event(), []
    want = [content(e) for e in play(running, "ABC")]

    async def before(query):
        arrived.set()
        try:
            await asyncio.sleep(60 if held else 0)
        except asyncio.CancelledError:
            cancelled.append(query)
            raise

    def interrupted(coroutine, loop):
        future = real(coroutine, loop)

        def result():
            assert arrived.wait(30)
            raise KeyboardInterrupt

        future.result = result
        return future

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
        play(running, "ABEG", Fake(before))
    assert [content(e) for e in play(running, "ABC")] == want
    assert bool(cancelled) == held


def test_a_failing_device_call_leaves_a_usable_engine(script, start, monkeypatch):
    """The state was given away to the call that failed."""
    running, real = start(script), sampler.decode_chunk
    want = [content(e) for e in play(running, "AB")]

    def broken(*args, **kwargs):
        real(*args, **kwargs)
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        patch.setattr(sampler, "decode_chunk", broken)
        play(running, "AB")
    assert [content(e) for e in play(running, "AB")] == want


def test_few_programs_serve_prompts_of_any_length(script, start):
    running, before = start(script), sampler.extend._cache_size()
    for length in range(2, 62, 3):
        running.generate(["I" * length], max_new_tokens=1)
    assert sampler.extend._cache_size() - before <= 3  # 16, 32 and 64 tokens
