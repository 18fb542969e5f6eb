"""Long Retry-After hints and eight workers that share a limit: all of it on one simulated clock, so
that six minutes take a second or two and are the same on every machine."""

import asyncio
import random
import selectors
from contextlib import AsyncExitStack

import pytest

from hermes_rl.errors import RateLimited
from hermes_rl.messages import AssistantMessage, UserMessage
from hermes_rl.models import Completion, Conversation, ModelRequest
from hermes_rl.models.calls import Clock, ModelCaller, Route
from hermes_rl.models.rate import Coordinator, Share
from hermes_rl.testing import Limits, RateLimits
from hermes_rl.usage import Usage

WORKERS, CALLERS = 8, 8
PER_S = 2.5
DOUBLES_S, END_S = 330.0, 395.0


class _Nobody(selectors.SelectSelector):
    """Waits for nothing: the time for which it was to wait has passed at once."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def select(self, timeout=None):
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "nothing will ever happen"
            self.now += timeout
        return ready


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Its time passes only while nobody has anything to do."""

    def __init__(self):
        self._nobody = _Nobody()
        super().__init__(self._nobody)

    def time(self):
        return self._nobody.now


class Server:
    """A token bucket of `PER_S`; refusals ask for `hint_s`."""

    api_mode = endpoint = "simulated"

    def __init__(self, burst_s, hint_s, latency_s, chance):
        rate = RateLimits(requests=60 * PER_S, burst_s=burst_s, retry_after_s=hint_s)
        self.limits, self.latency_s, self.chance = Limits(rate), latency_s, chance
        self.ends = []
        """(when, whether it was answered) of each request."""

    async def complete(self, request):
        now = asyncio.get_running_loop().time()
        verdict = self.limits.admit("", {"requests": 1}, now)
        self.ends.append((now, verdict.refused is None))
        if verdict.refused is not None:
            await asyncio.sleep(0.02)
            raise RateLimited("429", status=429, retry_after_s=verdict.wait_s)
        await asyncio.sleep(self.latency_s * self.chance.uniform(0.5, 1.5))
        return Completion(
            message=AssistantMessage(content="yes"),
            finish_reason="stop",
            usage=Usage(input_tokens=3, output_tokens=1),
        )

    def bound(self, request):
        return 11

    async def aclose(self):
        pass


async def eight_workers(server, kit):
    """Calls as rollouts make them, retried as they are."""
    time = asyncio.get_running_loop().time
    coordinator = Coordinator(WORKERS * CALLERS, {}, {}, clock=time, unix=time)
    clock = Clock(monotonic=time, time=time, uniform=server.chance.uniform)
    conversation = Conversation([UserMessage(content="hello")])

    async def caller(limiter):
        calling = ModelCaller([Route.single("m", server, limiter)], kit.Events(), clock=clock)
        while True:
            request = ModelRequest(model="m", conversation=conversation, call_id="c")
            await calling.call(request, turn=1)

    async with AsyncExitStack() as stack:
        shares = [Share(f"1-{n}", clock=time) for n in range(WORKERS)]
        limiters = [share.limiter("h", "KEY", "m") for share in shares]
        for share in shares:
            await stack.enter_async_context(share.coordinated(coordinator.handle))
        tasks = [asyncio.create_task(caller(lane)) for lane in limiters for _ in range(CALLERS)]
        await asyncio.sleep(DOUBLES_S)
        server.limits.factor = 2.0
        await asyncio.sleep(END_S - DOUBLES_S)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ended), "no call was given up"


def between(ends, since, until):
    """(answers per second, share of requests that were refused)."""
    found = [ok for at, ok in ends if since <= at < until]
    return sum(found) / (until - since), 1 - sum(found) / len(found)


@pytest.mark.parametrize("burst_s", [60.0, 1.0])
def test_whoever_was_refused_together_does_not_come_back_together(kit, burst_s):
    """All 64 callers are refused in the first second. From the third minute on 85 % of the rate is
    used, under 5 % are refused, and a minute after it doubled 85 % of that are used."""
    server = Server(burst_s, 89.0, 0.05, random.Random(1))
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(eight_workers(server, kit))
    used, refused = between(server.ends, 180.0, DOUBLES_S)
    assert used >= 0.85 * PER_S
    assert refused < 0.05
    used, _ = between(server.ends, DOUBLES_S + 55.0, DOUBLES_S + 65.0)
    assert used >= 0.85 * 2 * PER_S
