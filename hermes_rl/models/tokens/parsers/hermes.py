"""Hermes' form, which Qwen 2.5 and 3 share: JSON between `<tool_call>` and `</tool_call>`.

The JSON is read from its first brace by a JSON reader, so a closing tag inside of an argument ends
nothing. Arguments are kept as the very text that the model wrote.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from hermes_rl.models.tokens.parsers.base import (
    Parsed,
    ParsedCall,
    Tools,
    call_id,
    looks_like_a_call,
    outside,
)
from hermes_rl.models.tokens.parsers.reasoning import split_reasoning

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_BEGIN = re.compile(r"<tool_call>\s*(?=\{)")
_SPACE = re.compile(r"\s*")
_END = re.compile(r"\s*</tool_call>")
_NAME = re.compile(r'"name"\s*:\s*("(?:[^"\\]|\\.)*")')
_ARGUMENTS = re.compile(r'"arguments"\s*:\s*')
_JSON = json.JSONDecoder(strict=False)


class HermesParser:
    """Reads `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    A last call without its closing tag counts when its JSON is whole. One whose JSON is not is a
    call with an error: with its name where that can be read, and with its arguments as they are.
    """

    name = "hermes"

    def parse(
        self, text: str, tools: Tools = (), *, opened: bool = False, salt: str = ""
    ) -> Parsed:
        """See `ToolCallParser.parse`."""
        thought = split_reasoning(text, opened=opened)
        calls: list[ParsedCall] = []
        place = thought.start
        while begin := _BEGIN.search(text, place):
            call = _call(text, begin, len(calls), salt)
            calls.append(call)
            place = call.end
        content = outside(text, thought.start, calls)
        left = content if thought.closed else content + (thought.reasoning or "")
        return Parsed(content, thought.reasoning, tuple(calls), looks_like_a_call(left, tools))


def _call(text: str, begin: re.Match[str], position: int, salt: str) -> ParsedCall:
    try:
        members = _members(text, begin.end())
    except (ValueError, RecursionError) as failure:
        return _broken(text, begin, position, salt, failure)
    closed = _END.match(text, members.end)
    end = closed.end() if closed else members.end
    error = None
    if not closed and text[end:].strip() and not text[end:].lstrip().startswith(_OPEN):
        error = f"the tool call has text between its JSON and {_CLOSE}"
        end = _stop(text, end)
    name = members.values.get("name")
    if not isinstance(name, str) or not name:
        error = 'the tool call has no "name"'
    return ParsedCall(
        name=name if isinstance(name, str) else "",
        arguments_text=_arguments(text, members),
        start=begin.start(),
        end=end,
        id=call_id(position, text[begin.start() : end], salt),
        error=error,
    )


class _Members(NamedTuple):
    """A JSON object in a text."""

    values: dict[str, Any]
    spans: dict[str, tuple[int, int]]
    end: int


def _members(text: str, start: int) -> _Members:
    """The members of the object that begins at `start`, with the place of each value.

    Raises: ValueError when it is no JSON, RecursionError when it is nested too deeply.
    """
    values: dict[str, Any] = {}
    spans: dict[str, tuple[int, int]] = {}
    place = _skip(text, start + 1)
    if text.startswith("}", place):
        return _Members(values, spans, place + 1)
    while True:
        if not text.startswith('"', place):
            raise json.JSONDecodeError("expected a name in double quotes", text, place)
        key, place = _JSON.raw_decode(text, place)
        place = _expect(text, _skip(text, place), ":")
        at = _skip(text, place)
        values[key], place = _JSON.raw_decode(text, at)
        spans[key] = (at, place)
        place = _skip(text, place)
        if text.startswith("}", place):
            return _Members(values, spans, place + 1)
        place = _skip(text, _expect(text, place, ","))


def _skip(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    return found.end() if found else place


def _expect(text: str, place: int, char: str) -> int:
    if not text.startswith(char, place):
        raise json.JSONDecodeError(f"expected {char!r}", text, place)
    return place + 1


def _arguments(text: str, members: _Members) -> str:
    """The model's very text of the arguments; that of the text itself where they are encoded twice,
    and an empty object where there are none."""
    value = members.values.get("arguments")
    if value is None:
        return "{}"
    if isinstance(value, str):
        return value if value.strip() else "{}"
    start, end = members.spans["arguments"]
    return text[start:end]


def _broken(
    text: str, begin: re.Match[str], position: int, salt: str, failure: Exception
) -> ParsedCall:
    """A call whose JSON cannot be read. It ends at its closing tag, else where the next begins."""
    end = _stop(text, begin.end())
    inner = text[begin.end() : end].removesuffix(_CLOSE).rstrip()
    found = _NAME.search(inner)
    arguments = _ARGUMENTS.search(inner)
    cut = end == len(text) and not text.endswith(_CLOSE)
    what = failure.msg if isinstance(failure, json.JSONDecodeError) else "nested too deeply"
    why = "the answer ends in the middle of it" if cut else what
    return ParsedCall(
        name=_name(found.group(1)) if found else "",
        arguments_text=inner[arguments.end() :] if arguments else inner,
        start=begin.start(),
        end=end,
        id=call_id(position, text[begin.start() : end], salt),
        error=f"the JSON of the tool call cannot be read: {why}",
    )


def _name(spelled: str) -> str:
    """The name in a JSON string; empty where that string is what cannot be read."""
    try:
        return str(_JSON.decode(spelled))
    except ValueError:
        return ""


def _stop(text: str, start: int) -> int:
    close, following = text.find(_CLOSE, start), text.find(_OPEN, start)
    if close >= 0 and (following < 0 or close < following):
        return close + len(_CLOSE)
    return following if following >= 0 else len(text)
