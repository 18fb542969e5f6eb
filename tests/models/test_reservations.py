"""What a call reserves of a budget, and what is settled."""

import asyncio
import json
from dataclasses import replace

import pytest

from hermes_rl import errors as e
from hermes_rl.models import Sampling
from hermes_rl.models.calls import Route
from hermes_rl.models.providers import PriceTable, read_price
from hermes_rl.models.rate import Limiter


async def test_each_request_is_reserved_and_settled(kit, stage):
    """Refused: given back. Lost: the worst case. Answered: what it was."""
    budget = kit.budget_of(run_tokens=10**6)
    lease = budget.leases["run:tokens"]
    async with stage() as s:
        calling = s.caller(s.route(await s.server()), budget=budget)
        script = [[{"fault": "rate_limit"}, {"text": "lost", "fault": "cut"}, "done"]]
        request = kit.request(f"x\nSCRIPT: {json.dumps(script)}", sampling=Sampling(max_tokens=100))
        await calling.call(request, turn=1)
        assert s.outcomes == ["refused", "cut", "ok"]
        known = sum(x.usage.total_tokens for x in s.events.ends if x.usage)
        bounds = {x.call_id: x.max_input_tokens + 100 for x in s.events.starts}
        lost = sum(bounds[x.call_id] for x in s.events.ends if x.outcome == "cut")
        assert (lease.spent, lease.reserved) == (known + lost, 0)
        assert lost > known > 0


async def test_call_cancelled_in_the_queue_returns_its_reservation(kit, stage):
    """The one that was sent keeps its worst case: the server may have served it."""
    budget = kit.budget_of(run_tokens=10**6)
    lease = budget.leases["run:tokens"]
    async with stage() as s:
        server = await s.server(hold_at=1)
        route = Route.single("noop", s.client(server), Limiter(1))
        request = kit.request(sampling=Sampling(max_tokens=100))
        calls = [
            asyncio.create_task(s.caller(route, budget=budget).call(request, turn=1))
            for _ in range(2)
        ]
        await kit.until(lambda: server.requests == 1)
        worst = s.events.starts[0].max_input_tokens + 100
        await kit.until(lambda: lease.reserved == 2 * worst)
        for call in reversed(calls):
            call.cancel()
        await asyncio.wait(calls)
        assert (lease.spent, lease.reserved) == (worst, 0)


async def test_worst_case_in_dollars_uses_the_route_price(kit, stage):
    custom = {"noop": read_price({"input": 1, "output": 2})}
    request = kit.request("hi", sampling=Sampling(max_tokens=100))
    async with stage() as s:
        priced = replace(s.route(await s.server(), "noop"), prices=PriceTable(user_prices=custom))
        await s.caller(priced, price=lambda model, usage: 0.25).call(request, turn=1)
        assert s.events.ends[0].cost_usd == 0.25
        worst = (s.events.starts[0].max_input_tokens + 2 * 100) * 1000
        with pytest.raises(e.CostLimit):
            await s.caller(priced, budget=kit.budget_of(run_usd=worst - 1)).call(request, turn=1)
        budget = kit.budget_of(run_usd=worst)
        await s.caller(priced, budget=budget).call(request, turn=1)
        end = s.events.ends[1]
        assert end.cost_usd == pytest.approx(
            (end.usage.input_tokens + 2 * end.usage.output_tokens) / 1e6
        )
        assert budget.leases["run:usd"].spent == round(end.cost_usd * 1e9)
