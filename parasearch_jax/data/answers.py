"""The answer metrics of an evaluation, by the name of their normaliser (`data.normalizer`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from parasearch_jax.data import metrics, r1_searcher_metrics
from parasearch_jax.errors import UserError

Metric = Callable[[str | None, str | Iterable[str]], float]

# Search-R1, ParallelSearch, ZeroSearch, StepSearch and OTC report with the first, R1-Searcher with the second.
NORMALIZERS: dict[str, dict[str, Metric]] = {
    "squad": {
        "em": metrics.em,
        "f1": metrics.f1,
        "cover_em": metrics.cover_em,
        "cover_em_bag": metrics.cover_em_bag,
    },
    "r1_searcher": {
        "em": r1_searcher_metrics.em,
        "f1": r1_searcher_metrics.f1,
        "cover_em": r1_searcher_metrics.cover_em_contiguous,
        "cover_em_bag": r1_searcher_metrics.cover_em_bag,
    },
}


def answer_metrics(normalizer: str) -> dict[str, Metric]:
    """{"em", "f1", "cover_em", "cover_em_bag"}: each takes (answer or None, golden answers) and gives 0 to 1."""
    if normalizer not in NORMALIZERS:
        raise UserError(f"data.normalizer is {normalizer!r}; use one of: {', '.join(NORMALIZERS)}")
    return NORMALIZERS[normalizer]
