"""How a batch is cut: every row once, in the smallest bucket that its micro-batch needs, within the token budget."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from parasearch_jax.rl import portions

BUCKETS = (16, 32, 48)


@pytest.mark.parametrize("multiple", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 7, 100])
def test_every_row_goes_once(count, multiple):
    rng = np.random.default_rng(count)
    lengths = rng.integers(0, 49, count).astype(np.int32)
    lengths[0] = 40
    found = portions.micro_batches(lengths, np.arange(count), BUCKETS, 4, multiple)
    rows = np.concatenate([micro.rows for micro in found])
    assert sorted(rows[rows < count]) == np.flatnonzero(lengths).tolist()
    for micro in found:
        assert (
            micro.rows.dtype == np.int32
            and len(micro.rows) == {16: 12, 32: 6, 48: 4}[micro.tokens] // multiple * multiple
        )
        longest = lengths[micro.rows[micro.rows < count]].max()
        assert micro.tokens == min(bucket for bucket in BUCKETS if bucket >= longest)
    assert all(np.all(micro.rows < count) for micro in found[:-1])  # only the last is filled up


def test_long_rows_do_not_make_short_ones_long():
    lengths = np.array([10] * 12 + [40], np.int32)
    found = portions.micro_batches(lengths, np.arange(13), BUCKETS, 1)
    assert [(micro.tokens, micro.rows.tolist()) for micro in found] == [
        (48, [12]),
        *((16, list(range(i, i + 3))) for i in (0, 3, 6, 9)),
    ]


def test_updates_share_the_rows_in_their_order():
    lengths = np.array([9, 9, 0, 9, 9, 9, 0], np.int32)
    found = portions.portions(lengths, 2, (16,), 2)
    assert [portion.members.tolist() for portion in found] == [[1, 1, 0, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1, 0]]
    for portion in found:
        rows = np.concatenate([micro.rows for micro in portion.micros])
        assert sorted(rows[rows < 7]) == np.flatnonzero(portion.members).tolist()


def test_what_is_taken_is_placed_again():
    x, number = jnp.arange(24.0).reshape(4, 6), jnp.int32(3)
    rows = jnp.array([2, 0, 4])  # the last is padding
    got = portions.take({"x": x, "of row": x[:, 0], "number": number}, rows, 4)
    np.testing.assert_array_equal(got["x"], np.stack([x[2, :4], x[0, :4], np.zeros(4)]))
    np.testing.assert_array_equal(got["of row"], [12, 0, 0])
    assert got["number"] == 3
    back = portions.place({"x": jnp.zeros((4, 6))}, {"x": got["x"] + 1}, rows, 4)["x"]
    want = np.zeros((4, 6))
    want[[2, 0], :4] = np.asarray(x)[[2, 0], :4] + 1
    np.testing.assert_array_equal(back, want)
    assert jax.tree.leaves(portions.put([portions.Micro(4, np.array([1]))], None))[0] == 4
