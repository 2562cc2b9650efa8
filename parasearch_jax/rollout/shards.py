"""The engine's devices: weights and slots of this process, one shard of slots for each 'fsdp' row of its mesh.

Numpy goes in and comes out. All of it runs in the engine's device thread, where no `jax.set_mesh` of the caller holds:
the mesh of a run may span hosts, the one here does not.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from parasearch_jax.errors import UserError
from parasearch_jax.models import decoder
from parasearch_jax.models.decoder import DecoderConfig, Params
from parasearch_jax.rollout import sampler
from parasearch_jax.rollout.stops import Stops
from parasearch_jax.sharding import layout, rules
from parasearch_jax.sharding.mesh import local_mesh

# Tokens that a shard takes in one call of `extend`. A call's scores are fp32 [rows, heads, tokens, cells]: for 32 slots
# with documents of 512 tokens, 7B's 28 heads and 4,096 cells 7 GiB, twice.
CALL_TOKENS = 8192
COPY_ROWS = 8  # slots of a shard that a call of `copy_prompts` fills; one size, so that only prompts' buckets differ


class Row(NamedTuple):
    """What is appended to a slot, or copied to it."""

    slot: int  # shard * slots of a shard + slot in the shard
    ids: list[int]  # that go into the cache
    start: int  # cells already filled
    pending: int  # the token behind the ids, not fed yet
    left: int  # tokens that the turn may sample
    number: int  # of the episode, for its random numbers
    source: int | None = None  # a slot of the same shard with the same ids in its first cells: they are copied from it


class Shards:
    """`count` shards of `slots` slots of `cells` tokens each; `params`, the weights of the last sync."""

    def __init__(self, cfg: DecoderConfig, mesh: Mesh, slots: int, cells: int):
        """`mesh` and `slots` of the whole run. Raises UserError if the mesh does not divide the slots or the model."""
        if slots % mesh.shape["fsdp"]:
            raise UserError(
                f"rollout.slots is {slots}, mesh.fsdp is {mesh.shape['fsdp']}: give a multiple of mesh.fsdp, "
                "so that each of them has as many slots"
            )
        self.cfg, self.cells, self.params = cfg, cells, None
        self.mesh, self._layout = local_mesh(mesh), _sampler_layout(cfg, mesh)
        self.count, self.slots = self.mesh.shape["fsdp"], slots // mesh.shape["fsdp"]
        self._rows = NamedSharding(self.mesh, rules.ROWS)
        self._state = None

    def sync(self, params: Params) -> None:
        """Takes weights in the trainer's layout, wherever they lie; keeps nothing of them. All hosts call it together.

        The old ones go first: a device may have no room for both.
        """
        places, to_sampler = self._layout
        params, self.params = layout.place(params, places), None
        self.params = jax.block_until_ready(layout.local_part(to_sampler(params), self.mesh))

    def put(self, x: Any) -> jax.Array:
        """The same on every device."""
        return jax.device_put(x, NamedSharding(self.mesh, P()))

    def open(self) -> None:
        """Makes the slots, if there are none."""
        if self._state is None:
            self._state = sampler.init_state(self.cfg, self.count * self.slots, self.cells, self.mesh)

    def drop(self) -> None:
        """Forgets the slots: what they hold belongs to episodes that nobody will finish."""
        self._state = None

    def extend(self, rows: Sequence[Row], key: jax.Array) -> None:
        """Appends to slots, or copies to them, and starts a turn in each; `key` is that of the step. Few sizes of call,
        so that few programs are compiled."""
        fed = self._by_shard(row for row in rows if row.source is None)
        if most := max(map(len, fed)):
            tokens = token_bucket(_longest(fed), self.cells)
            count = min(_bucket(most, 8, self.slots), rows_of_call(tokens, self.slots))
            for start in range(0, most, count):
                self._extend([shard[start : start + count] for shard in fed], count, tokens, key)
        copied = self._by_shard(row for row in rows if row.source is not None)  # from rows above too, so behind them
        if most := max(map(len, copied)):
            cells, count = token_bucket(_longest(copied), self.cells), min(COPY_ROWS, self.slots)
            for start in range(0, most, count):
                shards = [shard[start : start + count] for shard in copied]
                feed = self._feed(shards, count, key, source=lambda row: row.source)
                self._state = sampler.copy_prompts(self._state, feed, cells=cells, mesh=self.mesh)
        jax.block_until_ready(self._state.length)

    def _extend(self, shards: Sequence[list[Row]], count: int, tokens: int, key: jax.Array) -> None:
        """One call, with `count` rows of `tokens` for each shard."""
        rows = [row for shard in shards for row in shard]
        ids = lambda row: row.ids + [0] * (tokens - len(row.ids))  # noqa: E731
        feed = self._feed(shards, count, key, ids=ids, start=lambda row: row.start)
        first = not any(row.start for row in rows)  # nothing but prompts: no cell of the cache has to be read
        window = 0 if first else self._window(max(row.start + len(row.ids) for row in rows))
        self._state = sampler.extend(self.params, self._state, feed, cfg=self.cfg, window=window, mesh=self.mesh)

    def _by_shard(self, rows: Iterable[Row]) -> list[list[Row]]:
        """The rows of each shard, which names its slots from 0 on."""
        shards: list[list[Row]] = [[] for _ in range(self.count)]
        for row in rows:
            shard, slot = divmod(row.slot, self.slots)
            source = None if row.source is None else row.source - shard * self.slots
            shards[shard].append(row._replace(slot=slot, source=source))
        return shards

    def _feed(self, shards: Sequence[list[Row]], count: int, key: jax.Array, **more) -> dict[str, jax.Array]:
        """What a call takes, `count` rows for each shard; `more`: columns of it alone, as functions of a row."""
        padding = Row(slot=self.slots, ids=[], start=0, pending=0, left=0, number=0, source=0)
        rows = [row for shard in shards for row in shard + [padding] * (count - len(shard))]
        feed = {
            "rows": [row.slot for row in rows],
            "count": [len(row.ids) for row in rows],
            "pending": [row.pending for row in rows],
            "left": [row.left for row in rows],
            **{name: list(map(column, rows)) for name, column in more.items()},
        }
        feed = {name: np.asarray(column, np.int32) for name, column in feed.items()}
        feed, number = jax.device_put((feed, np.asarray([row.number for row in rows], np.uint32)), self._rows)
        return feed | {"key": _fold(self.mesh)(key, number)}

    def decode(self, table: Stops, temperature: jax.Array, steps: int, longest: int) -> dict[str, np.ndarray]:
        """A chunk of `steps`; `longest` is the length of the longest active slot. Returns what `sampler.decode_chunk`
        reports, and "length" and "active" of all slots after it."""
        self._state, out = sampler.decode_chunk(
            self.params,
            self._state,
            table,
            temperature,
            cfg=self.cfg,
            steps=steps,
            window=self._window(longest + steps),
            mesh=self.mesh,
        )
        return jax.device_get({**out, "length": self._state.length, "active": self._state.active})

    def _window(self, tokens: int) -> int:
        return _bucket(tokens, 64, self.cells)


def token_bucket(tokens: int, cells: int) -> int:
    """Tokens of a row of a call that has to hold `tokens`."""
    return _bucket(tokens, 16, cells)


def rows_of_call(tokens: int, slots: int) -> int:
    """Most rows of a shard in one call."""
    return max(1, min(slots, CALL_TOKENS // tokens))


def _longest(shards: Sequence[list[Row]]) -> int:
    return max(len(row.ids) for shard in shards for row in shard)


def _bucket(n: int, smallest: int, largest: int) -> int:
    """The smallest of smallest * 2^i, capped at `largest`, that holds n."""
    size = smallest
    while size < n:
        size *= 2
    return min(size, largest)


# Engines of one model and mesh share their programs.


@functools.cache
def _sampler_layout(cfg: DecoderConfig, mesh: Mesh):
    """(shardings of the trainer's parameters, jitted re-layout to the sampler's), on the mesh of the whole run."""
    to_sampler = functools.partial(layout.to_sampler, dtype=cfg.dtype)
    shapes = decoder.param_shapes(cfg)
    # Under jit, also in fp32 on one device: what comes out is a copy, where eager code would pass on the trainer's own
    # arrays, which its next update donates.
    out = rules.sampler_shardings(jax.eval_shape(to_sampler, shapes), mesh)
    return rules.shardings(shapes, mesh), jax.jit(to_sampler, out_shardings=out)


@functools.cache
def _fold(mesh: Mesh):
    """(key, numbers [R]) -> one key per number, on the devices of the rows."""
    return jax.jit(jax.vmap(jax.random.fold_in, (None, 0)), out_shardings=NamedSharding(mesh, rules.ROWS))
