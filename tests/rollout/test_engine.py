"""The engine: scripted episodes through the real model, cache and sampler, and random ones against a plain loop."""

import asyncio
import logging
import threading
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripted import LOOP, PROTOCOL, Fake, drawn_questions, random_model, scripted_model, until

from parasearch_jax.data import Question
from parasearch_jax.errors import UserError
from parasearch_jax.models import decoder
from parasearch_jax.protocol import get_protocol
from parasearch_jax.rollout import Answer, Engine, Episode, Invalid, Search, engine, sampler
from parasearch_jax.rollout.observation import build_observation
from parasearch_jax.toy.tokenizer import END

TOTAL = 256
LIMITS = dict(slots=4, chunk=4, max_turns=3, max_turn_tokens=40, max_total_tokens=TOTAL, observation_tokens=200, topk=1)
SHORT = LIMITS | dict(slots=3, max_total_tokens=192, max_turn_tokens=24)  # for the random model

# By the marker that is the question. Every piece occurs once; a tag is cut differently each time.
SCRIPTS = {
    "A": [["<think>a</think>", "<sea", "rch>a1 ## a2</se", "arch>"], ["<answer> yes-a</answer>"]],
    "B": [["<search>b", "1</search>\n\n"], ["<answer>b", "</answer> and more"]],
    "C": [["I do not know", END], ["<answer>c</ans", "wer>"]],
    "E": [[f"<search>e{i}", f"</search>{i}"] for i in range(6)],
    "F": [["f goes on ", LOOP], ["<answer>f</answer>"]],
    "G": [["<search>" + "##".join(f"g{i}" for i in range(11)) + "</search>"], ["<answer>g</answer>"]],
    "I": [[b"<answer>\xc3", b"\xa9 \xf0\x9f", b"\x98\x80</answer>"]],
    "J": [["<search> ## </search>"], ["</search>j", "<search>j1</search>"], ["<answer>j</answer>"]],
}


@pytest.fixture(scope="module")
def script():
    return scripted_model(SCRIPTS)


@pytest.fixture(scope="module")
def dice():
    return random_model()


@pytest.fixture
def start():
    """start(model, **changes) -> Engine, closed at the end."""
    engines = []

    def make(model, seed=0, **changes):
        engines.append(Engine(model, seed=seed, **(LIMITS | changes)))
        return engines[-1]

    yield make
    for each in engines:
        each.close()


def ask(letters):
    return [Question(letter[0], letter, ["x"]) for letter in letters]


def play(engine, letters, retriever=None, **changes):
    return engine.rollout(ask(letters), PROTOCOL, retriever or Fake(), temperature=0.0, **changes)


def ids(episode):
    return [i for segment in episode.segments for i in segment.ids]


def content(episode):
    """What must not depend on how the engine went about it."""
    return [(s.source, s.text, s.ids) for s in episode.segments], episode.actions, episode.stop_reason


def check(episodes, tokenizer, limit=TOTAL):
    """What holds for every episode."""
    for episode in episodes:
        policy = [s for s in episode.segments if s.source == "policy"]
        assert episode.segments[0].source == "prompt" and len(episode.actions) == len(policy) == episode.turns
        assert all(len(s.ids) == len(s.logprobs) > 0 for s in policy)
        assert all(s.logprobs is None for s in episode.segments if s.source != "policy")
        assert episode.length() == len(ids(episode)) <= limit
        for i, segment in enumerate(episode.segments):
            if segment.source != "policy":
                assert list(segment.ids) == tokenizer(segment.text, add_special_tokens=False)["input_ids"]
            else:
                assert segment.text == tokenizer.decode(segment.ids, skip_special_tokens=True)
                action = episode.actions[[j for j, s in enumerate(episode.segments) if s.source == "policy"].index(i)]
                assert action.span[0] == i and 0 <= action.span[1] <= action.span[2] <= len(segment.text)
        again = Episode.from_text([(s.source, s.text) for s in episode.segments], PROTOCOL)
        assert again.actions == episode.actions  # a stored episode is scored as the one it was stored from


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
    text, want, _ = build_observation(PROTOCOL, script.tokenizer, documents, 100)
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
    finished, original = [], engine._Job._finish

    def spy(job, slot, reason):
        finished.append(job.slots[slot].episode.question_id)
        return original(job, slot, reason)

    monkeypatch.setattr(engine._Job, "_finish", spy)

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
        await until(lambda: {"b1", "g0"} <= here)

    episodes = play(start(script), "BG", Fake(before))
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


def random_questions(n):
    texts = drawn_questions(count=n)[:n]
    return [Question(f"q{i}", text, ["x"]) for i, text in enumerate(texts)]


def sequential(model, question, sample, retriever, seed, step, limits):
    """One episode, written down plainly: a full forward pass for every token, no cache, no slots, no automaton."""
    tokenizer, end = model.tokenizer, model.config.eos_token_ids
    key = jax.random.fold_in(jax.random.key(seed), step)
    key = jax.random.fold_in(key, zlib.crc32(f"{question.id}\n{sample}".encode()))
    out = [("prompt", PROTOCOL.render_prompt(question.text))]
    row = tokenizer(out[0][1], add_special_tokens=False)["input_ids"]
    for turn in range(limits["max_turns"] + 1):
        said = []
        while len(row) < limits["max_total_tokens"] and len(said) < limits["max_turn_tokens"]:
            padded = np.zeros((1, limits["max_total_tokens"]), np.int32)
            padded[0, : len(row)] = row
            logits, uniform = next_logits(model.config, model.params, padded, len(row) - 1, key)
            p = np.exp(np.asarray(logits, np.float64) - np.max(logits))
            token = int((p.cumsum() / p.sum() <= float(uniform)).sum())
            row, said = [*row, token], [*said, token]
            text = tokenizer.decode(said, skip_special_tokens=True)
            if token in end or token >= len(tokenizer) or PROTOCOL.parse(text + "!").end <= len(text):
                break
        out.append(("policy", text))
        action = PROTOCOL.parse(text).action
        if isinstance(action, Answer):
            return out, row, "answer"
        if len(row) >= limits["max_total_tokens"]:
            return out, row, "length"
        if turn == limits["max_turns"]:
            return out, row, "turns"
        if isinstance(action, Search):
            blocks = [
                "".join(PROTOCOL.document(1, d.title, d.text) for d in [retriever.document(q, 0)])
                for q in action.queries
            ]
            source, text = "docs", PROTOCOL.observation(blocks)
            assert len(tokenizer(text)["input_ids"]) <= limits["observation_tokens"]
        else:
            source, text = "notice", PROTOCOL.notice
        new = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(row) + len(new) >= limits["max_total_tokens"]:
            return out, row, "length"
        out, row = [*out, (source, text)], [*row, *new]


@jax.jit(static_argnums=0)
def next_logits(cfg, params, ids, at, key):
    positions = jnp.arange(ids.shape[1])[None]
    hidden = decoder.forward(params, cfg, ids, positions)
    return decoder.logits(params, cfg, hidden[0, at]), jax.random.uniform(jax.random.fold_in(key, at))


def test_equals_a_plain_sequential_loop(dice, start):
    """Whole episodes, documents and notices included, token for token; for 3 slots and for 8, in any order."""
    questions = random_questions(6)
    got = start(dice, seed=5, **SHORT).rollout(questions, PROTOCOL, Fake(), samples=2, step=7)
    assert [(e.question_id, e.sample) for e in got] == [(q.id, i) for q in questions for i in range(2)]
    for i, episode in enumerate(got):
        want = sequential(dice, questions[i // 2], i % 2, Fake(), 5, 7, SHORT)
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
        patch.setattr(engine, "build_observation", broken)
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
