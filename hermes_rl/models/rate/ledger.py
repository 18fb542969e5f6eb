"""The driver's side of budgets: spending, leases, and which units may spend the rest. Pure.

Units that have begun come first, in the order of the dataset. What each still needs is set aside:
the worst case of ten calls while no unit is finished, then the average cost of finished units. So
units that have begun can finish, and no unit begins that could not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from hermes_rl.models.rate.budgets import LeaseGrant, LeaseReport, UnitSpending

CALLS = 10
"""Expected calls of a unit before any is finished."""
OVERDUE = 4
"""A unit above the average is expected to need one such part of the average more."""


@dataclass(frozen=True)
class Costs:
    """Known costs of calls and units of a run."""

    call: int
    """The highest worst case of a call so far."""
    unit: int | None
    """The average of finished units; None before there is one."""

    @property
    def new(self) -> int:
        """Expected cost of a new unit."""
        return CALLS * self.call if self.unit is None else self.unit

    def claim(self, unit: UnitSpending) -> int:
        """Return the amount to set aside for a unit, beyond its calls in flight."""
        if unit.place < 0:  # not a unit: only this call counts
            return unit.need
        least = self.new // OVERDUE if self.unit is not None else 0
        rest = max(self.new - unit.spent, least)
        return max(rest - unit.held, unit.need, 0)


def units_allowed_to_spend(
    units: Iterable[UnitSpending], left: int, costs: Costs, more: int
) -> set[int] | None:
    """Return the places of the units whose calls may start now; None if there is enough for all.

    Args:
        units: all that have begun or wait.
        left: amount that no call has reserved.
        more: maximum number of units that may begin until the next decision.
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

    Invariant: spending and leases together never exceed the limit, except by calls above their
    worst case.

    Args:
        before: amount spent by earlier starts of the run.
        maximum: of units in progress.
    """

    def __init__(self, name: str, limit: int, before: int = 0, maximum: int = 1) -> None:
        self.name, self.limit = name, limit
        self._maximum = maximum
        self._most_expensive_call = 0
        self._former = LeaseReport(budget=name, spent=before)
        """Former workers, and earlier starts."""
        self._accounts: dict[str, LeaseReport] = {}

    @property
    def spent(self) -> int:
        """Amount spent."""
        return self._former.spent + sum(account.spent for account in self._accounts.values())

    @property
    def left(self) -> int:
        """Amount that may be leased; negative if calls exceeded their worst case."""
        return self.limit - self.spent - sum(a.held for a in self._accounts.values())

    @property
    def costs(self) -> Costs:
        """Costs of calls and units so far."""
        every = (self._former, *self._accounts.values())
        finished = sum(account.finished for account in every)
        spent = sum(account.finished_spent for account in every)
        return Costs(self._most_expensive_call, spent // finished if finished else None)

    def update(self, worker: str, report: LeaseReport) -> None:
        """Process a worker's report."""
        self._most_expensive_call = max(
            (self._most_expensive_call, *(unit.need for unit in report.units))
        )
        self._accounts[worker] = report

    def grant(self, worker: str) -> LeaseGrant:
        """Lease what a worker's waiting calls need, as far as possible."""
        account, left, costs = self._accounts[worker], max(0, self.left), self.costs
        free = account.held - sum(unit.held for unit in account.units)
        units = [unit for other in self._accounts.values() for unit in other.units]
        allowed = units_allowed_to_spend(units, left + free, costs, self._maximum)
        waiting = {
            name: [u for u in a.units if u.need and (allowed is None or u.place in allowed)]
            for name, a in self._accounts.items()
        }
        needs = [unit.need for unit in waiting[worker]]
        if worker != min((name for name in waiting if waiting[name]), default=worker):
            # Only the first worker collects parts of a need: several would each keep one forever.
            while needs and sum(needs) > left + free:
                needs.pop()
        add = max(0, min(left, sum(needs) - free))
        others = (a for name, a in self._accounts.items() if name != worker)
        wanted = any(unit.need for other in others for unit in other.units)
        self._accounts[worker] = msgspec.structs.replace(account, held=account.held + add)
        return LeaseGrant(
            budget=self.name,
            add=add,
            most=self.limit - self.spent,
            unit=costs.unit or 0,
            only=None if allowed is None else tuple(u.place for u in waiting[worker]),
            recall=wanted or allowed is not None,
        )

    def remove(self, worker: str) -> None:
        """Remove a worker. What it held counts as spent, because its calls may have been served."""
        account = self._accounts.pop(worker, None)
        if account is not None:
            self._former = LeaseReport(
                budget=self.name,
                spent=self._former.spent + account.spent + account.held,
                finished=self._former.finished + account.finished,
                finished_spent=self._former.finished_spent + account.finished_spent,
            )
