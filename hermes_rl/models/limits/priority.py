"""Who may spend what is left of a budget: units that have begun first, and of these the first of
the dataset. Pure.

What a unit still needs is set aside for those before it: as long as no unit is finished, the worst
case of ten calls; then what finished units cost on average. So units that are begun can be
finished, and those that could not be are not begun.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hermes_rl.models.limits.governor_wire import UnitSpending

CALLS = 10
"""Calls that a unit is taken to make while nobody knows."""
OVERDUE = 4
"""A unit that cost more than the average is taken to need this part of the average more."""


@dataclass(frozen=True)
class Costs:
    """What is known of a run's units."""

    call: int
    """The dearest worst case of a call so far."""
    unit: int | None
    """The average of finished units; None before there is one."""

    @property
    def new(self) -> int:
        """What a unit is expected to cost."""
        return CALLS * self.call if self.unit is None else self.unit

    def claim(self, unit: UnitSpending) -> int:
        """What has to be set aside for a unit, beside what its calls in flight hold."""
        if unit.place < 0:  # no unit: it asks for this call alone
            return unit.need
        least = self.new // OVERDUE if self.unit is not None else 0
        rest = max(self.new - unit.spent, least)
        return max(rest - unit.held, unit.need, 0)


def may_spend(units: Iterable[UnitSpending], left: int, costs: Costs, more: int) -> set[int] | None:
    """The places of the units whose calls may begin now; None when there is plenty for all.

    Args:
        units: all that have begun or wait.
        left: what no call has reserved.
        more: so many units may begin before this is asked again.
    """
    ordered = sorted(units, key=lambda u: (u.place >= 0 and not u.begun, u.place))
    if sum(map(costs.claim, ordered)) + more * costs.new <= left:
        return None
    allowed, first = set(), True
    for unit in ordered:
        claim = costs.claim(unit)
        if unit.need and (first or claim <= left):
            allowed.add(unit.place)
        left -= claim
        first = first and unit.place < 0
    return allowed
