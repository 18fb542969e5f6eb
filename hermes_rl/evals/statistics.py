"""Small pure functions: means and intervals with the task as the sampling unit.

Repeats of one task are not independent, so every interval resamples tasks, never rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 10_000


class Interval(NamedTuple):
    """An estimate with its bounds."""

    mean: float
    low: float
    high: float


def bootstrap(values: Sequence[float], *, level: float = 0.95, seed: int = 0) -> Interval:
    """Mean of per-task values with a percentile bootstrap interval over tasks.

    Args:
        values: one value per task, in any order: the interval is a function of the values alone.
        level: coverage of the interval.
        seed: of the resampling.

    Returns: NaN bounds for fewer than two tasks, NaN everywhere for none.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
    """
    data = np.sort(np.asarray(values, dtype=float))
    if data.size == 0:
        return Interval(float("nan"), float("nan"), float("nan"))
    mean = float(data.mean())
    if data.size == 1:
        return Interval(mean, float("nan"), float("nan"))
    random = np.random.default_rng(seed)
    means = np.empty(RESAMPLES)
    rows = max(1, 4_000_000 // data.size)  # bounds the memory of one draw to 32 MB
    for start in range(0, RESAMPLES, rows):
        stop = min(start + rows, RESAMPLES)
        picks = random.integers(0, data.size, size=(stop - start, data.size))
        means[start:stop] = data[picks].mean(axis=1)
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(mean, float(low), float(high))


def wilson(solved: int, tried: int) -> Interval:
    """Share of solved tries with its 95 % Wilson score interval, for the repeats of one task.

    Returns: NaN everywhere when nothing was tried.

    Source: Wilson, Probable Inference, JASA 22 (1927), 209-212.
    """
    if tried == 0:
        return Interval(float("nan"), float("nan"), float("nan"))
    z = 1.959963984540054  # the standard normal's 97.5 % quantile
    share = solved / tried
    scale = 1 + z * z / tried
    centre = (share + z * z / (2 * tried)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / tried + z * z / (4 * tried * tried))
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half))
