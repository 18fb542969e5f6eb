"""Budgets: leases from the coordinator, reservations from the leases, refusals."""

import asyncio

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hermes_rl.errors import CostLimit, UnitCostLimit
from hermes_rl.models.rate import (
    CALLS,
    NANO,
    UNIT_TOKENS,
    UNIT_USD,
    Budget,
    Coordinator,
    Costs,
    Lease,
    LeaseGrant,
    LeaseReport,
    Ledger,
    Report,
    Spend,
    UnitSpending,
    units_allowed_to_spend,
)

WORKERS = ("a", "b", "c")


def coordinate(budgets, spent=None, maximum=10):
    return Coordinator(maximum, budgets, spent or {}, clock=lambda: 100.0, unix=lambda: 100.0)


def lease_of(coordinator, worker):
    lease = Lease("run:tokens")

    def exchange():
        grant = coordinator.handle(Report(worker=worker, leases=(lease.report(),)))
        lease.take_grant(grant.leases[0])

    return lease, exchange


async def test_budget_waits_for_reservations_and_refuses_excess():
    coordinator = coordinate({"run:tokens": 100}, {"run:tokens": 20})
    one, exchange_one = lease_of(coordinator, "a")
    two, exchange_two = lease_of(coordinator, "b")
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
    assert coordinator.summary().spent == {"run:tokens": 60}


BUDGET_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["reserve", "settle", "exchange", "cancel"]),
        st.sampled_from(WORKERS),
        st.integers(0, 60),
    ),
    max_size=120,
)


@settings(deadline=None, max_examples=120)
@given(BUDGET_STEPS, st.integers(0, 300))
@example(
    steps=[("reserve", "a", 1), ("exchange", "a", 0), ("exchange", "a", 0), ("reserve", "a", 0)],
    limit=0,
)
@example(  # two workers, each of which could keep a part of what is left
    steps=[
        ("reserve", "a", 25),
        ("reserve", "a", 6),
        ("reserve", "a", 60),
        ("exchange", "a", 0),
        ("reserve", "a", 26),
        ("reserve", "c", 2),
        ("settle", "a", 0),
        ("exchange", "c", 0),
    ],
    limit=92,
)
def test_budget_is_never_exceeded_by_concurrent_calls(steps, limit):
    asyncio.run(spend(steps, limit))


async def spend(steps, limit):
    coordinator = coordinate({"run:tokens": limit})
    sides = {worker: lease_of(coordinator, worker) for worker in WORKERS}
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
        elif what == "exchange":
            exchange()
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
        assert coordinator.ledgers["run:tokens"].left >= 0
    await finish(sides, waiting, calls)


async def finish(sides, waiting, calls):
    """Once all calls have ended, each waiting one is served or refused."""
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


async def test_lease_of_a_lost_worker_counts_as_spent():
    coordinator = coordinate({"run:tokens": 100})
    lease, exchange = lease_of(coordinator, "a")
    task = asyncio.create_task(lease.reserve(70))
    await asyncio.sleep(0)
    exchange()
    await task
    coordinator.remove("a")
    assert coordinator.summary().spent == {"run:tokens": 70}


UNIT = st.builds(UnitSpending, st.integers(0, 99), *[st.integers(0, 20)] * 3)
REPORT = st.builds(
    LeaseReport,
    budget=st.just("b"),
    units=st.lists(UNIT, max_size=3).map(tuple),
    **dict.fromkeys(("spent", "held", "finished", "finished_spent"), st.integers(0, 20)),
)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.none() | REPORT), max_size=30))
def test_sums_of_accounts_equal_those_from_scratch(steps):
    """They are kept as workers report, and as they are lost (None)."""
    ledger, known, before = Ledger("b", 5000, 7), {}, [7, 0, 0]
    for worker, report in steps:
        if report is not None:
            ledger.update(worker, report)
            grant = ledger.grant(worker)
            known[worker] = replace(report, held=report.held + grant.add)
            others = [one for name, one in known.items() if name != worker]
            wanted = any(unit.need for one in others for unit in one.units)
            assert grant.recall == (wanted or grant.only is not None)
        elif worker in known:
            ledger.remove(worker)
            lost = known.pop(worker)
            more = (lost.spent + lost.held, lost.finished, lost.finished_spent)
            before = [a + b for a, b in zip(before, more, strict=True)]
        spent = before[0] + sum(one.spent for one in known.values())
        finished = before[1] + sum(one.finished for one in known.values())
        cost = before[2] + sum(one.finished_spent for one in known.values())
        assert ledger.spent == spent
        assert ledger.left == 5000 - spent - sum(one.held for one in known.values())
        assert ledger.costs.unit == (cost // finished if finished else None)


async def test_unit_budget_applies_with_the_run_budget():
    coordinator = coordinate({"run:tokens": 1000})
    lease, exchange = lease_of(coordinator, "a")
    unit = Budget({"run:tokens": lease}, limits={UNIT_USD: NANO})
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
    assert coordinator.summary().spent == {"run:tokens": 60}


async def test_unit_budget_in_tokens_and_dollars():
    unit = Budget({}, limits={UNIT_TOKENS: 100, UNIT_USD: NANO})
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


async def test_reported_costs_exhaust_a_budget_without_prices():
    """A call without a price reserves nothing; what it cost is known after it."""
    free, half = Spend(tokens=1, usd=None), Spend(tokens=1, usd=0.5)
    budget = Budget({}, limits={UNIT_USD: NANO})
    for _ in range(3):
        (await budget.reserve("m", free)).settle(half)
    with pytest.raises(UnitCostLimit, match="the unit's budget is used up"):
        await budget.reserve("m", free)
    lease = Lease("run:usd")  # of a run: what was spent since the last grant counts too
    lease.take_grant(LeaseGrant(budget="run:usd", add=0, most=NANO))
    shared = Budget({"run:usd": lease})
    for _ in range(3):
        (await shared.reserve("m", free)).settle(half)
    with pytest.raises(CostLimit):
        await shared.reserve("m", free)


async def test_cancelled_reservation_is_returned():
    coordinator = coordinate({"run:tokens": 100, "run:usd": 10**9})
    tokens, usd = Lease("run:tokens"), Lease("run:usd")
    tokens.take_grant(LeaseGrant(budget="run:tokens", add=100, most=100))
    budget = Budget({"run:tokens": tokens, "run:usd": usd})
    asking = asyncio.create_task(budget.reserve("m", Spend(tokens=60, usd=0.5)))
    await asyncio.sleep(0)
    assert tokens.reserved == 60
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (tokens.reserved, tokens.free, tokens.spent) == (0, 100, 0)
    assert coordinator.summary().spent == {"run:tokens": 0, "run:usd": 0}


WORST = 100
"""Of each call."""


def waiting(place, spent=0):
    return UnitSpending(place, spent, 0, WORST)


NEW = [waiting(place) for place in range(60)]
BEGUN = [waiting(0), waiting(7, spent=50), waiting(3, spent=250)]
AT_ITS_TOOLS = [UnitSpending(1, spent=100), waiting(2, spent=10)]


@pytest.mark.parametrize(
    ("units", "left", "average", "more", "places"),
    [
        # While the cost of a unit is unknown, few begin.
        (NEW, 2 * CALLS * WORST, None, 60, {0, 1}),
        (NEW, WORST, None, 60, {0}),
        (NEW, 120 * CALLS * WORST, None, 60, None),
        # Begun units come first, and what they need is set aside.
        (BEGUN, 1000, 300, 60, {3, 7, 0}),
        (BEGUN, 500, 300, 60, {3, 7}),
        (BEGUN, 300, 300, 60, {3}),
        # A unit at its tools keeps its place.
        (AT_ITS_TOOLS, 450, 300, 9, set()),
        (AT_ITS_TOOLS, 500, 300, 9, {2}),
        # Calls of no unit never wait for units.
        ([waiting(-1), waiting(-1), waiting(0)], 3 * WORST, 300, 9, {-1, 0}),
    ],
)
def test_units_that_may_spend(units, left, average, more, places):
    assert units_allowed_to_spend(units, left, Costs(WORST, average), more=more) == places


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(1, WORST), min_size=1, max_size=8), min_size=1, max_size=20),
    st.integers(0, 4000),
    st.sampled_from([1, 2, 3, 9]),
)
def test_units_finish_or_are_refused_within_the_budget(units, limit, workers):
    """Units of so many calls of so much, spread over workers, all begun at once."""
    finished, spent = asyncio.run(work(units, limit, workers))
    assert spent <= limit
    dearest, worst = max(map(sum, units)), CALLS * WORST
    if limit >= sum(map(sum, units)) + worst:
        assert len(finished) == len(units)
    elif limit >= dearest + worst:
        assert finished


async def work(units, limit, workers):
    coordinator = coordinate({"run:tokens": limit}, maximum=len(units))
    leases = [Lease("run:tokens") for _ in range(workers)]
    finished = []

    async def unit(place, calls):
        lease, done = leases[place % workers], False
        try:
            for cost in calls:
                await lease.reserve(WORST, place)
                await asyncio.sleep(0)
                lease.settle(WORST, cost, place)
                assert sum(one.spent + one.reserved for one in leases) <= limit
            finished.append(place)
            done = True
        except CostLimit:
            pass
        lease.end(place, finished=done)

    tasks = [asyncio.create_task(unit(place, calls)) for place, calls in enumerate(units)]
    for _ in range(3000):
        for number, lease in enumerate(leases):
            report = Report(worker=str(number), leases=(lease.report(),))
            lease.take_grant(coordinator.handle(report).leases[0])
            await asyncio.sleep(0)
        if all(task.done() for task in tasks):
            break
    assert all(task.done() for task in tasks), "calls wait for ever"
    await asyncio.gather(*tasks)
    return finished, sum(lease.spent for lease in leases)
