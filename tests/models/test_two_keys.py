"""Several keys whose provider names no time to wait: together they give the sum of their rates.
Time is virtual: a loop whose clock jumps to the next timer."""

import asyncio
import random
import selectors
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from hermes_rl import errors as e
from hermes_rl.messages import AssistantMessage
from hermes_rl.models import Completion
from hermes_rl.models.calls import Account, Clock, KeyPool, ModelCaller, RetryPolicy, Route
from hermes_rl.models.rate import Coordinator, Share
from hermes_rl.usage import Usage

LATENCY_S = 0.25
ANSWER = Completion(
    message=AssistantMessage(content="yes"),
    finish_reason="stop",
    usage=Usage(input_tokens=3, output_tokens=1),
)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Never waits: where nothing is ready, its time jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__(selectors.SelectSelector())
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self.now = max(self.now, self._scheduled[0]._when)
        super()._run_once()


class Server:
    """Lets in so many requests a minute, by a bucket or by fixed windows; refusals name no time."""

    api_mode = endpoint = "limited"

    def __init__(self, loop, per_minute, burst):
        self.loop, self.per_s, self.burst = loop, per_minute / 60, burst
        self.left, self.at, self.admitted, self.refused = burst, loop.time(), 0, 0

    def let_in(self):
        now = self.loop.time()
        if self.burst:
            self.left = min(self.burst, self.left + (now - self.at) * self.per_s)
        elif now // 60 > self.at // 60:
            self.left = 60 * self.per_s
        self.at = now
        self.left -= self.left >= 1
        return self.left >= 1

    async def complete(self, request):
        if not self.let_in():
            self.refused += 1
            await asyncio.sleep(0.01)
            raise e.RateLimited("429", status=429)
        self.admitted += 1
        await asyncio.sleep(LATENCY_S)
        return ANSWER

    def bound(self, request):
        return 11

    async def aclose(self):
        pass


@asynccontextmanager
async def limits(loop, workers):
    """What each worker has: limiters and cooldowns."""
    async with AsyncExitStack() as stack:
        coordinator = Coordinator(64, {}, {}, clock=loop.time, unix=loop.time)
        shares = [Share(str(n), clock=loop.time, unix=loop.time) for n in range(workers)]
        for share in shares:
            await stack.enter_async_context(share.coordinated(coordinator.handle))
        yield shares


class Simulation:
    """Callers that ask again and again, over keys with a rate of their own each."""

    def __init__(self, kit, per_key, *, keys, workers=1, burst=25, strategy="fill_first"):
        self.kit, self.keys, self.workers, self.strategy = kit, keys, workers, strategy
        self.loop, self.chance = VirtualLoop(), random.Random(1)
        self.servers = [Server(self.loop, per_key, burst) for _ in range(keys)]

    def route(self, share):
        accounts = [
            Account(f"K{n}", server, share.limiter("limited", f"K{n}", "m"))
            for n, server in enumerate(self.servers)
        ]
        pool = KeyPool(accounts, share.cooldowns, scope="h m", strategy=self.strategy)
        return Route(model="m", accounts=pool)

    async def caller(self, route):
        now, chance = self.loop.time, self.chance.uniform
        clock = Clock(monotonic=now, time=now, uniform=chance)
        calling = ModelCaller([route], self.kit.Events(), RetryPolicy(), clock=clock)
        while True:
            await calling.call(self.kit.request(), turn=1)

    def counts(self):
        return sum(s.admitted for s in self.servers), sum(s.refused for s in self.servers)

    async def steady(self, minutes, callers):
        async with limits(self.loop, self.workers) as shares:
            routes = [self.route(share) for share in shares]
            tasks = [
                asyncio.create_task(self.caller(routes[n % self.workers])) for n in range(callers)
            ]
            await asyncio.sleep(30 * minutes)
            before = self.counts()
            await asyncio.sleep(30 * minutes)
            admitted, refused = (b - a for a, b in zip(before, self.counts(), strict=True))
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        return admitted / (minutes / 2), refused / (admitted + refused)

    def run(self, minutes=10, callers=32):
        """(answers a minute, share refused) in the second half of the time."""
        try:
            return self.loop.run_until_complete(self.steady(minutes, callers))
        finally:
            self.loop.close()


@pytest.mark.parametrize("strategy", ["fill_first", "round_robin"])
@pytest.mark.parametrize("keys", [1, 2])
def test_keys_add_up_where_refusals_name_no_time(kit, keys, strategy):
    answered, refused = Simulation(kit, 300, keys=keys, strategy=strategy).run(minutes=6)
    assert 270 * keys <= answered <= 305 * keys
    assert refused < 0.05


def test_a_key_that_lets_nobody_in_for_hours_is_only_tried_now_and_then(kit):
    simulation = Simulation(kit, 300, keys=2)
    simulation.servers[0].per_s = simulation.servers[0].left = 0
    answered, refused = simulation.run(minutes=6)
    assert 250 <= answered <= 305
    assert refused < 0.08
