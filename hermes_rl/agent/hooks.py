"""What others may hook into: recorders for agents without a run directory, and typed callbacks.

Hooks look on; one of them, `pre_tool_call`, may forbid. They are called in order on the agent's
loop, may be plain or async functions, and what fails in them is logged and ends no run; a tool
whose `pre_tool_call` fails is not run.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hermes_rl.agent.parts import Caller, FallsBack, KnowsWindow
from hermes_rl.errors import ToolError
from hermes_rl.events import Event, Purpose
from hermes_rl.messages import AssistantMessage, Message
from hermes_rl.models import Completion, ModelRequest
from hermes_rl.tools import Tool, ToolContext, ToolResult
from hermes_rl.usage import Usage

_log = logging.getLogger(__name__)

OnEvent = Callable[[Event], None]


@dataclass(frozen=True, kw_only=True)
class SessionStart:
    """Before the first run of an agent."""

    session_id: str
    model: str
    resumed: bool
    """The conversation goes on from a saved session."""


@dataclass(frozen=True, kw_only=True)
class SessionEnd:
    """When the agent is closed, if it ever ran."""

    session_id: str
    model: str
    end_reason: str
    """Of the last run; `error` when it raised."""
    completed: bool
    interrupted: bool


@dataclass(frozen=True, kw_only=True)
class PreLLMCall:
    """Before each model call; retries of it are not calls of their own."""

    session_id: str
    task_id: str
    model: str
    turn: int
    purpose: Purpose
    conversation: tuple[Message, ...]
    """The messages so far. Not to be changed."""


@dataclass(frozen=True, kw_only=True)
class PostLLMCall:
    """After each model call that gave an answer."""

    session_id: str
    task_id: str
    model: str
    turn: int
    purpose: Purpose
    message: AssistantMessage
    finish_reason: str | None
    usage: Usage | None
    duration_s: float
    """Retries and waits included."""


@dataclass(frozen=True, kw_only=True)
class PreToolCall:
    """Before a tool runs, its arguments checked."""

    session_id: str
    task_id: str
    tool_name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class PostToolCall:
    """After a tool ran, was refused by a hook, or failed."""

    session_id: str
    task_id: str
    tool_name: str
    arguments: Mapping[str, Any]
    result: str | None
    """What it gave back; None when it failed."""
    ok: bool
    error: str | None
    duration_s: float


_P = TypeVar("_P")
Looks = Callable[[_P], Awaitable[None] | None]
"""A hook that looks on."""
Judges = Callable[[_P], Awaitable[str | None] | str | None]
"""A hook that may forbid: the text that it returns is what the model reads."""


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """Callbacks of an agent; None is none. See the payloads for when each is called."""

    on_session_start: Looks[SessionStart] | None = None
    on_session_end: Looks[SessionEnd] | None = None
    pre_llm_call: Looks[PreLLMCall] | None = None
    post_llm_call: Looks[PostLLMCall] | None = None
    pre_tool_call: Judges[PreToolCall] | None = None
    post_tool_call: Looks[PostToolCall] | None = None


async def call_hook(
    hook: Callable[[_P], Any] | None, payload: _P, failed: str | None = None
) -> Any:
    """Call a hook; what it returns, None when there is none, `failed` when it failed."""
    if hook is None:
        return None
    try:
        answer = hook(payload)
        return await answer if inspect.isawaitable(answer) else answer
    except Exception:  # a hook is not ours: whatever it raises, the run goes on
        _log.exception("the hook for %s failed", type(payload).__name__)
        return failed


@dataclass(frozen=True)
class Hooked:
    """The hooks of one run around its caller and its tools."""

    hooks: Hooks
    caller: Caller
    session_id: str
    task_id: str

    async def call(
        self, request: ModelRequest, *, turn: int, purpose: Purpose = "agent", agent: str = "main"
    ) -> Completion:
        """See `Caller`."""
        hooks, start = self.hooks, time.monotonic()
        common: dict[str, Any] = {
            "session_id": self.session_id,
            "task_id": self.task_id,
            "model": request.model,
            "turn": turn,
            "purpose": purpose,
        }
        if hooks.pre_llm_call is not None:
            before = PreLLMCall(**common, conversation=tuple(request.conversation))
            await call_hook(hooks.pre_llm_call, before)
        completion = await self.caller.call(request, turn=turn, purpose=purpose, agent=agent)
        after = PostLLMCall(
            **common,
            message=completion.message,
            finish_reason=completion.finish_reason,
            usage=completion.usage,
            duration_s=time.monotonic() - start,
        )
        await call_hook(hooks.post_llm_call, after)
        return completion

    def fall_back(self) -> bool:
        """See `FallsBack`."""
        return isinstance(self.caller, FallsBack) and self.caller.fall_back()

    @property
    def window(self) -> int | None:
        """See `KnowsWindow`."""
        return self.caller.window if isinstance(self.caller, KnowsWindow) else None

    def tools(self, tools: Mapping[str, Tool]) -> dict[str, Tool]:
        """The same tools, seen by the hooks."""
        return {name: self._watched(tool) for name, tool in tools.items()}

    def _watched(self, tool: Tool) -> Tool:
        async def handler(context: ToolContext, arguments: dict[str, Any]) -> ToolResult:
            start = time.monotonic()
            common: dict[str, Any] = {
                "session_id": self.session_id,
                "task_id": self.task_id,
                "tool_name": tool.name,
                "arguments": arguments,
            }
            result, error = None, None
            try:
                before = PreToolCall(**common)
                if why := await call_hook(self.hooks.pre_tool_call, before, "its guard failed"):
                    raise ToolError(f"{tool.name} was not run: {why}")
                result = await tool.handler(context, arguments)
                return result
            except Exception as failure:  # seen by the hook, and raised as it is
                named = "" if isinstance(failure, ToolError) else f"{type(failure).__name__}: "
                error = f"{named}{failure}"
                raise
            finally:
                if result is not None or error is not None:  # not when it was cancelled
                    after = PostToolCall(
                        **common,
                        result=None if result is None else result.text,
                        ok=result is not None and result.ok,
                        error=error,
                        duration_s=time.monotonic() - start,
                    )
                    await call_hook(self.hooks.post_tool_call, after)

        return replace(tool, handler=handler)
