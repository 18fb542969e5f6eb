"""hermes-agent's rows: `trajectories.jsonl` of its batch runner, and single-run samples.

The turns are those that `formats/sharegpt.py` writes. The system turn is a fixed text of the
format: its tools are imported, the text is not. Results are joined to calls by their order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.export.imports.base import ForeignRollout
from hermes_rl.messages import (
    UNPARSED,
    AssistantMessage,
    Message,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from hermes_rl.text import clean

_TOOLS = re.compile(r"<tools>\s*(?=[\[{])")
_SPACE = re.compile(r"\s*")
_THINK = re.compile(r"\s*<think>\n?(.*?)\n?</think>\n?", re.DOTALL)
_decoder = json.JSONDecoder()


def rollout_of(row: Mapping[str, Any]) -> ForeignRollout:
    """Parse a row. Raises: UserError."""
    turns = row.get("conversations")
    if not isinstance(turns, list) or not all(map(_is_turn, turns)):
        raise UserError("no 'conversations' of turns with 'from' and 'value'")
    metadata, toolsets = row.get("metadata") or {}, row.get("toolsets_used") or ()
    if not isinstance(metadata, dict) or not isinstance(toolsets, list | tuple):
        raise UserError("'metadata' must be an object, 'toolsets_used' a list")
    completed = bool(row.get("completed"))
    ending = "answered" if completed else "output_truncated" if row.get("partial") else "max_turns"
    known = ("conversations", "metadata", "toolsets_used")
    return ForeignRollout(
        messages=messages_of(turns),
        tools=tools_of(turns),
        model=str(metadata.get("model") or row.get("model") or "unknown"),
        end_reason=ending,
        toolsets=tuple(map(str, toolsets)),
        at=_moment(metadata.get("timestamp") or row.get("timestamp")),
        metadata={**{k: v for k, v in row.items() if k not in known}, **metadata},
    )


def messages_of(turns: list[Mapping[str, str]]) -> list[Message]:
    """Convert turns of `from` and `value` to messages. Raises: UserError for an unknown speaker."""
    messages: list[Message] = []
    for place, turn in enumerate(turns):
        speaker, value = turn["from"], turn["value"]
        if speaker == "system":
            if not _TOOLS.search(value):
                messages.append(SystemMessage(content=value))
        elif speaker in ("human", "user"):
            messages.append(UserMessage(content=value))
        elif speaker in ("gpt", "assistant"):
            following = turns[place + 1] if place + 1 < len(turns) else {"from": "", "value": ""}
            results = _blocks(following["value"], "tool_response")[0]
            ids = [r.get("tool_call_id") for r in results if isinstance(r, dict)]
            messages.append(_answer(value, ids if following["from"] == "tool" else [], place))
        elif speaker == "tool":
            messages += [_result(block) for block in _blocks(value, "tool_response")[0]]
        else:
            raise UserError(f"turn {place + 1} is from {speaker!r}: not system, human, gpt or tool")
    return messages


def tools_of(turns: list[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Return the functions that the system turn describes as OpenAI schemas, if any.

    They are a list, or consecutive objects, after the `<tools>` tag that JSON follows: the text may
    mention the tag earlier.
    """
    text = turns[0]["value"] if turns and turns[0]["from"] == "system" else ""
    found = _TOOLS.search(text)
    described: list[Any] = []
    at = found.end() if found else len(text)
    while text[at : at + 1] in ("[", "{"):
        try:
            value, at = _decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        described += value if isinstance(value, list) else [value]
        at = _end(_SPACE.match(text, at), at)
    functions = [f for f in described if isinstance(f, dict)]
    return [f if "function" in f else {"type": "function", "function": f} for f in functions]


def _end(found: re.Match[str] | None, otherwise: int) -> int:
    return found.end() if found else otherwise


def _is_turn(turn: Any) -> bool:
    return (
        isinstance(turn, dict)
        and isinstance(turn.get("from"), str)
        and isinstance(turn.get("value"), str)
    )


def _answer(value: str, ids: list[Any], place: int) -> AssistantMessage:
    thought = _THINK.match(value)
    rest = value[thought.end() :] if thought else value
    blocks, text = _blocks(rest, "tool_call")
    calls = [
        _call(block, ids[number] if number < len(ids) else None, f"call_{place}_{number}")
        for number, block in enumerate(blocks)
    ]
    return AssistantMessage(
        content=text.rstrip("\n") if calls else text,
        reasoning_content=(thought.group(1) or None) if thought else None,
        tool_calls=tuple(calls),
    )


def _call(block: Any, id: Any, otherwise: str) -> ToolCall:
    form = block if isinstance(block, dict) else {}
    arguments = form.get("arguments")
    if isinstance(arguments, dict) and set(arguments) == {UNPARSED}:
        text = str(arguments[UNPARSED])
    else:
        text = json.dumps(arguments if arguments is not None else {}, ensure_ascii=False)
    return ToolCall(
        id=_storable(id or otherwise),
        name=_storable(form.get("name") or ""),
        arguments=_storable(text),
    )


def _result(block: Any) -> ToolMessage:
    form = block if isinstance(block, dict) else {"content": block}
    content = form.get("content")
    if not isinstance(content, str):
        content = json.dumps(content, ensure_ascii=False)
    return ToolMessage(
        tool_call_id=_storable(form.get("tool_call_id") or ""),
        name=_storable(form.get("name") or ""),
        content=_storable(content),
    )


def _storable(value: Any) -> str:
    """Return text without lone surrogates (escapes such as `\\ud83d`), which cannot be stored."""
    return clean(str(value))


def _blocks(text: str, tag: str) -> tuple[list[Any], str]:
    """Return the JSON values between `<tag>` and `</tag>`, and the text around them.

    A value ends where its JSON ends, so a tag inside it does no harm. Invalid JSON stays text.
    """
    opening = re.compile(rf"<{tag}>\s*")
    closing = re.compile(rf"\s*</{tag}>\n?")
    values, kept, at = [], [], 0
    for start in opening.finditer(text):
        if start.start() < at:
            continue
        try:
            value, end = _decoder.raw_decode(text, start.end())
        except (ValueError, RecursionError):
            continue
        close = closing.match(text, end)
        if close is None:
            continue
        kept.append(text[at : start.start()])
        values.append(value)
        at = close.end()
    return values, "".join([*kept, text[at:]])


def _moment(stamp: Any) -> float:
    """Return the Unix time of an ISO time, which is UTC if it has no zone."""
    try:
        moment = datetime.fromisoformat(str(stamp))
    except ValueError:
        return 0.0
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
