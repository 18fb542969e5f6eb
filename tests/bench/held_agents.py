"""Agents alone, without sandboxes, all waiting for one model that does not answer.

    python held_agents.py BASE_URL AGENTS

prints their number and what this process then holds, in MB (PSS).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass

import meter

from hermes_rl.agent import AgentParts, preset, run_agent
from hermes_rl.events import Event
from hermes_rl.messages import UserMessage
from hermes_rl.models import Endpoint, connect
from hermes_rl.models.calls import ModelCaller, Route
from hermes_rl.models.rate import Limiter
from hermes_rl.tools import resolve

LOOKS = 120
"""At most, one a second."""


@dataclass
class Kept:
    """A recorder that keeps events, as a rollout's does."""

    events: list[Event]

    def record(self, event: Event) -> None:
        self.events.append(event)


async def hold(url: str, agents: int) -> dict[str, float]:
    """Start them all and look when each has its request out."""
    client = connect(Endpoint(base_url=url))
    route = Route.single("", client, Limiter(agents, start=agents))
    policy, tools = preset("datagen"), resolve(())

    async def one(number: int) -> None:
        kept = Kept([])
        parts = AgentParts(
            caller=ModelCaller([route], kept),
            model="echo",
            tools=tools,
            sandbox=None,
            recorder=kept,
            policy=policy,
            system="You work in a sandbox.",
        )
        await run_agent(parts, [UserMessage(content=f"Task {number}: run the steps.")])

    tasks = [asyncio.create_task(one(number)) for number in range(agents)]
    out = 0
    for _ in range(LOOKS):
        await asyncio.sleep(1.0)
        before, out = out, _connections()
        if out == before and out >= agents:
            break
    held = meter.memory_of([os.getpid()]).pss_mb
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.aclose()
    return {"agents": min(agents, out), "pss_mb": held}


def _connections() -> int:
    """Open sockets of this process."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except OSError:
            continue
    return count - 2  # the event loop's own pair


if __name__ == "__main__":
    print(json.dumps(asyncio.run(hold(sys.argv[1], int(sys.argv[2])))))
