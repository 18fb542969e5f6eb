"""Ten minutes without a model, the server's clock and ours scaled together."""

import asyncio
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from hermes_rl.agent import PRESETS, Limits, run_agent
from hermes_rl.messages import UserMessage
from hermes_rl.models import Endpoint, connect
from hermes_rl.models.calls import Clock, ModelCaller, RetryPolicy, Route
from hermes_rl.models.rate import Limiter
from hermes_rl.testing import Conditions, FakeConfig, FakeServer

from .conftest import row_of

SCALE = 300.0
"""Ten minutes are two seconds."""
OUTAGE_S = 600.0
LIMIT_S = 60.0


@pytest.mark.parametrize("preset", ["datagen", "rl"])
async def test_ten_minutes_cost_an_agent_nothing(rig: Any, preset: str) -> None:
    """It may be active for a minute, and is answered in the end; its row says how long it took."""
    calm = Conditions(clock_scale=SCALE)

    def ring(request: int) -> None:
        if request == 3:
            gone = ((server.now, server.now + OUTAGE_S),)
            out = replace(calm, outages=gone, outage="server_error")
            server.config = replace(server.config, conditions=out)

    async with FakeServer(FakeConfig(conditions=calm), ring) as server:
        client = connect(Endpoint(server.base_url))
        parts = rig.parts(
            policy=PRESETS[preset], limits=Limits(max_turns=10, max_seconds=LIMIT_S), model="echo-4"
        )
        clock = Clock(
            monotonic=lambda: time.monotonic() * SCALE,
            sleep=lambda seconds: asyncio.sleep(seconds / SCALE),
        )
        route = Route.single("", client, Limiter(8))
        caller = ModelCaller([route], rig.log, RetryPolicy(), clock=clock)
        given = [UserMessage(content="Go.")]
        ran = await run_agent(replace(parts, caller=caller), given)
        await client.aclose()
    row = row_of(rig.log, ran)
    assert (row.end_reason, row.turns, row.truncated) == ("answered", 5, False)
    outcomes = Counter(call.outcome for call in row.calls)
    assert outcomes["ok"] == 5
    assert outcomes["refused"] == len(row.calls) - 5 > 3
    assert ran.active_seconds < LIMIT_S < row.timing.waiting_s
