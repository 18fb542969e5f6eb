"""Run the agent: check the prompt, ask the model and act on its answers, end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from hermes_rl.agent.answers import REFUSAL, answer
from hermes_rl.agent.compression import compress
from hermes_rl.agent.parts import AgentParts, AgentResult, Control, Finish, RunState, Tries
from hermes_rl.agent.prompt import EMPTY
from hermes_rl.agent.run_hooks import with_context
from hermes_rl.agent.session import keep_todos
from hermes_rl.agent.tool_calls import run_calls
from hermes_rl.errors import (
    ContextOverflow,
    HermesError,
    Interrupted,
    PayloadTooLarge,
    Stalled,
    UserError,
)
from hermes_rl.events import ToolsOffered
from hermes_rl.messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    UserMessage,
    check_prompt,
    text_of,
)
from hermes_rl.models.prepare import repaired_roles
from hermes_rl.text import clean
from hermes_rl.tools import PROCESSES, TODO, ToolContext, take_ended


async def run_agent(
    parts: AgentParts, prompt: Sequence[Message], control: Control | None = None
) -> AgentResult:
    """Run the agent on a prompt until it ends.

    Args:
        parts: what it works with. Records messages and offered tools on `parts.recorder`; the
            caller records the calls.
        prompt: the conversation so far, ending with the user.
        control: lets others interrupt or steer the run.

    Raises: Interrupted; Stalled at the wall limit; UserError as `check_prompt`; ModelError
        and SandboxError when infrastructure failed.
    """
    control = control or Control()
    context = None
    if parts.hooks is not None and parts.resumed is None and prompt:
        with contextlib.suppress(Interrupted), control.scope():  # the scope below raises it again
            context = await parts.hooks.context(prompt)
    run = begin(parts, prompt, control, context)
    try:
        with control.scope():
            async with wall_limit(parts.limits.wall_seconds):
                result = await finalise(run, await run_turns(run))
    except HermesError as error:
        error.metrics = run.metrics()
        raise
    if parts.hooks is not None:
        await parts.hooks.answered(result.messages, result.final_response, result.end_reason)
    return result


def begin(
    parts: AgentParts, prompt: Sequence[Message], control: Control, context: str | None = None
) -> RunState:
    """The state of a run whose next step is a model call.

    Args:
        context: what hooks join to the prompt's last message.

    Raises: UserError for a prompt that does not end with the user, or a tool without its sandbox.
    """
    if parts.resumed is None:
        if not parts.policy.repair_history:  # then the record has to be what is sent
            prompt = repaired_roles(prompt)
        check_prompt(prompt)
    homeless = [tool.name for tool in parts.tools.values() if tool.needs_sandbox]
    if homeless and parts.sandbox is None:
        raise UserError(f"the tools {', '.join(homeless)} need a sandbox; give one, or no tools")
    run = RunState.of(parts, control)
    if parts.resumed is not None:
        run.resume(parts.resumed, prompt)
        return run
    if TODO in parts.tools and TODO not in parts.tool_state:
        keep_todos(parts.tool_state, parts.tools, prompt)
    parts.recorder.record(ToolsOffered(tools=list(run.request.tools)))
    if parts.system and not isinstance(prompt[0], SystemMessage):
        run.add(SystemMessage(content=parts.system))
    for message in prompt[: -1 if context else None]:
        run.add(message)
    if context:
        run.add(with_context(prompt[-1], context), raw_text=text_of(prompt[-1]))
    run.prompt_length = len(run.conversation)
    return run


async def compress_context(parts: AgentParts, messages: Sequence[Message]) -> bool:
    """Compress a conversation between two runs, and record it; whether it was compressed."""
    run = RunState.of(parts, Control())
    if parts.system:
        run.add(SystemMessage(content=parts.system))
    for message in messages:
        run.add(message)
    run.prompt_length = len(run.conversation)
    return await compress(run)


async def run_turns(run: RunState) -> str:
    """Turns until an ending; returns its end_reason. Raises: ModelError, SandboxError."""
    try:
        while True:
            run.check_limits()
            await step(run)
            if run.parts.after_turn is not None:
                await run.parts.after_turn(run.progress())
    except Finish as finish:
        return finish.end_reason


async def step(run: RunState) -> None:
    """One turn: an answer and the tool calls that it asks for. Raises: Finish."""
    if run.parts.policy.process_notices and PROCESSES in run.parts.tool_state:
        place = ToolContext(sandbox=run.parts.sandbox, state=run.parts.tool_state)
        for text in await take_ended(place):
            run.add(UserMessage(content=clean(text)), synthetic=True)
            run.note("process_notices")
    completion = await answer(run)
    message = completion.message
    if completion.finish_reason == REFUSAL:
        raise Finish("refused")
    if run.answered_by(message.tool_calls):
        raise Finish("answered")
    if message.tool_calls:
        await run_calls(run, message.tool_calls)
    elif texts := run.control.take_steers():
        run.add(UserMessage(content="\n".join(texts)))
    else:
        await _replied(run)
    run.tries = Tries()


async def _replied(run: RunState) -> None:
    """The user's reply to an answer joins the conversation. Raises: Finish when there is none."""
    ask = run.parts.reply
    message = await ask(run.originals()) if ask is not None else None
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
    if isinstance(run.conversation[-1], UserMessage):  # the last answer was discarded
        run.add(AssistantMessage(content=EMPTY), synthetic=True)
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


@asynccontextmanager
async def wall_limit(seconds: float | None) -> AsyncIterator[None]:
    """Run the block for at most so many seconds; None sets no limit. Raises: Stalled."""
    try:
        async with asyncio.timeout(seconds) as wall:
            yield
    except TimeoutError as error:
        if not wall.expired():
            raise
        raise Stalled(f"no end within {seconds:g} s (limits.wall_seconds)") from error
