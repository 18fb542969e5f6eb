"""Tool calls that are not quite calls: other names, arguments that are no JSON, equal calls."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

import msgspec

from hermes_rl.agent.continuation import cut_call
from hermes_rl.agent.parts import RunState
from hermes_rl.agent.verdicts import AskAgain, Take, Verdict
from hermes_rl.messages import AssistantMessage, ToolCall
from hermes_rl.models.base import Completion
from hermes_rl.tools.base import Tool

MAX_BAD_ARGUMENTS = 2
NEAR = 0.7
"""How like a tool's name another must be (the ratio of `difflib`) to be taken for it."""

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SEPARATORS = re.compile(r"[^a-z0-9]+")
_SUFFIX = re.compile(r"(?:_(?:tool|function|call|\d+))+$")
_LEAKED = re.compile(r"<\|.*|\(.*", re.DOTALL)
"""What chat formats leave behind a name: `terminal<|channel|>json`, `terminal()`."""


def checked(run: RunState, completion: Completion) -> Verdict:
    """The calls of a complete answer, before they are run."""
    policy, message = run.parts.policy, completion.message
    if policy.reask_arguments or policy.reask_cut_calls:
        unread = [call.arguments for call in message.tool_calls if not _is_json(call.arguments)]
        if policy.reask_cut_calls and any(map(is_cut, unread)):
            return cut_call(run, completion)
        if policy.reask_arguments and unread and run.tries.bad_arguments < MAX_BAD_ARGUMENTS:
            run.tries.bad_arguments += 1
            return AskAgain("tool call without JSON arguments")
    return Take(_without_duplicates(run, message) if policy.drop_duplicate_calls else message)


def is_cut(arguments: str) -> bool:
    """Whether arguments that are no JSON begin like some and end as if they had been cut off. More
    room would not help what never was JSON."""
    text = arguments.strip()
    return text.startswith(("{", "[")) and not text.endswith(("}", "]"))


def tool_meant(name: str, tools: Mapping[str, Tool]) -> Tool | None:
    """The tool meant by a name: in other letters or separators, with a namespace in front or a
    leaked mark behind, else the nearest one."""
    plain = _plain(_LEAKED.sub("", name))
    if not plain:
        return None
    known = {_plain(own): tool for own, tool in tools.items()}
    last = _plain(re.split(r"[.:/]", _LEAKED.sub("", name).rstrip(".:/0123456789"))[-1])
    for candidate in (plain, _SUFFIX.sub("", plain), last, _SUFFIX.sub("", last)):
        if candidate in known:
            return known[candidate]
    near = difflib.get_close_matches(_SUFFIX.sub("", last or plain), known, 1, NEAR)
    return known[near[0]] if near else None


def _plain(name: str) -> str:
    return _SEPARATORS.sub("_", _CAMEL.sub("_", name.strip()).lower()).strip("_")


def _is_json(text: str) -> bool:
    """Whether arguments can be read; no text at all stands for no arguments."""
    if not text.strip():
        return True
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return False
    return True


def _without_duplicates(run: RunState, message: AssistantMessage) -> AssistantMessage:
    kept = _first_of_each(message.tool_calls)
    dropped = len(message.tool_calls) - len(kept)
    if not dropped:
        return message
    run.note("duplicate_calls", dropped)
    return msgspec.structs.replace(message, tool_calls=kept)


def _first_of_each(calls: Sequence[ToolCall]) -> tuple[ToolCall, ...]:
    first: dict[tuple[str, str], ToolCall] = {}
    for call in calls:
        first.setdefault((call.name, call.arguments), call)
    return tuple(first.values())
