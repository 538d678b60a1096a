"""Tests and intervals that measurements state: McNemar's exact test, a paired bootstrap, the ratio estimator."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

RESAMPLES = 10_000
AT_ONCE = 500  # resamples drawn together: what bounds the memory
SEED = 0


def mcnemar(only_first: int, only_second: int) -> float:
    """Return McNemar's exact two-sided p, from the items that only one of two runs got right: 1.0 if there are none.

    An item that both or neither got right says nothing about a difference.
    """
    discordant = only_first + only_second
    if not discordant:
        return 1.0
    return float(_scipy_stats().binomtest(only_first, discordant).pvalue)


def bootstrap_interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the 95% interval of the mean of paired `differences`, one an item: percentiles of the means of
    `RESAMPLES` drawings of items with replacement, of a fixed seed."""
    values = np.asarray(differences, dtype=np.float64)
    if not values.size:
        raise ValueError("differences is empty: expected one number for each item")
    generator, means = np.random.default_rng(SEED), []
    for _ in range(0, RESAMPLES, AT_ONCE):
        means.append(values[generator.integers(values.size, size=(AT_ONCE, values.size))].mean(axis=1))
    low, high = np.percentile(np.concatenate(means), (2.5, 97.5))
    return float(low), float(high)


def ratio_half_width(tops: Sequence[float], bottoms: Sequence[float]) -> float:
    """Return the half width of the 95% interval of sum(tops) / sum(bottoms) over samples: the linearised estimator.

    Infinite for fewer than two samples, or where the bottoms are all 0.
    """
    n, total = len(tops), sum(bottoms)
    if n < 2 or not total:
        return math.inf
    ratio = sum(tops) / total
    residual = sum((t - ratio * b) ** 2 for t, b in zip(tops, bottoms, strict=True))
    return 1.96 * math.sqrt(residual * n / (n - 1)) / total


def rounded(value: float, digits: int = 4) -> float | None:
    """Return `value` for a result file: None where it is infinite, which JSON does not know."""
    return round(value, digits) if math.isfinite(value) else None


def _scipy_stats() -> Any:
    try:
        from scipy import stats
    except ImportError as error:
        raise ValueError(
            f"McNemar's test needs scipy ({error}): pip install scipy, or pip install 'specdec-toolkit[bench]'"
        ) from error
    return stats
