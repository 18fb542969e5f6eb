"""Run the tool calls of one turn, side by side where that is safe, and add their results in call
order.

Neighbours run side by side when they change nothing, or work on different files; every other call,
such as a command, is a barrier.
"""

from __future__ import annotations

import asyncio
import difflib
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hermes_rl.agent.parts import Finish, RunState
from hermes_rl.agent.prompt import steer_note
from hermes_rl.agent.results import (
    MAX_TURN_CHARS,
    PREVIEW_CHARS,
    READ_FILE,
    UNCHANGED,
    fenced,
    shown_before,
    spill,
)
from hermes_rl.agent.side_by_side import independent
from hermes_rl.agent.sight import Look, shown_images
from hermes_rl.errors import SandboxDied, SandboxKilled, ToolError
from hermes_rl.events import CommandDecided
from hermes_rl.identity import ID_LENGTH, digest
from hermes_rl.messages import ToolCall, ToolMessage
from hermes_rl.text import clean, cut_middle, to_json
from hermes_rl.tools import (
    PLAIN,
    SUSPECT,
    TODO,
    WARN,
    Tool,
    ToolContext,
    ToolResult,
    concern_of,
    find_loop,
    observe,
    observe_inner,
    read_arguments,
    refusal,
)

MAX_TOOL_S = 600.0
"""Bound of one tool call, whatever the limits say."""
MAX_SIDE_BY_SIDE = 8
MAX_TURN_IMAGE_CHARS = 16_000_000
"""Of the `data:` URLs of one turn. Anthropic accepts requests of 32 MB."""
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
    raw_text: str | None = None
    """What the tool returned, where a hook replaced it."""
    untrusted: bool = False
    """The text comes from others than the user."""
    images: Mapping[str, str] = field(default_factory=dict)


async def run_calls(run: RunState, calls: Sequence[ToolCall]) -> None:
    """Run a turn's calls and add their results.

    Every call gets a result, also when the sandbox dies or the user interrupts, so that the
    conversation stays well-formed.

    Raises: Finish when the calls end the run; errors of infrastructure as they are.
    """
    turn = _Turn(run, calls)
    try:
        while turn.done < len(calls):
            await turn.run_group()
    except asyncio.CancelledError:
        if run.control.interrupted:
            turn.fill(f"Not executed: {run.control.reason}.")
        raise
    except (SandboxDied, SandboxKilled) as error:
        if isinstance(error, SandboxDied) and not turn.died_again(error):
            raise
        turn.fill(f"The sandbox is no longer available: {error}")
        raise Finish("sandbox_killed") from error
    except Finish:
        turn.fill("Not executed: the time limit was reached.")
        raise
    if turn.images:
        run.add(shown_images(turn.images), synthetic=True)
    run.check_calls(valid=turn.valid)


class _Turn:
    """The calls of one turn, and their results as they come."""

    def __init__(self, run: RunState, calls: Sequence[ToolCall]) -> None:
        self.run, self.calls = run, calls
        self.tools = [_tool(run, call) for call in calls]
        self.outcomes: list[_Outcome | None] = [None] * len(calls)
        self.done = 0
        """How many results were added."""
        self.valid = False
        self._adding = False
        self._chars = 0
        """Of the results that were added."""
        self._programs: dict[int, _Program] = {}
        """By the index of the call."""
        self.images: dict[str, str] = {}
        """Name -> `data:` URL of those that the model is to see."""

    async def run_group(self) -> None:
        """Run the next calls that may run side by side and add their results in call order.

        Raises: Finish when no active time is left; errors of infrastructure as they are.
        """
        run = self.run
        run.check_time()
        start, made = time.monotonic(), run.parts.delegation
        delegate = None if made is None else made.of(run)
        look = None if run.parts.vision is None else Look(run, run.parts.vision)
        context = ToolContext(
            sandbox=run.parts.sandbox,
            state=run.parts.tool_state,
            max_timeout_s=run.time_left(MAX_TOOL_S),
            env=run.parts.env,
            opened=run.parts.opened,
            delegate=delegate,
            look=look,
            shows_images=run.parts.images,
            reaches_web=any(tool.toolset == "web" for tool in run.parts.tools.values()),
            services=run.parts.services,
        )
        try:
            group = await self._group(context)
            # _run_one carries errors in its outcome, so no task fails and cancels the others.
            async with asyncio.TaskGroup() as tasks:
                for index in group:
                    tasks.create_task(self._run(index, context))
        except ExceptionGroup as errors:  # of the recorder: a full disk must stay a DiskFull
            raise errors.exceptions[0] from None
        finally:
            elsewhere = run.take_hook_seconds() + sum(d.seconds for d in (delegate, look) if d)
            run.add_active(max(0.0, time.monotonic() - start - elsewhere))
        if self.done < len(self.calls) and (failed := self.outcomes[self.done]):
            assert failed.error is not None, "a result without an error was added"
            raise failed.error

    async def _group(self, context: ToolContext) -> Sequence[int]:
        """The next calls that may run side by side."""
        first = end = self.done
        while end < len(self.calls) and end - first < MAX_SIDE_BY_SIDE and self._joins(end):
            end += 1
        if end <= first + 1:
            return [first]
        if any(tool is not None and tool.writes for tool in self.tools[first:end]):
            end = first + await independent(context, self.calls[first:end], self.tools[first:end])
        return range(first, end)

    def _joins(self, index: int) -> bool:
        tool = self.tools[index]
        return tool is None or tool.parallel or tool.path_argument is not None

    async def _run(self, index: int, context: ToolContext) -> None:
        """Run a call, and add the results that are next in call order."""
        call, tool = self.calls[index], self.tools[index]
        if context.delegate is not None:
            context = replace(context, call_id=call.id)
        if tool is not None and tool.calls_tools:
            self._programs[index] = program = _Program(self.run)
            context = program.with_tools(context, call)
        self.outcomes[index] = await _run_one(self.run, context, call, tool)
        if self._adding:  # by the task of another call, which sees this result too
            return
        self._adding = True
        try:
            while self.done < len(self.calls):
                outcome = self.outcomes[self.done]
                if outcome is None or outcome.error is not None:
                    break
                self._add(await self._fitted(outcome))
        finally:
            self._adding = False

    async def _fitted(self, outcome: _Outcome) -> _Outcome:
        """A result as the model sees it: of bounded size, and fenced if it is untrusted."""
        tool, policy, text = self.tools[self.done], self.run.parts.policy, outcome.text
        offered = self.run.parts.tools.values()
        if tool is None:
            return outcome
        if outcome.images:
            return self._with_images(outcome)
        if policy.short_rereads and tool.name == READ_FILE and outcome.ok and self._known(text):
            self.run.note("short_rereads")
            return replace(outcome, text=UNCHANGED, raw_text=outcome.raw_text or text)
        limit = tool.max_chars
        if policy.spill_results:
            limit = min(limit, max(PREVIEW_CHARS, MAX_TURN_CHARS - self._chars))
        if len(text) > limit:
            readable = policy.spill_results and any(t.needs_sandbox for t in offered)
            sandbox = self.run.parts.sandbox if readable else None
            name = f"{self.run.parts.agent}-turn{self.run.turn}-call{self.done + 1}"
            text = await spill(text, sandbox, name, limit)
        if policy.fence_untrusted and outcome.untrusted:
            text = fenced(text, tool.name)
        return outcome if text is outcome.text else replace(outcome, text=text)

    def _with_images(self, outcome: _Outcome) -> _Outcome:
        """A result whose images the model is to see, unless the turn has too many."""
        shown = {**self.images, **outcome.images}
        if sum(map(len, shown.values())) > MAX_TURN_IMAGE_CHARS:
            return _failed("too many images in one turn; read this one again in the next turn")
        self.images = shown
        return outcome

    def _known(self, text: str) -> bool:
        call, context = self.calls[self.done], self.run.conversation
        return len(text) > 2 * len(UNCHANGED) and shown_before(context, call, text)

    def _add(self, outcome: _Outcome) -> None:
        call, text, raw = self.calls[self.done], outcome.text, outcome.raw_text
        self._chars += len(text)
        self.valid = self.valid or not outcome.invalid
        text += self._notes(outcome)
        self.done += 1
        self.run.add(
            ToolMessage(tool_call_id=call.id, name=call.name, content=text),
            tool_ok=outcome.ok,
            seconds=outcome.seconds,
            raw_text=outcome.text if raw is None and text != outcome.text else raw,
        )

    def _notes(self, outcome: _Outcome) -> str:
        """What joins a result: a warning, and to the turn's last one a hint and the user's text."""
        run, notes = self.run, self._watch(outcome)
        if self.done + 1 < len(self.calls):
            return notes
        if all(tool is not None and tool.refunds_turn for tool in self.tools):
            run.refund()
        elif run.parts.policy.budget_hints:
            notes += run.budget_hint() or ""
        if texts := run.control.take_steers():
            notes += steer_note(texts)
        return notes

    def _watch(self, outcome: _Outcome) -> str:
        """Notice repetitions; returns what the model reads about them."""
        run, policy = self.run, self.run.parts.policy
        if policy.loop_bounds is None and not policy.loop_warnings:
            return ""
        call, tool = self.calls[self.done], self.tools[self.done]
        program = self._programs.get(self.done)
        name = call.name if tool is None else tool.name
        run.loop = observe(
            run.loop,
            tool=name,
            arguments=call.arguments,
            result=outcome.text,
            ok=outcome.ok,
            # What a program has changed by its calls was noticed with them.
            changes=_changes(tool) and (program is None or not program.calls),
        )
        return _judge_loop(run, name) or (program.warning if program is not None else "")

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
        result = await _handled(run, context, call, tool, arguments)
    except ToolError as error:
        failed = _failed(str(error), seconds=time.monotonic() - start, kind=error.kind)
        return replace(failed, untrusted=tool.untrusted)
    except Exception as error:  # carried to its place in call order, and raised there
        return _Outcome("", ok=False, error=error)
    return _Outcome(
        clean(result.text),
        result.ok,
        time.monotonic() - start,
        raw_text=result.raw_text,
        untrusted=tool.untrusted or result.untrusted,
        images=result.images,
    )


async def _handled(
    run: RunState, context: ToolContext, call: ToolCall, tool: Tool, arguments: dict[str, Any]
) -> ToolResult:
    """What the tool returns, if its command is allowed. Raises: ToolError; errors of the tool."""
    if run.parts.approval is not None and tool.command_argument is not None:
        command = str(arguments.get(tool.command_argument))
        if SUSPECT.search(command.translate(PLAIN)):
            await _approve(run, call, tool, command)
    if run.parts.hooks is None:
        return await tool.handler(context, arguments)
    return await run.parts.hooks.call_tool(call, tool, arguments, context, run.turn)


async def _approve(run: RunState, call: ToolCall, tool: Tool, command: str) -> None:
    """Raises: ToolError for a command that is not allowed."""
    approval = run.parts.approval
    concern = concern_of(command)
    if approval is None or concern is None:
        return
    about = {
        "tool_name": tool.name,
        "command": command,
        "pattern_key": concern.pattern,
        "description": concern.reason,
    }
    hooks = run.parts.hooks if approval.asks(concern) else None
    if hooks is not None:
        await hooks.observe("pre_approval_request", **about)
    decision = await approval.decide(concern, tool.name, command)
    if hooks is not None:
        await hooks.observe("post_approval_response", **about, choice=decision)
    decided = CommandDecided(
        turn=run.turn, tool_call_id=call.id, pattern=concern.pattern, decision=decision
    )
    run.parts.recorder.record(decided)
    if decision != "allowed":
        raise ToolError(refusal(concern, decision))


class _Program:
    """A call of a tool that calls others: their calls are checked, hooked and watched like the
    model's."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self.calls = 0
        self.warning = ""
        """What the model reads about calls that fail again."""
        self._failed: set[str] = set()
        """Tools of which a call failed. Further ones do not count: the program may try many."""

    def with_tools(self, context: ToolContext, call: ToolCall) -> ToolContext:
        """The context of its tool."""
        run = self._run

        async def call_tool(name: str, arguments: str) -> ToolResult:
            tool = run.parts.tools.get(name)
            inner = ToolCall(id=call.id, name=name, arguments=arguments)
            outcome = await _run_one(run, replace(context, shows_images=False), inner, tool)
            if outcome.error is not None:
                raise outcome.error
            self._watch(inner, tool, outcome.ok)
            limit = MAX_TURN_CHARS if tool is None else tool.max_chars
            text = cut_middle(outcome.text, limit)
            return ToolResult(text=text, ok=outcome.ok, untrusted=outcome.untrusted)

        offered = run.parts.tools.items()
        order = {name: tuple(tool.parameters.get("properties", ())) for name, tool in offered}
        return replace(context, call_tool=call_tool, parameters=order)

    def _watch(self, call: ToolCall, tool: Tool | None, ok: bool) -> None:
        self.calls += 1
        run, policy = self._run, self._run.parts.policy
        if policy.loop_bounds is None and not policy.loop_warnings:
            return
        if not ok and call.name in self._failed:
            return
        run.loop = observe_inner(
            run.loop, tool=call.name, arguments=call.arguments, ok=ok, changes=_changes(tool)
        )
        if not ok:
            self._failed.add(call.name)
            self.warning = _judge_loop(run, call.name, inner=call.arguments) or self.warning


def _changes(tool: Tool | None) -> bool:
    """Whether the success of a tool is progress."""
    return tool is not None and not tool.parallel and tool.toolset != TODO


def _judge_loop(run: RunState, tool: str, *, inner: str | None = None) -> str:
    """Note whether the last call reached a limit; what the model reads about it.

    Args:
        tool: of that call.
        inner: its arguments, if a program made it.
    """
    policy = run.parts.policy
    bounds = policy.loop_bounds
    run.looping |= bounds is not None and find_loop(run.loop, tool, bounds, inner=inner) is not None
    found = find_loop(run.loop, tool, WARN, inner=inner) if policy.loop_warnings else None
    if found is None:
        return ""
    run.note("loop_warnings")
    return found.warning(tool, inner=inner is not None)


def _failed(
    error: str, *, seconds: float = 0.0, invalid: bool = False, kind: str | None = None
) -> _Outcome:
    fields = {"error": clean(error), **({"type": kind} if kind else {})}
    return _Outcome(clean(to_json(fields)), False, seconds, invalid)
