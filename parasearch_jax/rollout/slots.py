"""Which run sits in which slot, and which comes next.

Slots lie in shards, one for each 'fsdp' row of the mesh. A group (the samples of a question) stays in one shard; the
shard with most room takes the next group from the one queue, so that shards balance by themselves.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Collection, Iterator

from parasearch_jax.data import Question
from parasearch_jax.rollout.sampler import Sampling
from parasearch_jax.rollout.types import Episode

OnText = Callable[[str, str], None]  # (source, text): what an episode says, while it does


@dataclasses.dataclass(eq=False)
class Run:
    """One episode under way, or the extra model call of one."""

    episode: Episode
    prompt: tuple[str, list[int]]
    key: int  # number folded into the run key
    sampling: Sampling
    question: Question | None = None
    on_text: OnText | None = None
    most: int | None = None  # tokens that it may sample in all turns together
    parent: Run | None = None  # whose documents this extra call reads
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


class Slots:
    """`shards` x `each` slots; in every shard `kept` of them are for extra calls, so that episodes that wait for theirs
    can't take all."""

    def __init__(self, shards: int, each: int, kept: int = 0):
        self.each, self.kept = each, kept
        self.runs: dict[int, Run] = {}  # by slot
        self._queue: deque[list[Run]] = deque()  # groups
        self._extra: deque[Run] = deque()
        self._free = [list(range(i * each, (i + 1) * each))[::-1] for i in range(shards)]  # by shard
        self._groups: list[deque[Run]] = [deque() for _ in range(shards)]  # what is left of the group it has taken
        self._prompts: list[dict[int, tuple]] = [{} for _ in range(shards)]  # by slot: whose cells lie in front

    def add(self, group: list[Run]) -> None:
        self._queue.append(group)

    def add_extra(self, run: Run) -> None:
        self._extra.append(run)

    def slot_of(self, run: Run) -> int:
        return next(slot for slot, held in self.runs.items() if held is run)

    def forget(self, dropped: Collection[Run]) -> None:
        """Drops runs, and the extra calls of such, that have no slot yet."""
        self._extra = deque(run for run in self._extra if run.parent not in dropped)
        self._groups = [deque(run for run in group if run not in dropped) for group in self._groups]
        groups = ([run for run in group if run not in dropped] for group in self._queue)
        self._queue = deque(filter(None, groups))

    def admit(self) -> Iterator[tuple[int, Run]]:
        """(slot, run) of what takes free slots: first extra calls, then the rest of the group that a shard has begun,
        then the next groups."""
        shards = range(len(self._free))
        while self._extra and self._free[shard := max(shards, key=lambda i: len(self._free[i]))]:
            yield self._place(shard, self._extra.popleft())
        for shard in shards:
            yield from self._fill(shard)
        while self._queue and self._room(shard := max(shards, key=self._room)) > 0:
            self._groups[shard] = deque(self._queue.popleft())
            yield from self._fill(shard)

    def _fill(self, shard: int) -> Iterator[tuple[int, Run]]:
        group = self._groups[shard]
        while group and self._room(shard) > 0:
            yield self._place(shard, group.popleft())

    def _room(self, shard: int) -> int:
        """Slots that episodes may still take. Those kept for extra calls are free, or some have them."""
        if not self.kept:
            return len(self._free[shard])
        taken = sum(run.parent is None and slot // self.each == shard for slot, run in self.runs.items())
        return min(len(self._free[shard]), self.each - self.kept - taken)

    def _place(self, shard: int, run: Run) -> tuple[int, Run]:
        """Gives the run a slot, and says in `run.source` whose first cells hold this very prompt, if some do.

        The cache only grows, so a prompt's cells stay as they are until the slot's next episode. One that a member of
        the group has left is taken first, and no other group is begun before all of this one have a slot: so there is
        a source for every member but the first, however few slots there are, and no prompt is fed twice. Of several
        holders it is the one that was filled first, so never one that gets its cells by the same call.
        """
        free, prompts = self._free[shard], self._prompts[shard]
        holders = [slot for slot, held in prompts.items() if held is run.prompt]
        slot = next((slot for slot in holders if slot in free), free[-1])
        free.remove(slot)
        prompts.pop(slot, None)  # in the order of filling
        prompts[slot] = run.prompt
        run.source = slot if slot in holders else next(iter(holders), None)
        self.runs[slot] = run
        return slot, run

    def release(self, slot: int) -> Run:
        """Frees a slot; the run that had it."""
        self._free[slot // self.each].append(slot)
        return self.runs.pop(slot)
