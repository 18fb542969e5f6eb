"""What the fake model server answers: a pure function of the request.

The script is chosen by a line `SCRIPT: [...]` in the first user message, else by the model's name,
else it is the server's default; the turn is the number of assistant messages in the history. A
script is a list of steps, each text (a final answer), or an object:

    {"text": "...", "reasoning": "...", "field": "reasoning",        # spelling, or "think"
     "run": "ls -l",                                                 # one call of `terminal`
     "calls": [{"name": "read_file", "arguments": {"path": "a"}},    # an object, or any text:
               {"name": "terminal", "arguments": "{not json"}],      # written as it is
     "finish": "length", "latency_s": 0.1, "fault": "reset",
     "details": [...]}                                               # reasoning_details

A step that is a list has one step per request of that turn; the last one repeats. This scripts
answers that an agent discards.

After its last step a script answers "done". Names: `echo` (5 turns of `echo step-N`, then a text),
`echo-N` (N turns), `noop` (a text at once), `fault-KIND` (that fault, always; see `faults`).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from hermes_rl.messages import AssistantMessage, Message, ToolCall, UserMessage, text_of
from hermes_rl.testing.dialects.base import ServedRequest
from hermes_rl.usage import Usage

_MARK = re.compile(r"^SCRIPT:\s*(\[.*\])\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Step:
    """One answer of a script."""

    message: AssistantMessage
    finish_reason: str
    reasoning_field: str = "reasoning_content"
    latency_s: float = 0.0
    fault: str | None = None


TurnCounts = Counter[tuple[int, int]]
"""Script hash and turn -> number of requests."""

Play = Callable[[ServedRequest], Any]
"""Plays a model: returns a request's step, in the form of a script."""


class ScriptError(ValueError):
    """The script in a prompt cannot be played; the server answers 400 with this text."""


def step_for(
    request: ServedRequest, default: str, counts: TurnCounts, plays: Mapping[str, Play]
) -> Step:
    """Return the step that answers a request. Raises: ScriptError.

    Args:
        counts: of a server, for steps that are lists.
        plays: by model: users, judges and policies that are functions.
    """
    turn = sum(isinstance(m, AssistantMessage) for m in request.messages)
    if request.model in plays:
        try:
            return _parse_step(plays[request.model](request), turn)
        except Exception as error:  # a boundary: a test's function
            raise ScriptError(f"what plays {request.model} failed: {error!r}") from error
    script = _script_in(request.messages)
    if script is None:
        return _named(request.model, turn) or _named(default, turn) or _echo(5, turn)
    steps = _parse_turn(script, turn)
    if len(steps) == 1:
        return steps[0]
    key = (hash(script), turn)
    counts[key] += 1
    return steps[min(counts[key], len(steps)) - 1]


def usage_of(request: ServedRequest, step: Step) -> Usage:
    """Count tokens: a fixed number and a quarter of the characters per message.

    Cached is all but the last message: what an engine with a warm prefix cache would have. Where
    the wire caches only what is marked, a request with marks reads what the turn before it had
    marked, and writes the rest.
    """
    sizes = [_size(m) for m in request.messages]
    read, written = _cached(request, sizes)
    message = step.message
    reasoning = len(message.reasoning_content or "") // 4
    calls = sum(len(c.name) + len(c.arguments) for c in message.tool_calls)
    return Usage(
        input_tokens=sum(sizes),
        cache_read_tokens=read,
        cache_write_tokens=written,
        cache_write_1h_tokens=written if request.cache == "1h" or written is None else 0,
        output_tokens=1 + reasoning + (len(message.content) + calls) // 4,
        reasoning_tokens=reasoning,
    )


def _cached(request: ServedRequest, sizes: list[int]) -> tuple[int, int | None]:
    if request.cache_marks is None:
        return sum(sizes[:-1]), None
    if not request.cache_marks:
        return 0, 0
    answers = [i for i, m in enumerate(request.messages) if isinstance(m, AssistantMessage)]
    known = answers[-1] if answers else 0
    return sum(sizes[:known]), sum(sizes[known:])


def _size(message: Message) -> int:
    size = len(message.content) if isinstance(message.content, str) else 0
    if isinstance(message, AssistantMessage):
        size += sum(len(call.arguments) for call in message.tool_calls)
    return 4 + size // 4


def _script_in(messages: Sequence[Message]) -> str | None:
    """Return the script in the first user message."""
    first = next((text_of(m) for m in messages if isinstance(m, UserMessage)), "")
    found = _MARK.search(first) if "SCRIPT:" in first else None
    return found.group(1) if found else None


@lru_cache(maxsize=4096)
def _parse_turn(script: str, turn: int) -> tuple[Step, ...]:
    """Parse the steps of a turn: one per request of that turn."""
    try:
        steps = json.loads(script)
    except ValueError as error:
        raise ScriptError(f"SCRIPT is not a JSON list: {error}") from None
    form = steps[turn] if turn < len(steps) else "done"
    listed = form if isinstance(form, list) and form else [form]
    return tuple(_parse_step(one, turn) for one in listed)


def _parse_step(step: Any, turn: int) -> Step:
    if isinstance(step, str):
        return _text(step)
    if not isinstance(step, dict):
        raise ScriptError(f"step {turn} of SCRIPT must be text or an object")
    return _build(step, turn)


def _build(step: dict[str, Any], turn: int) -> Step:
    listed = list(step.get("calls", ()))
    if "run" in step:
        listed.insert(0, {"name": "terminal", "arguments": {"command": step["run"]}})
    calls = tuple(_call(form, turn, index) for index, form in enumerate(listed))
    message = AssistantMessage(
        content=step.get("text", ""),
        reasoning_content=step.get("reasoning"),
        tool_calls=calls,
        reasoning_details=step.get("details"),
    )
    return Step(
        message=message,
        finish_reason=step.get("finish") or ("tool_calls" if calls else "stop"),
        reasoning_field=step.get("field", "reasoning_content"),
        latency_s=float(step.get("latency_s", 0.0)),
        fault=step.get("fault"),
    )


def _call(form: dict[str, Any], turn: int, index: int) -> ToolCall:
    arguments = form.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    call_id = form.get("id", f"call_{turn}_{index}")
    return ToolCall(id=call_id, name=form.get("name", "terminal"), arguments=arguments)


@lru_cache(maxsize=4096)
def _named(name: str, turn: int) -> Step | None:
    if name == "noop":
        return _text("done")
    if name.startswith("fault-"):
        return Step(AssistantMessage(content="done"), "stop", fault=name.removeprefix("fault-"))
    kind, _, count = name.partition("-")
    if kind == "echo" and (count.isdigit() or not count):
        return _echo(int(count or 5), turn)
    return None


def _echo(turns: int, turn: int) -> Step:
    if turn >= turns:
        return _text(f"All {turns} steps are done.")
    return _build({"run": f"echo step-{turn + 1}"}, turn)


def _text(text: str) -> Step:
    return Step(AssistantMessage(content=text), "stop")
