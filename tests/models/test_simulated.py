"""Workers, keys and long hints against simulated servers. The clock is simulated too, so minutes
take a second and are the same on every machine."""

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
from simulated_time import SimulatedLoop

from hermes_rl.errors import RateLimited
from hermes_rl.messages import AssistantMessage
from hermes_rl.models import Completion
from hermes_rl.models.calls import Account, Clock, KeyPool, ModelCaller, Route
from hermes_rl.models.rate import Coordinator, Orders, Share
from hermes_rl.testing import Limits, RateLimits
from hermes_rl.usage import Usage

ANSWER = Completion(
    message=AssistantMessage(content="yes"),
    finish_reason="stop",
    usage=Usage(input_tokens=3, output_tokens=1),
)


class Server:
    """A client of a server that admits `per_minute` requests by a token bucket.

    Args:
        headers: whether answers report the limits.
        hint_s: Retry-After of refusals.
    """

    api_mode = endpoint = "simulated"

    def __init__(
        self, per_minute, chance, *, burst_s=5.0, hint_s=None, latency_s=0.25, headers=False
    ):
        rate = RateLimits(
            requests=per_minute, burst_s=burst_s, retry_after_s=hint_s, headers=headers
        )
        self.limits, self.chance = Limits(rate), chance
        self.hint_s, self.latency_s = hint_s, latency_s
        self.ends = []
        """(when, whether it was answered) of each request."""

    async def complete(self, request):
        now = asyncio.get_running_loop().time()
        verdict = self.limits.admit("", {"requests": 1}, now)
        headers = self.limits.headers(verdict, "chat_completions", now)
        self.ends.append((now, verdict.refused is None))
        if verdict.refused is not None:
            await asyncio.sleep(0.02)
            raise RateLimited("429", status=429, retry_after_s=self.hint_s, rate_limit=headers)
        await asyncio.sleep(self.latency_s * self.chance.uniform(0.5, 1.5))
        return replace(ANSWER, rate_limit=headers)

    def bound(self, request):
        return 11

    async def aclose(self):
        pass


def between(servers, since, until):
    """(answers per second, share of requests that were refused)."""
    found = [ok for server in servers for at, ok in server.ends if since <= at < until]
    return sum(found) / (until - since), 1 - sum(found) / len(found)


def play(kit, servers, phases, *, callers, workers=1, strategy="fill_first"):
    """Callers that call again and again, through workers that share one limit for each server.

    Args:
        phases: (seconds, function to call at their end).
    """

    async def run():
        time, chance = asyncio.get_running_loop().time, servers[0].chance
        coordinator = Coordinator(64, {}, {}, clock=time, unix=time)
        clock = Clock(monotonic=time, time=time, uniform=chance.uniform)

        async def caller(route):
            calling = ModelCaller([route], kit.Events(), clock=clock)
            while True:
                await calling.call(kit.request(), turn=1)

        async with AsyncExitStack() as stack:
            tasks = []
            for number in range(workers):
                share = Share(f"1-{number}", clock=time, unix=time)
                await stack.enter_async_context(share.coordinated(coordinator.handle))
                accounts = [
                    Account(f"K{n}", server, share.limiter("h", f"K{n}", "m"))
                    for n, server in enumerate(servers)
                ]
                pool = KeyPool(accounts, share.cooldowns, scope="h m", strategy=strategy)
                route = Route(model="m", accounts=pool)
                tasks += [asyncio.create_task(caller(route)) for _ in range(callers // workers)]
            for seconds, change in phases:
                await asyncio.sleep(seconds)
                change()
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended), "none was given up"

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(run())


def nothing():
    pass


@pytest.mark.parametrize(
    "server",
    [
        {"headers": True},
        {"latency_s": 0.05},
        {"latency_s": 0.001},
        {"burst_s": 60.0, "hint_s": 89.0, "latency_s": 0.05},
        {"burst_s": 1.0, "hint_s": 89.0, "latency_s": 0.05},
    ],
    ids=["headers", "refusals", "instant answers", "long hints", "long hints, small burst"],
)
def test_eight_workers_find_and_follow_the_allowed_rate(kit, server):
    """From the third minute on, 64 callers of eight workers use 85 % of the rate, under 5 % of
    their requests are refused, and a doubled rate is used within a minute. Without headers all are
    refused in the first second; with long hints they must not return together."""
    server = Server(150, random.Random(1), **server)

    def double():
        server.limits.factor = 2.0

    play(kit, [server], [(330, double), (65, nothing)], callers=64, workers=8)
    used, refused = between([server], 180, 330)
    assert used >= 0.85 * 2.5
    assert refused < 0.05
    assert between([server], 385, 395)[0] >= 0.85 * 5


@pytest.mark.parametrize("strategy", ["fill_first", "round_robin"])
@pytest.mark.parametrize("keys", [1, 2])
def test_rates_of_keys_add_up_without_retry_hints(kit, keys, strategy):
    chance = random.Random(1)
    servers = [Server(300, chance) for _ in range(keys)]
    play(kit, servers, [(360, nothing)], callers=32, strategy=strategy)
    used, refused = between(servers, 180, 360)
    assert 4.5 * keys <= used <= 5.1 * keys
    assert refused < 0.05


def test_blocked_key_is_probed_rarely(kit):
    chance = random.Random(1)
    servers = [Server(0.001, chance), Server(300, chance)]
    play(kit, servers, [(360, nothing)], callers=32)
    used, refused = between(servers, 180, 360)
    assert 4.1 <= used <= 5.1
    assert refused < 0.08


def test_many_workers_report_less_often_and_calls_and_pauses_do_not_wait(kit):
    async def run():
        loop, reports = asyncio.get_running_loop(), 0
        coordinator = Coordinator(1000, {}, {}, clock=loop.time, unix=loop.time)

        def handle(report):
            nonlocal reports
            reports += 1
            return coordinator.handle(report)

        async with AsyncExitStack() as stack:
            shares = [Share(f"1-{n}", clock=loop.time, unix=loop.time) for n in range(300)]
            limiters = [share.limiter("h", "K", "m") for share in shares]
            for share in shares:
                await stack.enter_async_context(share.coordinated(handle))
            await asyncio.sleep(2.0)
            reports = 0
            await asyncio.sleep(10.0)
            assert reports <= 4100, "as many as of a hundred workers"
            newest = Share("1-300", clock=loop.time, unix=loop.time)
            async with asyncio.timeout(0.1):
                await stack.enter_async_context(newest.coordinated(handle))
                async with newest.limiter("h", "K", "m").slot():
                    pass
            coordinator.orders = lambda model: Orders(paused=True)
            async with asyncio.timeout(2.0):
                await kit.until(lambda: not coordinator.behind("m"))
            called = asyncio.ensure_future(limiters[0].slot().__aenter__())
            await asyncio.sleep(1.0)
            assert not called.done()
            coordinator.orders = lambda model: Orders()
            async with asyncio.timeout(1.0):
                await called

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(run())
