"""The scheduler: which episode sits in which slot, and what each of them waits for.

    free slot <- sample of a group   extend (prompt); the group's other samples get a copy of its cells
    decode_chunk for all slots       a turn ends -> parse -> search | notice | end
    search -> documents              extend (documents), the slot decodes again; the others never waited

Which slot is whose stands in slots.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
import zlib
from collections.abc import Callable, Iterable

import jax
import numpy as np

from parasearch_jax.errors import UserError
from parasearch_jax.protocol import DOCUMENTS, Turn
from parasearch_jax.retrieval import Document
from parasearch_jax.rollout.observation import build_observation, document_blocks
from parasearch_jax.rollout.searches import search_all
from parasearch_jax.rollout.shards import Row
from parasearch_jax.rollout.slots import Run, Slots
from parasearch_jax.rollout.types import Answer, Episode, Invalid, Search, Segment

log = logging.getLogger(__name__)


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
        self.slots = Slots(engine.shards.count, engine.shards.slots, self._kept_slots())
        self.left: dict[Run, Group] = {}  # the runs that have not ended
        self.active: set[int] = set()  # slots that decode
        # What is to be appended to slots, each of which then starts a turn.
        self.feeds: dict[int, list[Segment]] = {}
        self.waiting: dict[asyncio.Task, int] = {}  # searches under way, by slot
        self.cancelled: set[Run] = set()
        self.wake = asyncio.Event()  # a group, a cancellation or the end of a session has come

    def _kept_slots(self) -> int:
        """Slots of a shard that are for extra calls alone."""
        if self.protocol is None or not self.protocol.distil:
            return 0
        shards = self.engine.shards
        if shards.slots < 2:
            raise UserError(
                f"protocol {self.protocol.name!r} makes model calls beside an episode's turns, which need slots too: "
                f"rollout.slots must be >= {2 * shards.count}, it is {shards.slots * shards.count}"
            )
        return shards.slots // 2

    def add(self, group: Group) -> None:
        """One more group, behind the others."""
        self.left |= dict.fromkeys(group.runs, group)
        self.slots.add(group.runs)
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
        held = {slot: run for slot, run in self.slots.runs.items() if run in runs or run.parent in runs}
        if at_work := self.active & set(held):
            self.active -= at_work
            await self._on_device("decode", self.engine.shards.release, at_work)
        tasks = [task for task, slot in self.waiting.items() if slot in held]
        for task in tasks:
            task.cancel()
            del self.waiting[task]
        await asyncio.gather(*tasks, return_exceptions=True)
        for slot, run in held.items():
            run.episode.segments += self.feeds.pop(slot, [])  # `on_text` has told of it
            self._cut_off(run)
            self._finish(slot, "cancelled")
        for run in runs & set(self.left):  # that have no slot yet
            self._ended(run, "cancelled")
        self.slots.forget(runs)

    # --------------------------------------------------------------------------------------------------------- slots

    def _admit(self) -> None:
        for slot, run in self.slots.admit():
            text, ids = run.prompt
            if DOCUMENTS in text:
                run.source = None  # its cells hold more than the prompt
                self._search(slot, (run.question.text,))
            else:
                self.feeds[slot] = [Segment("prompt", text, tuple(ids))]

    def _finish(self, slot: int, reason: str) -> None:
        self._ended(self.slots.release(slot), reason)

    def _ended(self, run: Run, reason: str) -> None:
        run.episode.stop_reason, run.episode.version = reason, self.engine.version  # no sync comes in between
        if run.parent is not None:
            return
        group = self.left.pop(run)
        if not any(other in self.left for other in group.runs):
            group.on_end()

    # --------------------------------------------------------------------------------------------------------- turns

    def _end_turn(self, slot: int) -> None:
        """Acts on a finished turn: starts its search, ends the episode, or has a notice fed."""
        run = self.slots.runs[slot]
        episode, text = run.episode, self._close_turn(run)
        ended = episode.segments[-1].ids[-1] in self.engine.model_config.eos_token_ids
        if run.parent is not None:
            return self._distilled(slot, text, "eos" if ended else "length")
        if self.protocol is None:
            return self._finish(slot, "eos" if ended else "length")
        full, turn = run.left(self.config.max_total_tokens) <= 0, self._turn(run)
        parsed = self.protocol.parse(text, len(episode.segments) - 1, turn)
        action, refusal = parsed.action, None
        if isinstance(action, Search):  # the last generation can only answer
            refusal = self.protocol.refuse(action, turn)
            action = Invalid(action.span) if turn.last or full or refusal is not None else action
        episode.actions.append(action)
        episode.dropped_queries += parsed.dropped_queries
        if isinstance(action, Answer):
            return self._finish(slot, "answer")
        if full or turn.last:
            self._close(run)
            return self._finish(slot, "length" if full else "turns")
        if isinstance(action, Search):
            return self._search(slot, action.queries)
        if refusal is not None:
            return self._append(slot, self._notice(self.protocol.observation([refusal])))
        if self.protocol.on_invalid == "end":
            return self._finish(slot, "eos" if ended else "length")
        self._append(slot, self._notice(self.protocol.notice))

    def _turn(self, run: Run, ahead: int = 0) -> Turn:
        """Where the run stands: at its last turn, or `ahead` of it."""
        episode, question = run.episode, run.question
        number, said = episode.turns + ahead, {}
        if question is not None:
            said = {"question": question.text, "kind": question.kind}
        return Turn(number, number > self.config.max_turns, earlier=tuple(episode.actions), **said)

    def _close(self, run: Run) -> None:
        """Puts down that the episode has no answer, where the protocol does; it is not fed."""
        segment = self._notice(self.protocol.unanswered)
        if segment.ids and run.episode.length() + len(segment.ids) <= self.config.max_total_tokens:
            run.episode.segments.append(segment)

    def _search(self, slot: int, queries: tuple[str, ...]) -> None:
        search = search_all(self.retriever, queries, self.config.topk, self.config.search_seconds)
        self.waiting[asyncio.create_task(search)] = slot

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
        for run in (run for run in map(self.slots.runs.get, self.active) if run.on_text):
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
        run, count = self.slots.runs[slot], self.engine.count
        run.episode.failed_searches += len(failed)
        count("queries/sent", len(results))
        count("queries/failed", len(failed))
        count("searches/failed", len(failed) == len(results))
        documents = [[] if isinstance(result, BaseException) else result for result in results]
        blocks = document_blocks(self.protocol, documents)
        if not run.episode.segments:
            self._begin(slot, blocks)
        elif len(failed) == len(results):
            self._append(slot, self._notice(self.protocol.failed()))
        elif self.protocol.distil:
            self._distil(slot, "".join(blocks))
        else:
            self._append(slot, self._observation(blocks))

    def _observation(self, blocks: list[str]) -> Segment:
        budget, variant = self.config.observation_tokens, self.config.observation_variant
        text, ids, cut = build_observation(self.protocol, self.engine.tokenizer, blocks, budget, variant)
        self.engine.count("observations/cut", cut)
        return Segment("docs", text, tuple(ids))

    def _append(self, slot: int, segment: Segment) -> None:
        """Has the segment fed, and what the environment says before the turn behind it, if that leaves room for a
        token; otherwise the episode ends."""
        run = self.slots.runs[slot]
        said = self.protocol.before_turn(self._turn(run, ahead=1))
        self._feed(slot, [segment, self._notice(said)] if said else [segment])

    def _feed(self, slot: int, segments: list[Segment]) -> None:
        run = self.slots.runs[slot]
        if run.fed + 1 + sum(len(segment.ids) for segment in segments) >= self.config.max_total_tokens:
            self._cut_off(run)
            return self._finish(slot, "length")
        self.feeds[slot] = segments
        for segment in segments if run.on_text else ():
            run.on_text(segment.source, segment.text)

    # ----------------------------------------------------------------------------- documents first, and extra calls

    def _begin(self, slot: int, blocks: list[str]) -> None:
        """Has a prompt fed that documents stand in: they are a segment of their own."""
        before, after = self.slots.runs[slot].prompt[0].split(DOCUMENTS)
        first = Segment("prompt", before, tuple(self.engine.encode(before)))
        segments = [first, self._observation(blocks), self._notice(after)]
        if (length := sum(len(segment.ids) for segment in segments)) >= self.config.max_total_tokens:
            raise UserError(
                f"The prompt of question {self.slots.runs[slot].episode.question_id!r} has {length} tokens with its "
                f"documents, rollout.max_total_tokens is {self.config.max_total_tokens}: raise it, or lower "
                "rollout.observation_tokens"
            )
        self._feed(slot, segments)

    def _distil(self, slot: int, documents: str) -> None:
        """Starts the extra call that reads the documents of a run's last search. One that is too long to be made brings
        the notice of a failed search."""
        run = self.slots.runs[slot]
        episode = run.episode
        said = "".join(segment.text for segment in episode.segments if segment.source == "policy")
        asked = self.protocol.distil_prompt(said, " ".join(episode.actions[-1].queries), documents)
        text = self.protocol.render_extra(self.engine.tokenizer, asked)
        prompt = text, self.engine.encode(text)
        if len(prompt[1]) >= self.config.max_total_tokens:
            log.warning("question %s: an extra call of %d tokens is not made", episode.question_id, len(prompt[1]))
            self.engine.count("calls/too_long")
            return self._append(slot, self._notice(self.protocol.failed()))
        key = zlib.crc32(f"{run.key}\nextra {episode.turns}".encode())
        extra = Episode(question_id=episode.question_id, sample=episode.sample)
        self.slots.add_extra(Run(extra, prompt, key, run.sampling, parent=run))
        self.engine.count("calls/extra")

    def _distilled(self, slot: int, text: str, reason: str) -> None:
        """An extra call has ended: its run goes on."""
        call = self.slots.runs[slot]
        self._finish(slot, reason)
        call.parent.episode.extra.append(call.episode)
        self._append(self.slots.slot_of(call.parent), self._observation([self.protocol.distilled(text)]))

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
        for slot, segments in self.feeds.items():
            run, ids = self.slots.runs[slot], [i for segment in segments for i in segment.ids]
            source, start = None if run.episode.segments else run.source, run.fed
            if source is None:
                self.engine.count("tokens/prefilled", len(ids))
            if run.pending is not None:
                ids = [run.pending, *ids]
            run.episode.segments += segments
            run.fed, run.pending = start + len(ids) - 1, ids[-1]
            left = min(self.turn_tokens, run.left(self.config.max_total_tokens))
            rows.append(Row(slot, ids[:-1], start, ids[-1], left, run.key, run.sampling, source))
        self.engine.shards.extend(rows, self.step_key)
        self.active.update(self.feeds)
        self.feeds = {}

    def _decode(self) -> list[int]:
        """One chunk; the slots whose turn has ended, in order."""
        engine, before = self.engine, {slot: self.slots.runs[slot].fed for slot in self.active}
        truncated = any(self.slots.runs[slot].sampling.truncated for slot in before)
        out = engine.shards.decode(self.table, self.config.chunk, before, truncated)
        for slot, fed in before.items():
            run, n = self.slots.runs[slot], int(out["length"][slot]) - fed
            run.fed, run.sampled = run.fed + n, run.sampled + n
            run.ids += out["tokens"][:n, slot].tolist()
            run.logprobs += out["logprobs"][:n, slot].tolist()
            run.pending = run.ids[-1]
            engine.count("tokens/sampled", n)
        engine.count("decode_steps", int(out["steps"].max()))
        engine.count("slot_steps", int(out["steps"].sum()) * engine.shards.slots)
        self.active = {slot for slot in self.active if out["active"][slot]}
        return sorted(set(before) - self.active)
