"""Run the agent: check the prompt, ask the model and act on its answers, end.

The tool calls of one turn run side by side where that is safe; their results join in call order.
`Control` interrupts and steers a run from any thread.
"""

from __future__ import annotations

import asyncio
import difflib
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from hermes_rl.agent.answers import REFUSAL, answer
from hermes_rl.agent.parts import AgentParts, AgentResult, Finish, RunState, Tries
from hermes_rl.agent.prompt import EMPTY, steer_note
from hermes_rl.errors import (
    ContextOverflow,
    Interrupted,
    PayloadTooLarge,
    SandboxDied,
    SandboxKilled,
    Stalled,
    ToolError,
    UserError,
)
from hermes_rl.events import ToolsOffered
from hermes_rl.identity import ID_LENGTH, digest
from hermes_rl.messages import (
    AssistantMessage,
    Message,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
    check_prompt,
)
from hermes_rl.models.prepare import repaired_roles
from hermes_rl.text import clean, cut_middle, to_json
from hermes_rl.tools import Tool, ToolContext, ToolResult, read_arguments


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
    run = begin(parts, prompt)
    with control.scope():
        async with wall_limit(parts.limits.wall_seconds):
            return await finalise(run, await run_turns(run, control))


def begin(parts: AgentParts, prompt: Sequence[Message]) -> RunState:
    """The state of a run whose next step is a model call.

    Raises: UserError for a prompt that does not end with the user, or a tool without its sandbox.
    """
    if parts.resumed is None:
        if not parts.policy.repair_history:  # then the record has to be what is sent
            prompt = repaired_roles(prompt)
        check_prompt(prompt)
    homeless = [tool.name for tool in parts.tools.values() if tool.needs_sandbox]
    if homeless and parts.sandbox is None:
        raise UserError(f"the tools {', '.join(homeless)} need a sandbox; give one, or no tools")
    run = RunState.of(parts)
    if parts.resumed is not None:
        run.resume(parts.resumed, prompt)
        return run
    parts.recorder.record(ToolsOffered(tools=list(run.request.tools)))
    if parts.system and not isinstance(prompt[0], SystemMessage):
        run.add(SystemMessage(content=parts.system))
    for message in prompt:
        run.add(message)
    run.prompt_length = len(run.conversation)
    return run


async def run_turns(run: RunState, control: Control) -> str:
    """Turns until an ending; returns its end_reason. Raises: ModelError, SandboxError."""
    try:
        while True:
            run.check_limits()
            await step(run, control)
            if run.parts.after_turn is not None:
                await run.parts.after_turn(run.progress())
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


MAX_TOOL_S = 600.0
"""Bound of one tool call, whatever the limits say."""
MAX_SIDE_BY_SIDE = 8
NEAR = 0.7
"""How like a tool's name another must be (the ratio of `difflib`) to be taken for it."""

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SEPARATORS = re.compile(r"[^a-z0-9]+")
_SUFFIX = re.compile(r"(?:_(?:tool|function|call|\d+))+$")
_LEAKED = re.compile(r"<\|.*|\(.*", re.DOTALL)
"""What chat formats leave behind a name: `terminal<|channel|>json`, `terminal()`."""


@dataclass(frozen=True)
class _Outcome:
    """One call's end: what the model is told, or the error that ends the run."""

    text: str
    ok: bool
    seconds: float = 0.0
    invalid: bool = False
    """No tool ran: unknown name or arguments that cannot be read."""
    error: Exception | None = None


async def run_calls(run: RunState, calls: Sequence[ToolCall], control: Control) -> None:
    """Run a turn's calls and add their results.

    Every call gets a result, also when the sandbox dies or the user interrupts, so that the
    conversation stays well-formed.

    Raises: Finish when the calls end the run; errors of infrastructure as they are.
    """
    turn = _Turn(run, calls, control)
    try:
        for group in _groups(calls, turn.tools):
            await turn.run_group(group)
    except asyncio.CancelledError:
        if control.interrupted:
            turn.fill("Not executed: the user interrupted the run.")
        raise
    except (SandboxDied, SandboxKilled) as error:
        if isinstance(error, SandboxDied) and not turn.died_again(error):
            raise
        turn.fill(f"The sandbox is no longer available: {error}")
        raise Finish("sandbox_killed") from error
    except Finish:
        turn.fill("Not executed: the time limit was reached.")
        raise
    turn.judge()


def _groups(
    calls: Sequence[ToolCall], tools: Sequence[Tool | None]
) -> Iterator[list[tuple[ToolCall, Tool | None]]]:
    """Neighbours that may run side by side; every other call is a barrier of its own."""
    group: list[tuple[ToolCall, Tool | None]] = []
    for call, tool in zip(calls, tools, strict=True):
        safe = tool is None or tool.parallel
        if group and (not safe or len(group) == MAX_SIDE_BY_SIDE):
            yield group
            group = []
        group.append((call, tool))
        if not safe:
            yield group
            group = []
    if group:
        yield group


class _Turn:
    """The results of one turn as they come."""

    def __init__(self, run: RunState, calls: Sequence[ToolCall], control: Control) -> None:
        self.run, self.calls, self.control = run, calls, control
        self.tools = [_tool(run, call) for call in calls]
        self.done = 0
        self.valid = False

    async def run_group(self, group: list[tuple[ToolCall, Tool | None]]) -> None:
        """Run the calls of a group and add their results in call order.

        Raises: Finish when no active time is left.
        """
        run = self.run
        run.check_time()
        start = time.monotonic()
        context = ToolContext(
            sandbox=run.parts.sandbox,
            state=run.parts.tool_state,
            max_timeout_s=run.time_left(MAX_TOOL_S),
            env=run.parts.env,
        )
        try:
            if len(group) == 1:
                self._add(await _run_one(run, context, *group[0]))
            else:
                await self._side_by_side(context, group)
        finally:
            run.active_s += time.monotonic() - start

    async def _side_by_side(
        self, context: ToolContext, group: list[tuple[ToolCall, Tool | None]]
    ) -> None:
        failed: _Outcome | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                # _run_one carries errors in its outcome, so no task fails and cancels the others.
                coroutines = [_run_one(self.run, context, *pair) for pair in group]
                for task in [tasks.create_task(c) for c in coroutines]:
                    outcome = await task
                    failed = failed or (outcome if outcome.error else None)
                    if failed is None:
                        self._add(outcome)
        except ExceptionGroup as errors:  # of the recorder: a full disk must stay a DiskFull
            raise errors.exceptions[0] from None
        if failed is not None:
            self._add(failed)

    def _add(self, outcome: _Outcome) -> None:
        if outcome.error is not None:
            raise outcome.error
        call = self.calls[self.done]
        text = outcome.text
        if self.done + 1 == len(self.calls) and (texts := self.control.take_steers()):
            text += steer_note(texts)
        self.done += 1
        self.valid = self.valid or not outcome.invalid
        self._watch(call, outcome.text)
        message = ToolMessage(tool_call_id=call.id, name=call.name, content=text)
        self.run.add(message, tool_ok=outcome.ok, seconds=outcome.seconds)

    def _watch(self, call: ToolCall, text: str) -> None:
        run = self.run
        this = (call.name, call.arguments, text)
        run.same_calls = run.same_calls + 1 if this == run.last_call else 1
        run.last_call = this

    def fill(self, why: str) -> None:
        """Give every call that has no result yet one that says why."""
        for call in self.calls[self.done :]:
            content = to_json({"error": why})
            message = ToolMessage(tool_call_id=call.id, name=call.name, content=content)
            self.run.add(message, synthetic=True, tool_ok=False, seconds=0.0)
        self.done = len(self.calls)

    def died_again(self, error: SandboxDied) -> bool:
        """Note which call was running when the sandbox died, if any was. True when it was running
        already when an earlier attempt's sandbox died: then that is its deed, not the host's."""
        tool = self.tools[self.done]
        if error.in_command and tool is not None:
            error.command = _name_of(tool, self.calls[self.done])
        return error.command in self.run.parts.fatal_commands

    def judge(self) -> None:
        """Raises: Finish when the model is stuck."""
        run, policy = self.run, self.run.parts.policy
        run.invalid_turns = 0 if self.valid else run.invalid_turns + 1
        if run.invalid_turns >= policy.invalid_turn_limit:
            raise Finish("invalid_tool_calls")
        if policy.tool_loop_limit is not None and run.same_calls >= policy.tool_loop_limit:
            raise Finish("tool_loop")


def _tool(run: RunState, call: ToolCall) -> Tool | None:
    tools = run.parts.tools
    tool = tools.get(call.name)
    if tool is None and run.parts.policy.repair_tool_names:
        return tool_meant(call.name, tools)
    return tool


def tool_meant(name: str, tools: Mapping[str, Tool]) -> Tool | None:
    """The tool meant by a name: in other letters or separators, with a namespace in front or a
    leaked mark behind, else the nearest one."""
    plain = _plain(_LEAKED.sub("", name))
    if not plain:
        return None
    known = {_plain(offered): tool for offered, tool in tools.items()}
    last = _plain(re.split(r"[.:/]", _LEAKED.sub("", name).rstrip(".:/0123456789"))[-1])
    for candidate in (plain, _SUFFIX.sub("", plain), last, _SUFFIX.sub("", last)):
        if candidate in known:
            return known[candidate]
    near = difflib.get_close_matches(_SUFFIX.sub("", last or plain), known, 1, NEAR)
    return known[near[0]] if near else None


def _plain(name: str) -> str:
    return _SEPARATORS.sub("_", _CAMEL.sub("_", name.strip()).lower()).strip("_")


def _name_of(tool: Tool, call: ToolCall) -> str:
    """Names a call that ran by what it does: the tool and its arguments, however written."""
    return digest([tool.name, read_arguments(call.arguments, tool.parameters)])[:ID_LENGTH]


async def _run_one(
    run: RunState, context: ToolContext, call: ToolCall, tool: Tool | None
) -> _Outcome:
    if tool is None and not call.name.strip():
        return _failed("The tool call has no name.", invalid=True)
    if tool is None:
        known = ", ".join(run.parts.tools) or "none"
        return _failed(f"Unknown tool {call.name!r}. Available tools: {known}", invalid=True)
    try:
        arguments = read_arguments(call.arguments, tool.parameters)
    except ToolError as error:
        return _failed(f"{tool.name}: {error}", invalid=True)
    start = time.monotonic()
    try:
        result = await tool.handler(context, arguments)
    except ToolError as error:
        return _failed(str(error), seconds=time.monotonic() - start)
    except Exception as error:  # carried to its place in call order, and raised there
        return _Outcome("", ok=False, error=error)
    return _Outcome(_text(result, tool), result.ok, time.monotonic() - start)


def _failed(error: str, *, seconds: float = 0.0, invalid: bool = False) -> _Outcome:
    return _Outcome(clean(to_json({"error": clean(error)})), False, seconds, invalid)


def _text(result: ToolResult, tool: Tool) -> str:
    return clean(cut_middle(result.text, tool.max_chars))


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


class Control:
    """The handle on one run. `interrupt` and `steer` may be called from any thread.

    An interrupt cancels the run's task, as `asyncio.timeout` does, so the model call or the tool
    in flight ends at once; outside cancellation stays what it is.
    """

    def __init__(self) -> None:
        self.message: str | None = None
        """What the interrupting user said."""
        self._lock = threading.Lock()  # guards all below: other threads write them
        self._interrupted = False
        self._cancelled = False
        self._steers: list[str] = []
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None

    @property
    def interrupted(self) -> bool:
        """Whether an interrupt was asked for."""
        return self._interrupted

    def interrupt(self, message: str | None = None) -> None:
        """End the run now. A later call only replaces the message."""
        with self._lock:
            self.message = message if message is not None else self.message
            first, self._interrupted = not self._interrupted, True
            if first and self._running is not None:
                self._running[0].call_soon_threadsafe(self._cancel)

    def steer(self, text: str) -> None:
        """Say something to the run without ending it: the model reads it at its next turn."""
        with self._lock:
            self._steers.append(text)

    def take_steers(self) -> list[str]:
        """What was said since the last time."""
        if not self._steers:
            return []
        with self._lock:
            texts, self._steers = self._steers, []
        return texts

    def _cancel(self) -> None:
        """On the run's loop; the run may have ended meanwhile."""
        with self._lock:
            if self._running is None:
                return
            self._cancelled = True
            self._running[1].cancel()

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Run the block under this control, within one task.

        Raises: Interrupted in place of the cancellation that an interrupt brought about.
        """
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("Control.scope needs a running task")
        with self._lock:
            if self._interrupted:
                raise Interrupted("interrupted before the start")
            self._running = (asyncio.get_running_loop(), task)
        before = task.cancelling()
        try:
            yield
        except asyncio.CancelledError:
            if self._cancelled and task.uncancel() <= before:
                raise Interrupted("interrupted") from None
            raise
        finally:
            with self._lock:
                self._running = None
