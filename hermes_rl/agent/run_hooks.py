"""The hooks of one run of the agent: when they are called, and what becomes of what they return."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from hermes_rl.agent.hooks import HookFailed, HookTable
from hermes_rl.errors import ModelError, ToolError
from hermes_rl.events import Purpose
from hermes_rl.messages import (
    AssistantMessage,
    Message,
    ToolCall,
    UserMessage,
    text_of,
    to_openai,
)
from hermes_rl.models import Completion, ModelRequest
from hermes_rl.text import clean, json_result, to_json
from hermes_rl.tools import MAX_RESULT_CHARS, Tool, ToolContext, ToolResult

_GUARD_FAILED = "its guard failed"
_API = ("pre_api_request", "post_api_request", "api_request_error")


class RunHooks:
    """The hooks of an agent's message, or of an attempt at a unit.

    Args:
        about: the values of `session_id`, `task_id`, `turn_id`, `model` and `platform`.
    """

    def __init__(self, table: HookTable, about: Mapping[str, str]) -> None:
        self._table, self._about = table, dict(about)
        self._counts: Counter[str] = Counter()
        self._user_message = ""
        self.seconds = 0.0
        """Spent in hooks of tools, which is not the agent's active time."""

    @property
    def metrics(self) -> dict[str, float]:
        """Counts for the row, absent when zero: `hook_errors`, `hook_timeouts`, `hook_skips`,
        `hook_bad_returns`, and what hooks changed: `hook_contexts`, `hook_refusals`,
        `hook_transforms`."""
        return {name: float(number) for name, number in self._counts.items() if number}

    async def observe(self, name: str, **more: Any) -> None:
        """Call a hook whose return value has no meaning."""
        await self._call(name, more)

    async def end(self, end_reason: str) -> None:
        """A message is over."""
        await self.observe(
            "on_session_end",
            end_reason=end_reason,
            completed=end_reason == "answered",
            interrupted=end_reason == "interrupted",
        )

    async def context(self, prompt: Sequence[Message]) -> str | None:
        """What hooks join to the last message of a prompt; None for nothing."""
        self._user_message = text_of(prompt[-1])
        found = await self._call(
            "pre_llm_call",
            {
                "user_message": self._user_message,
                "conversation_history": _forms(prompt[:-1]),
                "is_first_turn": not any(isinstance(m, AssistantMessage) for m in prompt),
            },
        )
        texts = [clean(text) for text in found if isinstance(text, str) and text.strip()]
        self._counts["hook_contexts"] += len(texts)
        return "\n\n".join(texts) or None

    async def answered(
        self, messages: Sequence[Message], answer: str | None, end_reason: str
    ) -> None:
        """The last model call for a message is over."""
        await self.observe(
            "post_llm_call",
            user_message=self._user_message,
            conversation_history=_forms(messages),
            assistant_response=answer or "",
            end_reason=end_reason,
        )

    async def output(self, text: str) -> str:
        """An answer as `AIAgent` returns it."""
        return await self._transform("transform_llm_output", "response_text", text, {})

    def caller(self, caller: Any) -> Any:
        """A caller of the model that calls the hooks of requests."""
        return _HookedCaller(caller, self) if self._table.has(*_API) else caller

    async def call_tool(
        self, call: ToolCall, tool: Tool, arguments: dict[str, Any], context: ToolContext, turn: int
    ) -> ToolResult:
        """Run a tool between its hooks. Raises: what the tool raises; ToolError for a refusal."""
        about = {
            "tool_name": tool.name,
            "args": lambda: deepcopy(arguments),
            "tool_call_id": call.id,
            "turn": turn,
        }
        began = time.monotonic()
        refusal = await self._refusal(about)
        start = time.monotonic()
        result, status, error = None, "ok", None
        try:
            if refusal is not None:
                status = "blocked"
                raise ToolError(f"{tool.name} was not run: {clean(refusal)}")
            result = await tool.handler(context, arguments)
            status = "ok" if result.ok else "error"
        except Exception as failure:  # the hooks see it, and it is raised as it is
            status, error = status if status == "blocked" else "error", failure
        end = time.monotonic()
        ended = {
            **about,
            "status": status,
            "error_type": None if error is None else type(error).__name__,
            "error_message": None if error is None else str(error),
            "duration_ms": round((end - start) * 1000),
        }
        before = to_json({"error": str(error)}) if result is None else result.text
        if result is not None:
            result = await self._transformed(result, arguments, context, ended)
        await self._call("post_tool_call", {**ended, "result": result.text if result else before})
        self.seconds += start - began + time.monotonic() - end
        if result is None:
            assert error is not None, "a tool that gave no result raised"
            raise error
        return result if result.text == before else replace(result, raw_text=before)

    async def _refusal(self, about: Mapping[str, Any]) -> str | None:
        for hook in self._table.named("pre_tool_call"):
            try:
                why = await hook.call({**self._about, **about})
            except HookFailed as failed:
                self._counts[str(failed)] += 1
                why = _GUARD_FAILED if hook.required else None
            if why:
                self._counts["hook_refusals"] += 1
                return str(why)
        return None

    async def _transformed(
        self,
        result: ToolResult,
        arguments: Mapping[str, Any],
        context: ToolContext,
        ended: Mapping[str, Any],
    ) -> ToolResult:
        if result.data is not None and ended["tool_name"] == "terminal":
            sandbox, output = context.sandbox, str(result.data.get("output", ""))
            about = {
                "command": arguments.get("command", ""),
                "returncode": result.data.get("exit_code"),
                "env_type": sandbox.info.backend if sandbox is not None else None,
            }
            changed = await self._transform("transform_terminal_output", "output", output, about)
            if changed != output:
                data = {**result.data, "output": changed}
                text = json_result(data, "output", MAX_RESULT_CHARS)
                result = replace(result, text=text, data=data)
        text = await self._transform("transform_tool_result", "result", result.text, ended)
        return result if text == result.text else replace(result, text=text)

    async def _transform(self, name: str, key: str, text: str, about: Mapping[str, Any]) -> str:
        """A text after all functions of a hook, each of which sees what the one before returned."""
        changed = text
        for hook in self._table.named(name):
            try:
                value = await hook.call({**self._about, **about, key: changed})
            except HookFailed as failed:
                self._counts[str(failed)] += 1
                continue
            changed = changed if value is None else clean(value)
        if changed != text:
            self._counts["hook_transforms"] += 1
        return changed

    async def _call(self, name: str, about: Mapping[str, Any]) -> list[Any]:
        """Call all functions of a hook with one payload; what they return."""
        found = []
        for hook in self._table.named(name):
            try:
                found.append(await hook.call({**self._about, **about}))
            except HookFailed as failed:
                self._counts[str(failed)] += 1
        return found


@dataclass
class _HookedCaller:
    """The hooks of requests around a caller; see `Caller`, `FallsBack` and `KnowsWindow`."""

    caller: Any
    hooks: RunHooks
    number: int = 0

    async def call(
        self, request: ModelRequest, *, turn: int, purpose: Purpose = "agent", agent: str = "main"
    ) -> Completion:
        """See `Caller`."""
        self.number += 1
        about = {"turn": turn, "purpose": purpose, "api_call_count": self.number}
        await self.hooks.observe(
            "pre_api_request",
            **about,
            message_count=len(request.conversation),
            tool_count=len(request.tools),
            max_tokens=request.sampling.max_tokens,
            request_messages=_forms(request.conversation),
        )
        start = time.monotonic()
        try:
            completion: Completion = await self.caller.call(
                request, turn=turn, purpose=purpose, agent=agent
            )
        except Exception as error:  # seen by the hook, and raised as it is
            await self.hooks.observe(
                "api_request_error",
                **about,
                api_duration=time.monotonic() - start,
                error_type=type(error).__name__,
                error_message=str(error),
                reason=error.reason if isinstance(error, ModelError) else None,
            )
            raise
        await self.hooks.observe(
            "post_api_request",
            **about,
            api_duration=time.monotonic() - start,
            finish_reason=completion.finish_reason,
            usage=lambda: msgspec.to_builtins(completion.usage),
            assistant_message=_form(completion.message),
        )
        return completion

    def fall_back(self) -> bool:
        """See `FallsBack`."""
        ask = getattr(self.caller, "fall_back", None)
        return ask is not None and bool(ask())

    @property
    def window(self) -> int | None:
        """See `KnowsWindow`."""
        return getattr(self.caller, "window", None)


def with_context(message: Message, context: str) -> Message:
    """A user message with what hooks join to it."""
    if not isinstance(message, UserMessage):
        return message
    if isinstance(message.content, str):
        return UserMessage(content=f"{message.content}\n\n{context}")
    return UserMessage(content=[*message.content, {"type": "text", "text": context}])


def _form(message: Message) -> Callable[[], dict[str, Any]]:
    """A message in OpenAI's form, made when a function wants it: changing it has no effect."""
    return lambda: deepcopy(to_openai(message, details=True))


def _forms(messages: Sequence[Message]) -> Callable[[], list[dict[str, Any]]]:
    return lambda: [deepcopy(to_openai(message, details=True)) for message in messages]
