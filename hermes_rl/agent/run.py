"""Run the agent: check the prompt, ask the model and act on its answers, end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hermes_rl.agent.answers import REFUSAL, answer
from hermes_rl.agent.control import Control, wall_limit
from hermes_rl.agent.parts import AgentParts, AgentResult, Finish, RunState, Tries
from hermes_rl.agent.tool_calls import run_calls
from hermes_rl.errors import ContextOverflow, PayloadTooLarge, UserError
from hermes_rl.events import ToolsOffered
from hermes_rl.messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    ToolMessage,
    UserMessage,
)


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
    run = begin(parts, prompt)
    with control.scope():
        async with wall_limit(parts.limits.wall_seconds):
            return await finalise(run, await run_turns(run, control))


def begin(parts: AgentParts, prompt: Sequence[Message]) -> RunState:
    """The state of a run whose next step is a model call.

    Raises: UserError when the prompt's roles are out of order, or a tool lacks its sandbox.
    """
    check_roles(prompt)
    homeless = [tool.name for tool in parts.tools.values() if tool.needs_sandbox]
    if homeless and parts.sandbox is None:
        raise UserError(f"the tools {', '.join(homeless)} need a sandbox; give one, or no tools")
    run = RunState.of(parts)
    parts.recorder.record(ToolsOffered(tools=list(run.request.tools)))
    if parts.system and not isinstance(prompt[0], SystemMessage):
        run.add(SystemMessage(content=parts.system))
    for message in prompt:
        run.add(message)
    run.prompt_length = len(run.conversation)
    return run


def check_roles(messages: Sequence[Message]) -> None:
    """Raises: UserError unless the roles are [system] user (assistant tool*)... user."""
    if not messages:
        raise UserError("the prompt is empty; give at least a user message")
    last: Message | None = None
    for place, message in enumerate(messages, 1):
        if not _may_follow(last, message):
            before = f"after {_role(last)}" if last else "first"
            raise UserError(
                f"prompt message {place}: a {_role(message)} message cannot stand {before}; "
                "user and assistant alternate, tool results follow their calls"
            )
        last = message
    if not isinstance(last, UserMessage):
        raise UserError(f"the prompt ends with a {_role(last)} message; end it with the user's")


def _may_follow(last: Message | None, message: Message) -> bool:
    if isinstance(message, SystemMessage):
        return last is None
    if isinstance(message, UserMessage):
        return not isinstance(last, UserMessage)
    if isinstance(message, ToolMessage):
        called = isinstance(last, AssistantMessage) and bool(last.tool_calls)
        return called or isinstance(last, ToolMessage)
    return isinstance(last, UserMessage | ToolMessage)


def _role(message: Message | None) -> str:
    return "no" if message is None else str(message.__struct_config__.tag)


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


async def finalise(run: RunState, end_reason: str) -> AgentResult:
    """The result of a run. Raises: ModelError of the summary's call."""
    if end_reason == "max_turns" and run.parts.policy.summary_on_limit and run.turn:
        await _summarise(run)
    return run.result(end_reason)


async def _summarise(run: RunState) -> None:
    """Ask once without tools; calls that the model makes all the same are recorded, not run."""
    turns = run.turn
    run.add(UserMessage(content=run.texts.summary_request), synthetic=True)
    request = replace(run.request, tools=())
    try:
        completion = await run.parts.caller.call(request, turn=turns + 1, purpose="summary")
    except (ContextOverflow, PayloadTooLarge):
        return  # the window is full: the run ends without a summary
    run.count(completion.usage)
    run.turn = turns + 1
    run.tries = Tries()  # the summary is the answer, not parts of a cut one
    run.add(completion.message)
    run.turn = turns
