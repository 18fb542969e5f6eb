"""Each step of recovery against the fake server, over a real socket."""

import asyncio
import json
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest

from hermes_rl import errors as e
from hermes_rl.messages import AssistantMessage, ToolCall, ToolMessage, UserMessage
from hermes_rl.models.attempts import Clock
from hermes_rl.models.base import Sampling
from hermes_rl.models.budget import Spend
from hermes_rl.models.client import Endpoint, connect
from hermes_rl.models.limiter import InProcessLimiter
from hermes_rl.models.pool import KeyPool
from hermes_rl.models.rests import Rests
from hermes_rl.models.retry import ModelCaller, RetryPolicy
from hermes_rl.models.route import Account, Route
from hermes_rl.testing.conditions import Conditions
from hermes_rl.testing.fake_server import FakeConfig, FakeServer
from hermes_rl.testing.picky import OUTPUT_CAP, PROMPT, WINDOW

QUICK = RetryPolicy(base_s=0.01, cap_s=0.05)
DOT = "data:image/png;base64,iVBORw0KGgo="
PICTURE = UserMessage(
    content=[
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": DOT}},
    ]
)
PATTERNED = (
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Find.",
            "parameters": {
                "type": "object",
                "properties": {"day": {"type": "string", "pattern": "\\d+", "format": "date"}},
            },
        },
    },
)
CALLED = ToolCall(id="call_1", name="find", arguments="{}")
RESULT = ToolMessage(tool_call_id="call_1", name="find", content="nothing")


def thought(*blocks):
    """A history whose answer holds reasoning blocks."""
    answer = AssistantMessage(tool_calls=(CALLED,), reasoning_details=list(blocks))
    return [UserMessage(content="hi"), answer, RESULT]


SIGNED = thought({"type": "thinking", "thinking": "hm", "signature": "c2ln"})
ENCRYPTED = thought({"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"})


class Stage:
    """Clients and callers on fake servers, closed at the end."""

    def __init__(self, kit, stack):
        self.kit, self.stack, self.events = kit, stack, kit.Events()

    async def server(self, **config):
        return await self.stack.enter_async_context(FakeServer(FakeConfig(**config)))

    def client(self, server, **endpoint):
        client = connect(Endpoint(server.base_url, **endpoint))
        self.stack.push_async_callback(client.aclose)
        return client

    def route(self, server, model="", **endpoint):
        return Route.single(model, self.client(server, **endpoint), InProcessLimiter(64))

    def caller(self, *routes, policy=QUICK, **options):
        return ModelCaller(routes, self.events, policy, **options)

    @property
    def outcomes(self):
        return [end.outcome for end in self.events.ends]


@pytest.fixture
def stage(kit):
    @asynccontextmanager
    async def opened():
        async with AsyncExitStack() as stack:
            yield Stage(kit, stack)

    return opened


@pytest.mark.parametrize(
    ("fault", "mode", "said", "fields"),
    [
        ("images", "chat_completions", [PICTURE], {}),
        ("large_images", "chat_completions", [PICTURE], {}),
        ("images", "anthropic_messages", [PICTURE], {}),
        ("images", "codex_responses", [PICTURE], {}),
        ("parts", "chat_completions", [PICTURE], {}),
        ("signatures", "anthropic_messages", SIGNED, {"tools": PATTERNED}),
        ("encrypted", "codex_responses", ENCRYPTED, {"tools": PATTERNED}),
        ("grammar", "chat_completions", "hi", {"tools": PATTERNED}),
        ("grammar", "anthropic_messages", "hi", {"tools": PATTERNED}),
        ("grammar", "codex_responses", "hi", {"tools": PATTERNED}),
    ],
)
async def test_what_a_server_will_not_take_is_left_out(kit, stage, fault, mode, said, fields):
    """One refused request, then the answer; the next turn is right at once."""
    async with stage() as s:
        server = await s.server()
        calling = s.caller(s.route(server, api_mode=mode))
        asked = kit.request(said, f"fault-{fault}", sampling=Sampling(max_tokens=50), **fields)
        answer = await calling.call(asked, turn=1)
        assert answer.message.content == "done"
        asked.conversation.append(answer.message)
        asked.conversation.append(UserMessage(content="and now?"))
        await calling.call(asked, turn=2)
        assert s.outcomes == ["refused", "ok", "ok"]
        assert [entry.outcome for entry in server.entries] == ["refused", "served", "served"]
        assert s.events.waited == []
        other = s.caller(s.route(server, api_mode=mode))  # another rollout learns for itself
        await other.call(kit.request(said, f"fault-{fault}", **fields), turn=1)
        assert s.outcomes[3:] == ["refused", "ok"]


async def test_nothing_is_left_out_without_the_switch(kit, stage):
    async with stage() as s:
        server = await s.server()
        calling = s.caller(s.route(server), policy=RetryPolicy(adapt=False))
        with pytest.raises(e.BadRequest):
            await calling.call(kit.request([PICTURE], "fault-images"), turn=1)
        assert s.outcomes == ["refused"]


@pytest.mark.parametrize("mode", ["chat_completions", "anthropic_messages", "codex_responses"])
async def test_half_characters_never_reach_a_server(kit, stage, mode):
    async with stage() as s:
        calling = s.caller(s.route(await s.server(), api_mode=mode))
        said = [UserMessage(content="a \ud83d b"), AssistantMessage(content="\udc00"), RESULT]
        said.append(UserMessage(content="\udfff"))
        await calling.call(kit.request(said, "noop"), turn=1)
        assert s.outcomes == ["ok"]


async def test_a_cap_on_output_is_learned(kit, stage):
    async with stage() as s:
        calling = s.caller(s.route(await s.server()))
        asked = kit.request("hi", "fault-over_cap", sampling=Sampling(max_tokens=99_999))
        await calling.call(asked, turn=1)
        await calling.call(asked, turn=2)
        assert s.outcomes == ["refused", "ok", "ok"]
        caps = [start.max_output_tokens for start in s.events.starts]
        assert caps == [99_999, OUTPUT_CAP, OUTPUT_CAP]


async def test_the_room_in_a_window_is_used_call_by_call(kit, stage):
    async with stage() as s:
        calling = s.caller(s.route(await s.server()))
        asked = kit.request("hi", "fault-over_window", sampling=Sampling(max_tokens=5_000))
        await calling.call(asked, turn=1)
        await calling.call(asked, turn=2)
        assert s.outcomes == ["refused", "ok"] * 2
        caps = [start.max_output_tokens for start in s.events.starts]
        assert caps == [5_000, WINDOW - PROMPT] * 2


async def test_a_compressor_makes_histories_fit(kit, stage):
    """Three messages at once are dropped by the hook; without a hook the overflow comes out."""
    heard = []

    async def shorten(request, error):
        heard.append(error.reason)
        rest = list(request.conversation)[2:]
        return replace(request, conversation=kit.request(rest).conversation)

    said = [UserMessage(content=str(n)) for n in range(7)]
    asked = kit.request(said, "fault-too_many", exact=True)
    async with stage() as s:
        route = s.route(await s.server())
        await s.caller(route, on_overflow=shorten).call(asked, turn=1)
        assert heard == ["context_overflow"] * 2
        assert s.outcomes == ["refused", "refused", "ok"]
        with pytest.raises(e.ContextOverflow):
            await s.caller(route).call(asked, turn=1)

        async def helpless(request, error):
            return None

        with pytest.raises(e.ContextOverflow):
            await s.caller(route, on_overflow=helpless).call(asked, turn=1)


async def test_a_refused_key_gives_way_to_the_next(kit, stage):
    async with stage() as s:
        server = await s.server(key="sk-right-key-123")
        keys = {"WRONG": "sk-wrong-key-123", "RIGHT": "sk-right-key-123"}
        accounts = [
            Account(name, s.client(server, api_key=key), InProcessLimiter(8))
            for name, key in keys.items()
        ]
        route = Route("noop", KeyPool(accounts, Rests(), scope="noop"))
        for turn in (1, 2):
            await s.caller(route).call(kit.request(), turn=turn)
        assert s.outcomes == ["refused", "ok", "ok"], "the refused key rests for all rollouts"
        assert [start.model for start in s.events.starts] == ["noop"] * 3
        only = Route("noop", KeyPool(accounts[:1], Rests(), scope="noop"))
        with pytest.raises(e.AuthError):
            await s.caller(only).call(kit.request(), turn=1)


async def test_a_model_that_is_not_there_falls_back_for_the_rest_of_the_conversation(kit, stage):
    async with stage() as s:
        server = await s.server(models=("noop",))
        routes = (s.route(server, "gone"), s.route(server, "noop"))
        calling = s.caller(*routes)
        for turn in (1, 2):
            answer = await calling.call(kit.request(), turn=turn)
            assert answer.served_model == "noop"
        assert [start.model for start in s.events.starts] == ["gone", "noop", "noop"]
        assert s.outcomes == ["refused", "ok", "ok"]
        with pytest.raises(e.ModelNotFound):
            await s.caller(routes[0]).call(kit.request(), turn=1)


async def test_an_overloaded_server_falls_back_after_two_tries(kit, stage):
    async with stage() as s:
        down = await s.server(conditions=Conditions(outages=((0, 1e9),)))
        calling = s.caller(s.route(down, "noop"), s.route(await s.server(), "noop"))
        await calling.call(kit.request(), turn=1)
        assert s.outcomes == ["refused"] * 3 + ["ok"]
        assert len(s.events.waited) == 2


@pytest.mark.parametrize("transport", ["http", "sdk"])
async def test_new_connections_leave_old_requests_alone(kit, stage, transport):
    async with stage() as s:
        server = await s.server(latency_s=0.2)
        client = s.client(server, transport=transport)
        calling = ModelCaller([Route.single("noop", client, InProcessLimiter(8))], s.events, QUICK)
        slow = asyncio.create_task(calling.call(kit.request(), turn=1))
        await kit.until(lambda: server.in_flight)
        await client.renew()
        assert server.connections_made == 1, "too young to be renewed"
        await client.renew(young_s=0.0)
        await calling.call(kit.request(), turn=2)
        await slow
        assert s.outcomes == ["ok", "ok"]
        assert server.connections_made == 2
        await kit.until(lambda: len(server.connections) == 1)


class Purse:
    """A budget that notes what happens to each reservation."""

    def __init__(self, tokens):
        self.left, self.notes = tokens, []

    async def reserve(self, model, worst):
        if worst.tokens > self.left:
            raise e.CostLimit(f"{self.left} tokens left")
        self.left -= worst.tokens
        return Held(self, worst)


class Held:
    def __init__(self, purse, worst):
        self.purse, self.worst = purse, worst

    def settle(self, spent):
        self.purse.notes.append("unknown" if spent is None else "spent")
        self.purse.left += self.worst.tokens - (spent or self.worst).tokens

    def release(self):
        self.purse.notes.append("released")
        self.purse.left += self.worst.tokens


async def test_each_request_is_reserved_and_settled(kit, stage):
    """Refused: given back. Lost: the worst case. Answered: what it was."""
    async with stage() as s:
        purse = Purse(10**6)
        calling = s.caller(s.route(await s.server()), budget=purse)
        script = [[{"fault": "rate_limit"}, {"text": "lost", "fault": "cut"}, "done"]]
        asked = kit.request(f"x\nSCRIPT: {json.dumps(script)}", sampling=Sampling(max_tokens=100))
        await calling.call(asked, turn=1)
        assert s.outcomes == ["refused", "cut", "ok"]
        assert purse.notes == ["released", "unknown", "spent"]
        known = sum(x.usage.total_tokens for x in s.events.ends if x.usage)
        bounds = {x.call_id: x.max_input_tokens + 100 for x in s.events.starts}
        lost = sum(bounds[x.call_id] for x in s.events.ends if x.outcome == "cut")
        assert 10**6 - purse.left == known + lost


async def test_without_budget_nothing_is_sent(kit, stage):
    async with stage() as s:
        server = await s.server()
        with pytest.raises(e.CostLimit):
            await s.caller(s.route(server), budget=Purse(10)).call(kit.request(), turn=1)
        assert (server.requests, s.events.starts) == (0, [])


async def test_what_was_reserved_for_a_call_that_never_came_to_a_slot_is_given_back(kit, stage):
    async with stage() as s:
        server = await s.server(hold_at=1)
        client, limiter, purse = s.client(server), InProcessLimiter(1), Purse(10**6)
        route = Route.single("noop", client, limiter)
        calls = [
            asyncio.create_task(s.caller(route, budget=purse).call(kit.request(), turn=1))
            for _ in range(2)
        ]
        await kit.until(lambda: server.requests == 1 and purse.left < 10**6 - 2)
        for call in reversed(calls):
            call.cancel()
        await asyncio.wait(calls)
        assert sorted(purse.notes) == ["released", "unknown"]


async def test_prices_are_the_routes_unless_told_otherwise(kit, stage):
    from hermes_rl.models.prices import PriceTable, read_price

    own = {"noop": read_price({"input": 1, "output": 2})}
    seen = []

    class Seen(Purse):
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


SCALE = 300.0
"""Ten minutes of both clocks are two seconds."""


def scaled():
    return Clock(
        monotonic=lambda: time.monotonic() * SCALE,
        sleep=lambda seconds: asyncio.sleep(seconds / SCALE),
    )


@pytest.mark.parametrize("kind", ["overloaded", "server_error"])
async def test_ten_minutes_of_outage_cost_no_call(kit, stage, kind):
    """16 rollouts are in the middle of their work, and the server is out, whatever it says."""
    async with stage() as s:
        calm = Conditions(clock_scale=SCALE)

        def ring(request):
            if request == 40:
                out = replace(calm, outages=((server.now, server.now + 600.0),), outage=kind)
                server.config = replace(server.config, conditions=out)

        server = FakeServer(FakeConfig(conditions=calm), ring)
        await s.stack.enter_async_context(server)
        route = s.route(server, "echo-4")
        async with asyncio.TaskGroup() as group:
            runs = [
                group.create_task(
                    kit.rollout(
                        ModelCaller([route], s.events, RetryPolicy(), clock=scaled()), model=""
                    )
                )
                for _ in range(16)
            ]
        assert all(run.result()[-1].content == "All 4 steps are done." for run in runs)
        assert s.outcomes.count("ok") == 16 * 5
        assert s.outcomes.count("refused") == len(s.outcomes) - 16 * 5 > 0
        assert sum(s.events.waited) > 16 * 100, "all that time is noted as waiting"


async def test_a_longer_outage_is_an_outage(kit, stage):
    async with stage() as s:
        server = await s.server(conditions=Conditions(outages=((0, 1e9),), clock_scale=SCALE))
        calling = ModelCaller(
            [s.route(server, "noop")], s.events, RetryPolicy(outage_s=300), clock=scaled()
        )
        with pytest.raises(e.Outage, match=r"no answer for \d min, the last error: 503"):
            await calling.call(kit.request(), turn=1)
        assert e.CAUSES["outage"].breaker
        assert not e.CAUSES["outage"].counted


async def test_an_interrupt_comes_through_at_once_in_an_outage(kit, stage):
    async with stage() as s:
        server = await s.server(conditions=Conditions(outages=((0, 1e9),)))
        calling = s.caller(s.route(server, "noop"), policy=RetryPolicy(base_s=1_000, cap_s=1_000))
        task = asyncio.create_task(calling.call(kit.request(), turn=1))
        await kit.until(lambda: s.events.ends)
        began = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - began < 5
        assert len(s.events.waited) == 1
