"""The loop: ask the model, do what it says, until it answers or an ending is reached."""

from __future__ import annotations

from hermes_rl.agent.answers import REFUSAL, answer
from hermes_rl.agent.control import Control
from hermes_rl.agent.parts import Finish, RunState
from hermes_rl.agent.tool_calls import run_calls
from hermes_rl.agent.verdicts import Tries
from hermes_rl.messages import UserMessage


async def run_turns(run: RunState, control: Control) -> str:
    """Turns until an ending; returns its end_reason. Raises: ModelError, SandboxError."""
    try:
        while True:
            run.check_limits()
            await step(run, control)
    except Finish as finish:
        return finish.end_reason


async def step(run: RunState, control: Control) -> None:
    """One turn: an answer and the tool calls that it asks for. Raises: Finish."""
    completion = await answer(run)
    message = completion.message
    if completion.finish_reason == REFUSAL:
        raise Finish("refused")
    if message.tool_calls:
        await run_calls(run, message.tool_calls, control)
    elif texts := control.take_steers():
        run.add(UserMessage(content="\n".join(texts)))
    else:
        await _replied(run)
    run.tries = Tries()


async def _replied(run: RunState) -> None:
    """The user's reply to an answer joins the conversation. Raises: Finish when there is none."""
    ask = run.parts.reply
    message = await ask(list(run.conversation)) if ask is not None else None
    if message is None:
        raise Finish("answered")
    run.add(message)
