"""Workers that share one limit, in real time: a server with a quota, a governor that dies."""

import asyncio
import math
import random
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from hermes_rl.errors import ModelError, Outage, ServerError
from hermes_rl.messages import AssistantMessage, UserMessage
from hermes_rl.models.base import Completion, Conversation, ModelRequest
from hermes_rl.models.calls.retry import Clock, ModelCaller, RetryPolicy
from hermes_rl.models.calls.route import Route
from hermes_rl.models.client import Endpoint, connect
from hermes_rl.models.limits.budget import Spend
from hermes_rl.models.limits.governor import Governor
from hermes_rl.models.limits.governor_wire import Charter
from hermes_rl.models.limits.rests import Rests
from hermes_rl.models.limits.share import DirectLine, LineDown, Share, alone
from hermes_rl.models.limits.spending import RUN_TOKENS
from hermes_rl.testing.conditions import Conditions
from hermes_rl.testing.fake_server import FakeConfig, FakeServer
from hermes_rl.testing.limits import RateLimits
from hermes_rl.usage import Usage

SCALE = 12
"""Seconds of the server's clock in one of ours: its minute lasts five seconds."""

WORKERS, CALLERS = 8, 8
PER_MINUTE = 150
PER_S = PER_MINUTE * SCALE / 60
SETTLING_S, STEADY_S = 10.0, 8.0  # two minutes of its clock, as in `test_pace`


def governor(**charter):
    told = Charter(**{"maximum": WORKERS * CALLERS, "lease_s": 1.0, **charter})
    return Governor(told, time.monotonic, Rests())


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
async def test_eight_workers_find_the_allowed_rate_and_follow_it():
    """Three servers at once: one that tells its limits, one that does not, and one whose answers
    take no time at all, so that one caller alone would ask too often."""
    async with asyncio.TaskGroup() as group:
        for headers, latency_s in ((True, 0.05), (False, 0.05), (False, 0.001)):
            group.create_task(find_and_follow(headers, latency_s))


@asynccontextmanager
async def eight_workers(rate, latency_s):
    """(server, load, governor), with callers in all workers, once the server's bucket is drained:
    what tells its limits refuses nobody and needs no time."""
    config = FakeConfig(
        rate=rate, latency_s=latency_s, conditions=Conditions(clock_scale=SCALE), keep=False
    )
    scaled = governor(cut_interval_s=15 / SCALE, window_s=60 / SCALE)
    async with FakeServer(config) as server, AsyncExitStack() as stack:
        load = Load(connect(Endpoint(base_url=server.base_url)))
        stack.push_async_callback(load.client.aclose)
        shares = [Share(f"1-{n}", DirectLine(scaled), tick_s=0.02) for n in range(WORKERS)]
        limiters = [
            (await stack.enter_async_context(share)).limiter("h", "KEY", "echo") for share in shares
        ]
        tasks = [
            asyncio.create_task(load.caller(lane)) for lane in limiters for _ in range(CALLERS)
        ]
        try:
            if not rate.headers:
                await until(lambda: load.between(0.0, math.inf)[1] >= 3, 30.0)
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


async def find_and_follow(headers, latency_s):
    """85 % of a rate is used, under 5 % are refused, and a minute after it doubled 85 % of that."""
    rate = RateLimits(requests=PER_MINUTE, headers=headers)
    async with eight_workers(rate, latency_s) as (server, load, scaled):
        used, refused = await steady(load)
        assert used >= 0.85
        assert refused < 0.05
        server.limits.factor, wanted = 2.0, 0.85 * 2 * PER_S * 8 / SCALE
        # Within a minute of the server's, over eight seconds of it. What it takes by itself is told
        # by `test_pace`: less than 50 s, wherever the pace stands. The rest is for a busy machine.
        await until(
            lambda: load.between(time.monotonic() - 8 / SCALE, math.inf)[0] >= wanted,
            60 / SCALE,
        )
    (lane,) = scaled.summary().lanes
    assert lane.clean + lane.throttled >= 0.9 * len(load.ends)


@pytest.mark.slow
async def test_hints_of_89_seconds_do_not_freeze_eight_workers():
    """Each refused caller waits that long, and all 64 do at first. They come back paced; the strict
    bounds are those of `test_hints`, on a clock that no busy machine stops."""
    rate = RateLimits(requests=PER_MINUTE, headers=False, retry_after_s=89.0)
    async with eight_workers(rate, 0.05) as (_, load, _):
        used, refused = await steady(load)
    assert used >= 0.8
    assert refused < 0.1


class Switch:
    """A line that can be cut, and whose governor can be replaced."""

    def __init__(self, governor):
        self.governor = governor

    async def exchange(self, report):
        if self.governor is None:
            raise LineDown
        await asyncio.sleep(0)
        return self.governor.handle(report)


async def until(holds, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_workers_outlive_their_governor():
    switch = Switch(governor(start=6, maximum=6, lease_s=0.5))
    done = [0, 0, 0]
    in_flight = most = 0

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
        shares = [Share(f"1-{n}", switch, tick_s=0.05) for n in range(3)]
        limiters = [(await stack.enter_async_context(s)).limiter("h", "K", "m") for s in shares]
        tasks = [
            asyncio.create_task(caller(n, limiter))
            for n, limiter in enumerate(limiters)
            for _ in range(5)
        ]
        await until(lambda: min(done) > 20)
        shares[0].rests.rest("K", 100.0, "billing")
        await until(lambda: all(s.rests.until("K") for s in shares))
        switch.governor = None
        before = list(done)
        await asyncio.sleep(1.2)  # both their grants and the time after them have ended
        await until(lambda: all(b - a > 20 for a, b in zip(before, done, strict=True)))
        switch.governor = governor(start=6, maximum=6, lease_s=0.5, successor=True)
        before = list(done)
        await until(lambda: all(b - a > 20 for a, b in zip(before, done, strict=True)))
        # What the dead one had counted, but for its last second.
        await until(lambda: any(lane.clean > 0 for lane in switch.governor.summary().lanes))
        assert most <= 6
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_a_successor_knows_what_was_spent():
    switch = Switch(governor(pots={RUN_TOKENS: 100}))
    share = Share("1-1", switch, (RUN_TOKENS,), tick_s=0.02)
    async with Share("1-2", switch, (RUN_TOKENS,), tick_s=0.02) as other:
        async with share:
            budget = share.budget()
            reservation = await budget.reserve("m", Spend(tokens=60, usd=None))
            reservation.settle(Spend(tokens=25, usd=None))
            await until(lambda: switch.governor.summary().spent == {RUN_TOKENS: 25})
        held = await other.budget().reserve("m", Spend(tokens=40, usd=None))
        await asyncio.sleep(1.1)  # so long a memory may be old
        await until(lambda: switch.governor.pots[RUN_TOKENS].left == 35)
        switch.governor = None
        await asyncio.sleep(0.1)
        switch.governor = governor(pots={RUN_TOKENS: 100}, successor=True)
        await until(lambda: switch.governor.summary().spent == {RUN_TOKENS: 25})
        held.release()


class Slow(DirectLine):
    """A governor that hears a report and answers only when it is let."""

    def __init__(self, governor):
        super().__init__(governor)
        self.may = asyncio.Event()
        self.reports = 0

    async def exchange(self, report):
        self.reports += 1
        grant = await super().exchange(report)
        await self.may.wait()
        return grant


async def test_what_a_slow_governor_was_told_is_not_told_again():
    """Its answer still counts when it comes, and so do the calls, once."""
    slow = Slow(governor())
    slow.may.set()
    share = Share("1-1", slow, tick_s=0.02)
    async with share:
        limiter = share.limiter("h", "K", "m")
        async with limiter.slot() as slot:
            slow.may.clear()
            slot.report(None)
        await until(lambda: [lane.clean for lane in slow.governor.summary().lanes] == [1])
        asked = slow.reports
        await asyncio.sleep(1.2)  # it goes on looking at its grants meanwhile
        assert slow.reports == asked
        async with limiter.slot() as slot:
            slot.report(None)
        slow.may.set()
        await until(lambda: slow.governor.summary().lanes[0].clean == 2)
    assert slow.governor.summary().lanes[0].clean == 2


async def test_a_share_ends_though_its_governor_never_answers():
    slow = Slow(governor())
    async with asyncio.timeout(20), Share("1-1", slow, tick_s=0.02):
        await until(lambda: slow.reports)


async def test_a_share_for_a_process_that_is_alone():
    async with alone(4) as share:
        assert share.budget() is None
        async with asyncio.timeout(20), share.limiter("h", "K", "m").slot() as slot:
            slot.report(None)


class Always:
    """A client that always answers, or never."""

    api_mode = endpoint = "always"

    def __init__(self, error=None):
        self.error = error

    async def complete(self, request):
        await asyncio.sleep(0.002)
        if self.error is not None:
            raise self.error
        return Completion(
            message=AssistantMessage(content="yes"),
            finish_reason="stop",
            usage=Usage(input_tokens=3, output_tokens=1),
        )

    def bound(self, request):
        return 11

    async def aclose(self):
        pass


@pytest.mark.parametrize(("others", "raised"), [(True, ServerError), (False, Outage)])
async def test_what_others_are_answered_tells_an_outage_from_a_bad_request(kit, others, raised):
    """One unit draws 500s only. Where another worker is answered all along it is the unit that
    fails, and the run goes on; a server that answers nobody parks it."""

    def fast():
        return 30 * time.monotonic()

    async def sleep(seconds):
        await asyncio.sleep(seconds / 30)

    clock = Clock(monotonic=fast, sleep=sleep)
    told = Governor(Charter(maximum=8, lease_s=150.0), fast, Rests())
    async with AsyncExitStack() as stack:
        shares = [Share(f"1-{n}", DirectLine(told), tick_s=0.02, clock=fast) for n in range(2)]
        here, there = [
            (await stack.enter_async_context(share)).limiter("h", "K", "m") for share in shares
        ]
        bad = Route.single("m", Always(ServerError("500", status=500)), here)
        good = Route.single("m", Always(), there)
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
