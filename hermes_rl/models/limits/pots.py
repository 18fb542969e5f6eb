"""A governor's side of the budgets: what is spent, what is leased, what may still be had. Pure.

Invariant: what is spent and what is leased never exceed a pot together, as far as this governor has
a say in it: a call that turns out dearer than its worst case, or a lease that a dead worker took
along, is counted and not undone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hermes_rl.models.limits.governor_wire import PotGrant, PotReport, UnitSpending
from hermes_rl.models.limits.priority import Costs, may_spend


@dataclass
class _Account:
    """One worker's doings with one pot."""

    spent: int = 0
    held: int = 0
    units: tuple[UnitSpending, ...] = ()
    finished: int = 0
    finished_spent: int = 0


class Pot:
    """One budget.

    Args:
        limit: in the pot's unit.
        before: spent by earlier starts of the run.
        maximum: units at work at a time.
    """

    def __init__(self, name: str, limit: int, before: int = 0, maximum: int = 1) -> None:
        self.name, self.limit, self.before = name, limit, before
        self._maximum = maximum
        self._call = self._finished = self._finished_spent = 0
        self._accounts: dict[str, _Account] = {}
        self._absent: dict[str, int] = {}
        """What workers that are not heard any more have spent or taken along."""

    @property
    def spent(self) -> int:
        """All that is gone for good."""
        gone = self.before + sum(self._absent.values())
        return gone + sum(account.spent for account in self._accounts.values())

    @property
    def left(self) -> int:
        """What may be leased now; negative when calls were dearer than their worst case."""
        return self.limit - self.spent - sum(a.held for a in self._accounts.values())

    @property
    def costs(self) -> Costs:
        """What calls and units cost."""
        every = self._accounts.values()
        finished = self._finished + sum(account.finished for account in every)
        spent = self._finished_spent + sum(account.finished_spent for account in every)
        return Costs(self._call, spent // finished if finished else None)

    def hear(self, worker: str, report: PotReport) -> None:
        """Take a worker's news in."""
        self._absent.pop(worker, None)
        self._call = max((self._call, *(unit.need for unit in report.units)))
        self._accounts[worker] = _Account(
            report.spent, report.held, report.units, report.finished, report.finished_spent
        )

    def grant(self, worker: str, report: PotReport, *, settling: bool) -> PotGrant:
        """A lease for the calls that wait and may begin, as far as it goes.

        Args:
            settling: it is not known yet what others hold: nothing is handed out.
        """
        account, left, costs = self._accounts[worker], max(0, self.left), self.costs
        free = report.held - sum(unit.held for unit in report.units)
        units = [unit for other in self._accounts.values() for unit in other.units]
        allowed = may_spend(units, left + free, costs, self._maximum)
        asking = [u for u in report.units if u.need and (allowed is None or u.place in allowed)]
        lacks = sum(unit.need for unit in asking) - free
        add = 0 if settling else max(0, min(left, lacks))
        account.held += add
        others = (a for name, a in self._accounts.items() if name != worker)
        hungry = any(unit.need for other in others for unit in other.units)
        return PotGrant(
            pot=self.name,
            add=add,
            most=self.limit - self.spent,
            unit=costs.unit or 0,
            only=None if allowed is None else tuple(unit.place for unit in asking),
            recall=hungry or allowed is not None,
        )

    def forget(self, worker: str) -> None:
        """A worker is no more. What it held may have been spent by calls that nobody saw end."""
        account = self._accounts.pop(worker, None)
        if account is not None:
            self._absent[worker] = account.spent + account.held
            self._finished += account.finished
            self._finished_spent += account.finished_spent

    def accounts(self) -> dict[str, int]:
        """Worker -> spent and leased, for a governor that comes after."""
        now = {name: account.spent + account.held for name, account in self._accounts.items()}
        return {**self._absent, **now}

    def resume(self, accounts: Mapping[str, int]) -> None:
        """Go on where a dead governor was. Workers that report again count for themselves."""
        for worker, amount in accounts.items():
            if worker not in self._accounts:
                self._absent[worker] = amount


def accounts_by_worker(pots: Iterable[Pot]) -> dict[str, dict[str, int]]:
    """Worker -> pot -> spent and leased."""
    found: dict[str, dict[str, int]] = {}
    for pot in pots:
        for worker, amount in pot.accounts().items():
            found.setdefault(worker, {})[pot.name] = amount
    return found
