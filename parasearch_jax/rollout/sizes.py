"""The shapes that a shard's devices are called with. Each is a program to compile, so they are few and known up front.

    extend         4 lengths of rows x (what is new reads no cell; what is appended reads one of 3 windows)     16
    decode_chunk   one of 5 windows, or of 5 numbers of pages (kv_cache.py)                                       5
    copy_prompts   the first eighth of a slot, or all of it                                                       2
    release                                                                                                       1
                                                                                               at most, a run    24

A call of `extend` holds about CALL_TOKENS tokens whatever the length of its rows, and longer rows are fed in pieces: so
one program a length serves the single document that arrives late as well as the many prompts of a start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from parasearch_jax.rollout.kv_cache import PAGE

# Of a shard, in a call. Enough that products and not the reading of weights take the time (on an H100 from about 300
# tokens on), and few, as rows that a call does not need are padding, and its scores are fp32 [rows, heads, T, window].
CALL_TOKENS = 512


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of shards with `slots` slots of `cells` tokens each, to which at most `observation` tokens are appended after a
    search; `paged`: chunks are decoded in pages (kv_cache.py)."""

    slots: int
    cells: int
    observation: int
    paged: bool

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of a row of `extend`, ascending. The largest holds a whole observation behind the pending token."""
        largest = _up(min(self.observation + 1, self.cells), 16)
        return tuple(sorted({_up(largest // part, 16) for part in (1, 2, 4, 8)}))

    @property
    def reads(self) -> tuple[int, ...]:
        """What `decode_chunk` reads, ascending: cells of each slot, or pages of all together."""
        if self.paged:
            most = self.slots * -(-self.cells // PAGE)
            return tuple(sorted({-(-most * part // 8) for part in (1, 2, 4, 6, 8)}))
        return self._parts(1, 2, 4, 6, 8)

    def read(self, lengths: Sequence[int], steps: int) -> int:
        """The one of `reads` for a chunk of `steps` whose active slots have these lengths."""
        if self.paged:
            return holding(sum(-(-n // PAGE) for n in lengths), self.reads)
        return holding(min(max(lengths) + steps, self.cells), self.reads)

    @property
    def long_windows(self) -> tuple[int, ...]:
        """Cells of a slot that `extend` reads, ascending: fewer, as it has more other work to do."""
        return self._parts(3, 5, 8)

    @property
    def prompts(self) -> tuple[int, ...]:
        """Cells of a slot that `copy_prompts` copies, ascending."""
        return self._parts(1, 8)

    def rows(self, length: int) -> int:
        """Rows of a shard in a call of `extend` with rows of `length`."""
        return max(1, min(self.slots, CALL_TOKENS // length))

    def count(self) -> int:
        """Programs that rollouts compile at most; with top-p or top-k `decode_chunk` has as many again."""
        return len(self.lengths) * (1 + len(self.long_windows)) + len(self.reads) + len(self.prompts) + 1

    def describe(self) -> str:
        """The programs, for the log of a run."""
        listed = lambda sizes: ", ".join(map(str, sizes))  # noqa: E731
        return (
            f"rollout, at most {self.count()} programs: extend of {listed(self.lengths)} tokens a row, each with "
            f"{listed((0, *self.long_windows))} cells read; decode_chunk with {listed(self.reads)} "
            f"{'pages' if self.paged else 'cells'} read; "
            f"copy_prompts of {listed(self.prompts)} cells; release"
        )

    def _parts(self, *eighths: int) -> tuple[int, ...]:
        return tuple(sorted({min(_up(self.cells * part // 8, 64), self.cells) for part in eighths}))


def holding(n: int, sizes: tuple[int, ...]) -> int:
    """The smallest of ascending sizes that holds n."""
    return next(size for size in sizes if size >= n)


def _up(n: int, multiple: int) -> int:
    """n rounded up, at least to one multiple: _up(70, 16) -> 80."""
    return max(1, -(-n // multiple)) * multiple
