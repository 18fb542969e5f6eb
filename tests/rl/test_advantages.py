"""Advantages over valid members, compared with their definitions and with known groups."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.rl import EPSILON, dr_grpo, grpo, mean, rloo, std

scores = st.floats(-100, 100, allow_nan=False)
groups = st.lists(st.none() | scores, min_size=1, max_size=9)


def expected_advantages(rewards: list[float | None]) -> list[tuple[float, float, float] | None]:
    valid = [r for r in rewards if r is not None]
    if len(valid) < 2:
        return [None] * len(rewards)
    centre, scale = statistics.fmean(valid), statistics.stdev(valid)
    figures = []
    for r in rewards:
        others = list(valid)
        others.remove(r) if r is not None else None
        figures.append(
            None
            if r is None
            else ((r - centre) / (scale + EPSILON), r - statistics.fmean(others), r - centre)
        )
    return figures


@given(groups)
def test_advantages_equal_their_definitions(rewards: list[float | None]) -> None:
    found = list(zip(grpo(rewards), rloo(rewards), dr_grpo(rewards), strict=True))
    for found_values, expected in zip(found, expected_advantages(rewards), strict=True):
        if expected is None:
            assert found_values == (None, None, None)
        else:
            # The scale of nearly equal rewards is inexact.
            assert found_values[1:] == pytest.approx(expected[1:], rel=1e-9, abs=1e-9)
            assert found_values[0] == pytest.approx(expected[0], rel=1e-6, abs=1e-6)


@given(st.lists(st.none() | st.floats(-1e307, 1e307), min_size=1, max_size=9))
def test_huge_rewards_have_finite_advantages(rewards: list[float | None]) -> None:
    """Rewards may be unbounded: a huge one must not end the run."""
    valid = [r for r in rewards if r is not None]
    for advantage in (grpo, rloo, dr_grpo):
        found = advantage(rewards)
        assert [a is None for a in found] == [r is None or len(valid) < 2 for r in rewards]
        assert all(math.isfinite(a) for a in found if a is not None)
    assert all(math.isfinite(f) for f in (std(rewards), mean(rewards)) if f is not None)


GOLDEN = {
    4: ([1.0, 0.0, 0.0, 1.0], 0.5, math.sqrt(1 / 3), [0.5, -0.5, -0.5, 0.5]),
    2: ([1.0, None, 0.0, None], 0.5, math.sqrt(0.5), [0.5, None, -0.5, None]),
    1: ([None, 1.0, None, None], 1.0, None, [None] * 4),
    0: ([None] * 4, None, None, [None] * 4),
}
"""Valid members -> rewards, mean, standard deviation, Dr. GRPO."""


@pytest.mark.parametrize("n_valid", list(GOLDEN))
def test_statistics_of_known_groups(n_valid: int) -> None:
    rewards, centre, scale, plain = GOLDEN[n_valid]
    assert mean(rewards) == centre
    assert std(rewards) == (None if scale is None else pytest.approx(scale))
    assert dr_grpo(rewards) == plain
    twice = [None if a is None else 4 / 3 * a if n_valid == 4 else 2 * a for a in plain]
    assert rloo(rewards) == [None if a is None else pytest.approx(a) for a in twice]
    if scale is not None:
        scaled = [None if a is None else a / (scale + EPSILON) for a in plain]
        assert grpo(rewards) == [None if a is None else pytest.approx(a) for a in scaled]


@given(scores, st.integers(2, 9))
def test_equal_rewards_have_advantages_of_exactly_zero(score: float, size: int) -> None:
    for advantage in (grpo, rloo, dr_grpo):
        assert advantage([score] * size) == [0.0] * size
