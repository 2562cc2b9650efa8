"""The loops that rollout.py measures the engine against: a fixed batch, turn by turn, on the same model code.

    feed every row    the whole context anew, or (Design.keeps) what came since the last turn
    decode            until the slowest row has ended its turn
    search            all queries of the batch in one call
    again with the rows that go on, until there are none

Weights, cache, `extend`, `decode_chunk`, random numbers, parsing and observations are the engine's own, so that the
episodes are too. What differs is the schedule. The sizes of calls are as fine as suits a loop that feeds long contexts
over and over (`Fine`); a run would not want to compile so many.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

import jax
import numpy as np

from parasearch_jax.data import Question
from parasearch_jax.protocol import Protocol
from parasearch_jax.retrieval import Retriever
from parasearch_jax.rollout import Episode, RolloutConfig, stops
from parasearch_jax.rollout.engine import _run_number
from parasearch_jax.rollout.observation import build_observation, document_blocks
from parasearch_jax.rollout.sampler import Sampling
from parasearch_jax.rollout.shards import Row, Shards
from parasearch_jax.rollout.sizes import Sizes, holding
from parasearch_jax.rollout.types import Answer, Invalid, Search, Segment
from parasearch_jax.sharding.mesh import make_mesh

CHUNK = 32  # steps between two looks of the host; a chunk ends early when no row goes on


@dataclasses.dataclass(frozen=True)
class Design:
    """What a lock-step loop does; as it stands: exact stops on device, everything fed anew each turn."""

    behind: float = 0.0  # tokens sampled behind a turn's end, as a share of the turn: cut on the host, and the rest
    #                      is encoded from its text
    keeps: bool = False  # the cache over turns
    shares: bool = False  # the prompt's cells within a group


class Fine(Sizes):
    """Sizes close to what a call needs."""

    @property
    def lengths(self) -> tuple[int, ...]:
        fine = {32, *range(128, self.cells, 128), self.cells}
        return tuple(sorted(fine | set(super().lengths)))  # those of the engine hold an observation without padding

    @property
    def long_windows(self) -> tuple[int, ...]:
        return (*range(256, self.cells, 256), self.cells)

    @property
    def reads(self) -> tuple[int, ...]:
        if not self.paged:
            return self.long_windows
        most = super().reads[-1]
        return tuple(sorted({-(-most * part // 16) for part in range(1, 17)}))


@dataclasses.dataclass
class Member:
    """One episode of the batch."""

    episode: Episode
    number: int  # for its random numbers
    context: list[int]
    slot: int = 0
    fed: int = 0  # tokens of the context in the slot's cells


class LockStep:
    """`rollout` and `pop_stats` as the engine has them, `batch` episodes at a time."""

    def __init__(self, model, config: RolloutConfig, design: Design, batch: int, seed: int = 0):
        self.config, self.design, self.batch = config, design, batch
        self.cfg, self.tokenizer = model.config, model.tokenizer
        self._key, self._vocabulary = jax.random.key(seed), stops.token_bytes(model.tokenizer)
        self._mesh = make_mesh(devices=jax.local_devices()[:1])
        self.shards = self._make(batch)
        self.shards.sync(model.params)
        self._smaller: dict[int, Shards] = {}
        self._tables: dict[tuple[Protocol | None, bool], stops.Stops] = {}
        self.stats: dict[str, float] = {}

    def pop_stats(self) -> dict[str, float]:
        stats, self.stats = self.stats, {}
        return stats

    def step_seconds(self, length: int, steps: int = 8) -> float:
        """Seconds of a decode step when every slot holds `length` tokens."""
        shards, seconds = self.shards, []
        shards.open()
        for _ in range(5):  # the first compiles
            self._go_on(shards, dict.fromkeys(range(self.batch), steps + 1), length)
            start = time.perf_counter()
            shards.decode(self.table(None, stop=False), steps, dict.fromkeys(range(self.batch), length), False)
            seconds.append((time.perf_counter() - start) / steps)
        return min(seconds[1:])

    def rollout(
        self,
        questions: Sequence[Question],
        protocol: Protocol,
        retriever: Retriever,
        *,
        samples: int = 1,
        temperature: float = 1.0,
        step: int = 0,
    ) -> list[Episode]:
        sampling = Sampling(temperature)
        self._step_key = self.shards.put(jax.random.fold_in(self._key, np.uint32(step)))
        members = [self._member(q, i, protocol) for q in questions for i in range(samples)]
        for start in range(0, len(members), self.batch):
            self._batch(members[start : start + self.batch], protocol, retriever, sampling)
        return [member.episode for member in members]

    def table(self, protocol: Protocol | None, stop: bool = True) -> stops.Stops:
        """The protocol's stops; without `stop` of the same size, and no token ever stops."""
        if (protocol, stop) not in self._tables:
            table = stops.build_stops(protocol, self._vocabulary, self.cfg.eos_token_ids, self.cfg.vocab_size)
            if not stop:
                table = table._replace(table=np.zeros_like(table.table))
            self._tables[protocol, stop] = self.shards.put(table)
        return self._tables[protocol, stop]

    def _make(self, slots: int) -> Shards:
        cells, observation = self.config.max_total_tokens, self.config.observation_tokens
        shards = Shards(self.cfg, self._mesh, slots, cells, observation)
        shards.sizes = Fine(slots, cells, observation, shards.sizes.paged)
        return shards

    def _member(self, question: Question, sample: int, protocol: Protocol) -> Member:
        text = protocol.render_prompt(question.text)
        ids = self._encode(text)
        episode = Episode([Segment("prompt", text, tuple(ids))], question_id=question.id, sample=sample)
        return Member(episode, _run_number(question.id, sample), ids)

    # -------------------------------------------------------------------------------------------------- one batch

    def _batch(self, live: list[Member], protocol: Protocol, retriever: Retriever, sampling: Sampling) -> None:
        for slot, member in enumerate(live):
            member.slot = slot
        while live:
            shards = self._feed(live, sampling)
            turns = self._generate(shards, live, protocol)
            for member, (ids, logprobs, kept) in zip(live, turns, strict=True):
                self._end_turn(member, ids, logprobs, kept, protocol)
            live = [member for member in live if member.episode.stop_reason == "error"]  # not yet set
            self._observe(live, protocol, retriever)
            live = [member for member in live if member.episode.stop_reason == "error"]

    def _feed(self, live: list[Member], sampling: Sampling) -> Shards:
        """Every row's turn begins. Returns where: without a cache to keep, in as few slots as the rows need."""
        start, shards, rows, holder = time.perf_counter(), self.shards, [], {}
        if not self.design.keeps:
            shards = self._holding(len(live))
            for slot, member in enumerate(live):
                member.slot, member.fed = slot, 0
        shards.open()
        for m in live:
            ids = m.context[m.fed :]
            source = holder.setdefault(m.episode.question_id, m.slot) if self.design.shares and not m.fed else m.slot
            source = None if source == m.slot else source
            left = min(self.config.max_turn_tokens, self.config.max_total_tokens - len(m.context))
            rows.append(Row(m.slot, ids[:-1], m.fed, ids[-1], left, m.number, sampling, source))
            self._count("tokens/prefilled", 0 if source is not None else len(ids) - (m.fed > 0))
            m.fed = len(m.context) - 1
        shards.extend(rows, self._step_key)
        self._count("seconds/prefill", time.perf_counter() - start)
        return shards

    def _holding(self, rows: int) -> Shards:
        """Shards with the smallest of batch, batch / 2, batch / 4 slots that hold the rows."""
        sizes = sorted({max(1, self.batch // part) for part in (1, 2, 4)})
        size = holding(rows, tuple(sizes))
        if size == self.batch:
            return self.shards
        if size not in self._smaller:
            self._smaller[size] = self._make(size)
        self._smaller[size].params = self.shards.params
        return self._smaller[size]

    def _generate(
        self, shards: Shards, live: list[Member], protocol: Protocol
    ) -> list[tuple[list[int], list[float], int]]:
        """(ids, log-probs, how many of them belong to the turn) of each row."""
        start = time.perf_counter()
        lengths = {member.slot: member.fed for member in live}
        turns = self._decode(shards, lengths, self.table(protocol))
        kept = {slot: len(ids) for slot, (ids, _) in turns.items()}
        if self.design.behind:
            more = {m.slot: self._behind(m, turns[m.slot][0]) for m in live}
            if any(more.values()):
                self._go_on(shards, more)
                lengths = {slot: lengths[slot] + kept[slot] for slot in lengths if more[slot]}
                for slot, (ids, logprobs) in self._decode(shards, lengths, self.table(protocol, stop=False)).items():
                    turns[slot] = turns[slot][0] + ids, turns[slot][1] + logprobs
        self._count("tokens/sampled", sum(kept.values()))
        self._count("seconds/decode", time.perf_counter() - start)
        return [(*turns[member.slot], kept[member.slot]) for member in live]

    def _behind(self, member: Member, ids: list[int]) -> int:
        """Tokens that the row samples behind its turn: none behind an end token or a limit."""
        if ids[-1] in self.cfg.eos_token_ids:
            return 0
        room = self.config.max_total_tokens - len(member.context)
        return min(math.ceil(self.design.behind * len(ids)), min(self.config.max_turn_tokens, room) - len(ids))

    def _go_on(self, shards: Shards, more: dict[int, int], length: int | None = None) -> None:
        """Slots shall sample so many tokens more, from where they stand or (to measure) from `length` tokens on."""
        left = np.array([more.get(slot, 0) for slot in range(shards.slots)], np.int32)
        new = {"left": left, "active": left > 0, "state": np.zeros_like(left)}
        if length is not None:
            new["length"] = np.full_like(left, length)
        shards._state = dataclasses.replace(shards._state, **jax.device_put(new, shards._rows))

    def _decode(self, shards: Shards, lengths: dict[int, int], table: stops.Stops) -> dict[int, tuple[list, list]]:
        """Decodes the slots, of these lengths, until all have ended; (ids, log-probs) of each."""
        out: dict[int, tuple[list, list]] = {slot: ([], []) for slot in lengths}
        active = dict(lengths)
        while active:
            chunk = shards.decode(table, CHUNK, active, False)
            for slot, before in active.items():
                n = int(chunk["length"][slot]) - before
                out[slot][0].extend(chunk["tokens"][:n, slot].tolist())
                out[slot][1].extend(chunk["logprobs"][:n, slot].tolist())
            self._count("decode_steps", int(chunk["steps"].sum()))
            self._count("slot_steps", int(chunk["steps"].sum()) * shards.slots)
            active = {slot: int(chunk["length"][slot]) for slot in active if chunk["active"][slot]}
        return out

    # ------------------------------------------------------------------------------------------------------- turns

    def _end_turn(self, m: Member, ids: list[int], logprobs: list[float], kept: int, protocol: Protocol) -> None:
        """What `Job._end_turn` does, but for the search itself, which waits for the batch."""
        episode, text = m.episode, self._text(ids)
        if self.design.behind:
            text = self._text(ids[:kept])
            text = text[: protocol.parse(text).end]
            segment = Segment("policy", text, tuple(self._encode(text)))
        else:
            segment = Segment("policy", text, tuple(ids), tuple(logprobs))
        episode.segments.append(segment)
        m.context += segment.ids
        m.fed = min(m.fed + kept, len(m.context) - 1)
        full = len(m.context) >= self.config.max_total_tokens
        action = protocol.parse(text, segment=len(episode.segments) - 1).action
        forced = episode.turns > self.config.max_turns
        if (forced or full) and isinstance(action, Search):
            action = Invalid(action.span)
        episode.actions.append(action)
        if isinstance(action, Answer):
            episode.stop_reason = "answer"
        elif full or forced:
            episode.stop_reason = "length" if full else "turns"

    def _observe(self, live: list[Member], protocol: Protocol, retriever: Retriever) -> None:
        """One search for the batch; documents or notices go into the contexts."""
        start = time.perf_counter()
        queries = [q for m in live if isinstance(m.episode.actions[-1], Search) for q in m.episode.actions[-1].queries]
        found = iter(retriever.search_sync(queries, self.config.topk) if queries else [])
        self._count("seconds/wait", time.perf_counter() - start)
        budget, variant = self.config.observation_tokens, self.config.observation_variant
        for m in live:
            action, segments = m.episode.actions[-1], m.episode.segments
            if isinstance(action, Search):
                documents = [next(found) for _ in action.queries]
                text, ids, _ = build_observation(
                    protocol, self.tokenizer, document_blocks(protocol, documents), budget, variant
                )
                segment = Segment("docs", text, tuple(ids))
            else:
                segment = Segment("notice", protocol.notice, tuple(self._encode(protocol.notice)))
            if len(m.context) + len(segment.ids) >= self.config.max_total_tokens:
                m.episode.actions[-1] = Invalid(action.span)
                m.episode.stop_reason = "length"
                continue
            segments.append(segment)
            m.context += segment.ids

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _count(self, name: str, amount: float) -> None:
        self.stats[name] = self.stats.get(name, 0) + amount
