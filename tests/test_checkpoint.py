"""Checkpoints: what comes back is bit for bit what went in, and nothing half-written is ever taken."""

import json
import resource
import shutil
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from parasearch_jax.checkpoint import Checkpoints, is_complete
from parasearch_jax.errors import UserError


def make_state(seed=0):
    """Parameters in two dtypes, an optax chain (named tuples, empty states), a typed key and a scalar."""
    keys = jax.random.split(jax.random.key(seed), 2)
    params = {
        "w": jax.random.normal(keys[0], (3, 5)),
        "layers": (jax.random.normal(keys[1], (2, 4), jnp.bfloat16), jnp.float32(1e-30)),
    }
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    _, opt = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    return {"params": params, "opt": opt, "key": keys[0], "count": jnp.uint32(4_000_000_000)}


def assert_bitwise(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("abstract", [False, True])
def test_state_and_run_state_come_back(tmp_path, abstract):
    state, run = make_state(), {"step": 3, "memory": {"q1": 2, "q2": float("inf")}, "order": [3, 1], "best": None}
    saver = Checkpoints(tmp_path / "checkpoints")
    assert saver.latest() is None
    saver.save(3, state, run)
    saver.wait()
    saver.close()

    like = make_state(seed=7)
    if abstract:
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
    reader = Checkpoints(tmp_path / "checkpoints", read_only=True)
    assert reader.latest() == 3
    got, got_run = reader.restore(3, like)
    reader.close()
    assert_bitwise(got, state)
    assert got_run == run
    assert type(got["opt"][1][0]) is type(state["opt"][1][0])  # ScaleByAdamState, not a list


def test_state_may_be_donated_right_after_save(tmp_path):
    update = jax.jit(lambda s: jax.tree.map(lambda x: x * 0.5 - 7, s), donate_argnums=0)
    make = jax.jit(lambda: {str(i): jnp.arange(1 << 19, dtype=jnp.float32) + i for i in range(4)})
    want, state = jax.tree.map(np.array, make()), make()
    saver = Checkpoints(tmp_path)
    saver.save(1, state, {})
    for _ in range(3):
        state = update(state)
    jax.block_until_ready(state)
    saver.wait()
    got, _ = saver.restore(1, state)
    saver.close()
    jax.tree.map(np.testing.assert_array_equal, got, want)


def steps_on_disk(directory):
    return sorted(int(p.name) for p in directory.iterdir() if p.name.isdecimal())


def test_keeps_the_last_ones(tmp_path):
    saver = Checkpoints(tmp_path, keep=2)
    for step in range(1, 5):
        saver.save(step, {"w": jnp.ones(2)}, {})
    saver.close()
    assert steps_on_disk(tmp_path) == [3, 4]


def test_keeps_the_protected_one_until_another_is(tmp_path):
    saver, seen = Checkpoints(tmp_path, keep=1), []
    for step, protected in ((1, 1), (2, 1), (3, 3), (4, 3), (5, None), (6, None)):
        saver.save(step, {"w": jnp.ones(2)}, {})
        saver.protect(protected)  # after the save has begun: what it was measured on is the checkpoint's weights
        saver.wait()
        seen.append(steps_on_disk(tmp_path))
    saver.close()
    assert seen == [[1], [1, 2], [1, 3], [3, 4], [3, 5], [6]]


def test_protection_is_given_again_after_a_resume(tmp_path):
    saver = Checkpoints(tmp_path, keep=1)
    saver.protect(1)
    for step in (1, 2):
        saver.save(step, {"w": jnp.ones(2)}, {})
    saver.close()
    again = Checkpoints(tmp_path, keep=1)
    again.protect(1)
    again.save(3, {"w": jnp.ones(2)}, {})
    again.close()
    assert steps_on_disk(tmp_path) == [1, 3]


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_none_is_refused(tmp_path, keep):
    with pytest.raises(UserError, match=rf"train\.keep is {keep}, .* at least 1"):
        Checkpoints(tmp_path, keep=keep)


def test_a_kill_while_one_is_deleted_leaves_no_part_of_it(tmp_path):
    saver = Checkpoints(tmp_path, keep=1)
    for step in (1, 2):
        saver.save(step, {"w": jnp.ones(2)}, {})
    saver._manager.wait_until_finished()  # Orbax is done, the deletion is to come
    assert steps_on_disk(tmp_path) == [2] and is_complete(tmp_path / "deleted" / "1")
    Checkpoints(tmp_path, read_only=True).close()
    assert (tmp_path / "deleted").exists()
    Checkpoints(tmp_path, keep=1).close()
    assert [p.name for p in tmp_path.iterdir()] == ["2"]
    saver.check()
    saver.save(3, {"w": jnp.ones(2)}, {})
    saver.wait()
    assert [p.name for p in tmp_path.iterdir()] == ["3"]
    saver.close()


@pytest.fixture
def small_files():
    """Files of at most 1 MiB: a write beyond that fails as on a full disk, for root too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failed_background_save_raises_every_time(tmp_path, small_files):
    big = {"w": jax.random.normal(jax.random.key(0), (1 << 20,))}  # 4 MiB that do not compress
    saver = Checkpoints(tmp_path)
    saver.save(1, {"w": jnp.ones(3)}, {})
    saver.save(2, big, {})  # returns: the write fails behind it
    for call in (saver.wait, saver.wait, lambda: saver.save(3, {"w": jnp.ones(3)}, {}), saver.close):
        with pytest.raises(UserError, match=r"checkpoint 2 in .* failed: .*the last complete checkpoint is 1"):
            call()
    assert steps_on_disk(tmp_path) == [1]
    again = Checkpoints(tmp_path)
    assert again.latest() == 1
    again.save(2, {"w": jnp.ones(3)}, {})
    again.close()
    assert steps_on_disk(tmp_path) == [1, 2]
    assert not [p for p in tmp_path.iterdir() if "tmp" in p.name]  # the failed save's folder is cleaned up


def test_check_reports_a_failed_save_and_the_old_checkpoints_stay(tmp_path, small_files):
    big = {"w": jax.random.normal(jax.random.key(0), (1 << 20,))}
    saver = Checkpoints(tmp_path, keep=1)
    saver.check()
    saver.save(1, {"w": jnp.ones(3)}, {})
    saver.wait()
    saver.check()
    saver.save(2, big, {})
    with pytest.raises(UserError, match=r"checkpoint 2 in .* failed: .*the last complete checkpoint is 1"):
        for _ in range(3000):  # as the loop asks, a step after the other; the save fails long before
            saver.check()
            time.sleep(0.01)
    for call in (saver.check, saver.wait, saver.close):
        with pytest.raises(UserError, match="checkpoint 2 in"):
            call()
    assert steps_on_disk(tmp_path) == [1] and is_complete(tmp_path / "1")  # keep=1, but 2 never came to be


def test_check_does_not_wait(tmp_path, monkeypatch):
    go = threading.Event()
    saver = Checkpoints(tmp_path)
    finish = saver._manager._finalize
    monkeypatch.setattr(saver._manager, "_finalize", lambda *args: (go.wait(20), finish(*args)))
    saver.save(1, {"w": jnp.ones(3)}, {})
    saver.check()
    assert not go.is_set() and saver._manager.is_saving_in_progress()  # check came back while the save went on
    go.set()
    saver.wait()
    saver.check()
    saver.close()
    assert steps_on_disk(tmp_path) == [1]


def test_a_save_that_can_not_begin_is_a_failed_save(tmp_path, monkeypatch):
    saver = Checkpoints(tmp_path)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saver._manager, "save", full)
    with pytest.raises(UserError, match=r"checkpoint 1 in .*No space left"):
        saver.save(1, {"w": jnp.ones(3)}, {})
    for call in (saver.check, saver.close):
        with pytest.raises(UserError, match="checkpoint 1 in"):
            call()


def test_unfinished_and_foreign_folders_are_not_taken(tmp_path):
    saver = Checkpoints(tmp_path, keep=2)
    for step in (1, 2):
        saver.save(step, {"w": jnp.full(3, step)}, {"step": step})
    saver.close()
    (tmp_path / "9.orbax-checkpoint-tmp" / "state").mkdir(parents=True)  # a killed save
    (tmp_path / "8" / "state").mkdir(parents=True)  # another program's
    shutil.copytree(tmp_path / "2", tmp_path / "7")  # a broken copy: its commit time is missing
    metadata = json.loads((tmp_path / "7" / "_CHECKPOINT_METADATA").read_text())
    (tmp_path / "7" / "_CHECKPOINT_METADATA").write_text(json.dumps(metadata | {"commit_timestamp_nsecs": None}))
    shutil.copytree(tmp_path / "2", tmp_path / "6")  # one whose arrays are missing
    shutil.rmtree(tmp_path / "6" / "state")
    (tmp_path / "5").write_text("a file")

    before = sorted(p.name for p in tmp_path.iterdir())
    reader = Checkpoints(tmp_path, read_only=True)
    assert reader.latest() == 2
    with pytest.raises(UserError, match=r"no complete checkpoint 8 .*latest complete: 2"):
        reader.restore(8, {"w": jnp.zeros(3)})
    reader.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == before

    saver = Checkpoints(tmp_path, keep=2)
    assert saver.latest() == 2
    saver.save(8, {"w": jnp.full(3, 8)}, {"step": 8})  # its number is free again
    saver.wait()
    assert saver.latest() == 8 and is_complete(tmp_path / "2")  # the foreign folders did not count as kept
    assert saver.restore(8, {"w": jnp.zeros(3, jnp.int32)})[1] == {"step": 8}
    saver.close()


def test_a_save_in_progress_is_not_the_latest(tmp_path):
    saver = Checkpoints(tmp_path)
    saver.save(1, {"w": jnp.ones(3)}, {})
    saver.wait()
    saver._manager.save = lambda *a, **k: (tmp_path / "2").mkdir()  # the folder is there, the commit is not
    saver.save(2, {"w": jnp.ones(3)}, {})
    assert saver.latest() == 1
    saver.close()


def test_differences_are_named(tmp_path):
    saver = Checkpoints(tmp_path)
    saver.save(1, {"a": jnp.ones((2, 3)), "b": jnp.ones(4, jnp.bfloat16), "old": jnp.ones(1)}, {})
    saver.wait()
    with pytest.raises(UserError) as error:
        saver.restore(1, {"a": jnp.ones((2, 5)), "b": jnp.ones(4), "new": jnp.ones(1)})
    saver.close()
    text = str(error.value)
    assert "a: saved float32[2, 3], wanted float32[2, 5]" in text
    assert "b: saved bfloat16[4], wanted float32[4]" in text
    assert "old: saved float32[1], wanted nothing" in text and "new: saved nothing, wanted float32[1]" in text


@pytest.mark.parametrize("value", [{1: 2}, (1, 2), np.float32(1), np.int64(3), jnp.ones(2)])
def test_run_state_that_json_would_change_is_refused(tmp_path, value):
    saver = Checkpoints(tmp_path)
    with pytest.raises(ValueError, match=r"run_state\['memory'\]"):
        saver.save(1, {"w": jnp.ones(2)}, {"memory": value})
    saver.close()
