"""How sure a number is: bootstrap intervals, and tests between two runs on the same questions.

A question is what is drawn: with several samples a question its samples stay together.
"""

from __future__ import annotations

import dataclasses

import numpy as np

RESAMPLES = 2_000
TOGETHER = 50
LEVEL = 0.95


def ratio_intervals(numerators: np.ndarray, denominators: np.ndarray, seed: int = 0) -> np.ndarray:
    """Percentile bootstrap intervals of sum(numerators) / sum(denominators), columns apart.

    numerators, denominators [questions, metrics]; a mean over questions has denominators of 1. Returns [2, metrics],
    the lower and the upper ends at LEVEL, nan where a resample has a denominator of 0: a function of its arguments.
    """
    both = np.concatenate([numerators, denominators], axis=1, dtype=np.float64)
    sums = _resampled_sums(both, seed)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = sums[:, : numerators.shape[1]] / sums[:, numerators.shape[1] :]
    return _ends(np.where(np.isfinite(ratios), ratios, np.nan))


def _ends(drawn: np.ndarray) -> np.ndarray:
    return np.quantile(drawn, ((1 - LEVEL) / 2, (1 + LEVEL) / 2), axis=0)


def _resampled_sums(values: np.ndarray, seed: int) -> np.ndarray:
    """[RESAMPLES, columns]: the sums over as many rows, drawn with replacement."""
    rng, n, out = np.random.default_rng(seed), len(values), []
    for _ in range(RESAMPLES // TOGETHER):  # few products of large matrices: values are read so many times
        counts = [np.bincount(rng.integers(n, size=n), minlength=n) for _ in range(TOGETHER)]
        out.append(np.array(counts, np.float64) @ values)
    return np.concatenate(out)


@dataclasses.dataclass(frozen=True)
class Difference:
    """The mean of a second run minus that of the first on the same questions, its interval, and the two-sided p."""

    value: float
    low: float
    high: float
    p: float


def paired_bootstrap(first: np.ndarray, second: np.ndarray, seed: int = 0) -> Difference:
    """The difference of two runs' values [questions] by the paired bootstrap.

    p is the share of resamples whose difference, around its own mean, is at least as large as the one found (with one
    added on both sides, so never 0): what would be seen if there were none.
    """
    differences = np.asarray(second, np.float64) - np.asarray(first, np.float64)
    found = differences.mean()
    drawn = _resampled_sums(differences[:, None], seed)[:, 0] / len(differences)
    low, high = _ends(drawn)
    beyond = np.abs(drawn - found) >= abs(found) - 1e-12  # equal ones may differ in their last bits
    return Difference(float(found), float(low), float(high), float((beyond.sum() + 1) / (RESAMPLES + 1)))


def mcnemar(only_first: int, only_second: int) -> float:
    """McNemar's exact two-sided p: `only_first` and `only_second` questions are right in one run alone.

    Without a difference each of them falls to either side with probability 1/2.
    """
    n, fewer = only_first + only_second, min(only_first, only_second)
    term = below = 1
    for k in range(fewer):
        term = term * (n - k) // (k + 1)
        below += term
    return min(1.0, 2 * below / 2**n)


def kappa(first: np.ndarray, second: np.ndarray) -> float:
    """Cohen's kappa of two raters' booleans [n]: agreement beyond chance; nan where chance alone agrees always."""
    first, second = np.asarray(first, bool), np.asarray(second, bool)
    agreed = (first == second).mean()
    chance = first.mean() * second.mean() + (1 - first.mean()) * (1 - second.mean())
    return float((agreed - chance) / (1 - chance)) if chance < 1 else float("nan")
