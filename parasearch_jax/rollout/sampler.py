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

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from parasearch_jax.models import decoder
from parasearch_jax.models.decoder import DecoderConfig, Params
from parasearch_jax.rollout import kv_cache, stops
from parasearch_jax.sharding import rules

BLOCK = 64  # tokens of a block in the two-level search; near the square root of a small vocabulary


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["cache", "length", "token", "state", "left", "active", "key"],
    meta_fields=[],
)
@dataclasses.dataclass
class SamplerState:
    """All slots. Waiting and finished slots are not `active`; they idle through a chunk unchanged."""

    cache: kv_cache.Cache
    length: jax.Array  # int32 [S]; tokens in the cache
    token: jax.Array  # int32 [S]; the pending token
    state: jax.Array  # int32 [S]; automaton state of the turn
    left: jax.Array  # int32 [S]; tokens the turn may still sample
    active: jax.Array  # bool [S]
    key: jax.Array  # key [S]; of the episode, folded with the position for each token


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
        )

    return jax.jit(init, out_shardings=state_shardings(cfg, mesh))


def state_shardings(cfg: DecoderConfig, mesh: Mesh) -> SamplerState:
    """A NamedSharding for every array of the state."""
    layer = (NamedSharding(mesh, rules.CACHE),) * cfg.num_layers
    rows = NamedSharding(mesh, rules.ROWS)
    return SamplerState({"k": layer, "v": layer}, *[rows] * 6)


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
    params: Params, state: SamplerState, feed: dict, *, cfg: DecoderConfig, window: int, mesh: Mesh
) -> SamplerState:
    """Appends tokens to slots and starts a turn in each.

    feed: {"rows" int32 [R] (a slot of the row's shard; the shard's number of slots: a padding row), "ids" int32 [R,T],
    "count" int32 [R] (valid ids), "start" int32 [R] (cells already filled), "pending" int32 [R] (the token after the
    ids), "left" int32 [R], "key" key [R]}, R / M rows for each shard in turn. Prompts (start 0) and documents alike.
    The window must hold start + count; 0 if every row starts at 0 (first prefill).
    """

    kind = cfg.attention if mesh.shape["tp"] == 1 else "xla"  # cuDNN's call, half ours and half XLA's, is untried

    @each_shard(mesh, out_specs=rules.ROWS)
    def run(params, split):
        state, feed = split
        rows, T = feed["rows"], feed["ids"].shape[1]
        offsets = jnp.arange(T, dtype=jnp.int32)
        positions = jnp.where(offsets < feed["count"][:, None], feed["start"][:, None] + offsets, -1)
        attend = kv_cache.Attend(state.cache, rows, positions, window, kind)
        decoder.forward_layers(params, cfg, feed["ids"], jnp.maximum(positions, 0), attend)
        return _start_turn(state, feed, attend.cache, feed["start"] + feed["count"])

    return run(params, (state, feed))


@functools.partial(jax.jit, static_argnames=("cells", "mesh"), donate_argnames="state")
@jax.named_scope("rollout")
def copy_prompts(state: SamplerState, feed: dict, *, cells: int, mesh: Mesh) -> SamplerState:
    """Gives slots the first cells of others and starts a turn in each.

    feed: as `extend` has it, with "source" int32 [R], the slots of the same shard that were fed the same ids, instead
    of "ids" and "start". `cells` is at least the largest count; what is copied beyond a count, nothing reads.
    """

    @each_shard(mesh, out_specs=rules.ROWS)
    def run(_, split):
        state, feed = split
        return _start_turn(state, feed, kv_cache.copy(state.cache, feed["source"], feed["rows"], cells), feed["count"])

    return run((), (state, feed))


def _start_turn(state: SamplerState, feed: dict, cache: kv_cache.Cache, length: jax.Array) -> SamplerState:
    """The state after `feed` has gone into `cache`; `length` [R] of its rows."""
    put = lambda old, new: old.at[feed["rows"]].set(new, mode="drop")  # noqa: E731
    return SamplerState(
        cache=cache,
        length=put(state.length, length),
        token=put(state.token, feed["pending"]),
        state=put(state.state, stops.START),
        left=put(state.left, feed["left"]),
        active=put(state.active, True),
        key=put(state.key, feed["key"]),
    )


@functools.partial(jax.jit, static_argnames=("cfg", "steps", "window", "mesh"), donate_argnames="state")
@jax.named_scope("rollout")
def decode_chunk(
    params: Params,
    state: SamplerState,
    table: stops.Stops,
    temperature: jax.Array,
    *,
    cfg: DecoderConfig,
    steps: int,
    window: int,
    mesh: Mesh,
) -> tuple[SamplerState, dict]:
    """Samples up to `steps` tokens in every active slot; a shard ends early when none of its slots is active.

    table: see `stops.build_stops`; temperature fp32 scalar, 0 for greedy. A slot stops at the token that completes a
    tag, at an end token, and when nothing is left of its budget. The window must hold the longest active length +
    steps. Returns the state and {"tokens" int32 [N,S], "logprobs" fp32 [N,S], "steps" int32 [M]}; a slot's tokens are
    the first length_after - length_before of its column.
    """

    columns = P(None, *rules.ROWS)

    @each_shard(mesh, out_specs=(rules.ROWS, {"tokens": columns, "logprobs": columns, "steps": rules.ROWS}))
    def run(whole, state):
        params, table, temperature = whole
        slots = state.length.shape[0]

        def body(carry):
            i, state, tokens, logprobs = carry
            attend = kv_cache.Attend(state.cache, None, state.length[:, None], window)
            hidden = decoder.forward_layers(params, cfg, state.token[:, None], state.length[:, None], attend)
            logits = rules.constrain(decoder.logits(params, cfg, hidden[:, 0]), P())  # whole rows, not split over tp
            keys = jax.vmap(jax.random.fold_in)(state.key, state.length)
            token, logprob = sample(logits, jax.vmap(jax.random.uniform)(keys), temperature)
            on = state.active
            stop = jnp.where(on, table.next(state.state, token).astype(jnp.int32), state.state)
            left = state.left - on
            new = SamplerState(
                cache=attend.cache,
                length=state.length + on,
                token=jnp.where(on, token, state.token),
                state=stop,
                left=left,
                active=on & (stop != table.accept) & (left > 0),
                key=state.key,
            )
            return i + 1, new, tokens.at[i].set(token), logprobs.at[i].set(logprob)

        def go_on(carry):
            return (carry[0] < steps) & carry[1].active.any()

        blank = jnp.zeros((steps, slots), jnp.int32), jnp.zeros((steps, slots), jnp.float32)
        done, state, tokens, logprobs = jax.lax.while_loop(go_on, body, (jnp.int32(0), state, *blank))
        return state, {"tokens": tokens, "logprobs": logprobs, "steps": done[None]}

    return run((params, table, temperature), state)


def sample(logits: jax.Array, uniform: jax.Array, temperature: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(token int32 [S], its log p fp32 [S]) from logits fp32 [S,V] by inverse CDF of uniform [S] in [0, 1).

    log p is that of the distribution sampled from (logits / temperature); greedy (0) takes the largest logit and
    reports log p at temperature 1. Two levels, first the block and then the token in it: one pass over V instead of a
    cumulative sum over it, and one random number a row instead of V.
    """
    greedy = temperature <= 0
    scaled = logits / jnp.where(greedy, 1.0, temperature)
    S, V = scaled.shape
    top = scaled.max(-1, keepdims=True)
    weights = jnp.exp(scaled - top)
    blocks = jnp.pad(weights, ((0, 0), (0, -V % BLOCK))).reshape(S, -1, BLOCK)
    sums = blocks.sum(-1)
    total = sums.sum(-1)
    block, rest = _pick(sums, uniform * total)
    inside, _ = _pick(jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0], rest)
    token = jnp.where(greedy, scaled.argmax(-1), block * BLOCK + inside).astype(jnp.int32)
    chosen = jnp.take_along_axis(scaled, token[:, None], 1)[:, 0]
    return token, chosen - top[:, 0] - jnp.log(total)


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
