"""The loop: ask the model, do what it says, until it answers or an ending is reached."""

from __future__ import annotations

from hermes_rl.agent.control import Control
from hermes_rl.agent.parts import Finish, RunState
from hermes_rl.agent.tool_calls import run_calls
from hermes_rl.errors import ContextOverflow, PayloadTooLarge
from hermes_rl.messages import UserMessage
from hermes_rl.models.base import Completion

REFUSAL = "refusal"
"""Finish reason by which a server says that the model refused in its own words."""


async def run_turns(run: RunState, control: Control) -> str:
    """Turns until an ending; returns its end_reason. Raises: ModelError, SandboxError."""
    try:
        while True:
            run.check_limits()
            await step(run, control)
    except Finish as finish:
        return finish.end_reason


async def step(run: RunState, control: Control) -> None:
    """One turn: a model call and the tool calls that it asks for. Raises: Finish."""
    completion = await ask(run)
    message = completion.message
    if completion.finish_reason == "length":
        raise Finish("output_truncated")  # calls that may be cut are not run
    if completion.finish_reason == REFUSAL:
        raise Finish("refused")
    if message.tool_calls:
        await run_calls(run, message.tool_calls, control)
    elif not message.content.strip():
        raise Finish("empty_response")
    elif texts := control.take_steers():
        run.add(UserMessage(content="\n".join(texts)))
    else:
        raise Finish("answered")


async def ask(run: RunState) -> Completion:
    """One model call; its answer joins the conversation. Raises: Finish, ModelError."""
    run.turn += 1
    try:
        completion = await run.parts.caller.call(run.request, turn=run.turn)
    except (ContextOverflow, PayloadTooLarge) as error:
        raise Finish("context_overflow") from error
    run.count(completion.usage)
    run.add(completion.message)
    return completion
