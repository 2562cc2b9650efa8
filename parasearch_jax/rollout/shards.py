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
from parasearch_jax.rollout import kv_cache, sampler
from parasearch_jax.rollout.sampler import Sampling
from parasearch_jax.rollout.sizes import Sizes, holding
from parasearch_jax.rollout.stops import Stops
from parasearch_jax.sharding import layout, rules
from parasearch_jax.sharding.mesh import local_mesh

COPY_ROWS = 8  # slots of a shard that a call of `copy_prompts` fills


class Row(NamedTuple):
    """What is appended to a slot, or copied to it."""

    slot: int  # shard * slots of a shard + slot in the shard
    ids: list[int]  # that go into the cache
    start: int  # cells already filled
    pending: int  # the token behind the ids, not fed yet
    left: int  # tokens that the turn may sample
    number: int  # of the episode, for its random numbers
    sampling: Sampling
    source: int | None = None  # a slot of the same shard with the same ids in its first cells: they are copied from it


class Shards:
    """`count` shards of `slots` slots of `cells` tokens each; `params`, the weights of the last sync."""

    def __init__(self, cfg: DecoderConfig, mesh: Mesh, slots: int, cells: int, observation: int):
        """`mesh` and `slots` of the whole run; `observation`: see Sizes. Raises UserError if the mesh does not divide
        the slots or the model."""
        if slots % mesh.shape["fsdp"]:
            raise UserError(
                f"rollout.slots is {slots}, mesh.fsdp is {mesh.shape['fsdp']}: give a multiple of mesh.fsdp, "
                "so that each of them has as many slots"
            )
        self.cfg, self.params = cfg, None
        self.mesh, self._layout = local_mesh(mesh), _sampler_layout(cfg, mesh)
        self.count, self.slots = self.mesh.shape["fsdp"], slots // mesh.shape["fsdp"]
        self.sizes = Sizes(self.slots, cells, observation, kv_cache.paged(cfg))
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
            self._state = sampler.init_state(self.cfg, self.count * self.slots, self.sizes.cells, self.mesh)

    def drop(self) -> None:
        """Forgets the slots: what they hold belongs to episodes that nobody will finish."""
        self._state = None

    def extend(self, rows: Sequence[Row], key: jax.Array) -> None:
        """Appends to slots, or copies to them, and starts a turn in each; `key` is that of the step."""
        fed = self._by_shard(row for row in rows if row.source is None)
        while any(fed):
            fed = self._feed_pieces(fed, key)
        copied = self._by_shard(row for row in rows if row.source is not None)  # from rows above too, so behind them
        count = min(COPY_ROWS, self.slots)
        for start in range(0, max(map(len, copied)), count):
            shards = [shard[start : start + count] for shard in copied]
            feed = self._feed(shards, count, source=lambda row: row.source)
            cells = holding(max(len(row.ids) for shard in shards for row in shard), self.sizes.prompts)
            self._state = sampler.copy_prompts(self._state, feed, key, cells=cells, mesh=self.mesh)
        jax.block_until_ready(self._state.length)

    def _feed_pieces(self, shards: list[list[Row]], key: jax.Array) -> list[list[Row]]:
        """Feeds each row as far as a call reaches; what is left. Rows that read the cache do not wait in one call with
        new ones, and long ones do not wait for short ones."""
        largest = self.sizes.lengths[-1]
        pieces = [[row._replace(ids=row.ids[:largest]) for row in shard] for shard in shards]
        for new in (True, False):
            todo = [sorted((r for r in shard if (r.start == 0) == new), key=lambda r: -len(r.ids)) for shard in pieces]
            while any(todo):
                length = holding(max(len(shard[0].ids) for shard in todo if shard), self.sizes.lengths)
                count = self.sizes.rows(length)
                self._extend([shard[:count] for shard in todo], count, length, key)
                todo = [shard[count:] for shard in todo]
        rest = lambda row: row._replace(ids=row.ids[largest:], start=row.start + largest)  # noqa: E731
        return [[rest(row) for row in shard if len(row.ids) > largest] for shard in shards]

    def _extend(self, shards: Sequence[list[Row]], count: int, length: int, key: jax.Array) -> None:
        """One call, with `count` rows of `length` for each shard."""
        end = max(row.start and row.start + len(row.ids) for shard in shards for row in shard)
        window = end and holding(end, self.sizes.long_windows)  # 0: no cell of the cache has to be read
        ids = lambda row: row.ids + [0] * (length - len(row.ids))  # noqa: E731
        feed = self._feed(shards, count, ids=ids, start=lambda row: row.start)
        self._state = sampler.extend(self.params, self._state, feed, key, cfg=self.cfg, window=window, mesh=self.mesh)

    def _by_shard(self, rows: Iterable[Row]) -> list[list[Row]]:
        """The rows of each shard, which names its slots from 0 on."""
        shards: list[list[Row]] = [[] for _ in range(self.count)]
        for row in rows:
            shard, slot = divmod(row.slot, self.slots)
            source = None if row.source is None else row.source - shard * self.slots
            shards[shard].append(row._replace(slot=slot, source=source))
        return shards

    def _feed(self, shards: Sequence[list[Row]], count: int, **more) -> dict[str, jax.Array]:
        """What a call takes, `count` rows for each shard; `more`: columns of it alone, as functions of a row."""
        padding = Row(slot=self.slots, ids=[], start=0, pending=0, left=0, number=0, sampling=Sampling(), source=0)
        rows = [row for shard in shards for row in shard + [padding] * (count - len(shard))]
        columns = {
            "rows": [row.slot for row in rows],
            "count": [len(row.ids) for row in rows],
            "pending": [row.pending for row in rows],
            "left": [row.left for row in rows],
            "top_k": [row.sampling.top_k for row in rows],
            **{name: list(map(column, rows)) for name, column in more.items()},
        }
        feed = {name: np.asarray(column, np.int32) for name, column in columns.items()}
        feed["number"] = np.asarray([row.number for row in rows], np.uint32)
        for name in ("temperature", "top_p"):
            feed[name] = np.asarray([getattr(row.sampling, name) for row in rows], np.float32)
        return jax.device_put(feed, self._rows)

    def decode(self, table: Stops, steps: int, lengths: dict[int, int], truncated: bool) -> dict[str, np.ndarray]:
        """A chunk of `steps`; `lengths` are those of the active slots, `truncated` as `decode_chunk` has it. Returns
        what that reports, and "length" and "active" of all slots after it."""
        of_shard: list[list[int]] = [[] for _ in range(self.count)]
        for slot, length in lengths.items():
            of_shard[slot // self.slots].append(length)
        self._state, out = sampler.decode_chunk(
            self.params,
            self._state,
            table,
            cfg=self.cfg,
            steps=steps,
            read=max(self.sizes.read(shard, steps) for shard in of_shard if shard),
            truncated=truncated,
            mesh=self.mesh,
        )
        return jax.device_get({**out, "length": self._state.length, "active": self._state.active})

    def release(self, slots: Iterable[int]) -> None:
        """Ends the turns of slots whose episodes nobody waits for any more."""
        kept = np.ones(self.count * self.slots, bool)
        kept[list(slots)] = False
        self._state = sampler.release(self._state, jax.device_put(kept, self._rows))


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
