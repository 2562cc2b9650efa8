"""What is counted over a whole run of the small world: nothing is fed twice, nothing is sampled in vain, and slots are
at work while episodes wait for one. Slow: the real base, corpus and index, 768 episodes."""

import collections

import pytest
import small_world
from cases import check

from parasearch_jax.protocol import get_protocol
from parasearch_jax.rollout import Answer, Engine, Episode, Search, Segment, job
from parasearch_jax.rollout.engine import _run_number
from parasearch_jax.rollout.shards import Shards
from parasearch_jax.sharding.mesh import MeshConfig, make_mesh

SAMPLES = 8
OCCUPANCY = 0.85

pytestmark = pytest.mark.slow


class Seen:
    """What the engine does, from outside: `homes` {number of an episode: its shards}; `queued`, the engine's counts
    over the chunks during which episodes waited for a slot."""

    def __init__(self, monkeypatch):
        self.homes, self.queued = collections.defaultdict(set), collections.Counter()
        extend, decode = Shards.extend, job.Job._decode

        def spy_extend(shards, rows, key):
            for row in rows:
                self.homes[row.number].add(row.slot // shards.slots)
            return extend(shards, rows, key)

        def spy_decode(under_way):
            waiting = under_way.slots._queue or any(under_way.slots._groups)
            before = dict(under_way.engine.stats)
            ended = decode(under_way)
            if waiting:
                after = under_way.engine.stats
                self.queued.update(
                    {name: after[name] - before.get(name, 0) for name in ("tokens/sampled", "slot_steps")}
                )
            return ended

        monkeypatch.setattr(Shards, "extend", spy_extend)
        monkeypatch.setattr(job.Job, "_decode", spy_decode)


def tokens(episodes, *sources):
    return sum(len(s.ids) for e in episodes for s in e.segments if s.source in sources)


def behind_the_tag(episode, protocol, tokenizer):
    """Tokens of an episode that stand behind the one with which a complete action ended."""
    wasted = 0
    for segment in episode.segments:
        if segment.source != "policy":
            continue
        for n in range(1, len(segment.ids)):
            text = tokenizer.decode(segment.ids[:n], skip_special_tokens=True)
            if protocol.parse(text + "!").end <= len(text):  # what is unfinished would go up to the end
                wasted += len(segment.ids) - n
                break
    return wasted


@pytest.mark.parametrize("fsdp, questions", [(1, 96), (2, 48), (4, 48)])
def test_counts_over_a_whole_run(monkeypatch, fsdp, questions):
    model, all_questions, protocol, retriever, limits = small_world.load()
    drawn = all_questions[:questions]
    seen, running = Seen(monkeypatch), Engine(model, limits, mesh=make_mesh(MeshConfig(fsdp, 1)))
    try:
        episodes = running.rollout(drawn, protocol, retriever, samples=SAMPLES)
    finally:
        running.close()
    stats = running.pop_stats()
    check(episodes, model.tokenizer, limits.max_total_tokens, protocol)
    assert {type(action) for e in episodes for action in e.actions} >= {Search, Answer}

    groups = [episodes[i : i + SAMPLES] for i in range(0, len(episodes), SAMPLES)]
    homes = [set().union(*(seen.homes[_run_number(e.question_id, e.sample)] for e in group)) for group in groups]
    assert set().union(*homes) == set(range(fsdp))
    prompts = sum(len(group[0].segments[0].ids) * len(home) for group, home in zip(groups, homes, strict=True))
    assert stats["tokens/prefilled"] == prompts + tokens(episodes, "docs", "notice")
    assert len(homes) == questions == sum(map(len, homes))  # and a group has one shard

    assert stats["tokens/sampled"] == tokens(episodes, "policy")
    assert sum(behind_the_tag(e, protocol, model.tokenizer) for e in episodes) == 0

    assert seen.queued["slot_steps"] > stats["slot_steps"] / 3  # of a good part of the run
    occupancy = seen.queued["tokens/sampled"] / seen.queued["slot_steps"]
    assert occupancy >= OCCUPANCY, f"{occupancy:.3f}"


def test_tokens_behind_a_tag_are_seen():
    tokenizer = small_world.load().model.tokenizer
    protocol = get_protocol("parallel")

    def said(text):
        ids = tuple(tokenizer(text)["input_ids"])
        return Episode([Segment("policy", text, ids, (0.0,) * len(ids))])

    whole = "<think>a</think><search>b ## c</search>"
    assert behind_the_tag(said(whole), protocol, tokenizer) == 0
    assert behind_the_tag(said(whole + " and more"), protocol, tokenizer) == len(tokenizer(" and more")["input_ids"])
    assert behind_the_tag(said("</search> <search> a"), protocol, tokenizer) == 0
