"""2,000 episodes with a retriever that is out of order: all of them end, and nothing is left behind. Slow."""

import asyncio
import gc
import random
import statistics
import threading
from collections import Counter, deque
from pathlib import Path

import pytest
import small_world
from cases import check
from scripted import until

from parasearch_jax.data import Question
from parasearch_jax.retrieval import Retriever
from parasearch_jax.rollout import Engine, Episode
from parasearch_jax.rollout.job import Run
from parasearch_jax.rollout.types import STOP_REASONS

pytestmark = pytest.mark.soak

EPISODES, BATCH, WARM = 2000, 100, 4
SHARE = 0.05
FAULTS = ("raises", "hangs", "garbage", "nothing")


class Broken(Retriever):
    """Another retriever's documents, but for four faults in one of twenty calls each."""

    def __init__(self, retriever):
        self.retriever, self.rng, self.counts = retriever, random.Random(0), Counter()

    async def search(self, queries, k):
        fault = self.rng.choices([*FAULTS, ""], [SHARE] * len(FAULTS) + [1 - SHARE * len(FAULTS)])[0]
        self.counts[fault] += 1
        if fault == "raises":
            raise self.rng.choice([ConnectionError("refused"), ValueError("no json"), KeyError("result")])
        if fault == "hangs":
            await asyncio.Event().wait()
        if fault == "garbage":
            return self.rng.choice([None, 7, "text", [None], [["text"]], [[], []], [[b"\xff"]]])
        if fault == "nothing":
            return self.rng.choice([[], [[]]])
        await asyncio.sleep(self.rng.uniform(0, 0.01))
        return await self.retriever.search(queries, k)


def in_rollouts(running, world, retriever):
    """Yields the episodes of each batch."""
    for i in range(EPISODES // BATCH):
        questions = world.questions[i * BATCH // 4 : (i + 1) * BATCH // 4]
        watchdog = threading.Timer(60, running.cancel)  # or the test would hang when a search has no end
        watchdog.start()
        yield running.rollout(questions, world.protocol, retriever, samples=4, step=i)
        watchdog.cancel()
        watchdog.join()


def in_one_session(running, world, retriever):
    """The same, submitted one by one with twice as many open as there are slots."""
    with running.session(world.protocol, retriever) as session:
        waiting, batch = deque(), []
        for i in range(EPISODES):
            prompt = world.protocol.render_prompt(world.questions[i % len(world.questions)].text)
            waiting.append(session.submit(prompt, key=i, on_text=lambda source, text: None))
            if len(waiting) > 2 * running.config.slots:
                batch.append(waiting.popleft().result(60))
            if len(batch) == BATCH:
                yield batch
                batch = []
        yield batch + [future.result(60) for future in waiting]


def warm_up(running, world, retriever):
    """Prompts up to the limit, so that every window of a slot is read, which a rare long episode would do later on."""
    text, longest = world.questions[0].text, world.limits.max_total_tokens - 10
    questions = [Question(f"warm{i}", text * i, ["x"]) for i in range(1, 40)]
    questions = [q for q in questions if len(running.encode(world.protocol.render_prompt(q.text))) < longest]
    assert len(questions) > 10
    for few in (questions, questions[::-1], *([question] for question in questions)):
        running.rollout(few, world.protocol, retriever, samples=4)


def resident():
    """Bytes of this process that lie in memory, behind a collection."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("batches", [in_rollouts, in_one_session])
def test_soak(batches):
    """Memory: the median of what lies in memory after the batches of the second half, against that of the first half,
    both behind some in which allocators grow. Programs are compiled before, and the episodes of a batch are dropped."""
    world, before = small_world.load(), set(threading.enumerate())
    retriever = Broken(world.retriever)
    running = Engine(world.model, world.limits, slots=32, search_seconds=0.2, deterministic=False)
    try:
        warm_up(running, world, world.retriever)
        running.pop_stats()
        ended, memory, failed = Counter(), [], 0
        for episodes in batches(running, world, retriever):
            check(episodes, world.model.tokenizer, world.limits.max_total_tokens, world.protocol)
            ended.update(e.stop_reason for e in episodes)
            assert not ended["cancelled"], "the watchdog: a search had no end"
            failed += sum(e.failed_searches for e in episodes)
            memory.append(resident())
        assert sum(ended.values()) == EPISODES and set(ended) <= set(STOP_REASONS) - {"cancelled", "error"}

        stats, calls = running.pop_stats(), sum(retriever.counts.values())
        assert stats["queries/sent"] == calls > EPISODES and stats["queries/failed"] == failed
        for fault in FAULTS:
            assert abs(retriever.counts[fault] / calls - SHARE) < 0.015, retriever.counts
        known = sum(retriever.counts[fault] for fault in FAULTS[:3])
        assert known <= failed <= known + retriever.counts["nothing"]  # [] is none's answer, [[]] one without documents

        asyncio.run(until(lambda: not asyncio.all_tasks(running.loop)))
        del episodes
        gc.collect()
        assert not [o for o in gc.get_objects() if isinstance(o, Episode | Run)]
        extra = set(threading.enumerate()) - before
        assert {thread.name.partition("_")[0] for thread in extra} == {"engine", "device"} and len(extra) == 2

        settled = memory[WARM:]
        first, second = (
            statistics.median(part) for part in (settled[: len(settled) // 2], settled[len(settled) // 2 :])
        )
        assert second <= 1.02 * first, [round(x / 2**20) for x in memory]
    finally:
        running.close()
    assert set(threading.enumerate()) == before
