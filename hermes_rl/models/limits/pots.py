"""A governor's side of the budgets: what is spent, what is leased, what may still be had. Pure.

Invariant: what is spent and what is leased never exceed a pot together, as far as this governor has
a say in it: a call that turns out dearer than its worst case, or a lease that a dead worker took
along, is counted and not undone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hermes_rl.models.limits.governor_wire import PotGrant, PotReport


@dataclass
class _Account:
    """One worker's doings with one pot."""

    spent: int = 0
    held: int = 0
    want: int = 0


class Pot:
    """One budget.

    Args:
        limit: in the pot's unit.
        before: spent by earlier starts of the run.
    """

    def __init__(self, name: str, limit: int, before: int = 0) -> None:
        self.name, self.limit, self.before = name, limit, before
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

    def hear(self, worker: str, report: PotReport) -> None:
        """Take a worker's news in."""
        self._absent.pop(worker, None)
        self._accounts[worker] = _Account(report.spent, report.held, report.want)

    def grant(self, worker: str, report: PotReport, *, settling: bool) -> PotGrant:
        """A lease for the calls that wait, as far as it goes; at least for the first, or nothing.

        Args:
            settling: it is not known yet what others hold: nothing is handed out.
        """
        left = max(0, self.left)
        add = 0
        if not settling and report.want > 0 and left >= report.first:
            add = min(left, report.want)
        self._accounts[worker].held += add
        self._accounts[worker].want -= add
        hungry = any(a.want > 0 for name, a in self._accounts.items() if name != worker)
        return PotGrant(pot=self.name, add=add, most=self.limit - self.spent, recall=hungry)

    def forget(self, worker: str) -> None:
        """A worker is no more. What it held may have been spent by calls that nobody saw end."""
        account = self._accounts.pop(worker, None)
        if account is not None:
            self._absent[worker] = account.spent + account.held

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
