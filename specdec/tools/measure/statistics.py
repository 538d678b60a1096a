"""Tests, intervals and rates of measurements. Tests of significance need scipy, of the extra `bench`."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

RESAMPLES = 10_000
SEED = 0
Z95 = 1.96  # of the normal law, two-sided


def mcnemar(only_first: int, only_second: int) -> float:
    """Return McNemar's exact two-sided p, from the items that only one of two runs got right: 1.0 if there are none."""
    discordant = only_first + only_second
    return float(scipy_stats().binomtest(only_first, discordant).pvalue) if discordant else 1.0


def bootstrap_interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the 95% interval of the mean of paired `differences`, one per item: percentiles of the means of
    `RESAMPLES` drawings of items with replacement, of a fixed seed."""
    values = np.asarray(differences, dtype=np.float64)
    if not values.size:
        raise ValueError("differences is empty: expected one number for each item")
    generator = np.random.default_rng(SEED)
    means = [values[generator.integers(values.size, size=values.size)].mean() for _ in range(RESAMPLES)]
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def ratio_half_width(tops: Sequence[float], bottoms: Sequence[float]) -> float:
    """Return the half width of the 95% interval of sum(tops) / sum(bottoms) over samples: the linearised estimator.

    Infinite for fewer than two samples, or if the bottoms are all 0.
    """
    n, total = len(tops), sum(bottoms)
    if n < 2 or not total:
        return math.inf
    ratio = sum(tops) / total
    residual = sum((t - ratio * b) ** 2 for t, b in zip(tops, bottoms, strict=True))
    return Z95 * math.sqrt(residual * n / (n - 1)) / total


def wilson(share: float, trials: int) -> tuple[float, float]:
    """Return the ends of Wilson's 95% interval of a share of `trials`."""
    if not trials:
        return 0.0, 1.0
    middle = (share + Z95**2 / (2 * trials)) / (1 + Z95**2 / trials)
    half = Z95 / (1 + Z95**2 / trials) * math.sqrt(share * (1 - share) / trials + Z95**2 / (4 * trials**2))
    return middle - half, middle + half


def student_t(freedom: int) -> float:
    """Return Student's t, two-sided 95%, for that number of degrees of freedom."""
    return float(scipy_stats().t.ppf(0.975, freedom))


def most_likely(mean: float, chance: float) -> int:
    """Return the count that a Poisson variable of this mean exceeds with a probability below `chance`."""
    return int(scipy_stats().poisson.isf(chance, mean))


def conditional(rates: Sequence[float]) -> list[float]:
    """Return the chance that position j is accepted if j - 1 was, from unconditional a_j; 0 if none ever was."""
    return [round(a / before, 4) if before else 0.0 for before, a in pairwise([1.0, *rates])]


def rounded(value: float, digits: int = 4) -> float | None:
    """Return `value` for a result file: None if it is infinite, which JSON does not support."""
    return round(value, digits) if math.isfinite(value) else None


def scipy_stats() -> Any:
    """Return scipy.stats; ValueError with the pip command. Long measurements call this before they begin."""
    try:
        from scipy import stats
    except ImportError as error:
        raise ValueError(
            f"tests of significance need scipy ({error}): pip install scipy, or pip install 'specdec-toolkit[bench]'"
        ) from error
    return stats
