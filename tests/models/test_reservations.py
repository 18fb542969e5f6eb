"""What a call reserves of a budget, and what is settled."""

import asyncio
import json
from dataclasses import replace

import pytest

from hermes_rl import errors as e
from hermes_rl.models import Sampling
from hermes_rl.models.calls import Route
from hermes_rl.models.providers import PriceTable, read_price
from hermes_rl.models.rate import Lease, LeaseGrant, Limiter, Spend


class FakeBudget:
    """A budget that notes what happens to each reservation."""

    def __init__(self, tokens):
        self.left, self.notes = tokens, []

    def binds(self, model, worst):
        return True

    async def reserve(self, model, worst):
        if worst.tokens > self.left:
            raise e.CostLimit(f"{self.left} tokens left")
        self.left -= worst.tokens
        return Held(self, worst)


class Held:
    def __init__(self, budget, worst):
        self.budget, self.worst = budget, worst

    def settle(self, spent):
        self.budget.notes.append("unknown" if spent is None else "spent")
        self.budget.left += self.worst.tokens - (spent or self.worst).tokens

    def release(self):
        self.budget.notes.append("released")
        self.budget.left += self.worst.tokens


async def test_each_request_is_reserved_and_settled(kit, stage):
    """Refused: given back. Lost: the worst case. Answered: what it was."""
    async with stage() as s:
        budget = FakeBudget(10**6)
        calling = s.caller(s.route(await s.server()), budget=budget)
        script = [[{"fault": "rate_limit"}, {"text": "lost", "fault": "cut"}, "done"]]
        asked = kit.request(f"x\nSCRIPT: {json.dumps(script)}", sampling=Sampling(max_tokens=100))
        await calling.call(asked, turn=1)
        assert s.outcomes == ["refused", "cut", "ok"]
        assert budget.notes == ["released", "unknown", "spent"]
        known = sum(x.usage.total_tokens for x in s.events.ends if x.usage)
        bounds = {x.call_id: x.max_input_tokens + 100 for x in s.events.starts}
        lost = sum(bounds[x.call_id] for x in s.events.ends if x.outcome == "cut")
        assert 10**6 - budget.left == known + lost


async def test_without_budget_nothing_is_sent(kit, stage):
    async with stage() as s:
        server = await s.server()
        with pytest.raises(e.CostLimit):
            await s.caller(s.route(server), budget=FakeBudget(10)).call(kit.request(), turn=1)
        assert (server.requests, s.events.starts) == (0, [])


async def test_what_was_reserved_for_a_call_that_never_came_to_a_slot_is_given_back(kit, stage):
    async with stage() as s:
        server = await s.server(hold_at=1)
        client, limiter, budget = s.client(server), Limiter(1), FakeBudget(10**6)
        route = Route.single("noop", client, limiter)
        calls = [
            asyncio.create_task(s.caller(route, budget=budget).call(kit.request(), turn=1))
            for _ in range(2)
        ]
        await kit.until(lambda: server.requests == 1 and budget.left < 10**6 - 2)
        for call in reversed(calls):
            call.cancel()
        await asyncio.wait(calls)
        assert sorted(budget.notes) == ["released", "unknown"]


async def test_prices_are_the_routes_unless_told_otherwise(kit, stage):
    own = {"noop": read_price({"input": 1, "output": 2})}
    seen = []

    class Seen(FakeBudget):
        async def reserve(self, model, worst):
            seen.append((model, worst))
            return await super().reserve(model, worst)

    async with stage() as s:
        priced = replace(s.route(await s.server(), "noop"), prices=PriceTable(own=own))
        asked = kit.request("hi", sampling=Sampling(max_tokens=100))
        await s.caller(priced, budget=Seen(10**6)).call(asked, turn=1)
        start, end = s.events.starts[0], s.events.ends[0]
        bound, usage = start.max_input_tokens, end.usage
        assert end.cost_usd == pytest.approx((usage.input_tokens + 2 * usage.output_tokens) / 1e6)
        assert seen == [("noop", Spend(tokens=bound + 100, usd=pytest.approx((bound + 200) / 1e6)))]
        await s.caller(priced, price=lambda model, usage: 0.25).call(asked, turn=1)
        assert s.events.ends[1].cost_usd == 0.25


async def test_who_waits_behind_a_cancelled_call_is_served() -> None:
    lease = Lease("run:tokens")
    lease.take_grant(LeaseGrant(budget="run:tokens", add=10, most=100))
    large, small = asyncio.create_task(lease.reserve(50)), asyncio.create_task(lease.reserve(5))
    await asyncio.sleep(0)
    assert not small.done()
    large.cancel()
    async with asyncio.timeout(5):
        await small
    assert (lease.free, lease.reserved) == (5, 5)
