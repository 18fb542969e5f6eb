"""The callbacks of hermes-agent's `AIAgent`, as adapters of the stream of events."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any, Self

from hermes_rl import events as ev
from hermes_rl.messages import AssistantMessage, ToolCall, ToolMessage, parse_arguments

_log = logging.getLogger(__name__)

_PREVIEW_CHARS = 80
_SUFFIX = "_callback"


class Callbacks:
    """Calls callbacks by event; takes each event of a run.

    | callback | arguments | when |
    |---|---|---|
    | `step_callback` | turn, results of the last (`name`, `arguments`, `result`) | a turn begins |
    | `thinking_callback` | text, empty at the end | a model call begins, and ends |
    | `stream_delta_callback` | text; None at the end | a piece of an answer arrives |
    | `reasoning_callback` | text | a piece of reasoning arrives, or all of it with the answer |
    | `interim_assistant_callback` | text | an answer has text beside tool calls |
    | `tool_start_callback` | id, name, arguments | the model calls a tool |
    | `tool_complete_callback` | id, name, arguments, result | its result is there |
    | `tool_progress_callback` | `tool.started`, `tool.completed`; name, preview, arguments | both |
    | `status_callback` | `error`, `retry`, `waiting`, `compressed`; text | of calls; of contexts |

    They are called on the agent's loop and must be quick. One that fails is logged.

    Args:
        callbacks: by name, without `_callback`.
    """

    def __init__(self, callbacks: Mapping[str, Callable[..., Any]]) -> None:
        self._callbacks = dict(callbacks)
        self._calls: dict[str, ToolCall] = {}
        self._results: list[dict[str, Any]] = []
        self._turn = 0
        self._streamed = False
        self._reasoned = False
        """The reasoning of this answer was streamed."""

    @classmethod
    def of(cls, names: Mapping[str, Any]) -> Self | None:
        """Those of the keywords of `AIAgent`; None when there are none."""
        found = {
            name.removesuffix(_SUFFIX): function
            for name, function in names.items()
            if name.endswith(_SUFFIX) and function is not None
        }
        if names.get("quiet_mode") is False:
            found["print"] = _print
        return cls(found) if found else None

    @property
    def streams(self) -> bool:
        """Whether pieces of answers are wanted."""
        return not self._callbacks.keys().isdisjoint(("stream_delta", "reasoning"))

    def on_delta(self, text: str) -> None:
        """Take a piece of an answer."""
        self._streamed = True
        self._call("stream_delta", text)

    def on_reasoning(self, text: str) -> None:
        """Take a piece of an answer's reasoning."""
        self._reasoned = True
        self._call("reasoning", text)

    def __call__(self, event: ev.Event) -> None:
        """Take an event; those of sub-agents are not reported."""
        if isinstance(event, ev.CallStarted | ev.AnswerDiscarded) and event.agent != "main":
            return
        match event:
            case ev.CallStarted(purpose="agent") if event.turn != self._turn:
                self._turn = event.turn
                results, self._results = self._results, []
                self._call("step", event.turn, results)
                self._call("thinking", "thinking")
            case ev.CallStarted():
                self._call("thinking", "thinking")
            case ev.CallEnded():
                self._end_call(event)
            case ev.AnswerDiscarded() | ev.ContextStarted() | ev.Waited():
                self._status(event)
            case ev.MessageAdded(message=AssistantMessage() as answer):
                if event.turn and not event.synthetic:
                    self._answer(answer)
            case ev.MessageAdded(message=ToolMessage() as result) if event.turn:
                self._result(result)
            case ev.Begun():
                self._turn, self._results = 0, []

    def _status(self, event: ev.AnswerDiscarded | ev.ContextStarted | ev.Waited) -> None:
        match event:
            case ev.AnswerDiscarded():
                self._call("status", "retry", event.why)
            case ev.ContextStarted():
                self._call("status", "compressed", event.reason)
            case ev.Waited():
                self._call("status", "waiting", f"waited {event.seconds:.1f} s")

    def _end_call(self, event: ev.CallEnded) -> None:
        self._call("thinking", "")
        if self._streamed:
            self._streamed = False
            self._call("stream_delta", None)
        if event.outcome != "ok":
            self._call("status", "error", event.error or event.outcome)

    def _answer(self, message: AssistantMessage) -> None:
        if message.reasoning_content and not self._reasoned:
            self._call("reasoning", message.reasoning_content)
        self._reasoned = False
        if message.tool_calls and message.content.strip():
            self._call("interim_assistant", message.content)
        for call in message.tool_calls:
            self._calls[call.id] = call
            arguments = _arguments(call)
            self._call("tool_start", call.id, call.name, arguments)
            self._call("tool_progress", "tool.started", call.name, _preview(call), arguments)
            self._call("print", f"{call.name} {_preview(call)}")

    def _result(self, message: ToolMessage) -> None:
        call = self._calls.pop(message.tool_call_id, None)
        if call is None:
            return
        arguments = _arguments(call)
        done = {"name": call.name, "arguments": arguments, "result": message.content}
        self._results.append(done)
        self._call("tool_complete", call.id, call.name, arguments, message.content)
        self._call("tool_progress", "tool.completed", call.name, _preview(call), arguments)

    def _call(self, name: str, *values: Any) -> None:
        callback = self._callbacks.get(name)
        if callback is None:
            return
        try:
            callback(*values)
        except Exception:  # a boundary: the user's code must not end a run that is paid for
            _log.exception("%s%s failed", name, _SUFFIX)


def _arguments(call: ToolCall) -> dict[str, Any]:
    return parse_arguments(call.arguments) or {}


def _preview(call: ToolCall) -> str:
    text = " ".join(call.arguments.split())
    return text if len(text) <= _PREVIEW_CHARS else f"{text[: _PREVIEW_CHARS - 3]}..."


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
