"""The driver's side of budgets: what is spent, what is leased, and who may spend the rest. Pure.

Units that have begun come first, and of these the first of the dataset. What each still needs is
set aside for it: the worst case of ten calls while no unit is finished, then what finished units
cost on average. So units that have begun can be finished, and those that could not be do not begin.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from hermes_rl.models.rate.budgets import LeaseGrant, LeaseReport, UnitSpending

CALLS = 10
"""Calls that a unit is expected to make while nothing is known."""
OVERDUE = 4
"""A unit that cost more than the average is expected to need this part of the average more."""


@dataclass(frozen=True)
class Costs:
    """What is known of the units of a run."""

    call: int
    """The highest worst case of a call so far."""
    unit: int | None
    """The average of finished units; None before there is one."""

    @property
    def new(self) -> int:
        """What a unit is expected to cost."""
        return CALLS * self.call if self.unit is None else self.unit

    def claim(self, unit: UnitSpending) -> int:
        """Return what to set aside for a unit, beside what its calls in flight hold."""
        if unit.place < 0:  # no unit: it asks for this call alone
            return unit.need
        least = self.new // OVERDUE if self.unit is not None else 0
        rest = max(self.new - unit.spent, least)
        return max(rest - unit.held, unit.need, 0)


def may_spend(units: Iterable[UnitSpending], left: int, costs: Costs, more: int) -> set[int] | None:
    """Return the places of the units whose calls may start now; None when there is enough for all.

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


class Ledger:
    """The accounts of one budget.

    Invariant: what is spent and what is leased never exceed the limit together. A call that turns
    out more expensive than its worst case is counted all the same.

    Args:
        limit: in the budget's unit.
        before: spent by earlier starts of the run.
        maximum: units in progress at a time.
    """

    def __init__(self, name: str, limit: int, before: int = 0, maximum: int = 1) -> None:
        self.name, self.limit = name, limit
        self._maximum = maximum
        self._dearest_call = 0
        self._gone = LeaseReport(budget=name, spent=before)
        """Workers that have left, and earlier starts."""
        self._accounts: dict[str, LeaseReport] = {}

    @property
    def spent(self) -> int:
        """What is spent for good."""
        return self._gone.spent + sum(account.spent for account in self._accounts.values())

    @property
    def left(self) -> int:
        """What may be leased now; negative when calls cost more than their worst case."""
        return self.limit - self.spent - sum(a.held for a in self._accounts.values())

    @property
    def costs(self) -> Costs:
        """What calls and units cost."""
        every = (self._gone, *self._accounts.values())
        finished = sum(account.finished for account in every)
        spent = sum(account.finished_spent for account in every)
        return Costs(self._dearest_call, spent // finished if finished else None)

    def update(self, worker: str, report: LeaseReport) -> None:
        """Take in a worker's report."""
        self._dearest_call = max((self._dearest_call, *(unit.need for unit in report.units)))
        self._accounts[worker] = report

    def grant(self, worker: str) -> LeaseGrant:
        """Lease what the calls that wait at a worker and may start need, as far as it goes."""
        account, left, costs = self._accounts[worker], max(0, self.left), self.costs
        free = account.held - sum(unit.held for unit in account.units)
        units = [unit for other in self._accounts.values() for unit in other.units]
        allowed = may_spend(units, left + free, costs, self._maximum)
        asking = [u for u in account.units if u.need and (allowed is None or u.place in allowed)]
        add = max(0, min(left, sum(unit.need for unit in asking) - free))
        others = (a for name, a in self._accounts.items() if name != worker)
        waiting = any(unit.need for other in others for unit in other.units)
        self._accounts[worker] = msgspec.structs.replace(account, held=account.held + add)
        return LeaseGrant(
            budget=self.name,
            add=add,
            most=self.limit - self.spent,
            unit=costs.unit or 0,
            only=None if allowed is None else tuple(unit.place for unit in asking),
            recall=waiting or allowed is not None,
        )

    def remove(self, worker: str) -> None:
        """A worker is gone. What it held may have been spent by calls that nobody saw end."""
        account = self._accounts.pop(worker, None)
        if account is not None:
            self._gone = LeaseReport(
                budget=self.name,
                spent=self._gone.spent + account.spent + account.held,
                finished=self._gone.finished + account.finished,
                finished_spent=self._gone.finished_spent + account.finished_spent,
            )
