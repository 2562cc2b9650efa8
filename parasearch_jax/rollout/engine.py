"""The engine: many episodes over few slots, decoding in chunks on device while searches are under way.

The engine owns one event loop in a thread of its own, so `rollout` and `generate` work from a script and from inside a
running loop (Jupyter) alike. The device runs in a second thread; the loop never waits for it.

    free slot <- sample of a group   extend (prompt); the group's other samples get a copy of its cells
    decode_chunk for all slots       a turn ends -> parse -> search | notice | end
    search -> documents              extend (documents), the slot decodes again; the others never waited

Slots lie in shards, one for each 'fsdp' row of the mesh. A group (the samples of a question) stays in one shard; the
shard with most free slots takes the next group from the one queue, so that shards balance by themselves.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Sequence

import jax
import numpy as np

from parasearch_jax.data import Question
from parasearch_jax.errors import UserError
from parasearch_jax.protocol import Protocol, get_protocol
from parasearch_jax.retrieval import Document, Retriever
from parasearch_jax.rollout import stops
from parasearch_jax.rollout.observation import build_observation
from parasearch_jax.rollout.searches import search_all
from parasearch_jax.rollout.shards import Row, Shards
from parasearch_jax.rollout.types import Answer, Episode, Invalid, Search, Segment
from parasearch_jax.sharding.mesh import make_mesh

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """Limits of an episode and of the engine. All lengths are in tokens."""

    slots: int = 64  # episodes under way at once, on all devices of the run together
    chunk: int = 16  # decode steps on device between two looks of the host
    max_turns: int = 4  # searches and invalid actions; then one forced final generation
    max_turn_tokens: int = 500
    max_total_tokens: int = 4096  # prompt, turns and observations together
    observation_tokens: int = 500
    observation_variant: str = "paper"  # or "released", see observation.py
    topk: int = 3  # documents per sub-query
    search_seconds: float = 60.0  # a sub-query that has no answer by then has failed
    deterministic: bool = True  # await all outstanding searches before the next chunk

    def __post_init__(self):
        if not self.search_seconds > 0:
            raise UserError(f"rollout.search_seconds is {self.search_seconds}: give the seconds a search may take")


@dataclasses.dataclass
class _Run:
    """One episode under way."""

    episode: Episode
    prompt: tuple[str, list[int]]
    key: int  # number folded into the run key
    source: int | None = None  # the slot whose cells of the prompt it gets; None: its prompt is fed
    fed: int = 0  # tokens in the slot's cache
    pending: int | None = None  # the last token, not yet in the cache
    ids: list[int] = dataclasses.field(default_factory=list)  # of the turn under way
    logprobs: list[float] = dataclasses.field(default_factory=list)


class Engine:
    """Generates episodes with the weights last given to `sync`.

    `stats` counts since the last `pop_stats`: seconds of prefill, decode and wait, tokens prefilled and sampled, decode
    steps (of the shard that made most) and slot steps (steps x slots, summed over the shards: what the tokens sampled
    could have been), sub-queries sent and failed, searches in which all of them failed, observation blocks cut.
    """

    def __init__(
        self,
        model,
        config: RolloutConfig | None = None,
        seed: int = 0,
        mesh: jax.sharding.Mesh | None = None,
        **changes,
    ):
        """`model` as `models.load_model` returns it; `changes` are fields of RolloutConfig (Engine(model, slots=8)).

        `mesh`: that of the whole run, of which the engine takes this process's devices, and their share of the slots;
        None: one device. Raises UserError if it does not divide the slots or the model.
        """
        self.config = dataclasses.replace(config or RolloutConfig(), **changes)
        self.model_config, self.tokenizer = model.config, model.tokenizer
        self._vocabulary = stops.token_bytes(self.tokenizer)
        if len(self._vocabulary) > model.config.vocab_size:
            raise UserError(
                f"The tokenizer has {len(self._vocabulary)} tokens, the model only {model.config.vocab_size}. "
                "Take the tokenizer that belongs to the model."
            )
        if mesh is None:
            mesh = make_mesh(devices=jax.local_devices()[:1])
        self.shards = Shards(model.config, mesh, self.config.slots, self.config.max_total_tokens)
        self._tables: dict[Protocol | None, stops.Stops] = {}
        self.stats: dict[str, float] = {}
        self._device = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="device")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
        self._thread.start()
        self._busy = asyncio.Lock()  # one job at a time; held in the loop, so that an interrupted caller can't drop it
        # Made in the device thread: here a `jax.set_mesh` of the caller might lay it on the devices of all hosts.
        self._key = self._device.submit(jax.random.key, seed).result()
        self.sync(model.params, version=0)

    def sync(self, params, version: int) -> None:
        """Takes new weights in the trainer's layout once no rollout is under way; episodes carry `version` from now on.

        Nothing of `params` is kept, so the trainer may donate them. With several hosts all of them call it together.
        """
        self._wait_for(self._sync(params, version))

    async def _sync(self, params, version: int) -> None:
        def take():
            self.shards.sync(params)
            self.version = version

        async with self._busy:
            await self._loop.run_in_executor(self._device, take)

    def rollout(
        self,
        questions: Sequence[Question],
        protocol: str | Protocol,
        retriever: Retriever,
        *,
        samples: int = 1,
        temperature: float = 1.0,
        step: int = 0,
    ) -> list[Episode]:
        """`samples` episodes of each question, ordered by (question, sample), however they finish.

        Random numbers depend on (seed, step, question id, sample, position) only. temperature 0 is greedy.
        """
        protocol = get_protocol(protocol)
        if retriever is None:
            raise ValueError(f"rollout: protocol {protocol.name!r} searches; give a retriever")
        groups = []
        for question in questions:
            prompt, name = self._prompt(protocol.render_prompt(question.text)), question.id
            episodes = [Episode(question_id=name, sample=i, version=self.version) for i in range(samples)]
            groups.append([_Run(episode, prompt, _run_number(name, i)) for i, episode in enumerate(episodes)])
        return self._submit(groups, protocol, retriever, temperature, step, self.config.max_turn_tokens)

    def generate(
        self, prompts: Sequence[str], max_new_tokens: int = 128, temperature: float = 1.0, step: int = 0
    ) -> list[Episode]:
        """One plain continuation of each prompt, up to an end token; no tags, no search, no chat template."""
        groups = [
            [_Run(Episode(question_id=str(i), version=self.version), (text, self._encode(text)), i)]
            for i, text in enumerate(prompts)
        ]
        return self._submit(groups, None, None, temperature, step, max_new_tokens)

    def pop_stats(self) -> dict[str, float]:
        stats, self.stats = self.stats, {}
        return stats

    def close(self) -> None:
        """Ends the engine's two threads; calling it again does nothing."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._device.shutdown()

    # ------------------------------------------------------------------------------------------------------ the loop

    def _submit(self, groups, protocol, retriever, temperature, step, turn_tokens) -> list[Episode]:
        runs = [run for group in groups for run in group]
        for run in runs:
            if not run.prompt[1]:
                raise UserError(f"The prompt of question {run.episode.question_id!r} is empty: give it some text.")
            if len(run.prompt[1]) >= self.config.max_total_tokens:
                raise UserError(
                    f"The prompt of question {run.episode.question_id!r} has {len(run.prompt[1])} tokens, "
                    f"rollout.max_total_tokens is {self.config.max_total_tokens}: raise it or shorten the prompt."
                )
        job = _Job(self, protocol, retriever, temperature, step, turn_tokens)
        self._wait_for(job.run(groups))
        return [run.episode for run in runs]

    def _wait_for(self, coroutine) -> None:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            future.result()
        except BaseException:  # Ctrl-C too
            future.cancel()
            raise

    def _table(self, protocol: Protocol | None) -> stops.Stops:
        if protocol not in self._tables:
            cfg = self.model_config
            table = stops.build_stops(protocol, self._vocabulary, cfg.eos_token_ids, cfg.vocab_size)
            self._tables[protocol] = self.shards.put(table)
        return self._tables[protocol]

    def _prompt(self, text: str) -> tuple[str, list[int]]:
        """(text, ids) of a prompt, in the tokenizer's chat template where it has one (Search-R1 does so for base models
        too)."""
        if getattr(self.tokenizer, "chat_template", None):
            message = [{"role": "user", "content": text}]
            text = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        return text, self._encode(text)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _count(self, name: str, amount: float = 1) -> None:
        self.stats[name] = self.stats.get(name, 0) + amount


class _Job:
    """One call of `rollout` or `generate`: which run sits in which slot, and what each waits for."""

    def __init__(self, engine: Engine, protocol, retriever, temperature, step, turn_tokens):
        self.engine, self.protocol, self.retriever = engine, protocol, retriever
        self.config, self.turn_tokens = engine.config, turn_tokens
        self.step, self.temperature = step, engine.shards.put(np.float32(temperature))
        self.table = engine._table(protocol)
        shards, n = engine.shards.count, engine.shards.slots
        self.free = [list(range(i * n, (i + 1) * n))[::-1] for i in range(shards)]  # by shard
        self.groups: list[deque[_Run]] = [deque() for _ in range(shards)]  # what is left of the group it has taken
        self.prompts: list[dict[int, tuple]] = [{} for _ in range(shards)]  # by slot: whose cells lie in front
        self.slots: dict[int, _Run] = {}
        self.active: set[int] = set()  # slots that decode
        self.waiting: dict[asyncio.Task, int] = {}  # searches under way, by slot

    async def run(self, groups: Sequence[Sequence[_Run]]) -> None:
        async with self.engine._busy:
            try:
                await self._run(deque(map(deque, groups)))
            except BaseException:
                self.engine.shards.drop()
                raise
            finally:
                for task in self.waiting:
                    task.cancel()
                await asyncio.gather(*self.waiting, return_exceptions=True)

    async def _run(self, queue: deque[deque[_Run]]) -> None:
        await self._on_device("prefill", self._open)
        feeds: list[tuple[int, Segment]] = []  # segments to append to slots, each of which then starts a turn
        while queue or any(self.groups) or self.slots:
            feeds += self._admit(queue)
            feeds += await self._documents(idle=not feeds and not self.active)
            if feeds:
                await self._on_device("prefill", self._extend, feeds)
            ended = await self._on_device("decode", self._decode) if self.active else []
            feeds = [(slot, notice) for slot in ended if (notice := self._end_turn(slot)) is not None]

    def _admit(self, queue: deque[deque[_Run]]) -> list[tuple[int, Segment]]:
        """Fills free slots: first with the rest of the group that their shard has begun, then the shard with most free
        slots takes the next group. Returns the prompts to feed."""
        shards = range(len(self.free))
        feeds = [feed for shard in shards for feed in self._fill(shard)]
        while queue and self.free[shard := max(shards, key=lambda i: len(self.free[i]))]:
            self.groups[shard] = queue.popleft()
            feeds += self._fill(shard)
        return feeds

    def _fill(self, shard: int) -> list[tuple[int, Segment]]:
        free, group, feeds = self.free[shard], self.groups[shard], []
        while free and group:
            run = group.popleft()
            slot, run.source = self._place(shard, run.prompt)
            self.slots[slot] = run
            text, ids = run.prompt
            feeds.append((slot, Segment("prompt", text, tuple(ids))))
        return feeds

    def _place(self, shard: int, prompt: tuple[str, list[int]]) -> tuple[int, int | None]:
        """(a free slot, the slot whose first cells hold this very prompt, if one does).

        The cache only grows, so a prompt's cells stay as they are until the slot's next episode. One that a member of
        the group has left is taken first, and no other group is begun before all of this one have a slot: so there is
        a source for every member but the first, however few slots there are, and no prompt is fed twice. Of several
        holders it is the one that was filled first, so never one that gets its cells by the same call.
        """
        free, prompts = self.free[shard], self.prompts[shard]
        holders = [slot for slot, held in prompts.items() if held is prompt]
        slot = next((slot for slot in holders if slot in free), free[-1])
        free.remove(slot)
        prompts.pop(slot, None)  # in the order of filling
        prompts[slot] = prompt
        return slot, slot if slot in holders else next(iter(holders), None)

    def _end_turn(self, slot: int) -> Segment | None:
        """Acts on a finished turn: starts its search, ends the episode, or returns the notice that the policy gets."""
        run, engine = self.slots[slot], self.engine
        episode, text = run.episode, engine._decode(run.ids)
        episode.segments.append(Segment("policy", text, tuple(run.ids), tuple(run.logprobs)))
        run.ids, run.logprobs = [], []
        full = run.fed + 1 >= self.config.max_total_tokens
        if self.protocol is None:
            ended = episode.segments[-1].ids[-1] in engine.model_config.eos_token_ids
            return self._finish(slot, "eos" if ended else "length")
        parsed = self.protocol.parse(text, segment=len(episode.segments) - 1)
        action, forced = parsed.action, episode.turns > self.config.max_turns
        if (forced or full) and isinstance(action, Search):  # the last generation can only answer
            action = Invalid(action.span)
        episode.actions.append(action)
        episode.dropped_queries += parsed.dropped_queries
        if isinstance(action, Answer):
            return self._finish(slot, "answer")
        if full or forced:
            return self._finish(slot, "length" if full else "turns")
        if isinstance(action, Search):
            search = search_all(self.retriever, action.queries, self.config.topk, self.config.search_seconds)
            self.waiting[asyncio.create_task(search)] = slot
            return None
        return self._append(slot, self._notice(self.protocol.notice))

    def _notice(self, text: str) -> Segment:
        return Segment("notice", text, tuple(self.engine._encode(text)))

    def _observe(self, slot: int, results: list[list[Document] | BaseException]) -> Segment | None:
        """What the policy sees of a search's results: a docs segment, or a notice if all of its sub-queries failed."""
        failed = [result for result in results if isinstance(result, BaseException)]
        for error in failed:
            log.warning("a sub-query failed and brings no document: %r", error)
        episode = self.slots[slot].episode
        episode.failed_searches += len(failed)
        self.engine._count("queries/sent", len(results))
        self.engine._count("queries/failed", len(failed))
        self.engine._count("searches/failed", len(failed) == len(results))
        if len(failed) == len(results):
            segment = self._notice(self.protocol.failed())
        else:
            documents = [[] if isinstance(result, BaseException) else result for result in results]
            budget, variant = self.config.observation_tokens, self.config.observation_variant
            text, ids, cut = build_observation(self.protocol, self.engine.tokenizer, documents, budget, variant)
            self.engine._count("observations/cut", cut)
            segment = Segment("docs", text, tuple(ids))
        segment = self._append(slot, segment)
        if segment is None:  # no room: a search with nothing behind it doesn't count (see Episode.from_text)
            episode.actions[-1] = Invalid(episode.actions[-1].span)
        return segment

    def _append(self, slot: int, segment: Segment) -> Segment | None:
        """The segment, if it leaves room for a token behind it; otherwise the episode ends."""
        if self.slots[slot].fed + 1 + len(segment.ids) < self.config.max_total_tokens:
            return segment
        return self._finish(slot, "length")

    def _finish(self, slot: int, reason: str) -> None:
        self.slots.pop(slot).episode.stop_reason = reason
        self.free[slot // self.engine.shards.slots].append(slot)

    async def _on_device(self, phase: str, function, *args):
        start = time.perf_counter()
        call = asyncio.get_running_loop().run_in_executor(self.engine._device, function, *args)
        try:
            out = await asyncio.shield(call)
        except asyncio.CancelledError:
            await asyncio.wait([call])  # it writes the engine's state, so nothing may start before it has ended
            raise
        self.engine._count(f"seconds/{phase}", time.perf_counter() - start)
        return out

    async def _documents(self, idle: bool) -> list[tuple[int, Segment]]:
        """Documents that have arrived. Waits for all in deterministic mode, for one when nothing else is to do."""
        if not self.waiting:
            return []
        start = time.perf_counter()
        if self.config.deterministic:
            await asyncio.wait(self.waiting)
        elif idle:
            await asyncio.wait(self.waiting, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(0)
        self.engine._count("seconds/wait", time.perf_counter() - start)
        # In slot order, so that the batch does not depend on who answered first.
        done = sorted((task for task in self.waiting if task.done()), key=self.waiting.__getitem__)
        feeds = []
        for task in done:
            slot = self.waiting.pop(task)
            segment = self._observe(slot, task.result())
            if segment is not None:
                feeds.append((slot, segment))
        return feeds

    # ------------------------------------------------------------------------------------------------- device thread

    def _open(self) -> None:
        shards, step = self.engine.shards, jax.device_put(np.uint32(self.step))
        shards.open()
        self.step_key = shards.put(jax.random.fold_in(self.engine._key, step))

    def _extend(self, feeds: list[tuple[int, Segment]]) -> None:
        """Appends each segment to its slot, which starts a turn."""
        rows = []
        for slot, segment in feeds:
            run, ids = self.slots[slot], list(segment.ids)
            if run.pending is not None:
                ids = [run.pending, *ids]
            run.episode.segments.append(segment)
            left = min(self.turn_tokens, self.config.max_total_tokens - run.fed - len(ids))
            source = run.source if segment.source == "prompt" else None
            rows.append(Row(slot, ids[:-1], run.fed, ids[-1], left, run.key, source))
            run.fed, run.pending = run.fed + len(ids) - 1, ids[-1]
            if source is None:
                self.engine._count("tokens/prefilled", len(segment.ids))
        self.engine.shards.extend(rows, self.step_key)
        self.active.update(slot for slot, _ in feeds)

    def _decode(self) -> list[int]:
        """One chunk; the slots whose turn has ended, in order."""
        engine, before = self.engine, {slot: self.slots[slot].fed for slot in self.active}
        out = engine.shards.decode(self.table, self.temperature, self.config.chunk, max(before.values()))
        for slot, fed in before.items():
            run, n = self.slots[slot], int(out["length"][slot]) - fed
            run.fed += n
            run.ids += out["tokens"][:n, slot].tolist()
            run.logprobs += out["logprobs"][:n, slot].tolist()
            run.pending = run.ids[-1]
            engine._count("tokens/sampled", n)
        engine._count("decode_steps", int(out["steps"].max()))
        engine._count("slot_steps", int(out["steps"].sum()) * engine.shards.slots)
        self.active = {slot for slot in self.active if out["active"][slot]}
        return sorted(set(before) - self.active)


def _run_number(question_id: str, sample: int) -> int:
    """A number for (question, sample) that is the same in every process and batch."""
    return zlib.crc32(f"{question_id}\n{sample}".encode())
