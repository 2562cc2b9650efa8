"""Intervals and tests against scipy's, and against what they promise."""

import numpy as np
import pytest
import scipy.stats

from parasearch_jax.data import statistics
from parasearch_jax.data.statistics import kappa, mcnemar, paired_bootstrap, ratio_intervals


def means(values, seed=0):
    return ratio_intervals(values, np.ones_like(values), seed)


def test_intervals_of_means_are_scipys():
    """Two bootstraps of the same data differ by their draws only: a few percent of the interval's width."""
    rng = np.random.default_rng(7)
    values = np.stack([rng.random(300) < 0.3, rng.gamma(2.0, size=300)], axis=1).astype(float)
    found = means(values)
    for column, (low, high) in zip(values.T, found.T, strict=True):
        theirs = scipy.stats.bootstrap((column,), np.mean, n_resamples=20_000, method="percentile", rng=1)
        width = theirs.confidence_interval.high - theirs.confidence_interval.low
        np.testing.assert_allclose((low, high), theirs.confidence_interval, atol=0.06 * width)


def test_intervals_of_ratios_are_scipys():
    rng = np.random.default_rng(7)
    right, calls = (rng.random(200) < 0.4).astype(float), rng.integers(0, 5, 200).astype(float)
    low, high = ratio_intervals(right[:, None], calls[:, None])[:, 0]

    def ratio(a, b, axis):
        return a.sum(axis) / b.sum(axis)

    theirs = scipy.stats.bootstrap((right, calls), ratio, paired=True, vectorized=True, n_resamples=20_000,
                                   method="percentile", rng=1).confidence_interval  # fmt: skip
    np.testing.assert_allclose((low, high), theirs, atol=0.06 * (theirs.high - theirs.low))


def test_intervals_hold_what_they_promise():
    """Of 200 samples of 100 throws about 95 % of the intervals hold the true share; percentile ones somewhat fewer."""
    throws = (np.random.default_rng(0).random((100, 200)) < 0.3).astype(float)
    low, high = means(throws)
    assert 0.90 <= ((low <= 0.3) & (high >= 0.3)).mean() <= 0.99


def test_intervals_are_a_function_of_the_data():
    rng = np.random.default_rng(7)
    values = rng.random((50, 2))
    np.testing.assert_array_equal(means(values), means(values))
    np.testing.assert_allclose(means(values)[:, 1:], means(values[:, 1:]), rtol=1e-12)  # columns apart
    assert (means(values) != means(values, seed=1)).any()
    np.testing.assert_array_equal(means(np.ones((5, 1))), [[1.0], [1.0]])
    assert np.isnan(ratio_intervals(np.ones((3, 1)), np.zeros((3, 1)))).all()


def test_paired_bootstrap_is_the_t_test_where_there_are_many():
    rng = np.random.default_rng(7)
    first = rng.normal(size=500)
    second = first + rng.normal(0.06, 0.6, size=500)
    found, theirs = paired_bootstrap(first, second), scipy.stats.ttest_rel(second, first)
    assert found.value == pytest.approx((second - first).mean())
    assert found.p == pytest.approx(theirs.pvalue, abs=0.01) and 0.001 < found.p < 0.2
    np.testing.assert_allclose((found.low, found.high), theirs.confidence_interval(), atol=0.01)


def test_paired_bootstrap_at_its_ends():
    same = paired_bootstrap(np.ones(9), np.ones(9))
    assert (same.value, same.low, same.high, same.p) == (0.0, 0.0, 0.0, 1.0)
    apart = paired_bootstrap(np.zeros(100), np.ones(100))
    assert (apart.value, apart.low, apart.p) == (1.0, 1.0, 1 / (statistics.RESAMPLES + 1))
    mirrored = paired_bootstrap(np.array([0, 1, 1.0]), np.array([1, 1, 0.0]))
    assert mirrored.value == 0.0 and mirrored.p == 1.0


@pytest.mark.parametrize("counts", [(0, 0), (1, 0), (0, 5), (5, 5), (3, 9), (120, 80), (1000, 1100)])
def test_mcnemar_is_the_exact_binomial_test(counts):
    n = sum(counts)
    expected = scipy.stats.binomtest(counts[0], n).pvalue if n else 1.0
    assert mcnemar(*counts) == pytest.approx(expected, rel=1e-9)
    assert mcnemar(*counts) == mcnemar(*counts[::-1])


def test_mcnemar_by_hand():
    assert mcnemar(0, 5) == 2 / 2**5
    assert mcnemar(1, 3) == 2 * (1 + 4) / 2**4


def test_kappa_by_hand():
    """Cohen's example: 20 yes-yes, 5 yes-no, 10 no-yes, 15 no-no: (0.7 - 0.5) / 0.5."""
    first = np.repeat([1, 1, 0, 0], [20, 5, 10, 15])
    second = np.repeat([1, 0, 1, 0], [20, 5, 10, 15])
    assert kappa(first, second) == pytest.approx(0.4)
    assert kappa(first, first) == 1.0 and np.isnan(kappa([1, 1], [1, 1]))
