"""The scheduler: which episode sits in which slot, and what each of them waits for.

    free slot <- sample of a group   extend (prompt); the group's other samples get a copy of its cells
    decode_chunk for all slots       a turn ends -> parse -> search | notice | end
    search -> documents              extend (documents), the slot decodes again; the others never waited

Slots lie in shards, one for each 'fsdp' row of the mesh. A group (the samples of a question) stays in one shard; the
shard with most free slots takes the next group from the one queue, so that shards balance by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable

import jax
import numpy as np

from parasearch_jax.retrieval import Document
from parasearch_jax.rollout.observation import build_observation
from parasearch_jax.rollout.sampler import Sampling
from parasearch_jax.rollout.searches import search_all
from parasearch_jax.rollout.shards import Row
from parasearch_jax.rollout.types import Answer, Episode, Invalid, Search, Segment

log = logging.getLogger(__name__)

OnText = Callable[[str, str], None]  # (source, text): what an episode says, while it does


@dataclasses.dataclass(eq=False)
class Run:
    """One episode under way."""

    episode: Episode
    prompt: tuple[str, list[int]]
    key: int  # number folded into the run key
    sampling: Sampling
    on_text: OnText | None = None
    most: int | None = None  # tokens that it may sample in all turns together
    source: int | None = None  # the slot whose cells of the prompt it gets; None: its prompt is fed
    fed: int = 0  # tokens in the slot's cache
    sampled: int = 0  # tokens of all turns so far
    pending: int | None = None  # the last token, not yet in the cache
    ids: list[int] = dataclasses.field(default_factory=list)  # of the turn under way
    logprobs: list[float] = dataclasses.field(default_factory=list)
    told: int = 0  # characters of the turn that on_text has got

    def left(self, total: int) -> int:
        """Tokens that it may still sample if an episode has at most `total`."""
        left = total - self.fed - (self.pending is not None)
        return left if self.most is None else min(left, self.most - self.sampled)


@dataclasses.dataclass(eq=False)
class Group:
    """Episodes of one prompt. `on_end` is called in the engine's thread when all of them have ended."""

    runs: list[Run]
    on_end: Callable[[], None] = lambda: None


class Job:
    """One call of `rollout` or `generate`, or one session: `run` ends when every group has, unless it is `kept_open`.

    All of it happens in the engine's loop, but for what stands under "device thread"; `cancel` may be called anywhere.
    """

    def __init__(self, engine, protocol, retriever, step: int, turn_tokens: int, kept_open: bool = False):
        self.engine, self.protocol, self.retriever = engine, protocol, retriever
        self.config, self.step, self.turn_tokens, self.kept_open = engine.config, step, turn_tokens, kept_open
        self.table = engine.table(protocol)
        shards, n = engine.shards.count, engine.shards.slots
        self.queue: deque[Group] = deque()
        self.left: dict[Run, Group] = {}  # the runs that have not ended
        self.free = [list(range(i * n, (i + 1) * n))[::-1] for i in range(shards)]  # by shard
        self.groups: list[deque[Run]] = [deque() for _ in range(shards)]  # what is left of the group it has taken
        self.prompts: list[dict[int, tuple]] = [{} for _ in range(shards)]  # by slot: whose cells lie in front
        self.slots: dict[int, Run] = {}
        self.active: set[int] = set()  # slots that decode
        self.feeds: dict[int, Segment] = {}  # what is to be appended to slots, each of which then starts a turn
        self.waiting: dict[asyncio.Task, int] = {}  # searches under way, by slot
        self.cancelled: set[Run] = set()
        self.wake = asyncio.Event()  # a group, a cancellation or the end of a session has come

    def add(self, group: Group) -> None:
        """One more group, behind the others."""
        self.left |= dict.fromkeys(group.runs, group)
        self.queue.append(group)
        self.wake.set()

    def cancel(self, runs: Iterable[Run] | None = None) -> None:
        """Ends these runs (None: all, and the job), from any thread; what they have so far stays in their episodes."""

        def mark():
            self.kept_open = self.kept_open and runs is not None
            self.cancelled |= set(self.left if runs is None else runs) & set(self.left)
            self.wake.set()

        with contextlib.suppress(RuntimeError):  # the engine is closed: nothing is under way
            self.engine.loop.call_soon_threadsafe(mark)

    async def run(self) -> None:
        async with self.engine.busy:
            try:
                await self._run()
            except BaseException:
                self.engine.shards.drop()
                raise
            finally:
                for task in self.waiting:
                    task.cancel()
                await asyncio.gather(*self.waiting, return_exceptions=True)

    async def _run(self) -> None:
        await self._on_device("prefill", self._open)
        while self.left or self.kept_open:
            self.wake.clear()
            if self.cancelled:
                await self._drop(self.cancelled)
            if not self.left:
                if self.kept_open:
                    await self.wake.wait()
                continue
            self._admit()
            await self._documents(idle=not self.feeds and not self.active)
            if self.feeds:
                await self._on_device("prefill", self._extend)
            if self.active:
                ended = await self._on_device("decode", self._decode)
                for slot in ended:
                    self._end_turn(slot)
                self._tell()

    async def _drop(self, runs: set[Run]) -> None:
        """Ends the runs, wherever they are."""
        self.cancelled = set()
        held = {slot: run for slot, run in self.slots.items() if run in runs}
        if at_work := self.active & set(held):
            self.active -= at_work
            await self._on_device("decode", self.engine.shards.release, at_work)
        tasks = [task for task, slot in self.waiting.items() if slot in held]
        for task in tasks:
            task.cancel()
            del self.waiting[task]
        await asyncio.gather(*tasks, return_exceptions=True)
        for slot, run in held.items():
            if slot in self.feeds:  # `on_text` has told of it
                run.episode.segments.append(self.feeds.pop(slot))
            self._cut_off(run)
            self._finish(slot, "cancelled")
        for run in runs & set(self.left):  # that have no slot yet
            self._ended(run, "cancelled")
        self.queue = deque(group for group in self.queue if group.runs[0] in self.left)
        for shard, group in enumerate(self.groups):
            self.groups[shard] = deque(run for run in group if run in self.left)

    # --------------------------------------------------------------------------------------------------------- slots

    def _admit(self) -> None:
        """Fills free slots: first with the rest of the group that their shard has begun, then the shard with most free
        slots takes the next group."""
        shards = range(len(self.free))
        for shard in shards:
            self._fill(shard)
        while self.queue and self.free[shard := max(shards, key=lambda i: len(self.free[i]))]:
            self.groups[shard] = deque(run for run in self.queue.popleft().runs if run in self.left)
            self._fill(shard)

    def _fill(self, shard: int) -> None:
        free, group = self.free[shard], self.groups[shard]
        while free and group:
            run = group.popleft()
            slot, run.source = self._place(shard, run.prompt)
            self.slots[slot] = run
            text, ids = run.prompt
            self.feeds[slot] = Segment("prompt", text, tuple(ids))

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

    def _finish(self, slot: int, reason: str) -> None:
        self.free[slot // self.engine.shards.slots].append(slot)
        self._ended(self.slots.pop(slot), reason)

    def _ended(self, run: Run, reason: str) -> None:
        run.episode.stop_reason, run.episode.version = reason, self.engine.version  # no sync comes in between
        group = self.left.pop(run)
        if not any(other in self.left for other in group.runs):
            group.on_end()

    # --------------------------------------------------------------------------------------------------------- turns

    def _end_turn(self, slot: int) -> None:
        """Acts on a finished turn: starts its search, ends the episode, or has a notice fed."""
        run = self.slots[slot]
        episode, text = run.episode, self._close_turn(run)
        full = run.left(self.config.max_total_tokens) <= 0
        if self.protocol is None:
            ended = episode.segments[-1].ids[-1] in self.engine.model_config.eos_token_ids
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
        else:
            self._append(slot, self._notice(self.protocol.notice))

    def _close_turn(self, run: Run) -> str:
        """Puts the tokens of the turn under way into a segment; its text."""
        text = self.engine.decode(run.ids)
        run.episode.segments.append(Segment("policy", text, tuple(run.ids), tuple(run.logprobs)))
        if run.on_text and text[run.told :]:
            run.on_text("policy", text[run.told :])
        run.ids, run.logprobs, run.told = [], [], 0
        return text

    def _tell(self) -> None:
        """Passes on what turns under way have said, in whole characters."""
        for run in (run for run in map(self.slots.get, self.active) if run.on_text):
            text = self.engine.decode(run.ids).rstrip("\ufffd")  # a character's first bytes
            if text[run.told :]:
                run.on_text("policy", text[run.told :])
                run.told = len(text)

    def _cut_off(self, run: Run) -> None:
        """Brings an episode that ends anywhere into the shape of one: an action for each turn, and no search counts
        behind which nothing came."""
        episode = run.episode
        if run.ids:
            text = self._close_turn(run)
            if self.protocol is not None:
                episode.actions.append(Invalid((len(episode.segments) - 1, 0, len(text))))
        elif episode.actions and episode.segments[-1].source == "policy":
            episode.actions[-1] = Invalid(episode.actions[-1].span)

    def _notice(self, text: str) -> Segment:
        return Segment("notice", text, tuple(self.engine.encode(text)))

    def _observe(self, slot: int, results: list[list[Document] | BaseException]) -> None:
        """Has fed what the policy sees of a search's results: a docs segment, or a notice if all sub-queries failed."""
        failed = [result for result in results if isinstance(result, BaseException)]
        for error in failed:
            log.warning("a sub-query failed and brings no document: %r", error)
        run, count = self.slots[slot], self.engine.count
        run.episode.failed_searches += len(failed)
        count("queries/sent", len(results))
        count("queries/failed", len(failed))
        count("searches/failed", len(failed) == len(results))
        if len(failed) == len(results):
            segment = self._notice(self.protocol.failed())
        else:
            documents = [[] if isinstance(result, BaseException) else result for result in results]
            budget, variant = self.config.observation_tokens, self.config.observation_variant
            text, ids, cut = build_observation(self.protocol, self.engine.tokenizer, documents, budget, variant)
            count("observations/cut", cut)
            segment = Segment("docs", text, tuple(ids))
        self._append(slot, segment)

    def _append(self, slot: int, segment: Segment) -> None:
        """Has the segment fed, if it leaves room for a token behind it; otherwise the episode ends."""
        run = self.slots[slot]
        if run.fed + 1 + len(segment.ids) >= self.config.max_total_tokens:
            self._cut_off(run)
            return self._finish(slot, "length")
        self.feeds[slot] = segment
        if run.on_text:
            run.on_text(segment.source, segment.text)

    async def _documents(self, idle: bool) -> None:
        """Takes what searches have brought. Waits for all in deterministic mode, for one when nothing else is to do."""
        if not self.waiting:
            return
        start = time.perf_counter()
        if self.config.deterministic or idle:
            await self._pause()
        else:
            await asyncio.sleep(0)
        self.engine.count("seconds/wait", time.perf_counter() - start)
        # In slot order, so that the batch does not depend on who answered first.
        done = sorted((task for task in self.waiting if task.done()), key=self.waiting.__getitem__)
        for task in done:
            self._observe(self.waiting.pop(task), task.result())

    async def _pause(self) -> None:
        """Until a search has ended, in deterministic mode all of them; or until the job is woken."""
        wake = asyncio.create_task(self.wake.wait())
        left = set(self.waiting)
        try:
            while left and not wake.done():
                done, _ = await asyncio.wait({*left, wake}, return_when=asyncio.FIRST_COMPLETED)
                left = left - done if self.config.deterministic else set()
        finally:
            wake.cancel()

    async def _on_device(self, phase: str, function, *args):
        start = time.perf_counter()
        call = asyncio.get_running_loop().run_in_executor(self.engine.device, function, *args)
        try:
            out = await asyncio.shield(call)
        except asyncio.CancelledError:
            await asyncio.wait([call])  # it writes the engine's state, so nothing may start before it has ended
            raise
        self.engine.count(f"seconds/{phase}", time.perf_counter() - start)
        return out

    # ------------------------------------------------------------------------------------------------- device thread

    def _open(self) -> None:
        shards, step = self.engine.shards, jax.device_put(np.uint32(self.step))
        shards.open()
        self.step_key = shards.put(jax.random.fold_in(self.engine.key, step))

    def _extend(self) -> None:
        """Appends each segment to its slot, which starts a turn."""
        rows = []
        for slot, segment in self.feeds.items():
            run, ids = self.slots[slot], list(segment.ids)
            if run.pending is not None:
                ids = [run.pending, *ids]
            run.episode.segments.append(segment)
            source, start = run.source if segment.source == "prompt" else None, run.fed
            run.fed, run.pending = start + len(ids) - 1, ids[-1]
            left = min(self.turn_tokens, run.left(self.config.max_total_tokens))
            rows.append(Row(slot, ids[:-1], start, ids[-1], left, run.key, run.sampling, source))
            if source is None:
                self.engine.count("tokens/prefilled", len(segment.ids))
        self.engine.shards.extend(rows, self.step_key)
        self.active.update(self.feeds)
        self.feeds = {}

    def _decode(self) -> list[int]:
        """One chunk; the slots whose turn has ended, in order."""
        engine, before = self.engine, {slot: self.slots[slot].fed for slot in self.active}
        truncated = any(self.slots[slot].sampling.truncated for slot in before)
        out = engine.shards.decode(self.table, self.config.chunk, before, truncated)
        for slot, fed in before.items():
            run, n = self.slots[slot], int(out["length"][slot]) - fed
            run.fed, run.sampled = run.fed + n, run.sampled + n
            run.ids += out["tokens"][:n, slot].tolist()
            run.logprobs += out["logprobs"][:n, slot].tolist()
            run.pending = run.ids[-1]
            engine.count("tokens/sampled", n)
        engine.count("decode_steps", int(out["steps"].max()))
        engine.count("slot_steps", int(out["steps"].sum()) * engine.shards.slots)
        self.active = {slot for slot in self.active if out["active"][slot]}
        return sorted(set(before) - self.active)
