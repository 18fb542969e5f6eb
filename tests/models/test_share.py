"""Workers that share one limit, in real time. `test_simulated` has their rates."""

import asyncio
import time
from contextlib import AsyncExitStack

import pytest
from simulated_time import in_simulated_time, loop_clock

from hermes_rl.errors import ModelError, Outage, ServerError
from hermes_rl.models.calls import ModelCaller, RetryPolicy, Route
from hermes_rl.models.rate import Coordinator, Share, Spend


def coordinate(maximum, **options):
    return Coordinator(maximum, {}, {}, **{"clock": time.monotonic, "unix": time.time, **options})


async def test_three_workers_share_one_limit(kit):
    coordinator, done, in_flight, most = coordinate(6, start=6), [0, 0, 0], 0, 0

    async def caller(number, limiter):
        nonlocal in_flight, most
        while True:
            async with limiter.slot() as slot:
                in_flight += 1
                most = max(most, in_flight)
                await asyncio.sleep(0.002)
                slot.report(None)
                in_flight -= 1
                done[number] += 1

    async with AsyncExitStack() as stack:
        shares = [Share(f"1-{n}", tick_s=0.05) for n in range(3)]
        limiters = [share.limiter("h", "K", "m") for share in shares]
        for share in shares:
            await stack.enter_async_context(share.coordinated(coordinator.handle))
        tasks = [
            asyncio.create_task(caller(n, limiter))
            for n, limiter in enumerate(limiters)
            for _ in range(5)
        ]
        await kit.until(lambda: min(done) > 20)
        shares[0].cooldowns.start("K", 100.0, "billing")
        await kit.until(lambda: all(share.cooldowns.left_s("K") for share in shares))
        assert most <= 6
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    (lane,) = coordinator.summary().lanes
    assert lane.clean == sum(done)


async def test_last_report_of_a_worker_reaches_the_coordinator():
    """As over Ray: reports are fetched, one at a time."""
    coordinator = Coordinator(4, {"run:tokens": 100}, {}, clock=time.monotonic, unix=time.time)
    share = Share("1-1", ("run:tokens",), tick_s=0.02)

    async def carry():
        report = await share.next_report()
        while not report.leaving:
            share.take_grant(coordinator.handle(report))
            report = await share.next_report()
        coordinator.handle(report)

    carrying = asyncio.create_task(carry())
    async with asyncio.timeout(60):
        reservation = await share.budget().reserve("m", Spend(tokens=60, usd=None))
        reservation.settle(Spend(tokens=25, usd=None))
        await share.leave()
        await carrying
    assert coordinator.summary().spent == {"run:tokens": 25}
    assert coordinator.ledgers["run:tokens"].left == 75


async def test_single_process_needs_no_coordinator():
    share = Share(maximum=4)
    assert share.budget() is None
    async with asyncio.timeout(60), share.limiter("h", "K", "m").slot() as slot:
        slot.report(None)


@pytest.mark.parametrize(("others", "raised"), [(True, ServerError), (False, Outage)])
@in_simulated_time
async def test_answers_to_other_workers_distinguish_outage_from_bad_request(kit, others, raised):
    """One unit draws 500s only. If another worker gets answers, the unit fails and the run
    continues. If no call is answered, it is an outage."""
    clock = loop_clock()
    coordinator = coordinate(8, clock=clock.monotonic)
    async with AsyncExitStack() as stack:
        shares = [Share(f"1-{n}", clock=clock.monotonic) for n in range(2)]
        here, there = [share.limiter("h", "K", "m") for share in shares]
        for share in shares:
            await stack.enter_async_context(share.coordinated(coordinator.handle))
        bad = Route.single("m", kit.Scripted(ServerError("500", status=500)), here)
        good = Route.single("m", kit.Scripted(kit.ANSWER), there)
        policy = RetryPolicy(outage_s=45.0, max_attempts=6, cap_s=4.0)

        async def busy():
            calling = ModelCaller([good], kit.Events(), policy, clock=clock)
            while True:
                await calling.call(kit.request(), turn=1)
                await asyncio.sleep(0.1)

        beside = [asyncio.create_task(busy())] if others else []
        with pytest.raises(ModelError) as failed:
            await ModelCaller([bad], kit.Events(), policy, clock=clock).call(kit.request(), turn=1)
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
    assert type(failed.value) is raised
