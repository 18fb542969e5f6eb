"""Advantages of the members of a group, over valid members only.

A member without a reward (its rollout failed, and not by the policy's fault) has no advantage, and
the others' are computed without it: counted as 0.0 it would shift them all. Each function takes
rewards in the order of the members, None for an invalid member, and returns a list of the same
length with None at the same indices. With fewer than two valid members all are None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Rewards = Sequence[float | None]
Advantages = list[float | None]

EPSILON = 1e-6
"""Added to the standard deviation of GRPO, as verl does (`norm_adv_by_std_in_grpo`)."""


def mean(rewards: Rewards) -> float | None:
    """Return the mean over valid members; None without any."""
    valid = _valid(rewards)
    return _mean(valid) if valid else None


def std(rewards: Rewards) -> float | None:
    """Return the sample standard deviation (n - 1) over valid members; None below two of them.

    TRL and verl use it too (`torch.std`): a group is a sample of the policy's rollouts of a task.
    """
    valid = _valid(rewards)
    if len(valid) < 2:
        return None
    centre = _mean(valid)
    return math.hypot(*(r - centre for r in valid)) / math.sqrt(len(valid) - 1)


def grpo(rewards: Rewards) -> Advantages:
    """(r - mean) / (std + epsilon): Shao et al. 2024, DeepSeekMath (arXiv 2402.03300), 4.1.2.

    Zero for every member where all rewards are equal.
    """
    scale = std(rewards)
    return _each(rewards, lambda r, centre, _: (r - centre) / ((scale or 0.0) + EPSILON))


def rloo(rewards: Rewards) -> Advantages:
    """r - mean of the other members: Ahmadian et al. 2024, Back to Basics (arXiv 2402.14740)."""
    return _each(rewards, lambda r, centre, n: (r - centre) * n / (n - 1))


def dr_grpo(rewards: Rewards) -> Advantages:
    """r - mean: Liu et al. 2025, Understanding R1-Zero-like training (arXiv 2503.20783)."""
    return _each(rewards, lambda r, centre, _: r - centre)


def _mean(valid: Sequence[float]) -> float:
    """The mean, also of numbers whose sum overflows: rewards may be unbounded."""
    try:
        return math.fsum(valid) / len(valid)
    except OverflowError:
        return math.fsum(r / len(valid) for r in valid)


def _valid(rewards: Rewards) -> list[float]:
    return [r for r in rewards if r is not None]


def _each(rewards: Rewards, advantage: Callable[[float, float, int], float]) -> Advantages:
    valid = _valid(rewards)
    if len(valid) < 2:
        return [None] * len(rewards)
    if min(valid) == max(valid):  # exactly: the mean of equal numbers need not equal them
        return [None if r is None else 0.0 for r in rewards]
    centre = _mean(valid)
    return [None if r is None else advantage(r, centre, len(valid)) for r in rewards]
