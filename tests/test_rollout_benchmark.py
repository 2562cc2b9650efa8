"""benchmarks/rollout.py: that its loops do the same job, each in the way it is named after."""

import importlib.util
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from lockstep import Design, Fine, LockStep
from scripted_search import Script, scripted, small_world, words_tokenizer

from parasearch_jax.rollout import Engine
from parasearch_jax.rollout.kv_cache import PAGE

# By its path: `rollout` is also a folder of tests.
spec = importlib.util.spec_from_file_location("rollout_benchmark", f"{sys.path[0]}/rollout.py")
rollout = importlib.util.module_from_spec(spec)
spec.loader.exec_module(rollout)

TINY = {
    "vocab_size": 600,
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "intermediate_size": 24,
}
SCRIPT = Script(prompt=10, documents=60, turns=3, median=4, p95=12, limit=16)
SAMPLES, BATCH = 4, 4
DESIGNS = {
    "a": Design(behind=rollout.BEHIND),
    "b": Design(),
    "keeps": Design(keeps=True),
    "shares": Design(keeps=True, shares=True),
}


def run(work, batch):
    """loop -> (its episodes, greedy; what it counted)"""
    loops = {name: LockStep(work.model, work.config, design, batch) for name, design in DESIGNS.items()}
    loops["ours"] = Engine(work.model, work.config)
    out = {}
    for name, loop in loops.items():
        work.prepare(loop)
        given = dict(samples=work.samples, temperature=0.0)
        out[name] = loop.rollout(work.questions, work.protocol, work.retriever, **given), loop.pop_stats()
    loops["ours"].close()
    return out


@pytest.fixture(scope="module")
def job():
    work = scripted(3, SAMPLES, SCRIPT, TINY, slots=BATCH, chunk=4)
    return work, run(work, BATCH)


def parts(episode, logprobs=True):
    said = [(s.source, s.text, s.ids) for s in episode.segments]
    return episode.question_id, episode.sample, episode.stop_reason, episode.actions, said


@pytest.mark.parametrize("name", [*DESIGNS, "ours"])
def test_every_loop_follows_the_script(job, name):
    work, out = job
    for episode, lengths in zip(out[name][0], work.lengths.tolist(), strict=True):
        tokens = [(s.source, len(s.ids)) for s in episode.segments]
        docs = ("docs", SCRIPT.documents)
        turns = [("policy", n) for n in lengths]
        assert tokens == [("prompt", SCRIPT.prompt), turns[0], docs, turns[1], docs, turns[2]]
        assert len(episode.searches) == 2 and episode.stop_reason == "answer"


@pytest.mark.parametrize("name", DESIGNS)
def test_greedy_episodes_are_the_engine_s(job, name):
    _, out = job
    assert list(map(parts, out[name][0])) == list(map(parts, out["ours"][0]))
    if name != "a":  # which encodes its text anew
        for mine, theirs in zip(out[name][0], out["ours"][0], strict=True):
            for a, b in zip(mine.segments, theirs.segments, strict=True):
                np.testing.assert_allclose(a.logprobs or (), b.logprobs or (), atol=1e-4)


def test_each_loop_feeds_and_samples_what_it_is_named_after(job):
    work, out = job
    stats = {name: counted for name, (_, counted) in out.items()}
    lengths, starts = work.lengths, SCRIPT.starts(work.lengths)
    docs, prompts = 2 * SCRIPT.documents * len(lengths), SCRIPT.prompt * len(work.questions)
    fed = {name: counted["tokens/prefilled"] for name, counted in stats.items()}
    assert fed["a"] == fed["b"] == starts.sum()
    assert fed["keeps"] == docs + SAMPLES * prompts
    assert fed["shares"] == fed["ours"] == docs + prompts
    assert all(counted["tokens/sampled"] == lengths.sum() for counted in stats.values())
    batches = lengths.reshape(-1, BATCH, SCRIPT.turns)
    assert stats["b"]["decode_steps"] == batches.max(1).sum()
    behind = np.minimum(np.ceil(rollout.BEHIND * batches), SCRIPT.limit - batches).max(1).sum()
    assert stats["a"]["decode_steps"] == batches.max(1).sum() + behind
    assert stats["b"]["slot_steps"] == BATCH * stats["b"]["decode_steps"]


@pytest.mark.slow
def test_the_small_world_ends_its_turns_by_itself():
    work = small_world(4, 2, slots=4, max_total_tokens=192)
    out = run(work, 8)
    want = list(map(parts, out["ours"][0]))
    assert {len(e.segments) for e in out["ours"][0]} != {2}, "no episode searched"
    for name in ("b", "keeps", "shares"):
        assert list(map(parts, out[name][0])) == want
    assert out["b"][1]["slot_steps"] < 8 * out["b"][1]["decode_steps"]  # rows that are done take no slots
    assert out["keeps"][1]["tokens/prefilled"] < out["b"][1]["tokens/prefilled"]
    assert out["a"][1]["decode_steps"] > out["b"][1]["decode_steps"]


def test_the_script_is_drawn_as_asked():
    script = Script()
    lengths = script.draw(4000)
    assert np.median(lengths) == pytest.approx(script.median, rel=0.05)
    assert np.quantile(lengths, 0.95) == pytest.approx(script.p95, rel=0.05)
    assert lengths.min() >= 1 and lengths.max() == script.limit
    usual = script.typical(32, 8)
    steps = np.mean([script.draw(32, seed)[:8].max(0).sum() for seed in range(300)])
    assert usual[:8].max(0).sum() == pytest.approx(steps, rel=0.1)
    assert usual.sum() / 32 == pytest.approx(lengths.sum() / 4000, rel=0.1)


def test_words_encode_to_the_ids_they_came_from():
    tokenizer, words = words_tokenizer(600)
    ids = np.random.default_rng(0).integers(0, words, 50).tolist()
    assert tokenizer(tokenizer.decode(ids))["input_ids"] == ids


def test_sizes_of_the_lock_step_loops_hold_every_call():
    sizes = Fine(8, 2624, 450, True)
    assert sizes.lengths[-1] == sizes.long_windows[-1] == 2624
    assert np.diff(sizes.lengths).max() == 128 and np.diff(sizes.long_windows).max() == 256
    assert sizes.reads[-1] == 8 * 2624 / PAGE and np.diff(sizes.reads).max() <= -(-sizes.reads[-1] // 16)
    assert Fine(8, 2624, 450, False).reads == sizes.long_windows


def test_the_tables_show_rates_and_shares():
    rates = {"a": [1.0, 2.0], "b": [2.0, 2.0], "keeps": [3.0], "shares": [4.0], "ours": [4.0, 6.0]}
    counted = {key: 1.0 for key, _ in rollout.COLUMNS.values()}
    results = {name: [counted | {"rate": rate} for rate in each] for name, each in rates.items()}
    assert "| ours / (a), round by round | 3.50 | 3.00 | 4.00 |" in rollout.rates(results)
    rows = rollout.shares(results).splitlines()
    assert len({row.count("|") for row in rows[:-2]}) == 1
    assert f"| x 1.33 | {math.log(4 / 3) / math.log(5 / 1.5):.0%} |" in rows[5]
    assert sum(int(row.split("|")[4].strip(" %")) for row in rows[3:7]) == pytest.approx(100, abs=2)  # rounded


@pytest.mark.slow
def test_the_script_runs():
    command = [sys.executable, rollout.__file__, "--quick", "--only=small"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "ours / (b), round by round" in done.stdout
