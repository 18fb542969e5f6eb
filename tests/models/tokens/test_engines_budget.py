"""Budgets on the token wires: what is set aside is what the engine is asked for at most."""

import pytest
from engines_kit import FREE, TOOLS, WIRES, asked, client_of, engine_at, script

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
    calling = ModelCaller([route], log, RetryPolicy(adapt=False), budget=budget)
    conversation = Conversation(asked(script("one", "two", "three")))
    request = ModelRequest("toy", conversation, "", tools=TOOLS, sampling=FREE, exact=True)
    for turn in (1, 2, 3):
        answer = await calling.call(request, turn=turn)
        conversation.append(answer.message)
        conversation.append(UserMessage(content="Go on."))


@pytest.mark.parametrize("wire", WIRES)
async def test_a_small_window_costs_one_refused_call(tmp_path, wire):
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
    asked_for = [start.max_output_tokens for start in events(bound, CallStarted)]
    if wire == "llamacpp":  # it gives as much as the window has, whatever it is asked for
        assert asked_for == [OUTPUT_MAX] * 3
        return
    assert [end.outcome for end in ends] == ["refused", "ok", "ok", "ok"]
    assert asked_for[0] == OUTPUT_MAX
    used = [end.usage.input_tokens for end in ends[1:]]
    assert asked_for[1] == WINDOW - used[0]
    assert all(WINDOW - u - most <= u // 8 for u, most in zip(used, asked_for[1:], strict=True))
