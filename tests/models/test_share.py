"""Workers that share one limit, in real time, against a server with a quota."""

import asyncio
import math
import random
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from hermes_rl.errors import ModelError, Outage, ServerError
from hermes_rl.messages import UserMessage
from hermes_rl.models import Conversation, Endpoint, ModelRequest, connect
from hermes_rl.models.calls import Clock, ModelCaller, RetryPolicy, Route
from hermes_rl.models.rate import Coordinator, Share, Spend
from hermes_rl.testing import Conditions, FakeConfig, FakeServer, RateLimits

SCALE = 12
"""Seconds of the server's clock in one of ours: its minute lasts five seconds."""

WORKERS, CALLERS = 8, 8
PER_MINUTE = 150
PER_S = PER_MINUTE * SCALE / 60
SETTLING_S, STEADY_S = 10.0, 8.0  # two minutes of its clock, as in `test_adaptive`


def coordinate(maximum=WORKERS * CALLERS, **options):
    return Coordinator(maximum, {}, {}, **{"clock": time.monotonic, "unix": time.time, **options})


@dataclass
class Load:
    """Callers that ask again and again, and when they were answered or refused."""

    client: object
    ends: list[tuple[float, bool]] = field(default_factory=list)

    async def caller(self, limiter):
        conversation = Conversation([UserMessage(content="hello")])
        while True:
            request = ModelRequest(model="echo", conversation=conversation, call_id="c")
            pause = 0.0
            async with limiter.slot() as slot:
                try:
                    answer = await self.client.complete(request)
                except ModelError as error:
                    slot.report(error, headers=error.rate_limit)
                    pause = ((error.retry_after_s or 0) + random.uniform(0, 5)) / SCALE
                else:
                    slot.report(None, answer.usage, answer.rate_limit)
                self.ends.append((time.monotonic(), not pause))
            await asyncio.sleep(pause)

    def between(self, since, until):
        """(answers, refusals) in that time."""
        ends = [ok for at, ok in self.ends if since <= at < until]
        return sum(ends), len(ends) - sum(ends)


@pytest.mark.slow
async def test_eight_workers_find_the_allowed_rate_and_follow_it(kit):
    """Three servers at once: one that tells its limits, one that does not, and one whose answers
    take no time at all, so that one caller alone would ask too often."""
    async with asyncio.TaskGroup() as group:
        for headers, latency_s in ((True, 0.05), (False, 0.05), (False, 0.001)):
            group.create_task(find_and_follow(kit, headers, latency_s))


@asynccontextmanager
async def eight_workers(kit, rate, latency_s):
    """(server, load, coordinator), with callers in all workers, once the bucket is drained:
    what tells its limits refuses nobody and needs no time."""
    config = FakeConfig(
        rate=rate, latency_s=latency_s, conditions=Conditions(clock_scale=SCALE), keep=False
    )
    scaled = coordinate(minute_s=60 / SCALE)
    async with FakeServer(config) as server, AsyncExitStack() as stack:
        load = Load(connect(Endpoint(base_url=server.base_url)))
        stack.push_async_callback(load.client.aclose)
        shares = [Share(f"1-{n}", tick_s=0.02) for n in range(WORKERS)]
        limiters = [share.limiter("h", "KEY", "echo") for share in shares]
        for share in shares:
            await stack.enter_async_context(share.coordinated(scaled.handle))
        tasks = [
            asyncio.create_task(load.caller(lane)) for lane in limiters for _ in range(CALLERS)
        ]
        try:
            if not rate.headers:
                await kit.until(lambda: load.between(0.0, math.inf)[1] >= 3, 30.0)
            yield server, load, scaled
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def steady(load):
    """(share of the rate that is used, share of requests that are refused)."""
    await asyncio.sleep(SETTLING_S)
    began = time.monotonic()
    await asyncio.sleep(STEADY_S)
    ended = time.monotonic()
    answered, refused = load.between(began, ended)
    return answered / (PER_S * (ended - began)), refused / (answered + refused)


async def find_and_follow(kit, headers, latency_s):
    """85 % of a rate is used, under 5 % are refused, and a minute after it doubled 85 % of that."""
    rate = RateLimits(requests=PER_MINUTE, headers=headers)
    async with eight_workers(kit, rate, latency_s) as (server, load, scaled):
        used, refused = await steady(load)
        assert used >= 0.85
        assert refused < 0.05
        server.limits.factor, wanted = 2.0, 0.85 * 2 * PER_S * 8 / SCALE
        # Within a minute of the server's, over eight seconds of it. `test_adaptive` has the strict
        # bound of 50 s; the rest is for a busy machine.
        await kit.until(
            lambda: load.between(time.monotonic() - 8 / SCALE, math.inf)[0] >= wanted,
            60 / SCALE,
        )
    (lane,) = scaled.summary().lanes
    assert lane.clean + lane.throttled >= 0.9 * len(load.ends)


@pytest.mark.slow
async def test_hints_of_89_seconds_do_not_freeze_eight_workers(kit):
    """Each refused caller waits that long, and all 64 do at first. They come back paced; the strict
    bounds are those of `test_simulated`, on a clock that no busy machine stops."""
    rate = RateLimits(requests=PER_MINUTE, headers=False, retry_after_s=89.0)
    async with eight_workers(kit, rate, 0.05) as (_, load, _):
        used, refused = await steady(load)
    assert used >= 0.8
    assert refused < 0.1


async def test_three_workers_keep_one_limit_together(kit):
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


async def test_the_last_report_of_a_worker_waits_for_the_coordinator():
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
    async with asyncio.timeout(20):
        reservation = await share.budget().reserve("m", Spend(tokens=60, usd=None))
        reservation.settle(Spend(tokens=25, usd=None))
        await share.leave()
        await carrying
    assert coordinator.summary().spent == {"run:tokens": 25}
    assert coordinator.ledgers["run:tokens"].left == 75


async def test_a_process_that_is_alone_needs_no_coordinator():
    share = Share(maximum=4)
    assert share.budget() is None
    async with asyncio.timeout(20), share.limiter("h", "K", "m").slot() as slot:
        slot.report(None)


@pytest.mark.parametrize(("others", "raised"), [(True, ServerError), (False, Outage)])
async def test_what_others_are_answered_tells_an_outage_from_a_bad_request(kit, others, raised):
    """One unit draws 500s only. Where another worker is answered all along it is the unit that
    fails, and the run goes on; a server that answers nobody parks it."""

    def fast():
        return 30 * time.monotonic()

    async def sleep(seconds):
        await asyncio.sleep(seconds / 30)

    clock = Clock(monotonic=fast, sleep=sleep)
    coordinator = coordinate(8, clock=fast)
    async with AsyncExitStack() as stack:
        shares = [Share(f"1-{n}", tick_s=0.02, clock=fast) for n in range(2)]
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

        beside = [asyncio.create_task(busy())] if others else []
        async with asyncio.timeout(30):
            with pytest.raises(ModelError) as failed:
                await ModelCaller([bad], kit.Events(), policy, clock=clock).call(
                    kit.request(), turn=1
                )
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
    assert type(failed.value) is raised
