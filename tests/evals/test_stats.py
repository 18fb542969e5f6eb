"""Formulas: against scipy and published values, and intervals that cover the truth as they say."""

import math

import numpy as np
import pytest
import scipy

from hermes_rl.evals import bootstrap, stats, wilson

TRIALS = 1_500


@pytest.mark.parametrize("df", [1, 2, 3, 9, 59, 163, 100_000])
def test_students_t_is_that_of_scipy(df: int) -> None:
    for p in (0.05, 0.6, 0.9, 0.975, 0.995):
        assert stats.t_quantile(p, df) == pytest.approx(scipy.stats.t.ppf(p, df), rel=1e-7)
    for t in (-8, -0.3, 0, 1, 5):
        assert stats.t_cdf(t, df) == pytest.approx(scipy.stats.t.cdf(t, df), abs=1e-9)


@pytest.mark.parametrize(
    ("tasks", "mean", "spread", "repeats"),
    [(100, 0.5, 1, 1), (100, 0.5, 4, 4), (100, 0.9, 3, 4), (300, 0.05, 4, 1), (300, 0.95, 3, 4)],
)
def test_the_interval_of_a_share_covers_the_truth(
    tasks: int, mean: float, spread: float, repeats: int
) -> None:
    random, hits = np.random.default_rng(5), 0
    for _ in range(TRIALS):
        chances = random.beta(mean * spread, (1 - mean) * spread, tasks)
        shares = random.binomial(repeats, chances) / repeats
        _, low, high = stats.share_interval(shares, units=tasks * repeats)
        hits += low <= mean <= high
    assert 0.93 <= hits / TRIALS <= 0.97


def test_the_interval_of_a_mean_covers_the_truth_with_clusters() -> None:
    random, hits = np.random.default_rng(6), 0
    clusters = np.repeat(np.arange(40), 5)
    for _ in range(TRIALS):
        values = np.repeat(random.normal(0.3, 1, 40), 5) + random.normal(0, 1, 200)
        _, low, high = stats.mean_interval(values, clusters.tolist())
        hits += low <= 0.3 <= high
    assert 0.93 <= hits / TRIALS <= 0.97


def test_the_interval_of_pass_at_k_covers_the_truth() -> None:
    random, hits, truth = np.random.default_rng(7), 0, 1 - (0.5 * 0.5625 + 0.5 * 0.0625)
    for _ in range(TRIALS):
        solved = random.binomial(4, random.choice([0.25, 0.75], 150))
        values = [stats.pass_at_k(4, int(c), 2) for c in solved]
        _, low, high = stats.share_interval(values, units=600)
        hits += low <= truth <= high
    assert 0.93 <= hits / TRIALS <= 0.97


def test_a_paired_difference_covers_the_truth_and_tests_have_their_level() -> None:
    random, hits, rejected = np.random.default_rng(8), 0, 0
    for _ in range(400):
        chances = random.beta(2, 2, 60)
        difference = random.binomial(2, chances, 60) / 2 - random.binomial(2, chances, 60) / 2
        _, low, high = stats.mean_interval(difference)
        hits += low <= 0 <= high
        rejected += stats.paired_t(difference) < 0.05
    assert hits / 400 == pytest.approx(0.95, abs=0.025)
    assert rejected / 400 == pytest.approx(0.05, abs=0.025)


def test_a_share_of_one_result_has_a_width() -> None:
    mean, low, high = stats.share_interval([1.0] * 20)
    assert (mean, high) == (1.0, 1.0)
    assert low == pytest.approx(20 / (20 + scipy.stats.t.ppf(0.975, 19) ** 2))
    assert math.isnan(stats.share_interval([0.5]).low)
    assert math.isnan(stats.share_interval([]).mean)


def test_the_bootstrap_interval_does_not_depend_on_order() -> None:
    values = [1.0] * 13 + [0.0] * 7 + [0.1, 0.7]
    shuffled = np.random.default_rng(1).permutation(values).tolist()
    assert bootstrap(values) == bootstrap(values[::-1]) == bootstrap(shuffled)
    assert np.isnan(bootstrap([]).mean)
    assert np.isnan(bootstrap([1.0]).low)


def test_the_interval_of_a_task_is_the_wilson_interval() -> None:
    # Values of Newcombe, Statistics in Medicine 17 (1998), table I: 81/263, 15/148, 0/20, 1/29.
    for solved, tried, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        assert wilson(solved, tried) == pytest.approx((solved / tried, low, high), abs=5e-5)
    assert np.isnan(wilson(0, 0).mean)


def test_pass_at_k_is_unbiased() -> None:
    assert stats.pass_at_k(4, 1, 2) == 0.5
    assert stats.pass_hat_k(4, 3, 2) == 0.5
    assert (stats.pass_at_k(5, 5, 5), stats.pass_hat_k(5, 4, 5)) == (1.0, 0.0)
    assert math.isnan(stats.pass_at_k(3, 3, 4))
    for estimate, truth in (
        (stats.pass_at_k, 1 - 0.7**3),
        (stats.pass_hat_k, 0.3**3),
    ):
        weights = scipy.stats.binom.pmf(range(9), 8, 0.3)
        mean = sum(w * estimate(8, c, 3) for c, w in enumerate(weights))
        assert mean == pytest.approx(truth)


def test_tests_are_those_of_scipy() -> None:
    assert stats.mcnemar(3, 12) == pytest.approx(scipy.stats.binomtest(3, 15).pvalue)
    assert stats.mcnemar(0, 0) == stats.mcnemar(4, 4) == 1.0
    large = scipy.stats.binomtest(59_000, 119_000).pvalue  # by sums of binomials: hours
    assert stats.mcnemar(60_000, 59_000) == pytest.approx(large)
    random = np.random.default_rng(2)
    data = random.normal(0.4, 1, 12)
    assert stats.paired_t(data) == pytest.approx(scipy.stats.ttest_1samp(data, 0).pvalue)
    exact = scipy.stats.permutation_test(
        (data,), np.mean, permutation_type="samples", n_resamples=np.inf
    )
    assert stats.sign_flips(data) == pytest.approx(exact.pvalue)
    many = random.normal(0.1, 1, 200)
    assert stats.sign_flips(many) == pytest.approx(stats.paired_t(many), abs=0.02)


def test_the_interval_of_a_difference_of_shares_is_one_of_shares() -> None:
    assert stats.difference_interval([-1, -1, 1, 1]) == (0, -1, 1)
    assert stats.difference_interval([0.98, 1.0]).high == 1


def test_many_p_values() -> None:
    values = [0.01, 0.04, 0.03, 0.005]
    assert stats.holm(values) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    expected = scipy.stats.false_discovery_control(values)
    assert stats.benjamini_hochberg(values) == pytest.approx(list(expected))


def test_the_variance_is_split_into_tasks_and_repeats() -> None:
    random = np.random.default_rng(9)
    tasks = np.repeat(np.arange(4_000), 5)
    values = np.repeat(random.normal(0, 2, 4_000), 5) + random.normal(0, 1, 20_000)
    split = stats.variance_split(values, tasks)
    assert (split.between, split.within) == (pytest.approx(4, rel=0.1), pytest.approx(1, rel=0.1))
    assert split.standard_error == pytest.approx(math.sqrt(4.2 / 4_000), rel=0.05)
    assert "only more tasks" in split.advice
    noisy = stats.variance_split(random.normal(0, 1, 20_000), tasks)
    assert "more repeats help" in noisy.advice
    assert "at least twice" in stats.variance_split([0.0, 1.0], [0, 1]).advice
    assert "neither tasks nor repeats" in stats.variance_split([0, 0, 0, 0], [0, 0, 1, 1]).advice
    assert "run more tasks" in stats.variance_split([0, 1], [0, 0]).advice


@pytest.mark.parametrize(
    ("values", "tasks"),
    [
        ([1, 0] * 10, [n // 2 for n in range(20)]),  # tasks do not differ at all
        ([1, 0, 1], [0, 1, 1]),  # unequal repeats, by chance less different than the noise
        ([1, 0, 0, 1, 1, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1, 2, 2, 2]),
    ],
)
def test_where_only_repeats_differ_more_repeats_are_advised(
    values: list[int], tasks: list[int]
) -> None:
    split = stats.variance_split(values, tasks)
    assert split.between == 0
    assert split.advice.startswith("repeats differ much")
    assert split.with_twice_the_repeats <= split.standard_error


def test_a_detectable_effect_is_detected_in_four_of_five_cases() -> None:
    random, found = np.random.default_rng(10), 0
    effect = stats.detectable_effect(1.0, 50)
    for _ in range(1_000):
        found += stats.paired_t(random.normal(effect, 1.0, 50)) < 0.05
    assert found / 1_000 == pytest.approx(0.8, abs=0.04)
    needed = stats.tasks_needed(1.0, effect)
    assert 49 <= needed <= 50


def test_a_tiny_effect_needs_a_number_of_tasks() -> None:
    assert stats.tasks_needed(0.3, 1e-12) == pytest.approx(0.3**2 * 7.8489e24, rel=1e-3)
