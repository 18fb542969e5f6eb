"""Statistics of evaluations: numbers in, numbers out. Each formula names its source.

Tasks are the sampling unit: repeats of one task are not independent of each other. `summaries`
applies this to runs. Only numpy is needed.

Miller (2024) is E. Miller, Adding Error Bars to Evals, arXiv:2411.00640.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

RESAMPLES = 10_000
_EXACT_FLIPS = 16
"""Values other than 0 up to which all sign flips are tried."""

_SUMMED_PAIRS = 1_000
"""Differing pairs up to which binomials are added as whole numbers."""
_MANY = 10**9
"""Degrees of freedom at which Student's t is the normal distribution."""

Numbers = Sequence[float] | npt.NDArray[Any]
Labels = Sequence[Any] | npt.NDArray[Any]


class Interval(NamedTuple):
    """An estimate with its bounds."""

    mean: float
    low: float
    high: float


_UNKNOWN = Interval(math.nan, math.nan, math.nan)


def t_cdf(t: float, df: float) -> float:
    """Return the distribution function of Student's t.

    Source: Abramowitz and Stegun (1964), 26.7.1 and the continued fraction 26.5.8.
    """
    x = df / (df + t * t)
    tail = 0.5 * _incomplete_beta(x, df / 2, 0.5)
    return 1 - tail if t > 0 else tail


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    ends = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(ends + a * math.log(x) + b * math.log1p(-x)) / a
    c, d = 1.0, 1 / max(1 - (a + b) * x / (a + 1), 1e-300)
    product = d
    for m in range(1, 10_000):
        for step in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + step * d or 1e-300)
            c = 1 + step / c or 1e-300
            product *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * product


@functools.lru_cache
def t_quantile(probability: float, df: float) -> float:
    """Return the quantile of Student's t, by bisection of `t_cdf`."""
    if probability < 0.5:
        return -t_quantile(1 - probability, df)
    low, high = 0.0, 1.0
    while t_cdf(high, df) < probability:
        low, high = high, high * 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, df) < probability else (low, middle)
    return (low + high) / 2


def standard_error(values: Numbers, clusters: Labels | None = None) -> float:
    """Return the standard error of a mean, NaN for fewer than two clusters.

    Args:
        values: one per observation.
        clusters: the cluster of each; None makes each its own.

    Source: Miller (2024), section 2.2, with the factor C / (C - 1) for C clusters.
    """
    data = np.asarray(values, dtype=float)
    if clusters is None:
        sums = data - data.mean() if data.size else data
    else:
        _, index = np.unique(np.asarray(clusters), return_inverse=True)
        sums = np.bincount(index, weights=data - data.mean()) if data.size else data
    if sums.size < 2:
        return math.nan
    return float(np.sqrt(sums.size / (sums.size - 1) * (sums**2).sum()) / data.size)


def mean_interval(
    values: Numbers, clusters: Labels | None = None, *, level: float = 0.95
) -> Interval:
    """Return a mean with its t interval: clustered standard error, C - 1 degrees of freedom.

    Args:
        values: one per observation, for example the mean of each task.
        clusters: what observations have in common, for example a repository.
        level: coverage.

    Returns: NaN bounds for fewer than two clusters, NaN everywhere without values.
    """
    data = np.asarray(values, dtype=float)
    if data.size == 0:
        return _UNKNOWN
    mean, error = float(data.mean()), standard_error(data, clusters)
    if math.isnan(error):
        return Interval(mean, math.nan, math.nan)
    number = data.size if clusters is None else len(set(clusters))
    half = t_quantile((1 + level) / 2, number - 1) * error
    return Interval(mean, mean - half, mean + half)


def difference_interval(
    differences: Numbers, clusters: Labels | None = None, *, level: float = 0.95
) -> Interval:
    """Return a mean paired difference of shares with its interval, within -1 and 1.

    The t interval. Where all differences are equal (other tasks may differ), that of Agresti and
    Min: half an observation is added to each of the four outcomes of a pair.

    Args:
        differences: one per task.
        clusters: as in `mean_interval`.

    Source: Agresti and Min, Statistics in Medicine 24 (2005), 729-740, section 5.
    """
    plain = mean_interval(differences, clusters, level=level)
    number = len(differences if clusters is None else set(clusters))
    if number < 2:
        return plain
    if plain.high - plain.low > 1e-9:
        return Interval(plain.mean, max(-1.0, plain.low), min(1.0, plain.high))
    mean = number * plain.mean / (number + 2)
    spread = (number * plain.mean**2 + 1) / (number + 2) - mean**2
    half = t_quantile((1 + level) / 2, number - 1) * math.sqrt(spread / (number + 2))
    low, high = min(plain.mean, mean - half), max(plain.mean, mean + half)
    return Interval(plain.mean, max(-1.0, low), min(1.0, high))


def share_interval(
    values: Numbers,
    clusters: Labels | None = None,
    *,
    units: int | None = None,
    level: float = 0.95,
) -> Interval:
    """Return the mean of shares with an interval that stays within 0 and 1.

    The Wilson interval with the effective number of observations, mean (1 - mean) / SE^2, and t
    quantiles. It has a width where all tasks have one result too, and agrees with `mean_interval`
    in the middle.

    Args:
        values: one share per task.
        clusters: as in `mean_interval`.
        units: observations behind all values, which bound the effective number.

    Source: Franco, Little, Louis and Slud, J. Survey Stat. Methodol. 7 (2019), 334-364, section 2.
    """
    data = np.asarray(values, dtype=float)
    number = data.size if clusters is None else len(set(clusters))
    if number < 2:
        return Interval(float(data.mean()), math.nan, math.nan) if number else _UNKNOWN
    mean, error = float(data.mean()), standard_error(data, clusters)
    spread = mean * (1 - mean)
    effective = spread / error**2 if error > 0 else math.inf
    # Without variation in sight the tasks count.
    most = number if spread <= 0 else max(units or data.size, number)
    return _wilson(mean, min(effective, most), t_quantile((1 + level) / 2, number - 1))


def wilson(solved: float, tried: int) -> Interval:
    """Return the solved share of the repeats of one task with its 95 % Wilson score interval.

    Returns: NaN everywhere when nothing was tried.

    Source: Wilson, Probable Inference, JASA 22 (1927), 209-212.
    """
    return _wilson(solved / tried, tried, 1.959963984540054) if tried else _UNKNOWN


def _wilson(share: float, tried: float, z: float) -> Interval:
    scale = 1 + z * z / tried
    centre = (share + z * z / (2 * tried)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / tried + z * z / (4 * tried * tried))
    low = 0.0 if share <= 0 else max(0.0, centre - half)
    return Interval(share, low, 1.0 if share >= 1 else min(1.0, centre + half))


def bootstrap(values: Numbers, *, level: float = 0.95, seed: int = 0) -> Interval:
    """Return the mean of per-task values with a percentile bootstrap interval over tasks.

    Args:
        values: one value per task; their order does not matter.
        level: coverage of the interval.
        seed: of the resampling.

    Returns: NaN bounds for fewer than two tasks, NaN everywhere for none.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
    """
    data = np.sort(np.asarray(values, dtype=float))
    if data.size < 2:
        return Interval(float(data[0]), math.nan, math.nan) if data.size else _UNKNOWN
    random = np.random.default_rng(seed)
    means = np.empty(RESAMPLES)
    rows = max(1, 4_000_000 // data.size)  # bounds the memory of one draw to 32 MB
    for start in range(0, RESAMPLES, rows):
        stop = min(start + rows, RESAMPLES)
        picks = random.integers(0, data.size, size=(stop - start, data.size))
        means[start:stop] = data[picks].mean(axis=1)
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(float(data.mean()), float(low), float(high))


def pass_at_k(tried: int, solved: int, k: int) -> float:
    """Return the probability that at least one of k repeats solves a task; NaN for tried < k.

    Source: the unbiased estimator of Chen et al., Evaluating Large Language Models Trained on
    Code (2021), arXiv:2107.03374, section 2.1.
    """
    if tried < k or k < 1:
        return math.nan
    return 1 - math.prod((tried - solved - i) / (tried - i) for i in range(k))


def pass_hat_k(tried: int, solved: int, k: int) -> float:
    """Return the probability that all of k repeats solve a task; NaN for tried < k.

    Source: Yao et al., tau-bench (2024), arXiv:2406.12045, section 3.
    """
    if tried < k or k < 1:
        return math.nan
    return math.prod(max(0, solved - i) / (tried - i) for i in range(k))


@dataclass(frozen=True)
class VarianceSplit:
    """Where the variance of a score comes from, and what to buy more of."""

    tasks: int
    repeats: float
    """Per task; the harmonic mean where they differ."""
    between: float
    """Variance between the true scores of tasks."""
    within: float
    """Mean variance between repeats of a task; NaN without repeats."""
    standard_error: float
    with_twice_the_tasks: float
    """Standard error with twice the tasks."""
    with_twice_the_repeats: float

    @property
    def advice(self) -> str:
        """What reduces the standard error more, for the same number of units."""
        if self.tasks < 2:
            return "one task says nothing about others: run more tasks"
        if self.between + self.within == 0:
            return "neither tasks nor repeats differ: run other tasks"
        if math.isnan(self.within):
            return "run each task at least twice to see how much repeats differ"
        if _less_noise(self.between, self.within / self.repeats) < 0.75:
            return "repeats differ much: more repeats help nearly as much as more tasks"
        return "tasks differ more than repeats: only more tasks help"


def variance_split(values: Numbers, tasks: Labels) -> VarianceSplit:
    """Split the variance of a score into that of tasks and that of repeats.

    Args:
        values: one per unit.
        tasks: the task of each.

    Source: Miller (2024), section 3: Var = (between + within / repeats) / tasks; estimators of the
    one-way analysis of variance (Searle, Casella and McCulloch, Variance Components, 1992, 3.6).
    """
    data = np.asarray(values, dtype=float)
    _, index, sizes = np.unique(np.asarray(tasks), return_inverse=True, return_counts=True)
    number, degrees = sizes.size, data.size - sizes.size
    if number < 2:
        return VarianceSplit(number, math.nan, *[math.nan] * 5)
    means = np.bincount(index, weights=data) / sizes
    within = float(((data - means[index]) ** 2).sum()) / degrees if degrees else math.nan
    of_means, repeats = float(np.var(means, ddof=1)), float(number / (1 / sizes).sum())
    noise = 0.0 if math.isnan(within) else within / repeats
    between = max(0.0, of_means - noise)
    return VarianceSplit(
        tasks=number,
        repeats=repeats,
        between=between,
        within=within,
        standard_error=math.sqrt(of_means / number),
        with_twice_the_tasks=math.sqrt(of_means / (2 * number)),
        with_twice_the_repeats=math.sqrt(of_means / number) * _less_noise(between, noise),
    )


def _less_noise(between: float, noise: float) -> float:
    """The factor by which twice the repeats change a standard error. Where tasks happen to differ
    by less than the noise, `between` is 0, and the noise makes up all of it."""
    total = between + noise
    return math.sqrt((between + noise / 2) / total) if total > 0 else 1.0


def mcnemar(only_a: int, only_b: int) -> float:
    """Return the p-value of the exact McNemar test.

    Args:
        only_a: tasks that only the first solved.
        only_b: tasks that only the second solved.

    Source: McNemar, Psychometrika 12 (1947), 153-157, with the two-sided binomial distribution.
    """
    number, less = only_a + only_b, min(only_a, only_b)
    if number > _SUMMED_PAIRS:  # sums of such binomials take many minutes
        return min(1.0, 2 * _incomplete_beta(0.5, number - less, less + 1))
    tail = sum(math.comb(number, i) for i in range(less + 1)) / 2**number
    return min(1.0, 2 * float(tail))


def paired_t(differences: Numbers, clusters: Labels | None = None) -> float:
    """Return the p-value of a paired t test of a mean difference of 0; NaN for under two clusters.

    Args:
        differences: one per task.

    Source: Miller (2024), section 4.2.
    """
    data, error = np.asarray(differences, dtype=float), standard_error(differences, clusters)
    if math.isnan(error):
        return math.nan
    if error == 0:
        return float(data.mean() == 0)
    number = data.size if clusters is None else len(set(clusters))
    return 2 * t_cdf(-abs(float(data.mean())) / error, number - 1)


def sign_flips(differences: Numbers, *, seed: int = 0) -> float:
    """Return the p-value of a permutation test that flips the signs of paired differences.

    All flips for up to 16 differences other than 0, else 10,000 random ones.

    Source: Fisher, The Design of Experiments (1935), 21; with the observed one counted among
    random flips (Phipson and Smyth, Stat. Appl. Genet. Mol. Biol. 9, 2010).
    """
    data = np.asarray(differences, dtype=float)
    data = data[data != 0]
    if data.size == 0:
        return 1.0
    observed = abs(data.sum()) - 1e-12 * np.abs(data).sum()
    if data.size <= _EXACT_FLIPS:
        bits = np.arange(2**data.size)[:, None] >> np.arange(data.size) & 1
        return float((np.abs((1 - 2 * bits) @ data) >= observed).mean())
    random, beyond, rows = np.random.default_rng(seed), 0, max(1, 4_000_000 // data.size)
    for start in range(0, RESAMPLES, rows):
        size = (min(rows, RESAMPLES - start), data.size)
        signs = random.integers(0, 2, size=size, dtype=np.int8) * 2 - 1
        beyond += int((np.abs(signs @ data) >= observed).sum())
    return (beyond + 1) / (RESAMPLES + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for claims about many comparisons (family-wise error).

    Source: Holm, Scand. J. Statistics 6 (1979), 65-70.
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted, largest = [0.0] * len(order), 0.0
    for rank, at in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[at]))
        adjusted[at] = largest
    return adjusted


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for exploring many comparisons (false discovery rate).

    Source: Benjamini and Hochberg, J. R. Statist. Soc. B 57 (1995), 289-300.
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__, reverse=True)
    adjusted, least = [0.0] * len(order), 1.0
    for place, at in enumerate(order):
        least = min(least, len(order) / (len(order) - place) * p_values[at])
        adjusted[at] = least
    return adjusted


def detectable_effect(
    deviation: float, tasks: int, *, alpha: float = 0.05, power: float = 0.8
) -> float:
    """Return the smallest mean difference that a paired test finds with the probability `power`.

    Args:
        deviation: standard deviation of the differences of tasks.

    Source: Miller (2024), section 5: (t at 1 - alpha / 2 plus t at power) times the standard error.
    """
    if tasks < 2:
        return math.nan
    quantiles = t_quantile(1 - alpha / 2, tasks - 1) + t_quantile(power, tasks - 1)
    return quantiles * deviation / math.sqrt(tasks)


def tasks_needed(
    deviation: float, effect: float, *, alpha: float = 0.05, power: float = 0.8
) -> int:
    """Return how many tasks `detectable_effect` needs to be at most `effect`.

    Raises: ValueError for an effect of 0.
    """
    if effect == 0:
        raise ValueError("no number of tasks shows an effect of 0")
    low, high = 2, 4
    quantiles = detectable_effect(1.0, _MANY, alpha=alpha, power=power) * math.sqrt(_MANY)
    if (many := (quantiles * deviation / effect) ** 2) > _MANY:  # t is normal there
        return math.ceil(many)
    while detectable_effect(deviation, high, alpha=alpha, power=power) > abs(effect):
        low, high = high, high * 2
    while low < high:
        middle = (low + high) // 2
        enough = detectable_effect(deviation, middle, alpha=alpha, power=power) <= abs(effect)
        low, high = (low, middle) if enough else (middle + 1, high)
    return low
