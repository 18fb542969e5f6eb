"""Rewards of a rollout: one number, or weighted parts, of the whole rollout or of a turn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import SupportsFloat

from hermes_rl.errors import VerifierFault
from hermes_rl.events import RewardPart
from hermes_rl.identity import canonical

WHOLE = "reward"
"""Name of the single part of a reward that is a plain number."""


@dataclass(frozen=True)
class Rewards:
    """A reward in parts.

    Rewards([part("correct", 1.0), part("format", 0.5, weight=0.2)])
    """

    parts: tuple[RewardPart, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that are recorded beside the reward and do not count in it."""

    def __init__(
        self, parts: Iterable[RewardPart] = (), metrics: Mapping[str, float] | None = None
    ) -> None:
        object.__setattr__(self, "parts", tuple(parts))
        object.__setattr__(self, "metrics", dict(metrics or {}))

    @property
    def total(self) -> float:
        """The sum of score times weight."""
        return math.fsum(p.score * p.weight for p in self.parts)


def part(
    name: str,
    score: float,
    *,
    weight: float = 1.0,
    turn: int | None = None,
    detail: str | None = None,
) -> RewardPart:
    """Make one part of a reward.

    Args:
        turn: 1-based; None is the whole rollout.
        detail: stored for people and later analysis; never read.
    """
    return RewardPart(name=name, score=float(score), weight=float(weight), turn=turn, detail=detail)


def check_rewards(value: object, bounds: tuple[float, float] | None, turns: int) -> Rewards:
    """Check what `compute_reward` or `score_group` returned.

    Args:
        bounds: the least and greatest total, inclusive; None sets no bounds.
        turns: of the rollout; parts may name only these.

    Raises: VerifierFault for anything but a number or `Rewards`, for NaN and infinities, a total
        out of bounds, and a part of a turn that the rollout does not have.
    """
    rewards = _as_rewards(value)
    for one in rewards.parts:
        _check_part(one, turns)
    for name, value in rewards.metrics.items():
        if not isinstance(name, str) or not _finite(value):
            shown = _shown(value)
            raise VerifierFault(
                f"the metric {name!r} is {shown}; metrics are finite numbers by name"
            )
    _check_total(rewards, bounds)
    return rewards


def _as_rewards(value: object) -> Rewards:
    if isinstance(value, Rewards):
        return value
    if isinstance(value, SupportsFloat) and not isinstance(value, str):  # numpy's numbers too
        try:
            return Rewards([part(WHOLE, float(value))])
        except Exception as error:  # a boundary: an array of numbers, or a user's class
            raise VerifierFault(
                f"returned {_shown(value)}, which is not a number: {error}"
            ) from error
    raise VerifierFault(f"returned {_shown(value)}; return a number or Rewards([part(...), ...])")


def _check_part(one: object, turns: int) -> None:
    if not isinstance(one, RewardPart):
        raise VerifierFault(
            f"Rewards contains {_shown(one)}; make its parts with part(name, score)"
        )
    if not isinstance(one.name, str) or not isinstance(one.detail, str | None):
        raise VerifierFault(f"the part {_shown(one.name)}: its name and its detail must be texts")
    for what, number in (("score", one.score), ("weight", one.weight)):
        if not _finite(number):
            raise VerifierFault(f"the part {one.name!r} has the {what} {number!r}: not finite")
    if one.turn is not None and (not isinstance(one.turn, int) or not 1 <= one.turn <= turns):
        raise VerifierFault(
            f"the part {one.name!r} names turn {one.turn!r}; this rollout has turns 1 to {turns}"
        )


def _check_total(rewards: Rewards, bounds: tuple[float, float] | None) -> None:
    if not rewards.parts:
        raise VerifierFault("returned Rewards without parts; raise CannotJudge when there is none")
    try:
        total = rewards.total
    except (OverflowError, ValueError):  # the products or the sum of finite parts
        total = math.inf
    total = canonical(total) if math.isfinite(total) else total
    if not math.isfinite(total) or (bounds is not None and not bounds[0] <= total <= bounds[1]):
        where = f"reward_range {list(bounds)}" if bounds else "the finite numbers"
        raise VerifierFault(f"returned the reward {total!r}, outside {where}")


def _finite(value: object) -> bool:
    """Whether a number fits a float column; huge integers do not."""
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:
        return False


def _shown(value: object) -> str:
    if value is None:
        return "None"
    return f"{type(value).__name__} {str(value)[:60]!r}"
