"""Advantages of the members of a group, over valid members only.

A member without a reward (its rollout failed for a reason that is not the policy's) has no
advantage, and the others' are what they would be without it: kept at 0.0 it would shift them all.
Each function takes rewards in the order of the members, None where a member is not valid, and
gives a list of the same length, None in the same places. Below two valid members nothing can be
compared, and all are None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Rewards = Sequence[float | None]
Advantages = list[float | None]

EPSILON = 1e-6
"""Added to the standard deviation of GRPO, as verl does (`norm_adv_by_std_in_grpo`)."""


def mean(rewards: Rewards) -> float | None:
    """The mean over valid members; None without any."""
    valid = _valid(rewards)
    return _mean(valid) if valid else None


def std(rewards: Rewards) -> float | None:
    """The sample standard deviation (n - 1) over valid members; None below two of them.

    The sample's, as TRL and verl compute it (`torch.std`), since a group is a sample of what the
    policy does with a task.
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
    """Also of numbers whose sum is beyond floats: an environment may leave rewards unbounded."""
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
