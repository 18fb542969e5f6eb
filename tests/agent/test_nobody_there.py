"""`AIAgent` towards a server that is not there."""

import asyncio
import time

import pytest

from hermes_rl import AIAgent
from hermes_rl.config import ModelConfig
from hermes_rl.errors import Outage
from hermes_rl.testing import FakeServer


@pytest.mark.slow
async def test_a_closed_port_fails_in_seconds_with_one_line() -> None:
    async with FakeServer() as server:
        url = server.base_url
    began = time.monotonic()
    async with AIAgent(ModelConfig(name="m", base_url=url), toolsets=()) as agent:
        with pytest.raises(Outage) as raised:
            await asyncio.to_thread(agent.chat, "Hello?")
    assert time.monotonic() - began < 15
    assert "cannot reach 127.0.0.1" in str(raised.value)
    assert "\n" not in str(raised.value)
