"""Qwen3-Coder's form: `<function=NAME><parameter=KEY>VALUE</parameter></function>`.

Values are bare text without escapes; the tool's schema tells their types. A parameter ends at the
`</parameter>` that another parameter or the end of the function follows, so the tag may stand in
the middle of a value.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from hermes_rl.models.tokens.parsers.base import (
    Parsed,
    ParsedCall,
    call_id,
    outside,
    parameters,
)
from hermes_rl.models.tokens.parsers.reasoning import split_reasoning
from hermes_rl.models.tokens.parsers.values import typed
from hermes_rl.models.unparsed import Tools, names

_BEGIN = re.compile(r"(<tool_call>\s*)?<function=([^>\n]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>")
_VALUE_END = re.compile(r"</parameter>(?=\s*(?:<parameter=[^>\n]*>|</function>))")
_LOOSE_END = re.compile(r"\n<parameter=[^>\n]*>|\n?</function>")
_FUNCTION_END = re.compile(r"\s*</function>")
_CALL_END = re.compile(r"\s*</tool_call>")
_INTERRUPTION = re.compile(r"<tool_call>\s*<function=[^>\n]*>\s*(?:<parameter=|</function>)")
"""A whole opening of another call: what stands before it belongs to no value behind it."""
_NEXT = re.compile(r"<tool_call>|\s*<function=[^>\n]*>")
_CUT = "the tool call breaks off in the middle"


class Qwen3CoderParser:
    """Reads calls of Qwen3-Coder, also those whose `<tool_call>` the model left out.

    Without it, only a whole call of an offered tool counts; other such text stays content.
    """

    name = "qwen3_coder"

    def parse(
        self, text: str, tools: Tools = (), *, opened: bool = False, salt: str = ""
    ) -> Parsed:
        """See `ToolCallParser.parse`."""
        thought = split_reasoning(text, opened=opened)
        calls: list[ParsedCall] = []
        offered = names(tools)
        place = thought.start
        while begin := _BEGIN.search(text, place):
            call = _call(text, begin, len(calls), tools, salt)
            bare = begin.group(1) is None
            if bare and (call.error or call.name not in offered):
                place = begin.end()
                continue
            calls.append(call)
            place = call.end
        content = outside(text, thought.start, calls)
        return Parsed.of(content, thought.reasoning, calls, tools)


class _Body(NamedTuple):
    """What stands in a function."""

    values: dict[str, Any]
    end: int
    """Behind `</function>`, or where reading stopped."""
    error: str | None


def _call(text: str, begin: re.Match[str], position: int, tools: Tools, salt: str) -> ParsedCall:
    name = begin.group(2).strip()
    body = _body(text, begin.end(), parameters(tools, name))
    end = body.end
    if begin.group(1) is not None and (closed := _CALL_END.match(text, end)):
        end = closed.end()
    arguments = json.dumps(body.values, ensure_ascii=False)
    if body.error:
        arguments = text[begin.end() : body.end]
    error = body.error or (None if name else "the tool call names no function")
    spelled = text[begin.start() : end]
    return ParsedCall(name, arguments, begin.start(), end, call_id(position, spelled, salt), error)


def _body(text: str, start: int, schema: Any) -> _Body:
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    values: dict[str, Any] = {}
    interruption = _INTERRUPTION.search(text, start)
    limit = interruption.start() if interruption else len(text)
    place = start
    while parameter := _PARAMETER.match(text, place, limit):
        found = _value(text, parameter.end(), limit)
        if found is None:
            return _Body(values, _stop(text, start), _CUT)
        key = parameter.group(1).strip()
        values[key] = typed(_unwrapped(found.text), properties.get(key), schema)
        place = found.end
    if closed := _FUNCTION_END.match(text, place):
        return _Body(values, closed.end(), None)
    why = _CUT
    if text[place : place + 30].strip():
        why = f"the tool call has {text[place : place + 30].strip()!r} where a parameter belongs"
    return _Body(values, _stop(text, place), why)


class _Value(NamedTuple):
    text: str
    end: int
    """Behind its closing tag, where it has one."""


def _value(text: str, start: int, limit: int) -> _Value | None:
    """The value that begins at `start`; None when it does not end before `limit`."""
    if text.find("</parameter>", start, limit) >= 0:
        ended = _VALUE_END.search(text, start, limit)
        if ended:
            return _Value(text[start : ended.start()], ended.end())
    loose = _LOOSE_END.search(text, start, limit)  # the model left the closing tag out
    return _Value(text[start : loose.start()], loose.start()) if loose else None


def _unwrapped(value: str) -> str:
    """The value without the one line break that the form puts around it."""
    return value.removeprefix("\n").removesuffix("\n")


def _stop(text: str, start: int) -> int:
    """Where a broken call ends: at its closing tag, else where the next begins."""
    for tag in ("</function>", "</tool_call>"):
        close = text.find(tag, start)
        following = _NEXT.search(text, start)
        if close >= 0 and (following is None or close < following.start()):
            return close + len(tag)
    following = _NEXT.search(text, start)
    return following.start() if following else len(text)
