"""Budgets on the token wires: the reserved output limit is sent to the engine."""

import pytest
from engines_kit import FREE, TOOLS, WIRES, client_of, engine_at, script, user_turn

from hermes_rl.errors import UnitCostLimit
from hermes_rl.events import CallEnded, CallStarted, EventLog
from hermes_rl.messages import UserMessage
from hermes_rl.models import Conversation, ModelRequest
from hermes_rl.models.calls import ModelCaller, RetryPolicy, Route
from hermes_rl.models.rate import OUTPUT_MAX, Budget, Limiter

WINDOW = 1024


def events(log, kind):
    return [event for event in log.events if isinstance(event, kind)]


async def talk(client, log, budget):
    route = Route.single("toy", client, Limiter(4))
    calling = ModelCaller([route], log, RetryPolicy(), budget=budget)
    conversation = Conversation(user_turn(script("one", "two", "three")))
    request = ModelRequest("toy", conversation, "", tools=TOOLS, sampling=FREE, exact=True)
    for turn in (1, 2, 3):
        answer = await calling.call(request, turn=turn)
        conversation.append(answer.message)
        conversation.append(UserMessage(content="Continue."))


@pytest.mark.parametrize("wire", WIRES)
async def test_small_window_costs_one_refused_exact_call(tmp_path, wire):
    async with engine_at(tmp_path / "t", window=WINDOW) as engine:
        client, free, bound = client_of(engine, wire), EventLog(), EventLog()
        await talk(client, free, None)
        await talk(client, bound, Budget({}, limits={"unit:tokens": 10**6}))
        with pytest.raises(UnitCostLimit):
            await talk(client, EventLog(), Budget({}, limits={"unit:tokens": OUTPUT_MAX}))
        await client.aclose()
    assert {start.max_output_tokens for start in events(free, CallStarted)} == {None}
    assert [end.outcome for end in events(free, CallEnded)] == ["ok"] * 3
    ends = events(bound, CallEnded)
    requested_limits = [start.max_output_tokens for start in events(bound, CallStarted)]
    if wire == "llamacpp":  # it samples up to the window, whatever the limit
        assert requested_limits == [OUTPUT_MAX] * 3
        return
    assert [end.outcome for end in ends] == ["refused", "ok", "ok", "ok"]
    assert requested_limits[0] == OUTPUT_MAX
    used = [end.usage.input_tokens for end in ends[1:]]
    assert requested_limits[1] == WINDOW - used[0]
    assert all(
        WINDOW - u - most <= u // 8 for u, most in zip(used, requested_limits[1:], strict=True)
    )
