"""Sampling by inverse CDF against numpy, and the cached passes against one full forward pass (T11, T16)."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parasearch_jax.errors import UserError
from parasearch_jax.models import decoder
from parasearch_jax.models.decoder import DecoderConfig
from parasearch_jax.rollout import kv_cache, sampler, stops
from parasearch_jax.sharding.layout import to_sampler
from parasearch_jax.sharding.mesh import make_mesh

CFG = DecoderConfig(
    vocab_size=83,  # no multiple of the sampler's block
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=24,
    eos_token_ids=(0,),
)
SLOTS, CELLS, MESH, KEY = 4, 32, make_mesh(), jax.random.key(9)
EXACT = 1e-5  # fp32, cached against uncached

sample = jax.jit(sampler.sample)


@functools.cache
def random_params():
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: rng.normal(0.1, 0.3, x.shape).astype(np.float32), decoder.param_shapes(CFG))


@functools.cache
def table(end_ids=()):
    return jax.tree.map(jnp.asarray, stops.build_stops(None, [b"x"] * CFG.vocab_size, end_ids))


@pytest.fixture(params=["pages", "windows"])
def reading(request, monkeypatch):
    """Both ways of a chunk to read the cache."""
    kind = {"pages": "auto", "windows": "blocks"}[request.param]
    monkeypatch.setattr(sys.modules[__name__], "CFG", dataclasses.replace(CFG, attention=kind))
    assert kv_cache.paged(CFG) == (request.param == "pages")


def extend(state, feeds, window=CELLS, tokens=12, **sampling):
    """feeds {slot: (pending or None, ids, left)}; `sampling`: fields of Sampling, a value or {slot: value}. Every call
    has the same shapes, so one program serves all."""
    rows = []
    for slot, (pending, ids, left) in feeds.items():
        ids = [*([] if pending is None else [pending]), *ids]
        start = 0 if pending is None else int(state.length[slot])
        rows.append((slot, ids[:-1] + [7] * (tokens - len(ids) + 1), len(ids) - 1, start, ids[-1], left, 100 + slot))
    rows += [(SLOTS, [7] * tokens, 0, 0, 0, 0, 0)] * (SLOTS - len(rows))
    names = ("rows", "ids", "count", "start", "pending", "left", "number")
    feed = {name: np.asarray(column, np.int32) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
    feed["number"] = feed["number"].astype(np.uint32)
    for field in dataclasses.fields(sampler.Sampling):
        given = sampling.get(field.name, field.default)
        values = [given.get(slot, field.default) if isinstance(given, dict) else given for slot in feed["rows"]]
        feed[field.name] = np.asarray(values, np.int32 if field.name == "top_k" else np.float32)
    return sampler.extend(to_sampler(random_params()), state, feed, KEY, cfg=CFG, window=window, mesh=MESH)


def decode(state, steps=6, read=CELLS, end_ids=(), truncated=False):
    static = dict(cfg=CFG, steps=steps, read=read, truncated=truncated, mesh=MESH)
    return sampler.decode_chunk(to_sampler(random_params()), state, table(end_ids), **static)


def poisoned_state(value=np.nan):
    """No cell is used yet, so no result may depend on what the cells hold."""
    state = sampler.init_state(CFG, SLOTS, CELLS, MESH)
    return dataclasses.replace(state, cache=jax.tree.map(lambda x: jnp.full_like(x, value), state.cache))


@functools.partial(jax.jit, static_argnums=0)
def full_logits(cfg, params, ids):
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    return decoder.logits(params, cfg, decoder.forward(params, cfg, ids, positions))


def full_logprobs(row, temperature=1.0):
    """log p of each token of a row after the first, from one full forward pass."""
    ids = np.zeros((1, CELLS), np.int32)
    ids[0, : len(row)] = row
    logits = np.asarray(full_logits(CFG, random_params(), ids), np.float64)[0, : len(row) - 1] / temperature
    logits -= logits.max(-1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return logprobs[np.arange(len(row) - 1), row[1:]]


# ------------------------------------------------------------------------------------------------------------ sample


def kept_ids(x, top_p, top_k):
    """The ids that are kept of one row, ascending: likeliest first, of equal ones the lower ids."""
    order = np.argsort(-x, kind="stable")[: top_k or len(x)]
    p = np.exp(x[order] - x[order[0]])
    n = np.searchsorted(p.cumsum() / p.sum(), top_p) + 1 if top_p < 1 else len(p)
    return np.sort(order[:n])


def reference(logits, uniform, temperature=1.0, top_p=1.0, top_k=0):
    """Inverse CDF over what is kept of each row, in float64; (token, log p over the whole row, distance of uniform to
    the next border). Settings: a number, or one for each row."""
    rows = np.broadcast_arrays(np.asarray(uniform, np.float64), temperature, top_p, top_k)
    out = []
    for x, u, t, p, k in zip(np.asarray(logits, np.float64), *rows, strict=True):
        x = x / (t or 1)
        x -= x.max() + np.log(np.exp(x - x.max()).sum())
        ids = kept_ids(x, p, k) if t else np.array([x.argmax()])
        cdf = np.exp(x[ids]).cumsum() / np.exp(x[ids]).sum()
        token = ids[min((cdf <= u).sum(), len(ids) - 1)]
        out.append((token, x[token], np.abs(cdf - u).min() if t else 1.0))
    return map(np.array, zip(*out, strict=True))


@pytest.mark.parametrize("V", [2, 64, 83, 1000])
def test_equals_inverse_cdf(V):
    rng = np.random.default_rng(V)
    logits = rng.normal(0, 3, (400, V)).astype(np.float32)
    logits[200:] = logits[200]  # one row over an even grid of uniforms too
    uniform = np.concatenate([rng.random(200), (np.arange(200) + 0.5) / 200]).astype(np.float32)
    temperature = rng.choice([0.0, 0.6, 1.0], 400).astype(np.float32)
    token, logprob = map(np.asarray, sample(logits, uniform, temperature))
    want, want_logprob, border = reference(logits, uniform, temperature)
    clear = border > 1e-6
    assert clear.mean() > 0.99
    np.testing.assert_array_equal(token[clear], want[clear])
    np.testing.assert_allclose(logprob[clear], want_logprob[clear], atol=EXACT)


@pytest.mark.parametrize("V", [2, 83, 1000])
def test_top_p_and_top_k_keep_what_numpy_keeps(V):
    """Rows of different settings in one call. Every token that is kept is drawn by the middle of its interval, and
    reported with its probability among all."""
    rng = np.random.default_rng(V)
    rows = []
    for _ in range(60):
        x = rng.normal(0, 2, V).astype(np.float32)
        if rng.random() < 0.5:
            x = np.round(x)  # many are equal
        t, p, k = rng.choice([0.5, 1.0, 2.0]), rng.choice([1.0, 0.95, 0.5, 0.1]), rng.choice([0, 1, 3, 50, V + 5])
        scaled = x.astype(np.float64) / t
        ids = kept_ids(scaled, p, k)
        cdf = np.exp(scaled[ids] - scaled.max()).cumsum()
        middle = (np.append(0, cdf[:-1]) + cdf) / 2 / cdf[-1]
        logprob = scaled[ids] - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum())
        wide = np.diff(np.append(0, cdf)) / cdf[-1] > 1e-5
        rows += [(x, u, t, p, k, *want) for u, *want in np.stack([middle, ids, logprob], 1)[wide]]
    *args, want, want_logprob = (np.array(column) for column in zip(*rows, strict=True))
    args = [x.astype(np.float32) for x in args[:-1]] + [args[-1].astype(np.int32)]
    token, logprob = sample(*args)
    np.testing.assert_array_equal(token, want)
    np.testing.assert_allclose(logprob, want_logprob, atol=EXACT)


NEVER = -1e30  # the logit of a row past the vocabulary that is in use
KEEPS = [  # logits, temperature, top_p, top_k, the ids that are kept
    ([1, 3, 2, 0], 1, 1.0, 1, [1]),
    ([1, 3, 2, 0], 1, 1e-6, 0, [1]),
    ([1, 3, 2, 0], 1, 1e-45, 0, [1]),  # p times the mass is no fp32 number
    ([1, 3, 2, 0], 1, np.nextafter(np.float32(1), np.float32(0)), 0, [0, 1, 2, 3]),
    ([1, 3, 2, 0], 1, 1.0, 99, [0, 1, 2, 3]),
    ([1, 3, 2, 0], 0, 0.9, 3, [1]),  # greedy, whatever else is set
    ([0, 0, 0, 0], 1, 0.5, 0, [0, 1]),  # exactly at a border, and of equal ones the lower ids
    ([0, 0, 0, 0], 1, 0.51, 0, [0, 1, 2]),
    ([0, 0, 0, 0], 1, 1.0, 3, [0, 1, 2]),
    ([0, 0, 0, 0], 1, 0.5, 3, [0, 1]),  # of the three that top-k keeps
    ([0.0, -0.0, 0.0, -0.0], 1, 1.0, 3, [0, 1, 2]),
    ([0, 5, 0, 5], 1, 1.0, 3, [0, 1, 3]),
    ([0, 5, 0, 5], 1, 0.3, 0, [1]),
    ([5, 200, 5, 5], 1, 0.99, 0, [1]),  # one has all the mass
    ([5, 200, 5, 5], 1, 1.0, 2, [1]),  # the other has a weight of 0
    ([2, NEVER, 1, NEVER], 1, 0.99, 0, [0, 2]),
    ([2, NEVER, 1, NEVER], 1, 1.0, 3, [0, 2]),
    ([2, -np.inf, 1, -np.inf], 0.5, 0.99, 4, [0, 2]),
]


def test_borders_of_top_p_and_top_k():
    """Over an even grid of uniforms exactly these are drawn."""
    grid = np.float32((np.arange(4000) + 0.5) / 4000)
    for logits, temperature, p, k, want in KEEPS:
        settings = (np.full(len(grid), x, np.float32) for x in (temperature, p))
        token, _ = sample(np.tile(np.float32(logits), (len(grid), 1)), grid, *settings, np.full(len(grid), k, np.int32))
        assert np.unique(token).tolist() == want, (logits, temperature, p, k)


@pytest.mark.parametrize("V", [83, 32768])
def test_rows_that_keep_all_are_drawn_as_without_truncation(V):
    """Bit for bit, beside rows that are truncated."""
    rng = np.random.default_rng(V)
    logits, uniform = rng.normal(0, 3, (64, V)).astype(np.float32), rng.random(64).astype(np.float32)
    logits[:, 0], uniform[::4] = -25, 0  # the first token, though its weight is lost in the sum of all
    temperature = rng.choice([0.0, 0.7, 1.0], 64).astype(np.float32)
    whole = np.arange(64) % 2 == 0
    top_p, top_k = np.where(whole, 1, 0.8).astype(np.float32), np.where(whole, 0, 7).astype(np.int32)
    plain, truncated = sample(logits, uniform, temperature), sample(logits, uniform, temperature, top_p, top_k)
    for a, b in zip(plain, truncated, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[whole], np.asarray(b)[whole])
    assert (np.asarray(plain[0]) != np.asarray(truncated[0])).any()


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("temperature", -1.0, "temperature is -1.0"),
        ("temperature", float("nan"), "temperature is nan"),
        ("top_p", 0.0, "top_p is 0.0"),
        ("top_p", 1.5, "top_p is 1.5"),
        ("top_k", -1, "top_k is -1"),
        ("top_k", 1.5, "top_k is 1.5"),
    ],
)
def test_a_wrong_setting_is_named(field, value, told):
    with pytest.raises(UserError, match=told):
        sampler.Sampling(**{field: value})


def test_frequencies_match_softmax():
    """Pearson's statistic over 20,000 draws has mean 82 and deviation 12.8 here; the bound is 5 deviations."""
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 1, CFG.vocab_size), jnp.float32)
    uniform = jax.random.uniform(jax.random.key(3), 20_000)
    token, _ = sample(jnp.broadcast_to(logits, (20_000, CFG.vocab_size)), uniform, jnp.ones(20_000))
    want = np.asarray(jax.nn.softmax(logits), np.float64) * 20_000
    found = np.bincount(token, minlength=CFG.vocab_size)
    assert ((found - want) ** 2 / want).sum() < 82 + 5 * np.sqrt(2 * 82)


def test_t11_temperature():
    logits = jnp.array([[2.0, 0.0]])
    for temperature, want in [(0.5, -0.018150), (1.0, -0.126928)]:
        token, logprob = sample(logits, jnp.zeros(1), jnp.full(1, temperature))
        assert token[0] == 0 and abs(float(logprob[0]) - want) < 1e-6


def test_greedy_takes_the_largest_at_temperature_1():
    logits = np.random.default_rng(1).normal(0, 3, (50, CFG.vocab_size)).astype(np.float32)
    token, logprob = sample(logits, np.full(50, 0.999, np.float32), jnp.zeros(50))
    np.testing.assert_array_equal(token, logits.argmax(-1))
    want = np.asarray(jax.nn.log_softmax(logits))[np.arange(50), logits.argmax(-1)]
    np.testing.assert_allclose(logprob, want, atol=EXACT)


def test_never_an_impossible_token():
    """uniform at both ends, probability only on a few tokens, the last block and padding of the block empty."""
    rng = np.random.default_rng(2)
    logits = np.full((600, 150), -np.inf, np.float32)
    for row in logits:
        chosen = rng.choice(140, rng.integers(1, 5), replace=False)
        row[chosen] = rng.normal(0, 5, len(chosen))
    for u in (0.0, np.nextafter(np.float32(1), np.float32(0)), 0.5):
        token, logprob = sample(logits, np.full(600, u, np.float32), jnp.ones(600))
        assert np.isfinite(logits[np.arange(600), token]).all() and np.isfinite(np.asarray(logprob)).all()


def test_rounding_of_long_sums_never_picks_an_empty_entry():
    """Over hundreds of entries XLA sums in a tree, and the running sum may rise by an ulp at an entry of weight 0."""
    rng = np.random.default_rng(3)
    weights = (rng.exponential(size=(400, 512)) * (rng.random((400, 512)) < 0.5)).astype(np.float32)
    sums = np.asarray(jax.jit(lambda w: jnp.cumsum(w, -1))(weights))
    row, column = np.nonzero((np.diff(sums) > 0) & (weights[:, 1:] == 0))
    assert len(row) > 100
    index, rest = jax.jit(sampler._pick)(weights[row], sums[row, column])
    assert (weights[row, index] > 0).all() and (np.asarray(rest) >= 0).all()


# ------------------------------------------------------------------------------------------------- extend and decode


def take(state, before, out, rows):
    """Appends the sampled tokens to `rows` {slot: (ids, logprobs, sampled)}."""
    for slot, (ids, logprobs, sampled) in rows.items():
        n = int(state.length[slot]) - before[slot]
        ids += np.asarray(out["tokens"])[:n, slot].tolist()
        logprobs += np.asarray(out["logprobs"])[:n, slot].tolist()
        sampled += [True] * n


@pytest.mark.parametrize("garbage", [np.nan, 1e9])
def test_cached_log_probs_equal_one_full_pass(garbage):
    """Rows of different length and temperature (one greedy), documents appended midway to two of them, slot 2 idle;
    every free cell is garbage."""
    temperature = {0: 1.0, 1: 0.7, 3: 0.0}
    rng = np.random.default_rng(4)
    prompts = {slot: rng.integers(1, CFG.vocab_size, n).tolist() for slot, n in {0: 3, 1: 9, 3: 1}.items()}
    rows = {slot: (list(ids), [0.0] * len(ids), [False] * len(ids)) for slot, ids in prompts.items()}
    state = extend(
        poisoned_state(garbage), {slot: (None, ids, 4) for slot, ids in prompts.items()}, temperature=temperature
    )
    for docs in ({0: 4, 1: 6}, {0: 2, 3: 5}, {}):
        before = state.length.tolist()
        state, out = decode(state)
        take(state, before, out, {slot: row for slot, row in rows.items() if state.length[slot] != before[slot]})
        assert not np.asarray(state.active).any() and out["steps"].tolist() == [4]  # all budgets used: it ended early
        feeds = {}
        for slot, n in docs.items():
            ids = rng.integers(1, CFG.vocab_size, n).tolist()
            feeds[slot] = (rows[slot][0][-1], ids, 4)
            for column, new in zip(rows[slot], (ids, [0.0] * n, [False] * n), strict=True):
                column += new
        if feeds:
            state = extend(state, feeds, temperature=temperature)
    assert [len(rows[slot][0]) for slot in rows] == [3 + 4 + 4 + 4 + 2 + 4, 9 + 4 + 6 + 4, 1 + 4 + 5 + 4]
    for slot, (ids, logprobs, sampled) in rows.items():
        want = np.where(sampled[1:], full_logprobs(np.array(ids), temperature[slot] or 1), 0)
        np.testing.assert_allclose(logprobs[1:], want, atol=EXACT, err_msg=str(slot))
        assert int(state.length[slot]) == len(ids) - 1  # the last one is pending
    assert int(state.length[2]) == 0


def test_tokens_come_from_the_uniform_of_key_and_position(reading):
    state = extend(poisoned_state(), {0: (None, [5, 6, 7], 9), 2: (None, [8], 9)})
    state, out = decode(state)
    for slot, row in {0: [5, 6, 7], 2: [8]}.items():
        for token in np.asarray(out["tokens"])[:, slot].tolist():
            ids = np.zeros((1, CELLS), np.int32)
            ids[0, : len(row)] = row
            logits = full_logits(CFG, random_params(), ids)[0, len(row) - 1]
            uniform = jax.random.uniform(jax.random.fold_in(jax.random.fold_in(KEY, 100 + slot), len(row) - 1))
            want, _, border = reference(logits[None], uniform[None])
            assert border[0] > 1e-5 and token == want[0]
            row.append(token)


def test_the_window_and_the_chunk_change_nothing(reading):
    feeds = {0: (None, [5, 6, 7], 10), 1: (None, [9], 8)}
    _, whole = decode(extend(poisoned_state(), feeds), steps=6)
    state, narrow = decode(extend(poisoned_state(), feeds, window=12), steps=6, read=2 if kv_cache.paged(CFG) else 12)
    np.testing.assert_array_equal(whole["tokens"], narrow["tokens"])
    np.testing.assert_allclose(whole["logprobs"], narrow["logprobs"], atol=EXACT)
    state, first = decode(extend(poisoned_state(), feeds), steps=2)
    _, rest = decode(state, steps=4)
    tokens = np.concatenate([first["tokens"], rest["tokens"]])[:, :2]
    np.testing.assert_array_equal(tokens, np.asarray(whole["tokens"])[:, :2])


def test_truncated_slots_beside_others(reading):
    """Slot 0 draws from its two likeliest tokens, slot 1 takes the likeliest, slot 2 draws from all, bit for bit as in
    a chunk that heeds no truncation; all report log p over the whole vocabulary."""
    feeds = {slot: (None, [5, 6, 7 + slot], 9) for slot in (0, 1, 2)}
    settings = {"top_k": {0: 2}, "top_p": {1: 1e-6}}
    state = extend(poisoned_state(), feeds, **settings)
    _, out = decode(state, truncated=True)
    tokens, logprobs = (np.asarray(out[name])[:, :3].T for name in ("tokens", "logprobs"))
    for row, drawn, found in zip(feeds.values(), tokens, logprobs, strict=True):
        ids = np.concatenate([row[1], drawn])
        np.testing.assert_allclose(found, full_logprobs(ids)[2:], atol=EXACT)
    ids = np.zeros((2, CELLS), np.int32)
    ids[:, :3], ids[:, 3:9] = [feeds[0][1], feeds[1][1]], tokens[:2]
    ranks = np.argsort(-np.asarray(full_logits(CFG, random_params(), ids))[:, 2:8], kind="stable")
    assert all(tokens[0, i] in ranks[0, i, :2] for i in range(6)) and (tokens[1] == ranks[1, :, 0]).all()
    assert (tokens[0] != ranks[0, :, 0]).any()
    _, plain = decode(extend(poisoned_state(), feeds, **settings))
    for name in ("tokens", "logprobs"):
        np.testing.assert_array_equal(plain[name][:, 2], out[name][:, 2])
        assert (np.asarray(plain[name])[:, :2] != np.asarray(out[name])[:, :2]).any(0).all()


def test_a_stopped_row_is_left_alone(reading):
    """An end token in one row: it stops, keeps that token, and nothing in its cells moves while the other goes on."""
    feeds = {0: (None, [5, 6, 7], 20), 1: (None, [9], 20)}
    _, out = decode(extend(poisoned_state(0), feeds))
    first, other = np.asarray(out["tokens"])[:, :2].T.tolist()
    end = first[2]
    assert end not in first[:2] + other
    state, out = decode(extend(poisoned_state(0), feeds), end_ids=(end,))
    assert state.length.tolist()[:2] == [2 + 3, 0 + 3] and state.active.tolist() == [False, True, False, False]
    assert np.asarray(out["tokens"])[:3, 0].tolist() == first[:3] and int(state.token[0]) == end
    used = jax.tree.map(lambda x: np.asarray(x)[0, :, :5].copy(), state.cache)
    state, _ = decode(state, end_ids=(end,))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, np.asarray(b)[0, :, :5]), used, state.cache)
    assert state.length.tolist()[:2] == [5, 9]


def test_capacity(reading):
    """Row 0 reaches its last cell and row 3 its budget while row 1 goes on: both stop, and bit for bit no cell changes
    but those of the tokens that came, and the one behind a row's last, where its pending token will lie."""
    prompt = list(range(1, 13))
    state = extend(poisoned_state(0), {0: (None, prompt, 2), 1: (None, [9], 31), 3: (None, prompt, 3)})
    state = extend(state, {0: (40, list(range(20, 32)), 6)})  # 12 + 12 tokens before, one of them pending
    for _ in range(3):
        state, _ = decode(state, steps=6)
    before = int(state.length[0])
    assert not state.active[0] and state.active[1]
    state = extend(state, {0: (int(state.token[0]), [3], CELLS - before - 2)})  # all the room there is
    cells = jax.tree.map(lambda x: np.asarray(x).copy(), state.cache)
    lengths = state.length.tolist()
    for _ in range(8):
        state, _ = decode(state, steps=6)
    assert not state.active.any() and state.length.tolist() == [CELLS - 1, CELLS - 1, 0, 11 + 3]  # and a pending token
    for old, new in zip(jax.tree.leaves(cells), jax.tree.leaves(state.cache), strict=True):
        for slot, (length, after) in enumerate(zip(lengths, state.length.tolist(), strict=True)):
            np.testing.assert_array_equal(old[slot, :, :length], np.asarray(new)[slot, :, :length])
            np.testing.assert_array_equal(old[slot, :, after + 1 :], np.asarray(new)[slot, :, after + 1 :])


def test_a_chunk_ends_when_a_third_have_stopped():
    """The host then has slots to fill."""
    for lefts, steps in (((2, 4, 9, 9), 4), ((2, 2, 9, 9), 2), ((2, 9, 9), 2), ((1, 2, 3, 3), 2), ((9,), 6)):
        state = extend(poisoned_state(0), {slot: (None, [5, 6, 7], left) for slot, left in enumerate(lefts)})
        state, out = decode(state)
        assert out["steps"].tolist() == [steps], lefts
        assert state.length.tolist()[: len(lefts)] == [2 + min(left, steps) for left in lefts]


def test_writes_beyond_a_slot_are_dropped():
    """T16: a chunk of 4 at offset 10 of 12 cells is not shifted back to 8, and padding is written nowhere."""
    cells, new = jnp.zeros((2, 1, 12, 1)), jnp.arange(1.0, 9.0).reshape(2, 4, 1, 1)
    out = np.asarray(kv_cache.write(cells, jnp.array([1, 5]), jnp.array([[10, 11, 12, 13], [0, 1, 2, 3]]), new))
    assert out[1, 0, :, 0].tolist() == [0] * 10 + [1, 2] and not out[0].any()
    out = np.asarray(kv_cache.write(cells, jnp.array([0, 1]), jnp.array([[3, -1, -1, -1], [-1] * 4]), new))
    assert out[0, 0, :, 0].tolist() == [0, 0, 0, 1] + [0] * 8 and not out[1].any()


def test_decode_moves_nothing_between_host_and_device_and_traces_once():
    params, static = to_sampler(random_params()), dict(cfg=CFG, steps=6, read=CELLS, truncated=False, mesh=MESH)
    params = jax.device_put(params)
    state = extend(poisoned_state(), {0: (None, [5, 6, 7], 20)})
    state, _ = sampler.decode_chunk(params, state, table(), **static)
    programs = sampler.decode_chunk._cache_size()
    with jax.transfer_guard("disallow"):
        state, _ = sampler.decode_chunk(params, state, table(), **static)
    assert sampler.decode_chunk._cache_size() == programs


def test_first_prefill_reads_no_cell(reading):
    """Window 0: the same cache and the same next tokens as through the window, whatever the cells held."""
    ids = list(range(20, 29))
    feeds = {0: (None, ids, 9), 2: (None, ids[:4], 9)}
    through, first = (extend(poisoned_state(), feeds, window=window) for window in (CELLS, 0))
    for a, b in zip(jax.tree.leaves(through.cache), jax.tree.leaves(first.cache), strict=True):
        np.testing.assert_allclose(a[0, :, :8], b[0, :, :8], atol=EXACT)
        np.testing.assert_allclose(a[2, :, :3], b[2, :, :3], atol=EXACT)
    outs = [decode(state)[1] for state in (through, first)]
    np.testing.assert_array_equal(outs[0]["tokens"][:, [0, 2]], outs[1]["tokens"][:, [0, 2]])
    np.testing.assert_allclose(outs[0]["logprobs"][:, [0, 2]], outs[1]["logprobs"][:, [0, 2]], atol=EXACT)


def test_t16_cache_over_turns_with_a_left_padded_row():
    """A row of 12 as prompt 3, three single steps, a chunk of 4 documents, two steps; beside it the same row, fed with
    two padding ids on its left. Both give the logits of one full pass, at the same cells."""
    params = jax.device_put(to_sampler(random_params()))
    row = np.random.default_rng(5).integers(1, CFG.vocab_size, 12)
    want = np.asarray(full_logits(CFG, random_params(), np.pad(row, (0, CELLS - 12))[None].astype(np.int32)))[0, :12]
    cache = jax.tree.map(lambda x: jnp.full_like(x, np.nan), kv_cache.init_cache(CFG, 2, 12))

    @jax.jit
    def forward(params, cache, ids, at):
        attend = kv_cache.Attend(cache, jnp.arange(2), at, 12)
        hidden = decoder.forward_layers(params, CFG, ids, jnp.maximum(at, 0), attend)
        return decoder.logits(params, CFG, hidden), attend.cache

    start = 0
    for size in (3, 1, 1, 1, 4, 1, 1):
        at = np.arange(start, start + size, dtype=np.int32)
        ids, positions = np.tile(row[at], (2, 1)), np.tile(at, (2, 1))
        if size > 1:  # the same tokens, moved to the right by two columns of padding
            ids = np.stack([np.pad(row[at], (0, 2)), np.pad(row[at], (2, 0))])
            positions = np.stack([np.pad(at, (0, 2), constant_values=-1), np.pad(at, (2, 0), constant_values=-1)])
        got, cache = forward(params, cache, ids.astype(np.int32), positions)
        np.testing.assert_allclose(got[0][positions[0] >= 0], want[at], atol=1e-4)
        np.testing.assert_allclose(got[1][positions[1] >= 0], want[at], atol=1e-4)
        start += size
    for layer in (*cache["k"], *cache["v"]):
        np.testing.assert_allclose(layer[0], layer[1], atol=1e-5)
