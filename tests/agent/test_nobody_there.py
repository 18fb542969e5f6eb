"""`AIAgent` towards a server that is not there."""

import asyncio
import time

import pytest

from hermes_rl import AIAgent
from hermes_rl.config import ModelConfig
from hermes_rl.errors import Outage


@pytest.mark.slow
async def test_a_closed_port_fails_in_seconds_with_one_line() -> None:
    began = time.monotonic()
    model = ModelConfig(name="m", base_url="http://127.0.0.1:1/v1")
    async with AIAgent(model, toolsets=()) as agent:
        with pytest.raises(Outage) as raised:
            await asyncio.to_thread(agent.chat, "Hello?")
    assert time.monotonic() - began < 60
    assert "cannot reach 127.0.0.1" in str(raised.value)
    assert "\n" not in str(raised.value)
