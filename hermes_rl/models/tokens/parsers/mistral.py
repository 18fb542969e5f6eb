"""Mistral's forms behind `[TOOL_CALLS]`: a list of objects, or a name and its arguments.

    [TOOL_CALLS] [{"name": "terminal", "arguments": {"command": "ls"}, "id": "a1B2c3D4e"}]
    [TOOL_CALLS]terminal{"command": "ls"}
    [TOOL_CALLS]terminal[CALL_ID]a1B2c3D4e[ARGS]{"command": "ls"}

The id that the model gives its call is kept where it has the nine letters that its templates want,
since the results must name it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from hermes_rl.models.tokens.parsers.base import (
    Parsed,
    ParsedCall,
    call_id,
    outside,
    split_reasoning,
)
from hermes_rl.models.tokens.parsers.json_call import (
    JSON,
    arguments_of,
    members,
    name_in,
    skip,
    why_unread,
)
from hermes_rl.models.unparsed import Tools

_MARK = "[TOOL_CALLS]"
_BEGIN = re.compile(r"\[TOOL_CALLS\]\s*")
_NAMED = re.compile(
    r"([^\s\[\]{}\"]+)\s*(?:\[CALL_ID\]\s*([^\s\[\]{}\"]*)\s*)?(?:\[ARGS\]\s*)?(?=\{)"
)
_NAME = re.compile(r'"name"\s*:\s*("(?:[^"\\]|\\.)*")')
_ARGUMENTS = re.compile(r'"arguments"\s*:\s*')
_NEXT = re.compile(r'\[TOOL_CALLS\]|,\s*(?=\{\s*"name"\s*:)')
_ID = re.compile(r"[a-zA-Z0-9]{9}")


class MistralParser:
    """Reads the calls behind each `[TOOL_CALLS]`; what no call can be read of stays text."""

    name = "mistral"

    def parse(
        self, text: str, tools: Tools = (), *, opened: bool = False, salt: str = ""
    ) -> Parsed:
        """See `ToolCallParser.parse`."""
        thought = split_reasoning(text, opened=opened)
        calls: list[ParsedCall] = []
        place = thought.start
        while begin := _BEGIN.search(text, place):
            place = begin.end()
            start = begin.start()
            for read in _calls(text, place):
                calls.append(_told(text, start, read, calls, salt))
                place = read.end
                start = skip(text, place)
        content = outside(text, thought.start, calls)
        return Parsed.of(content, thought.reasoning, calls, tools)


class _Read(NamedTuple):
    """A call as it stands in the text."""

    name: str
    arguments: str
    end: int
    id: Any = None
    error: str | None = None


def _told(text: str, start: int, read: _Read, before: list[ParsedCall], salt: str) -> ParsedCall:
    own = isinstance(read.id, str) and _ID.fullmatch(read.id) is not None
    free = own and all(call.id != read.id for call in before)
    return ParsedCall(
        name=read.name,
        arguments_text=read.arguments,
        start=start,
        end=read.end,
        id=read.id if free else call_id(len(before), text[start : read.end], salt),
        error=read.error,
    )


def _calls(text: str, place: int) -> Iterator[_Read]:
    """The calls behind one mark."""
    if text.startswith("[", place):
        yield from _listed(text, place + 1)
    elif text.startswith("{", place):
        yield _object(text, place)
    elif named := _NAMED.match(text, place):
        yield _named(text, named)


def _listed(text: str, place: int) -> Iterator[_Read]:
    """The objects of a list; the last one takes the closing bracket with it."""
    place = skip(text, place)
    while text.startswith("{", place):
        read = _object(text, place)
        after = skip(text, read.end)
        more = text.startswith(",", after)
        if more or text.startswith("]", after):
            read = read._replace(end=after + 1)
        yield read
        if not more and read.error is None:
            return
        place = skip(text, read.end)


def _object(text: str, place: int) -> _Read:
    try:
        found = members(text, place)
    except (ValueError, RecursionError) as failure:
        return _broken(text, place, failure)
    name = found.values.get("name")
    return _Read(
        name=name if isinstance(name, str) else "",
        arguments=arguments_of(text, found),
        end=found.end,
        id=found.values.get("id"),
        error=None if name and isinstance(name, str) else 'the tool call has no "name"',
    )


def _named(text: str, named: re.Match[str]) -> _Read:
    try:
        _, end = JSON.raw_decode(text, named.end())
    except (ValueError, RecursionError) as failure:
        end = _stop(text, named.end())
        told = text[named.end() : end].rstrip()
        why = why_unread(failure, cut=end == len(text) and not told.endswith("}"))
        return _Read(named.group(1), told, end, named.group(2), why)
    return _Read(named.group(1), text[named.end() : end], end, named.group(2))


def _broken(text: str, place: int, failure: Exception) -> _Read:
    """An object that cannot be read. It ends where the next call begins."""
    end = _stop(text, place + 1)
    inner = text[place:end].rstrip()
    if end < len(text):
        inner = inner.removesuffix(",").rstrip()
    name, arguments = _NAME.search(inner), _ARGUMENTS.search(inner)
    return _Read(
        name=name_in(name.group(1)) if name else "",
        arguments=inner[arguments.end() :] if arguments else inner,
        end=end,
        error=why_unread(failure, cut=end == len(text) and not inner.endswith(("]", "}"))),
    )


def _stop(text: str, start: int) -> int:
    """Where a broken call ends: before the next mark, behind the comma before the next object."""
    following = _NEXT.search(text, start)
    if following is None:
        return len(text)
    return following.start() if following.group() == _MARK else following.end()
