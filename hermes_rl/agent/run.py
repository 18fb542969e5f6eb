"""Run the agent: prologue, loop, finalisation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hermes_rl.agent.control import Control
from hermes_rl.agent.finalise import finalise
from hermes_rl.agent.loop import run_turns
from hermes_rl.agent.parts import AgentParts, AgentResult, Caller
from hermes_rl.agent.prologue import begin
from hermes_rl.errors import Stalled
from hermes_rl.messages import Message

__all__ = ["AgentParts", "AgentResult", "Caller", "run_agent"]


async def run_agent(
    parts: AgentParts, prompt: Sequence[Message], control: Control | None = None
) -> AgentResult:
    """Run the agent on a prompt until it ends.

    Args:
        parts: what it works with. Records messages and offered tools on `parts.recorder`; the
            caller records the calls.
        prompt: the conversation so far, ending with the user.
        control: lets others interrupt or steer the run.

    Raises: Interrupted; Stalled at the wall limit; UserError for a prompt out of order; ModelError
        and SandboxError when infrastructure failed.
    """
    control = control or Control()
    limit = parts.limits.wall_seconds
    run = begin(parts, prompt)
    with control.scope():
        try:
            async with asyncio.timeout(limit) as wall:
                return await finalise(run, await run_turns(run, control))
        except TimeoutError as error:
            if not wall.expired():
                raise
            raise Stalled(f"no end within {limit:g} s (limits.wall_seconds)") from error
