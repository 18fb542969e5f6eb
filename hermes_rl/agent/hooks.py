"""Hooks: functions of users and plugins that are called at named moments of a run.

`HOOKS` lists the moments with their keywords. A function takes the keywords that it names, or all
of them with `**kwargs`. Plain functions run in a thread of their own, async ones on a loop of their
own, so that one which blocks holds up nothing but its own call.

What fails is contained: a function that raises, returns a value of the wrong kind, or does not
return within its deadline is logged and counted (`hook_errors`, `hook_bad_returns`,
`hook_timeouts`), and the run continues as if it had returned None. One that missed its deadline is
not called again in this process (`hook_skips`), because its thread may never end.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hermes_rl.aio import LoopThread
from hermes_rl.errors import UserError
from hermes_rl.events import Event
from hermes_rl.input_errors import unknown

_log = logging.getLogger(__name__)

OnEvent = Callable[[Event], None]
HookFunction = Callable[..., Any]
Returns = Literal["nothing", "text", "context", "refusal"]

DEADLINE_S = 10.0


@dataclass(frozen=True)
class HookPoint:
    """A moment at which functions are called."""

    when: str
    keywords: tuple[str, ...]
    returns: Returns = "nothing"
    """What may be returned beside None: `text` replaces a text; `context` is a text, or a dict with
    it as `context`; `refusal` is a text, or a dict with `action` "block" and a `message`."""

    @property
    def changes_input(self) -> bool:
        """Whether what it returns reaches the model."""
        return self.returns != "nothing" and self.when != _AT_THE_END


_RUN = ("session_id", "task_id", "turn_id", "model", "platform")
_CALL = (*_RUN, "turn", "purpose", "api_call_count")
_TOOL = ("tool_name", "args", *_RUN, "tool_call_id", "turn")
_RESULT = ("result", "status", "error_type", "error_message", "duration_ms")
_APPROVAL = ("tool_name", "command", "pattern_key", "description")
_CHILD = ("child_id", "parent_id", "tool_call_id")
_AT_THE_END = "`AIAgent` returns an answer; batch runs never call it"

HOOKS: dict[str, HookPoint] = {
    "on_session_start": HookPoint(
        "before the first message of an agent, or of a unit of a run",
        (*_RUN, "resumed"),
    ),
    "on_session_end": HookPoint(
        "after each message was answered, failed or was interrupted",
        (*_RUN, "end_reason", "completed", "interrupted"),
    ),
    "on_session_finalize": HookPoint("when the agent is closed, or the unit is over", _RUN),
    "on_session_reset": HookPoint(
        "when another conversation takes the place of the agent's",
        _RUN,
    ),
    "pre_llm_call": HookPoint(
        "before the first model call for a message; what it returns is joined to the message",
        (*_RUN, "user_message", "conversation_history", "is_first_turn"),
        "context",
    ),
    "post_llm_call": HookPoint(
        "after the last model call for a message",
        (*_RUN, "user_message", "conversation_history", "assistant_response", "end_reason"),
    ),
    "transform_llm_output": HookPoint(_AT_THE_END, ("response_text", *_RUN), "text"),
    "pre_api_request": HookPoint(
        "before each model call",
        (*_CALL, "message_count", "tool_count", "max_tokens", "request_messages"),
    ),
    "post_api_request": HookPoint(
        "after each model call that was answered",
        (*_CALL, "api_duration", "finish_reason", "usage", "assistant_message"),
    ),
    "api_request_error": HookPoint(
        "after each model call that failed, its retries included",
        (*_CALL, "api_duration", "error_type", "error_message", "reason"),
    ),
    "pre_tool_call": HookPoint(
        "before a tool runs; what it returns is the model's result in place of running it",
        _TOOL,
        "refusal",
    ),
    "post_tool_call": HookPoint("after a tool ran, failed or was refused", (*_TOOL, *_RESULT)),
    "transform_terminal_output": HookPoint(
        "after a command of `terminal`; what it returns replaces the output",
        ("command", "output", "returncode", *_RUN, "env_type"),
        "text",
    ),
    "transform_tool_result": HookPoint(
        "after a tool ran; what it returns replaces the result", (*_TOOL, *_RESULT), "text"
    ),
    "pre_approval_request": HookPoint(
        "before the callback is asked to approve a dangerous command", (*_RUN, *_APPROVAL)
    ),
    "post_approval_response": HookPoint(
        "after the decision: `allowed` or `denied`", (*_RUN, *_APPROVAL, "choice")
    ),
    "subagent_start": HookPoint("before a sub-agent starts", (*_RUN, *_CHILD, "goal")),
    "subagent_stop": HookPoint(
        "after a sub-agent has ended, unless the run ends with it",
        (*_RUN, *_CHILD, "status", "end_reason", "summary", "duration_ms"),
    ),
}
"""Name -> when it is called, with what, and what it may return."""

NEVER_CALLED = frozenset(
    {
        "on_memory_write",
        "pre_verify",
        "pre_gateway_dispatch",
        "kanban_task_claimed",
        "kanban_task_completed",
        "kanban_task_blocked",
    }
)
"""Hooks of hermes-agent for what does not exist here: plugins may register them."""


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """Functions of an agent by the name of their hook; see `HOOKS`."""

    on_session_start: HookFunction | None = None
    on_session_end: HookFunction | None = None
    on_session_finalize: HookFunction | None = None
    on_session_reset: HookFunction | None = None
    pre_llm_call: HookFunction | None = None
    post_llm_call: HookFunction | None = None
    transform_llm_output: HookFunction | None = None
    pre_api_request: HookFunction | None = None
    post_api_request: HookFunction | None = None
    api_request_error: HookFunction | None = None
    pre_tool_call: HookFunction | None = None
    """A tool whose guard fails is not run."""
    post_tool_call: HookFunction | None = None
    transform_terminal_output: HookFunction | None = None
    transform_tool_result: HookFunction | None = None
    pre_approval_request: HookFunction | None = None
    post_approval_response: HookFunction | None = None
    subagent_start: HookFunction | None = None
    subagent_stop: HookFunction | None = None
    deadline_s: float = DEADLINE_S
    """Seconds that each of them has for a call."""


class HookFailed(Exception):
    """A function that gave no usable value. Args: how it is counted."""


@dataclass(eq=False)
class Hook:
    """A registered function.

    Raises: UserError for a function that cannot be called with the keywords of its hook, or a
        deadline that cannot be used.
    """

    name: str
    function: HookFunction
    owner: str
    """Who registered it, for messages."""
    deadline_s: float = DEADLINE_S
    required: bool = False
    """Of `pre_tool_call`: the tool does not run if this fails."""
    disabled: bool = False
    _accepted: frozenset[str] | None = None
    _loop_thread: LoopThread | None = None
    _reported: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise UserError(f"{self.owner}: the hook {self.name} is not a function. Pass one")
        seconds = self.deadline_s
        if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
            raise UserError(
                f"{self.owner}: deadline_s of the hook {self.name} must be a number of seconds "
                f"above 0, not {seconds!r}"
            )
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError):  # a builtin: all keywords are tried
            return
        known = HOOKS[self.name].keywords
        for parameter in parameters:
            positional = parameter.kind is parameter.POSITIONAL_ONLY
            required = parameter.default is parameter.empty
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if required and (positional or parameter.name not in known):
                raise UserError(
                    f"{self.owner}: the hook {self.name} is called with the keywords "
                    f"{', '.join(known)}; {parameter.name!r} is not one of them"
                )
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            self._accepted = frozenset(p.name for p in parameters)

    async def call(self, payload: Mapping[str, Any]) -> Any:
        """Call it with what it accepts; values that are functions are called for their value.

        Raises: HookFailed.
        """
        if self.disabled:
            raise HookFailed("hook_skips")
        keywords = {
            name: value() if callable(value) else value
            for name, value in payload.items()
            if self._accepted is None or name in self._accepted
        }
        try:
            async with asyncio.timeout(self.deadline_s) as deadline:
                return _checked(await self._run(keywords), HOOKS[self.name].returns)
        except TimeoutError:
            if not deadline.expired():
                self._report("failed", error=True)
                raise HookFailed("hook_errors") from None
            self.disabled = True
            self._report(f"did not return within {self.deadline_s:g} s and is not called again")
            raise HookFailed("hook_timeouts") from None
        except HookFailed:
            self._report("returned a value of the wrong kind, which is ignored")
            raise
        except Exception:  # a boundary: the function is not ours, whatever it raises
            self._report("failed", error=True)
            raise HookFailed("hook_errors") from None

    def _report(self, what: str, *, error: bool = False) -> None:
        """Log the first failure of a kind: the rows count them all."""
        if what not in self._reported:
            self._reported.add(what)
            _log.error("the hook %s of %s %s", self.name, self.owner, what, exc_info=error)

    async def _run(self, keywords: dict[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self.function):
            value = self.function(**keywords)
        else:
            value = await _in_daemon_thread(self.function, keywords)
        if not inspect.isawaitable(value):
            return value
        if self._loop_thread is None:
            self._loop_thread = LoopThread(f"hook-{self.name}")
        return await self._loop_thread.arun(_awaited(value))


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


async def _in_daemon_thread(function: HookFunction, keywords: dict[str, Any]) -> Any:
    """Call a function in a thread that does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def work() -> None:
        value, failed = None, None
        try:
            value = function(**keywords)
        except BaseException as error:  # SystemExit too: it must not end the run
            failed = error if isinstance(error, Exception) else RuntimeError(repr(error))
        try:
            loop.call_soon_threadsafe(settle, value, failed)
        except RuntimeError:  # the loop has ended meanwhile
            pass

    threading.Thread(target=work, name="hermes-rl-hook", daemon=True).start()
    return await future


def _checked(value: Any, kind: Returns) -> Any:
    """The text that a function returned; None for none. Raises: HookFailed for anything else."""
    if value is None or kind == "nothing":
        return None
    if isinstance(value, Mapping) and kind == "context":
        value = value.get("context")
    elif isinstance(value, Mapping) and kind == "refusal":
        if value.get("action") != "block":
            raise HookFailed("hook_bad_returns")
        value = value.get("message") or "blocked by a hook"
    if value is not None and not isinstance(value, str):
        raise HookFailed("hook_bad_returns")
    return value


@dataclass(frozen=True)
class Plugin:
    """A plugin that was loaded."""

    name: str
    digest: str
    """Of its source."""
    hooks: tuple[Hook, ...]

    @property
    def changes_input(self) -> bool:
        """Whether it may change what the model sees: then it is part of a run's identity."""
        return any(HOOKS[hook.name].changes_input for hook in self.hooks)


@dataclass(frozen=True)
class HookTable:
    """The registered functions of an agent or a run, in order."""

    hooks: tuple[Hook, ...] = ()

    @classmethod
    def of(cls, hooks: Hooks | None, plugins: Sequence[Plugin] = ()) -> HookTable | None:
        """Those of plugins, then those of `Hooks`; None when there are none. Raises: UserError."""
        found = [hook for plugin in plugins for hook in plugin.hooks]
        for name in HOOKS if hooks is not None else ():
            if (function := getattr(hooks, name)) is not None and hooks is not None:
                required = name == "pre_tool_call"
                found.append(Hook(name, function, "hooks", hooks.deadline_s, required))
        return cls(tuple(found)) if found else None

    def named(self, name: str) -> Iterator[Hook]:
        """The functions of a hook."""
        return (hook for hook in self.hooks if hook.name == name)

    def has(self, *names: str) -> bool:
        """Whether any of these hooks has a function."""
        return any(hook.name in names for hook in self.hooks)


class PluginContext:
    """What a plugin's `register` gets.

    Args:
        owner: the plugin's name, for messages.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.hooks: list[Hook] = []

    def register_hook(
        self,
        name: str,
        callback: HookFunction,
        *,
        deadline_s: float = DEADLINE_S,
        required: bool = False,
    ) -> None:
        """Call a function at a moment of `HOOKS`.

        Args:
            deadline_s: seconds that it has for a call.
            required: of `pre_tool_call`: the tool does not run if the function fails.

        Raises: UserError for a hook that does not exist, or a function that does not fit it.
        """
        if name in NEVER_CALLED:
            _log.info("%s: the hook %s is never called by hermes_rl", self.owner, name)
            return
        if name not in HOOKS:
            raise UserError(f"{self.owner}: {unknown('hook', name, HOOKS)}")
        self.hooks.append(Hook(name, callback, self.owner, deadline_s, required))
