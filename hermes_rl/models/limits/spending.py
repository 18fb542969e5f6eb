"""A worker's side of the budgets: leases from the governor, and reservations from the leases."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hermes_rl.errors import CostLimit, HermesError, UnitCostLimit
from hermes_rl.models.limits.budget import Budget, Reservation, Spend
from hermes_rl.models.limits.governor_wire import PotGrant, PotReport

RUN_TOKENS = "run:tokens"
RUN_USD = "run:usd"
NANO = 1_000_000_000
"""Pots of dollars are counted in billionths."""

UNIT_TOKENS = "unit:tokens"
UNIT_USD = "unit:usd"

_ASKED_FOR = 64
"""So many of the calls that wait are counted into what is asked for."""


def model_pot(model: str, unit: str = "usd") -> str:
    """The pot of one model's dollars (`usd`) or `tokens`."""
    return f"model:{model}:{unit}"


def model_of(pot: str) -> str | None:
    """The model that a pot is for; None for other pots."""
    return pot.removeprefix("model:").rpartition(":")[0] if pot.startswith("model:") else None


@dataclass(frozen=True)
class _Waiter:
    ready: asyncio.Future[None]
    need: int


class Lease:
    """One worker's part of one pot.

    Invariant: what calls have reserved was leased before; what they spend beyond that is a debt of
    the lease, which is paid before the next call starts.

    Args:
        hungry: called when calls begin to wait.
    """

    def __init__(self, pot: str, hungry: Callable[[], None] = lambda: None) -> None:
        self.pot = pot
        self.spent = self.reserved = self.free = 0
        self._most: int | None = None
        self._recalled = False
        self._hungry = hungry
        self._waiting: deque[_Waiter] = deque()

    async def reserve(self, need: int) -> None:
        """Set an amount aside; waits while other calls' reservations may still come back.

        Raises: CostLimit when it cannot fit even if all of them come back.
        """
        if not self._waiting and need <= self.free:
            self._hold(need)
            return
        waiter = _Waiter(asyncio.get_running_loop().create_future(), need)
        self._waiting.append(waiter)
        self._serve()
        self._hungry()
        try:
            await waiter.ready
        except asyncio.CancelledError:
            ready = waiter.ready
            if ready.done() and not ready.cancelled() and ready.exception() is None:
                self.settle(need, 0)
            self._serve()
            raise

    def settle(self, need: int, spent: int) -> None:
        """A call that had reserved `need` ended and cost `spent`."""
        self.reserved -= need
        self.spent += spent
        self.free += need - spent
        self._serve()

    def report(self, *, leaving: bool = False) -> PotReport:
        """How the lease stands. What was recalled is handed in with it."""
        if leaving or self._recalled:
            self.free = min(self.free, 0)
        waiting = [w.need for w in self._waiting if not w.ready.done()]
        lacks = sum(waiting[:_ASKED_FOR]) - self.free
        return PotReport(
            pot=self.pot,
            spent=self.spent,
            held=self.reserved + self.free,
            want=max(0, lacks) if waiting else 0,
            first=max(0, waiting[0] - self.free) if waiting else 0,
        )

    def granted(self, grant: PotGrant) -> None:
        """The answer to a report."""
        self.free += grant.add
        self._most, self._recalled = grant.most, grant.recall
        self._serve()

    def _hold(self, need: int) -> None:
        self.free -= need
        self.reserved += need

    def _serve(self) -> None:
        while self._waiting:
            waiter = self._waiting[0]
            if not waiter.ready.done():
                if waiter.need <= self.free:
                    self._hold(waiter.need)
                    waiter.ready.set_result(None)
                elif self._most is not None and waiter.need > self._most:
                    waiter.ready.set_exception(_refusal(self.pot, waiter.need, self._most))
                else:
                    return
            self._waiting.popleft()


def _refusal(pot: str, need: int, most: int) -> HermesError:
    who, _, unit = pot.rpartition(":")
    left = f"{_text(max(0, most), unit)} left, a call may cost {_text(need, unit)}"
    if who == "unit":
        return UnitCostLimit(f"the unit's budget is used up: {left}")
    whose = "the run's budget" if who == "run" else f"the budget of {who.removeprefix('model:')}"
    return CostLimit(f"{whose} is used up: {left}")


def _text(amount: int, unit: str) -> str:
    return f"${amount / NANO:,.4f}" if unit == "usd" else f"{amount:,} tokens"


class SharedBudget:
    """The budgets of a run, as a `Budget`.

    Args:
        leases: by pot; a pot that is not there has no limit.
    """

    def __init__(self, leases: Mapping[str, Lease]) -> None:
        self._leases = leases

    def binds(self, model: str, worst: Spend) -> bool:
        """See `Budget.binds`."""
        return any(_Held(self._leases, model).parts(worst, up=True).values())

    async def reserve(self, model: str, worst: Spend) -> Reservation:
        """See `Budget.reserve`."""
        held = _Held(self._leases, model)
        try:
            for pot, need in held.parts(worst, up=True).items():
                await self._leases[pot].reserve(need)
                held.needs[pot] = need
        except BaseException:  # also when cancelled: the pots before this one are given back
            held.release()
            raise
        return held


class _Held:
    """One call's part of every pot that it draws on."""

    def __init__(self, leases: Mapping[str, Lease], model: str) -> None:
        self.needs: dict[str, int] = {}
        self._leases, self._model = leases, model

    def parts(self, spend: Spend, *, up: bool = False) -> dict[str, int]:
        """Pot -> amount, always in the same order: calls that wait for each other's pots would
        wait for ever otherwise."""
        usd = (spend.usd or 0.0) * NANO
        nano = math.ceil(usd) if up else round(usd)
        tokens = (UNIT_TOKENS, RUN_TOKENS, model_pot(self._model, "tokens"))
        dollars = (UNIT_USD, RUN_USD, model_pot(self._model))
        amounts = {**dict.fromkeys(tokens, spend.tokens), **dict.fromkeys(dollars, nano)}
        return {pot: amount for pot, amount in amounts.items() if pot in self._leases}

    def settle(self, spent: Spend | None) -> None:
        """See `Reservation.settle`. Where only the price is not known, that stays the worst."""
        if spent is None:
            self._end(self.needs)
        elif spent.usd is None:
            tokens = {pot: spent.tokens for pot in self.needs if pot.endswith(":tokens")}
            self._end({**self.needs, **tokens})
        else:
            self._end(self.parts(spent))

    def release(self) -> None:
        """See `Reservation.release`."""
        self._end({})

    def _end(self, amounts: Mapping[str, int]) -> None:
        needs, self.needs = self.needs, {}
        for pot, need in needs.items():
            self._leases[pot].settle(need, amounts.get(pot, 0))


class UnitBudget:
    """What one attempt may spend, beside the run's budgets.

    Args:
        limits: of `UNIT_TOKENS` and `UNIT_USD`, in the pot's unit.
        shared: the run's budgets, where there are some.
    """

    def __init__(self, limits: Mapping[str, int], shared: Budget | None) -> None:
        self._limits = dict(limits)
        self._leases = {pot: Lease(pot) for pot in limits}
        self._own = SharedBudget(self._leases)
        self._shared = shared
        for pot, limit in limits.items():
            self._leases[pot].granted(PotGrant(pot=pot, add=limit, most=limit))

    def binds(self, model: str, worst: Spend) -> bool:
        """See `Budget.binds`."""
        shared = self._shared is not None and self._shared.binds(model, worst)
        return shared or self._own.binds(model, worst)

    async def reserve(self, model: str, worst: Spend) -> Reservation:
        """See `Budget.reserve`. Raises: UnitCostLimit too."""
        own = await self._own.reserve(model, worst)
        try:
            shared = await self._shared.reserve(model, worst) if self._shared else None
        except BaseException:  # also when cancelled
            own.release()
            self.tell()
            raise
        return _UnitHeld(self, own, shared)

    def tell(self) -> None:
        """A call ended: those that wait may be refused now."""
        for pot, lease in self._leases.items():
            lease.granted(PotGrant(pot=pot, add=0, most=self._limits[pot] - lease.spent))


@dataclass(frozen=True)
class _UnitHeld:
    unit: UnitBudget
    own: Reservation
    shared: Reservation | None

    def settle(self, spent: Spend | None) -> None:
        """See `Reservation.settle`."""
        self.own.settle(spent)
        self.unit.tell()
        if self.shared is not None:
            self.shared.settle(spent)

    def release(self) -> None:
        """See `Reservation.release`."""
        self.own.release()
        self.unit.tell()
        if self.shared is not None:
            self.shared.release()
