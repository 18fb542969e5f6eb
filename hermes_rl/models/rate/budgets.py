"""The worker's side of budgets: reserve each call's worst case before it, and settle its cost
after.

Amounts are whole numbers: tokens, or billionths of a US dollar. A worker spends from leases that
the driver's ledger grants (`ledger`); the budget of one attempt is a separate lease.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import msgspec

from hermes_rl.errors import CostLimit, HermesError, UnitCostLimit

OUTPUT_MAX = 32_000
"""Output limit of a call without one, if its model's maximum is unknown: a budget reserves this
many and sends it as the limit. Equals the default of the Messages dialect."""

NANO = 1_000_000_000
"""Billionths in a dollar."""

RUN_TOKENS, RUN_USD = "run:tokens", "run:usd"
UNIT_TOKENS, UNIT_USD = "unit:tokens", "unit:usd"

NO_UNIT = -1
"""The place of calls that belong to no unit."""


def model_budget(model: str, unit: str = "usd") -> str:
    """Return the name of the budget of one model, in `usd` or `tokens`."""
    return f"model:{model}:{unit}"


def model_of(budget: str) -> str | None:
    """Return the model that a budget is for; None for other budgets."""
    if not budget.startswith("model:"):
        return None
    return budget.removeprefix("model:").rpartition(":")[0]


@dataclass(frozen=True)
class Spend:
    """An amount: the worst case of a reservation, the actual cost of a settlement."""

    tokens: int = 0
    """Input and output."""
    usd: float | None = 0.0
    """None where the price is not known."""


class UnitSpending(msgspec.Struct, frozen=True, array_like=True):
    """One unit's share of a budget."""

    place: int
    """In the dataset; negative for calls that belong to no unit."""
    spent: int = 0
    held: int = 0
    """Reserved by its calls in flight."""
    need: int = 0
    """What its waiting calls would reserve."""

    @property
    def begun(self) -> bool:
        """Whether it has cost anything."""
        return self.spent > 0 or self.held > 0


class LeaseReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one budget at a worker."""

    budget: str
    spent: int = 0
    """Since the worker's start."""
    held: int = 0
    """Of its lease: reserved by calls, or free."""
    units: tuple[UnitSpending, ...] = ()
    """Units in progress there."""
    finished: int = 0
    """Units finished there."""
    finished_spent: int = 0
    """What those cost."""


class LeaseGrant(msgspec.Struct, frozen=True, kw_only=True):
    """A change of a worker's lease."""

    budget: str
    add: int
    """Amount added to the lease."""
    most: int
    """What is not spent: a call with a larger worst case can never be made."""
    unit: int = 0
    """Average cost of a unit; none begins if less is unspent. 0 if unknown."""
    only: tuple[int, ...] | None = None
    """Places of the units whose calls may start; None for all."""
    recall: bool = False
    """Other workers wait: return what no call has reserved."""


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
    """One worker's share of one budget.

    Invariant: reservations never exceed grants. Cost beyond a worst case is a debt of the lease,
    which is settled before the next call starts.

    Args:
        limit: of a budget that is not shared; None waits for grants.
        on_demand: called when calls begin to wait.
    """

    def __init__(
        self, budget: str, limit: int | None = None, on_demand: Callable[[], None] = lambda: None
    ) -> None:
        self.budget = budget
        self.spent = self.reserved = 0
        self.free = limit or 0
        self._most = limit
        self._unit_cost = 0
        self._only: Collection[int] | None = None
        self._recalled = False
        self._on_demand = on_demand
        self._waiting: list[_Waiter] = []
        self._units: dict[int, _Unit] = {}
        self._finished = self._finished_spent = 0

    async def reserve(self, need: int, place: int = NO_UNIT) -> None:
        """Reserve an amount. Waits while reservations may be returned, and for units with priority.

        Args:
            place: of the unit.

        Raises: CostLimit if the amount cannot fit even if all reservations are returned.
        """
        self._units.setdefault(place, _Unit())
        if not need:  # no price, or zero: grants list only units that need an amount
            if self._most is not None and self._most < 0:  # answers reported their costs
                raise _refusal(self.budget, self._most, "a call may cost", need)
            return
        if not self._waiting and need <= self.free and self._may(place):
            self._hold(need, place)
            return
        waiter = _Waiter(asyncio.get_running_loop().create_future(), need, place)
        self._waiting.append(waiter)
        self._serve()
        self._on_demand()
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
        if self._most is not None:
            self._most -= spent
        if unit := self._units.get(place):
            unit.held -= need
            unit.spent += spent
        self._serve()
        if self._waiting:
            self._on_demand()

    def end(self, place: int, *, finished: bool) -> None:
        """A unit's attempt has ended."""
        unit = self._units.pop(place, None)
        if unit is not None and finished:
            self._finished += 1
            self._finished_spent += unit.spent
        if self._waiting:
            self._on_demand()

    def report(self, *, leaving: bool = False) -> LeaseReport:
        """Return the state of the lease, without what was recalled."""
        if leaving or self._recalled:
            self.free = min(self.free, 0)
        needs: Counter[int] = Counter()
        for waiter in self._waiting:
            needs[waiter.place] += 0 if waiter.ready.done() else waiter.need
        return LeaseReport(
            budget=self.budget,
            spent=self.spent,
            held=self.reserved + self.free,
            units=tuple(
                UnitSpending(place, unit.spent, unit.held, needs[place])
                for place, unit in self._units.items()
            ),
            finished=self._finished,
            finished_spent=self._finished_spent,
        )

    def take_grant(self, grant: LeaseGrant) -> None:
        """Obey a grant from now on."""
        self.free += grant.add
        self._most, self._unit_cost = grant.most, grant.unit
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
        """Return why a call can never be made."""
        if self._most is None:
            return None
        if waiter.need > self._most:
            return _refusal(self.budget, self._most, "a call may cost", waiter.need)
        if self._unit_cost > self._most and not self._begun(waiter.place):
            return _refusal(self.budget, self._most, "a unit costs about", self._unit_cost)
        return None

    def _serve(self) -> None:
        """Start what may start: units that have begun first, and in the order of the dataset."""
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


def _refusal(budget: str, most: int, what: str, amount: int) -> HermesError:
    owner, _, unit = budget.rpartition(":")
    left = f"{_text(max(0, most), unit)} left, {what} {_text(amount, unit)}"
    if owner == "unit":
        return UnitCostLimit(f"the unit's budget is used up: {left}")
    name = "the run's budget" if owner == "run" else f"the budget of {owner.removeprefix('model:')}"
    return CostLimit(f"{name} is used up: {left}")


def _text(amount: int, unit: str) -> str:
    return f"${amount / NANO:,.4f}" if unit == "usd" else f"{amount:,} tokens"


class Budget:
    """The budgets of one attempt: the run's and the attempt's.

    Args:
        shared: the worker's leases of the run's budgets, by name.
        place: of the unit.
        limits: of the attempt, by name (`UNIT_TOKENS`, `UNIT_USD`).
    """

    def __init__(
        self,
        shared: Mapping[str, Lease],
        place: int = NO_UNIT,
        limits: Mapping[str, int] | None = None,
    ) -> None:
        unit_leases = {name: Lease(name, limit) for name, limit in (limits or {}).items()}
        self.leases = {**unit_leases, **shared}
        self.place = place
        self._shared = shared

    def binds(self, model: str, worst: Spend) -> bool:
        """Return whether a call with this worst case is charged to any budget."""
        return any(Reservation(self, model).amounts(worst, up=True).values())

    async def reserve(self, model: str, worst: Spend) -> Reservation:
        """Reserve the worst case of one call. Raises: CostLimit, UnitCostLimit."""
        reservation = Reservation(self, model)
        try:
            for name, need in reservation.amounts(worst, up=True).items():
                await self.leases[name].reserve(need, self.place)
                reservation.needs[name] = need
        except BaseException:  # also when cancelled
            reservation.release()
            raise
        return reservation

    def unit_spent(self) -> dict[str, int]:
        """Return the amounts spent of the attempt's limits, by name."""
        return {
            name: lease.spent for name, lease in self.leases.items() if name not in self._shared
        }

    def charge(self, spent: Mapping[str, int]) -> None:
        """Charge what the resumed attempt had spent of these limits."""
        for name in spent.keys() & self.leases.keys() - self._shared.keys():
            self.leases[name].settle(0, spent[name])

    def end(self, *, finished: bool) -> None:
        """The attempt has ended.

        Args:
            finished: its unit is done: its cost predicts what others will cost.
        """
        for lease in self._shared.values():
            lease.end(self.place, finished=finished)


class Reservation:
    """One call's reservations in all its budgets."""

    def __init__(self, budget: Budget, model: str) -> None:
        self.needs: dict[str, int] = {}
        self._budget, self._model = budget, model

    def amounts(self, spend: Spend, *, up: bool = False) -> dict[str, int]:
        """Return budget -> amount, always in the same order, so that calls cannot deadlock."""
        usd = (spend.usd or 0.0) * NANO
        nano = math.ceil(usd) if up else round(usd)
        amounts = {
            UNIT_TOKENS: spend.tokens,
            UNIT_USD: nano,
            RUN_TOKENS: spend.tokens,
            model_budget(self._model, "tokens"): spend.tokens,
            RUN_USD: nano,
            model_budget(self._model): nano,
        }
        return {name: amount for name, amount in amounts.items() if name in self._budget.leases}

    def settle(self, spent: Spend | None) -> None:
        """Report the cost of the call. If it is None the worst case counts as spent; if only the
        price is unknown, the worst case in dollars."""
        if spent is None:
            self._end(self.needs)
        elif spent.usd is None:
            tokens = {name: spent.tokens for name in self.needs if name.endswith(":tokens")}
            self._end({**self.needs, **tokens})
        else:
            self._end(self.amounts(spent))

    def release(self) -> None:
        """Release the reservations of a call that was not served."""
        self._end({})

    def _end(self, amounts: Mapping[str, int]) -> None:
        needs, self.needs = self.needs, {}
        for name, need in needs.items():
            lease = self._budget.leases[name]
            lease.settle(need, amounts.get(name, 0), self._budget.place)
