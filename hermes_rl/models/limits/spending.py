"""A worker's side of the budgets: leases from the governor, and reservations from the leases."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from hermes_rl.errors import CostLimit, HermesError, UnitCostLimit
from hermes_rl.models.limits.budget import Budget, Reservation, Spend
from hermes_rl.models.limits.governor_wire import PotGrant, PotReport, UnitSpending

RUN_TOKENS = "run:tokens"
RUN_USD = "run:usd"
NANO = 1_000_000_000
"""Pots of dollars are counted in billionths."""

UNIT_TOKENS = "unit:tokens"
UNIT_USD = "unit:usd"

NO_UNIT = -1
"""The place of calls that belong to no unit."""


def model_pot(model: str, unit: str = "usd") -> str:
    """The pot of one model's dollars (`usd`) or `tokens`."""
    return f"model:{model}:{unit}"


def model_of(pot: str) -> str | None:
    """The model that a pot is for; None for other pots."""
    return pot.removeprefix("model:").rpartition(":")[0] if pot.startswith("model:") else None


@dataclass(frozen=True, eq=False)
class _Waiter:
    ready: asyncio.Future[None]
    need: int
    place: int


@dataclass
class _Unit:
    spent: int = 0
    held: int = 0


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
        self._unit_costs = 0
        self._only: Collection[int] | None = None
        self._recalled = False
        self._hungry = hungry
        self._waiting: list[_Waiter] = []
        self._units: dict[int, _Unit] = {}
        self._finished = self._finished_spent = 0

    async def reserve(self, need: int, place: int = NO_UNIT) -> None:
        """Set an amount aside; waits while other calls' reservations may still come back, and while
        units that come before have to be finished.

        Args:
            place: of the unit.

        Raises: CostLimit when it cannot fit even if all of them come back.
        """
        self._units.setdefault(place, _Unit())
        if not self._waiting and need <= self.free and self._may(place):
            self._hold(need, place)
            return
        waiter = _Waiter(asyncio.get_running_loop().create_future(), need, place)
        self._waiting.append(waiter)
        self._serve()
        self._hungry()
        try:
            await waiter.ready
        except asyncio.CancelledError:
            ready = waiter.ready
            if ready.done() and not ready.cancelled() and ready.exception() is None:
                self.settle(need, 0, place)
            self._serve()
            raise

    def settle(self, need: int, spent: int, place: int = NO_UNIT) -> None:
        """A call that had reserved `need` ended and cost `spent`."""
        self.reserved -= need
        self.spent += spent
        self.free += need - spent
        if unit := self._units.get(place):
            unit.held -= need
            unit.spent += spent
        self._serve()
        if self._waiting:
            self._hungry()

    def end(self, place: int, *, finished: bool) -> None:
        """A unit's attempt has ended."""
        unit = self._units.pop(place, None)
        if unit is not None and finished:
            self._finished += 1
            self._finished_spent += unit.spent
        if self._waiting:
            self._hungry()

    def report(self, *, leaving: bool = False) -> PotReport:
        """How the lease stands. What was recalled is handed in with it."""
        if leaving or self._recalled:
            self.free = min(self.free, 0)
        needs: Counter[int] = Counter()
        for waiter in self._waiting:
            needs[waiter.place] += 0 if waiter.ready.done() else waiter.need
        return PotReport(
            pot=self.pot,
            spent=self.spent,
            held=self.reserved + self.free,
            units=tuple(
                UnitSpending(place, unit.spent, unit.held, needs[place])
                for place, unit in self._units.items()
            ),
            finished=self._finished,
            finished_spent=self._finished_spent,
        )

    def granted(self, grant: PotGrant) -> None:
        """The answer to a report."""
        self.free += grant.add
        self._most, self._unit_costs = grant.most, grant.unit
        self._only, self._recalled = grant.only, grant.recall
        self._serve()

    def _may(self, place: int) -> bool:
        return self._only is None or place in self._only

    def _begun(self, place: int) -> bool:
        unit = self._units.get(place)
        return place < 0 or (unit is not None and (unit.spent > 0 or unit.held > 0))

    def _hold(self, need: int, place: int) -> None:
        self.free -= need
        self.reserved += need
        self._units.setdefault(place, _Unit()).held += need

    def _refusal(self, waiter: _Waiter) -> HermesError | None:
        """Why a call can never be made."""
        if self._most is None:
            return None
        if waiter.need > self._most:
            return _refusal(self.pot, self._most, "a call may cost", waiter.need)
        if self._unit_costs > self._most and not self._begun(waiter.place):
            return _refusal(self.pot, self._most, "a unit costs about", self._unit_costs)
        return None

    def _serve(self) -> None:
        """Let begin what may; units that have begun first, nobody overtakes."""
        if not self._waiting:
            return
        stuck, left = False, list[_Waiter]()
        for waiter in sorted(self._waiting, key=lambda w: (not self._begun(w.place), w.place)):
            if waiter.ready.done():
                continue
            if (refusal := self._refusal(waiter)) is not None:
                waiter.ready.set_exception(refusal)
                continue
            if not stuck and self._may(waiter.place) and waiter.need <= self.free:
                self._hold(waiter.need, waiter.place)
                waiter.ready.set_result(None)
                continue
            stuck = stuck or self._may(waiter.place)
            left.append(waiter)
        self._waiting = left


def _refusal(pot: str, most: int, what: str, amount: int) -> HermesError:
    who, _, unit = pot.rpartition(":")
    left = f"{_text(max(0, most), unit)} left, {what} {_text(amount, unit)}"
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
        place: of the unit that spends.
    """

    def __init__(self, leases: Mapping[str, Lease], place: int = NO_UNIT) -> None:
        self._leases, self._place = leases, place

    def binds(self, model: str, worst: Spend) -> bool:
        """See `Budget.binds`."""
        return any(_Held(self._leases, model, self._place).parts(worst, up=True).values())

    async def reserve(self, model: str, worst: Spend) -> Reservation:
        """See `Budget.reserve`."""
        held = _Held(self._leases, model, self._place)
        try:
            for pot, need in held.parts(worst, up=True).items():
                await self._leases[pot].reserve(need, self._place)
                held.needs[pot] = need
        except BaseException:  # also when cancelled: the pots before this one are given back
            held.release()
            raise
        return held

    def end(self, *, finished: bool) -> None:
        """See `Budget.end`."""
        for lease in self._leases.values():
            lease.end(self._place, finished=finished)


class _Held:
    """One call's part of every pot that it draws on."""

    def __init__(self, leases: Mapping[str, Lease], model: str, place: int) -> None:
        self.needs: dict[str, int] = {}
        self._leases, self._model, self._place = leases, model, place

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
            self._leases[pot].settle(need, amounts.get(pot, 0), self._place)


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

    def end(self, *, finished: bool) -> None:
        """See `Budget.end`."""
        if self._shared is not None:
            self._shared.end(finished=finished)

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
