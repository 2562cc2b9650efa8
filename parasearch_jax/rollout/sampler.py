"""The jitted functions of the sampler: `extend` feeds given tokens, `decode_chunk` samples new ones, `copy_prompts`
takes over what another slot was fed.

Axes: S slots, R rows of a call, T tokens of a row, N steps of a chunk, V vocab, M shards.

Slots are split over the mesh axis 'fsdp' into M shards, and `jax.shard_map` runs the code below in each of them: it
sees the slots of its shard only, its rows name them from 0 on, and its loop ends with its own last active slot. Every
shard has all weights; 'tp', which splits them inside of it, is left to the compiler. One device is one shard.

A slot's last token is always pending: known, but not yet in the cache. `decode_chunk` feeds it to learn what comes
next, `extend` feeds it in front of what it appends. So no logits have to be kept between calls, and a closing tag costs
no forward pass of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from parasearch_jax.errors import UserError
from parasearch_jax.models import decoder
from parasearch_jax.models.decoder import DecoderConfig, Params
from parasearch_jax.rollout import kv_cache, stops
from parasearch_jax.sharding import rules

BLOCK = 64  # tokens of a block in the two-level search; near the square root of a small vocabulary
# A chunk ends when one in so many of the slots that began it have stopped: the host has something for them to do. On
# the small world (turns of 11 tokens, chunks of 8) slots are at work in 0.92 of the steps so, and in 0.73 without.
ENOUGH = 3


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the tokens of an episode are drawn. Of the distribution softmax(logits / temperature) the `top_k` likeliest
    tokens are kept, and of these, renormalised, the smallest set whose probabilities reach `top_p`."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # 1: all
    top_k: int = 0  # 0: all

    def __post_init__(self):
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature is {self.temperature}; give a number from 0 (greedy) on")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; give a number above 0, at most 1 (all tokens)")
        if self.top_k != int(self.top_k) or self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}; give a whole number of tokens, 0 for all")

    @property
    def truncated(self) -> bool:
        """Whether some tokens are left out, which costs the sampler a search for the border."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "cache",
        "length",
        "token",
        "state",
        "left",
        "active",
        "key",
        "temperature",
        "top_p",
        "top_k",
    ],
    meta_fields=[],
)
@dataclasses.dataclass
class SamplerState:
    """All slots. Waiting and finished slots are not `active`; they idle through a chunk unchanged."""

    cache: kv_cache.Cache  # within a chunk in pages: kv_cache.Pages
    length: jax.Array  # int32 [S]; tokens in the cache
    token: jax.Array  # int32 [S]; the pending token
    state: jax.Array  # int32 [S]; automaton state of the turn
    left: jax.Array  # int32 [S]; tokens the turn may still sample
    active: jax.Array  # bool [S]
    key: jax.Array  # key [S]; of the episode, folded with the position for each token
    temperature: jax.Array  # fp32 [S]; this and the next two: see Sampling
    top_p: jax.Array  # fp32 [S]
    top_k: jax.Array  # int32 [S]


def init_state(cfg: DecoderConfig, slots: int, cells: int, mesh: Mesh) -> SamplerState:
    """Empty slots, laid out over the mesh; `slots` of all shards together."""
    return _init(cfg, slots, cells, mesh)()


@functools.cache
def _init(cfg: DecoderConfig, slots: int, cells: int, mesh: Mesh):
    def init():
        return SamplerState(
            cache=kv_cache.init_cache(cfg, slots, cells),
            length=jnp.zeros(slots, jnp.int32),
            token=jnp.zeros(slots, jnp.int32),
            state=jnp.zeros(slots, jnp.int32),
            left=jnp.zeros(slots, jnp.int32),
            active=jnp.zeros(slots, bool),
            key=jax.random.split(jax.random.key(0), slots),
            temperature=jnp.ones(slots, jnp.float32),
            top_p=jnp.ones(slots, jnp.float32),
            top_k=jnp.zeros(slots, jnp.int32),
        )

    return jax.jit(init, out_shardings=state_shardings(cfg, mesh))


def state_shardings(cfg: DecoderConfig, mesh: Mesh) -> SamplerState:
    """A NamedSharding for every array of the state."""
    layer = (NamedSharding(mesh, rules.CACHE),) * cfg.num_layers
    rows = NamedSharding(mesh, rules.ROWS)
    return SamplerState({"k": layer, "v": layer}, *[rows] * 9)


def each_shard(mesh: Mesh, out_specs):
    """Decorator of f(whole, split): runs it in every shard, where `split` holds the shard's share of the first axis."""
    # A 'tp' of one device is ours too: cuDNN's call is then this device's alone, where XLA else asks JAX to split it.
    ours = {"fsdp"} if mesh.shape["tp"] > 1 else set(mesh.axis_names)
    return functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), rules.ROWS),
        out_specs=out_specs,
        axis_names=ours,
        check_vma=False,
    )


@functools.partial(jax.jit, static_argnames=("cfg", "window", "mesh"), donate_argnames="state")
@jax.named_scope("rollout")
def extend(
    params: Params, state: SamplerState, feed: dict, key: jax.Array, *, cfg: DecoderConfig, window: int, mesh: Mesh
) -> SamplerState:
    """Appends tokens to slots and starts a turn in each.

    feed: {"rows" int32 [R] (a slot of the row's shard; the shard's number of slots: a padding row), "ids" int32 [R,T],
    "count" int32 [R] (valid ids), "start" int32 [R] (cells already filled), "pending" int32 [R] (the token after the
    ids), "left" int32 [R], "number" uint32 [R] (of the episode; folded into `key`, the step's), "temperature" fp32 [R],
    "top_p" fp32 [R], "top_k" int32 [R]}, R / M rows for each shard in turn. Prompts (start 0) and documents alike. The
    window must hold start + count; 0 if every row starts at 0 (first prefill).
    """

    kind = cfg.attention if mesh.shape["tp"] == 1 else "xla"  # cuDNN's call, half ours and half XLA's, is untried

    @each_shard(mesh, out_specs=rules.ROWS)
    def run(whole, split):
        (params, key), (state, feed) = whole, split
        rows, T = feed["rows"], feed["ids"].shape[1]
        offsets = jnp.arange(T, dtype=jnp.int32)
        positions = jnp.where(offsets < feed["count"][:, None], feed["start"][:, None] + offsets, -1)
        attend = kv_cache.Attend(state.cache, rows, positions, window, kind)
        decoder.forward_layers(params, cfg, feed["ids"], jnp.maximum(positions, 0), attend)
        return _start_turn(state, feed, key, attend.cache, feed["start"] + feed["count"])

    return run((params, key), (state, feed))


@functools.partial(jax.jit, static_argnames=("cells", "mesh"), donate_argnames="state")
@jax.named_scope("rollout")
def copy_prompts(state: SamplerState, feed: dict, key: jax.Array, *, cells: int, mesh: Mesh) -> SamplerState:
    """Gives slots the first cells of others and starts a turn in each.

    feed: as `extend` has it, with "source" int32 [R], the slots of the same shard that were fed the same ids, instead
    of "ids" and "start". `cells` is at least the largest count; what is copied beyond a count, nothing reads.
    """

    @each_shard(mesh, out_specs=rules.ROWS)
    def run(key, split):
        state, feed = split
        cache = kv_cache.copy(state.cache, feed["source"], feed["rows"], cells)
        return _start_turn(state, feed, key, cache, feed["count"])

    return run(key, (state, feed))


def _start_turn(
    state: SamplerState, feed: dict, key: jax.Array, cache: kv_cache.Cache, length: jax.Array
) -> SamplerState:
    """The state after `feed` has gone into `cache`; `length` [R] of its rows."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, feed["number"])
    put = lambda old, new: old.at[feed["rows"]].set(new, mode="drop")  # noqa: E731
    return SamplerState(
        cache=cache,
        length=put(state.length, length),
        token=put(state.token, feed["pending"]),
        state=put(state.state, stops.START),
        left=put(state.left, feed["left"]),
        active=put(state.active, True),
        key=put(state.key, keys),
        **{name: put(getattr(state, name), feed[name]) for name in ("temperature", "top_p", "top_k")},
    )


@functools.partial(jax.jit, donate_argnames="state")
def release(state: SamplerState, kept: jax.Array) -> SamplerState:
    """The slots that are not `kept` (bool [S]) idle from now on."""
    return dataclasses.replace(state, active=state.active & kept)


@functools.partial(jax.jit, static_argnames=("cfg", "steps", "read", "truncated", "mesh"), donate_argnames="state")
@jax.named_scope("rollout")
def decode_chunk(
    params: Params,
    state: SamplerState,
    table: stops.Stops,
    *,
    cfg: DecoderConfig,
    steps: int,
    read: int,
    truncated: bool,
    mesh: Mesh,
) -> tuple[SamplerState, dict]:
    """Samples up to `steps` tokens in every active slot; a shard ends early when a third of them have stopped.

    table: see `stops.build_stops`; `truncated`: whether top_p and top_k of the slots are heeded. A slot stops at the
    token that completes a tag, at an end token, and when nothing is left of its budget. `read` is what a shard reads:
    of each slot so many cells, which hold the longest active length + steps; where `kv_cache.paged`, of all together so
    many pages, which hold the active lengths. Returns the state and {"tokens" int32 [N,S], "logprobs" fp32 [N,S],
    "steps" int32 [M]}; a slot's tokens are the first length_after - length_before of its column.
    """

    columns, pages = P(None, *rules.ROWS), kv_cache.paged(cfg)

    @each_shard(mesh, out_specs=(rules.ROWS, {"tokens": columns, "logprobs": columns, "steps": rules.ROWS}))
    def run(whole, state):
        params, table = whole
        slots = state.length.shape[0]
        kept = (state.top_p, state.top_k) if truncated else ()
        uniform = _uniform(state.key, state.length + jnp.arange(steps)[:, None])  # a slot moves on by one a step

        cache, before = state.cache, state.length
        if pages:
            held = jnp.where(state.active, before, 0)
            state = dataclasses.replace(state, cache=kv_cache.open_pages(cache, held, read, steps))

        def body(carry):
            i, state, tokens, logprobs = carry
            if pages:
                attend = kv_cache.AttendPages(state.cache, i)
            else:
                attend = kv_cache.Attend(state.cache, None, state.length[:, None], read)
            hidden = decoder.forward_layers(params, cfg, state.token[:, None], state.length[:, None], attend)
            logits = rules.constrain(decoder.logits(params, cfg, hidden[:, 0]), P())  # whole rows, not split over tp
            token, logprob = sample(logits, uniform[i], state.temperature, *kept)
            on = state.active
            stop = jnp.where(on, table.next(state.state, token).astype(jnp.int32), state.state)
            left = state.left - on
            new = dataclasses.replace(
                state,
                cache=attend.cache,
                length=state.length + on,
                token=jnp.where(on, token, state.token),
                state=stop,
                left=left,
                active=on & (stop != table.accept) & (left > 0),
            )
            return i + 1, new, tokens.at[i].set(token), logprobs.at[i].set(logprob)

        begun = state.active.sum()

        def go_on(carry):
            stopped = begun - carry[1].active.sum()
            return (carry[0] < steps) & (stopped * ENOUGH < begun)

        blank = jnp.zeros((steps, slots), jnp.int32), jnp.zeros((steps, slots), jnp.float32)
        done, state, tokens, logprobs = jax.lax.while_loop(go_on, body, (jnp.int32(0), state, *blank))
        if pages:
            cache = kv_cache.close_pages(cache, state.cache, before, state.length)
            state = dataclasses.replace(state, cache=cache)
        return state, {"tokens": tokens, "logprobs": logprobs, "steps": done[None]}

    return run((params, table), state)


def _uniform(keys: jax.Array, positions: jax.Array) -> jax.Array:
    """Numbers fp32 [N,S] in [0, 1), of keys [S] and positions [N,S] alone."""
    keys = jax.vmap(jax.vmap(jax.random.fold_in), (None, 0))(keys, positions)
    return jax.vmap(jax.vmap(jax.random.uniform))(keys)


def sample(
    logits: jax.Array,
    uniform: jax.Array,
    temperature: jax.Array,
    top_p: jax.Array | None = None,
    top_k: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(token int32 [S], its log p fp32 [S]) from logits fp32 [S,V] by inverse CDF of uniform [S] in [0, 1) over the
    tokens by id; temperature fp32 [S], top_p fp32 [S], top_k int32 [S]: see Sampling. Without these two all are kept.

    log p is that of softmax(logits / temperature), whatever is left out. Greedy (0) takes the largest logit, of equal
    ones the lowest id, and reports log p at temperature 1. Two levels, first the block and then the token in it: one
    pass over V instead of a cumulative sum over it, and one random number a row instead of V.
    """
    S, V = logits.shape
    greedy = temperature <= 0
    blocks = jnp.pad(logits, ((0, 0), (0, -V % BLOCK)), constant_values=-jnp.inf).reshape(S, -1, BLOCK)
    tops = blocks.max(-1)  # and of them the largest: `argmax` over V takes XLA on CPU longer than all the rest
    scaled = (blocks - tops.max(-1)[:, None, None]) / jnp.where(greedy, 1.0, temperature)[:, None, None]
    weights = jnp.exp(scaled)
    kept = weights if top_p is None else _truncate(scaled, weights, top_p, top_k)
    block, inside = _search(kept, uniform * _sum(kept))
    block = jnp.where(greedy, tops.argmax(-1), block)
    row = jnp.take_along_axis(scaled, block[:, None, None], 1)[:, 0]
    inside = jnp.where(greedy, row.argmax(-1), inside)
    chosen = jnp.take_along_axis(row, inside[:, None], 1)[:, 0]
    return (block * BLOCK + inside).astype(jnp.int32), chosen - jnp.log(_sum(weights))


def _sum(blocks: jax.Array) -> jax.Array:
    """[S,V/BLOCK,BLOCK] -> [S]"""
    return blocks.sum(-1).sum(-1)


def _truncate(scaled: jax.Array, weights: jax.Array, top_p: jax.Array, top_k: jax.Array) -> jax.Array:
    """The weights with 0 for what top-k, and then top-p, leaves out."""
    count = jnp.where(top_k > 0, top_k, scaled[0].size).astype(jnp.float32)
    weights = jnp.where(_likeliest(scaled, 1.0, count), weights, 0.0)
    nucleus = _likeliest(scaled, weights, top_p * _sum(weights))
    return jnp.where(nucleus | (top_p >= 1)[:, None, None], weights, 0.0)


def _likeliest(x: jax.Array, value: jax.Array | float, need: jax.Array) -> jax.Array:
    """bool, as x [S,V/BLOCK,BLOCK]: the smallest set, the largest x first and of equal ones the lower ids, whose
    `value` (not negative, the same where x is) adds up to `need` [S]. At least one; all if it is never reached.

    The smallest x of the set is found without a sort, bit by bit from the highest, one pass over V each: 32 rows of
    32,768 take 5 ms on one core, a sort takes 160.
    """
    need = jnp.maximum(need, jnp.finfo(jnp.float32).tiny)
    amount = lambda chosen: _sum(jnp.where(chosen, value, 0.0))  # noqa: E731

    def set_bit(i, border):
        higher = border | jnp.uint32(1 << 31) >> i.astype(jnp.uint32)
        return jnp.where(amount(x >= _float(higher)) >= need, higher, border)

    border = _float(jax.lax.fori_loop(0, 32, set_bit, jnp.zeros(len(x), jnp.uint32)))
    border = jnp.fmax(border, x.min((1, 2), keepdims=True))  # NaN where rounding leaves all of them short of `need`
    above, equal = x > border, x == border
    of_each = jnp.where(equal, value, 0.0).max((1, 2))
    taken = jnp.ceil((need - amount(above)) / of_each)
    block, inside = _search(equal.astype(jnp.float32), taken - 0.5)
    ids = jnp.arange(x[0].size).reshape(x.shape[1:])
    return above | equal & (ids <= (block * BLOCK + inside)[:, None, None])


def _float(order: jax.Array) -> jax.Array:
    """uint32 [S] -> the fp32 number [S,1,1] in that place of their order (negative ones have all bits turned)."""
    bits = jnp.where(order >> 31 == 1, order ^ jnp.uint32(1 << 31), ~order)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)[:, None, None]


def _search(weights: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(block, place in it) of the entry of weights [S,V/BLOCK,BLOCK] in which the running sum passes target [S]."""
    block, rest = _pick(weights.sum(-1), target)
    inside, _ = _pick(jnp.take_along_axis(weights, block[:, None, None], 1)[:, 0], rest)
    return block, inside


def _pick(weights: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(index of the entry in which the running sum passes target, what of target is left inside it).

    Never an entry of weight 0: the running sum of hundreds of entries is added up as a tree, and rounding may let it
    rise there. Rounding can also leave target at or above the whole sum; the last entry with weight is taken then.
    """
    sums = jnp.cumsum(weights, -1)
    passed = (sums > target[:, None]) & (weights > 0)
    last = weights.shape[-1] - 1 - jnp.argmax(weights[:, ::-1] > 0, -1)
    index = jnp.where(passed.any(-1), jnp.argmax(passed, -1), last)
    before = jnp.take_along_axis(sums - weights, index[:, None], -1)[:, 0]
    return index, jnp.maximum(target - before, 0.0)
