"""Who may spend what is left of a budget, over several workers."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from hermes_rl.errors import CostLimit
from hermes_rl.models.limits.governor import Governor
from hermes_rl.models.limits.governor_wire import Charter, Report, UnitSpending
from hermes_rl.models.limits.priority import CALLS, Costs, may_spend
from hermes_rl.models.limits.rests import Rests
from hermes_rl.models.limits.spending import Lease

WORST = 100
"""Of each call."""


def waiting(place, spent=0):
    return UnitSpending(place, spent, 0, WORST)


def test_while_nobody_knows_what_a_unit_costs_few_begin():
    units = [waiting(place) for place in range(60)]
    costs = Costs(WORST, None)
    assert may_spend(units, 2 * CALLS * WORST, costs, more=60) == {0, 1}
    assert may_spend(units, WORST, costs, more=60) == {0}
    assert may_spend(units, 120 * CALLS * WORST, costs, more=60) is None


def test_begun_units_come_first_and_what_they_need_is_set_aside():
    units = [waiting(0), waiting(7, spent=50), waiting(3, spent=250)]
    assert may_spend(units, 1000, Costs(WORST, 300), more=60) == {3, 7, 0}
    assert may_spend(units, 500, Costs(WORST, 300), more=60) == {3, 7}
    assert may_spend(units, 300, Costs(WORST, 300), more=60) == {3}


def test_a_unit_at_its_tools_keeps_its_place():
    working = UnitSpending(1, spent=100)
    assert may_spend([working, waiting(2, spent=10)], 450, Costs(WORST, 300), more=9) == set()
    assert may_spend([working, waiting(2, spent=10)], 500, Costs(WORST, 300), more=9) == {2}


def test_calls_of_no_unit_never_wait_for_units():
    units = [waiting(-1), waiting(-1), waiting(0)]
    assert may_spend(units, 3 * WORST, Costs(WORST, 300), more=9) == {-1, 0}


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(1, WORST), min_size=1, max_size=8), min_size=1, max_size=20),
    st.integers(0, 4000),
    st.integers(1, 3),
)
def test_units_end_or_are_refused_and_the_budget_holds(units, limit, workers):
    """Units of so many calls of so much, spread over workers, all begun at once."""
    finished, spent = asyncio.run(spend(units, limit, workers))
    assert spent <= limit
    dearest, worst = max(map(sum, units)), CALLS * WORST
    if limit >= sum(map(sum, units)) + worst:
        assert len(finished) == len(units)
    elif limit >= dearest + worst:
        assert finished


async def spend(units, limit, workers):
    governor = Governor(
        Charter(maximum=len(units), pots={"run:tokens": limit}), lambda: 100.0, Rests()
    )
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
            report = Report(worker=str(number), pots=(lease.report(),))
            lease.granted(governor.handle(report).pots[0])
            await asyncio.sleep(0)
        if all(task.done() for task in tasks):
            break
    assert all(task.done() for task in tasks), "calls wait for ever"
    await asyncio.gather(*tasks)
    return finished, sum(lease.spent for lease in leases)
