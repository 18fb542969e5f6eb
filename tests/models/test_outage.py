"""Outages against the fake server, its clock and ours scaled together."""

import asyncio
import time

import pytest

from hermes_rl import errors as e
from hermes_rl.messages import UserMessage
from hermes_rl.models.calls import Clock, ModelCaller, RetryPolicy
from hermes_rl.testing import Conditions

SCALE = 300.0
"""Ten minutes of both clocks are two seconds."""


def scaled():
    return Clock(
        monotonic=lambda: time.monotonic() * SCALE,
        sleep=lambda seconds: asyncio.sleep(seconds / SCALE),
    )


async def test_request_that_alone_draws_500s_is_not_an_outage(kit, stage):
    """After six failures the same model is probed. It answers, so the next failure is blamed on the
    request, and the run continues. The probe is recorded like any call."""
    poison = [UserMessage(content='SCRIPT: [{"text": "never", "fault": "server_error"}]')]
    async with stage() as s:
        server = await s.server(conditions=Conditions(clock_scale=SCALE))
        calling = ModelCaller(
            [s.route(server, "noop")],
            s.events,
            RetryPolicy(max_attempts=6, outage_s=9_000.0),
            clock=scaled(),
        )
        with pytest.raises(e.ServerError, match="500"):
            await calling.call(kit.request(poison), turn=3)
        assert s.outcomes == ["refused"] * 6 + ["ok", "refused"]
        request = [(x.purpose, x.turn, x.max_output_tokens) for x in s.events.starts]
        assert request == [("agent", 3, None)] * 6 + [("probe", 3, 64), ("agent", 3, None)]
        assert [x.retries for x in s.events.ends] == list(range(8))
        (paid,) = [x for x in s.events.ends if x.outcome == "ok"]
        assert paid.usage is not None
        assert [entry.outcome for entry in server.entries].count("served") == 1
