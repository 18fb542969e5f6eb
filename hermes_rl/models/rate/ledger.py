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
        self.spent = before
        """Amount spent, leases of former workers included."""
        self._maximum = maximum
        self._most_expensive_call = 0
        self._accounts: dict[str, LeaseReport] = {}
        self._held = self._units = self._need = self._finished = self._finished_spent = 0
        """Sums over the accounts, so that a report costs the same with many workers."""
        self._allowed: set[int] | None = None
        self._collector = ""
        self._undecided = 0
        """Grants since the last decision."""

    @property
    def left(self) -> int:
        """Amount that may be leased; negative if calls exceeded their worst case."""
        return self.limit - self.spent - self._held

    @property
    def costs(self) -> Costs:
        """Costs of calls and units so far."""
        average = self._finished_spent // self._finished if self._finished else None
        return Costs(self._most_expensive_call, average)

    def update(self, worker: str, report: LeaseReport) -> None:
        """Process a worker's report."""
        self._most_expensive_call = max(
            (self._most_expensive_call, *(unit.need for unit in report.units))
        )
        known = self._accounts.get(worker)
        if known is not None:
            self._add(known, -1)
        self._accounts[worker] = report
        self._add(report, 1)

    def _add(self, account: LeaseReport, sign: int) -> None:
        self.spent += sign * account.spent
        self._held += sign * account.held
        self._units += sign * len(account.units)
        self._need += sign * _need(account)
        self._finished += sign * account.finished
        self._finished_spent += sign * account.finished_spent

    def grant(self, worker: str) -> LeaseGrant:
        """Lease what a worker's waiting calls need, as far as possible."""
        account, left, costs = self._accounts[worker], max(0, self.left), self.costs
        free = account.held - sum(unit.held for unit in account.units)
        self._decide(left + free, costs)
        waiting = [u for u in account.units if self._may(u)]
        needs = [unit.need for unit in waiting]
        if worker != self._collector:
            # Only the first worker collects parts of a need: several would each keep one forever.
            while needs and sum(needs) > left + free:
                needs.pop()
        add = max(0, min(left, sum(needs) - free))
        self._accounts[worker] = msgspec.structs.replace(account, held=account.held + add)
        self._held += add
        return LeaseGrant(
            budget=self.name,
            add=add,
            most=self.limit - self.spent,
            unit=costs.unit or 0,
            only=None if self._allowed is None else tuple(u.place for u in waiting),
            recall=self._need > _need(account) or self._allowed is not None,
        )

    def _decide(self, left: int, costs: Costs) -> None:
        """Decide which units may spend. Only when little is left does that depend on all units:
        then one decision is for as many grants as half of the workers."""
        if (self._units + self._maximum) * costs.new + self._need <= left:
            self._allowed = None
            return
        self._undecided += 1
        if 2 * self._undecided < len(self._accounts):
            return
        self._undecided = 0
        units = [unit for account in self._accounts.values() for unit in account.units]
        self._allowed = units_allowed_to_spend(units, left, costs, self._maximum)
        waiting = (name for name, a in self._accounts.items() if any(map(self._may, a.units)))
        self._collector = min(waiting, default="")

    def _may(self, unit: UnitSpending) -> bool:
        return unit.need > 0 and (self._allowed is None or unit.place in self._allowed)

    def remove(self, worker: str) -> None:
        """Remove a worker. What it held counts as spent, because its calls may have been served."""
        account = self._accounts.pop(worker, None)
        if account is not None:
            self._held -= account.held
            self._units -= len(account.units)
            self._need -= _need(account)
            self.spent += account.held


def _need(account: LeaseReport) -> int:
    return sum(unit.need for unit in account.units)
