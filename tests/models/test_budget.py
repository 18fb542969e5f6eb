"""Budgets: leases from the governor, reservations from the leases, refusals."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl.errors import CostLimit, UnitCostLimit
from hermes_rl.models.limits.budget import Spend
from hermes_rl.models.limits.governor import Governor
from hermes_rl.models.limits.governor_wire import Charter, PotGrant, Report
from hermes_rl.models.limits.rests import Rests
from hermes_rl.models.limits.spending import NANO, Lease, SharedBudget, UnitBudget

WORKERS = ("a", "b", "c")


def govern(**charter):
    return Governor(Charter(maximum=10, **charter), lambda: 100.0, Rests())


def pot_of(governor, worker):
    lease = Lease("run:tokens")

    def exchange(*, heard=True, answered=True):
        report = lease.report()
        if heard:
            grant = governor.handle(Report(worker=worker, pots=(report,)))
            if answered:
                lease.granted(grant.pots[0])

    return lease, exchange


async def test_a_budget_waits_for_reservations_and_refuses_what_cannot_fit():
    governor = govern(pots={"run:tokens": 100}, spent={"run:tokens": 20})
    one, exchange_one = pot_of(governor, "a")
    two, exchange_two = pot_of(governor, "b")
    first = asyncio.create_task(one.reserve(60))
    await asyncio.sleep(0)
    exchange_one()
    await first
    second = asyncio.create_task(two.reserve(30))
    await asyncio.sleep(0)
    exchange_two()
    await asyncio.sleep(0)
    assert not second.done()  # 20 are left, but the first may give some of its 60 back
    one.settle(60, 10)
    exchange_one()
    exchange_two()
    await second
    two.settle(30, 30)
    third = asyncio.create_task(two.reserve(41))
    await asyncio.sleep(0)
    exchange_two()
    with pytest.raises(CostLimit, match="the run's budget is used up: 40 tokens left"):
        await third
    assert governor.summary().spent == {"run:tokens": 60}


BUDGET_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "settle", "exchange", "unheard", "unanswered", "cancel"]),
        st.sampled_from(WORKERS),
        st.integers(0, 60),
    ),
    max_size=120,
)


@settings(deadline=None, max_examples=120)
@given(BUDGET_STEPS, st.integers(0, 300))
def test_a_budget_is_never_overdrawn(steps, limit):
    asyncio.run(spend(steps, limit))


async def spend(steps, limit):
    governor = govern(pots={"run:tokens": limit})
    sides = {worker: pot_of(governor, worker) for worker in WORKERS}
    waiting = {worker: [] for worker in WORKERS}
    calls = {worker: [] for worker in WORKERS}
    for what, worker, amount in steps:
        lease, exchange = sides[worker]
        if what == "reserve":
            waiting[worker].append((amount, asyncio.ensure_future(lease.reserve(amount))))
        elif what == "settle" and calls[worker]:
            need = calls[worker].pop(0)
            lease.settle(need, min(need, amount))
        elif what == "cancel" and waiting[worker]:
            waiting[worker][0][1].cancel()
        elif what in ("exchange", "unheard", "unanswered"):
            exchange(heard=what != "unheard", answered=what != "unanswered")
        for _ in range(3):
            await asyncio.sleep(0)
        for name, tasks in waiting.items():
            done = [pair for pair in tasks if pair[1].done()]
            waiting[name] = [pair for pair in tasks if not pair[1].done()]
            for need, task in done:
                if not task.cancelled() and task.exception() is None:
                    calls[name].append(need)
        out = sum(side.spent + side.reserved for side, _ in sides.values())
        assert out <= limit
        assert all(sum(calls[w]) == sides[w][0].reserved for w in WORKERS)
        assert governor.pots["run:tokens"].left >= 0
    await finish(sides, waiting, calls)


async def finish(sides, waiting, calls):
    """Nobody waits for ever: once all calls end, each that waits is served or refused."""
    for _ in range(600):
        for worker, (lease, exchange) in sides.items():
            while calls[worker]:
                need = calls[worker].pop()
                lease.settle(need, need)
            exchange()
        for _ in range(3):
            await asyncio.sleep(0)
        for name, tasks in waiting.items():
            for pair in [pair for pair in tasks if pair[1].done()]:
                tasks.remove(pair)
                if not pair[1].cancelled() and pair[1].exception() is None:
                    calls[name].append(pair[0])
        if not any(waiting.values()):
            return
    raise AssertionError(f"calls wait for ever: {waiting}")


async def test_a_dead_workers_lease_counts_as_spent_until_it_reports_again():
    governor = govern(pots={"run:tokens": 100})
    lease, exchange = pot_of(governor, "a")
    task = asyncio.create_task(lease.reserve(70))
    await asyncio.sleep(0)
    exchange()
    await task
    governor.forget("a")
    assert governor.summary().spent == {"run:tokens": 70}
    lease.settle(70, 5)
    exchange()
    assert governor.summary().spent == {"run:tokens": 5}


async def test_a_units_budget_stands_beside_the_runs():
    governor = govern(pots={"run:tokens": 1000})
    lease, exchange = pot_of(governor, "a")
    unit = UnitBudget({"unit:usd": NANO}, SharedBudget({"run:tokens": lease}))
    asking = asyncio.create_task(unit.reserve("m", Spend(tokens=100, usd=0.6)))
    await asyncio.sleep(0)
    exchange()
    held = await asking
    second = asyncio.create_task(unit.reserve("m", Spend(tokens=10, usd=0.6)))
    await asyncio.sleep(0)
    assert not second.done()  # the first may cost less than it might
    held.settle(Spend(tokens=50, usd=0.3))
    held = await second
    held.settle(None)
    with pytest.raises(UnitCostLimit, match="the unit's budget is used up"):
        await unit.reserve("m", Spend(tokens=1, usd=0.2))
    exchange()
    assert governor.summary().spent == {"run:tokens": 60}


async def test_a_unit_has_tokens_too():
    unit = UnitBudget({"unit:tokens": 100, "unit:usd": NANO}, None)
    held = await unit.reserve("m", Spend(tokens=60, usd=0.1))
    waiting = asyncio.create_task(unit.reserve("m", Spend(tokens=60, usd=0.1)))
    await asyncio.sleep(0)
    assert not waiting.done()
    held.settle(Spend(tokens=30, usd=None))  # the tokens are known, the dollars stay the worst
    (await waiting).release()
    with pytest.raises(UnitCostLimit, match="70 tokens left, a call may cost 71 tokens"):
        await unit.reserve("m", Spend(tokens=71, usd=0.1))
    with pytest.raises(UnitCostLimit, match=r"\$0.9000 left"):
        await unit.reserve("m", Spend(tokens=70, usd=0.91))
    (await unit.reserve("m", Spend(tokens=70, usd=0.9))).settle(None)
    with pytest.raises(UnitCostLimit):
        await unit.reserve("m", Spend(tokens=1, usd=0.0))


async def test_a_call_that_gives_up_gives_back():
    governor = govern(pots={"run:tokens": 100, "run:usd": 10**9})
    tokens, usd = Lease("run:tokens"), Lease("run:usd")
    tokens.granted(PotGrant(pot="run:tokens", add=100, most=100))
    budget = SharedBudget({"run:tokens": tokens, "run:usd": usd})
    asking = asyncio.create_task(budget.reserve("m", Spend(tokens=60, usd=0.5)))
    await asyncio.sleep(0)
    assert tokens.reserved == 60
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (tokens.reserved, tokens.free, tokens.spent) == (0, 100, 0)
    assert governor.summary().spent == {"run:tokens": 0, "run:usd": 0}
