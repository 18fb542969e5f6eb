"""Hermes' form, which Qwen 2.5 and 3 share: JSON between `<tool_call>` and `</tool_call>`.

The JSON is read from its first brace by a JSON reader, so a closing tag inside of an argument ends
nothing. Arguments are kept as the very text that the model wrote.
"""

from __future__ import annotations

import re

from hermes_rl.models.tokens.parsers.base import (
    Parsed,
    ParsedCall,
    call_id,
    outside,
    split_reasoning,
)
from hermes_rl.models.tokens.parsers.json_call import arguments_of, members, name_in, why_unread
from hermes_rl.models.unparsed import Tools

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_BEGIN = re.compile(r"<tool_call>\s*(?=\{)")
_END = re.compile(r"\s*</tool_call>")
_NAME = re.compile(r'"name"\s*:\s*("(?:[^"\\]|\\.)*")')
_ARGUMENTS = re.compile(r'"arguments"\s*:\s*')


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
        return Parsed.of(content, thought.reasoning, calls, tools)


def _call(text: str, begin: re.Match[str], position: int, salt: str) -> ParsedCall:
    try:
        found = members(text, begin.end())
    except (ValueError, RecursionError) as failure:
        return _broken(text, begin, position, salt, failure)
    closed = _END.match(text, found.end)
    end = closed.end() if closed else found.end
    error = None
    if not closed and text[end:].strip() and not text[end:].lstrip().startswith(_OPEN):
        error = f"the tool call has text between its JSON and {_CLOSE}"
        end = _stop(text, end)
    name = found.values.get("name")
    if not isinstance(name, str) or not name:
        error = 'the tool call has no "name"'
    return ParsedCall(
        name=name if isinstance(name, str) else "",
        arguments_text=arguments_of(text, found),
        start=begin.start(),
        end=end,
        id=call_id(position, text[begin.start() : end], salt),
        error=error,
    )


def _broken(
    text: str, begin: re.Match[str], position: int, salt: str, failure: Exception
) -> ParsedCall:
    """A call whose JSON cannot be read. It ends at its closing tag, else where the next begins."""
    end = _stop(text, begin.end())
    inner = text[begin.end() : end].removesuffix(_CLOSE).rstrip()
    found = _NAME.search(inner)
    arguments = _ARGUMENTS.search(inner)
    cut = end == len(text) and not text.endswith(_CLOSE)
    return ParsedCall(
        name=name_in(found.group(1)) if found else "",
        arguments_text=inner[arguments.end() :] if arguments else inner,
        start=begin.start(),
        end=end,
        id=call_id(position, text[begin.start() : end], salt),
        error=why_unread(failure, cut=cut),
    )


def _stop(text: str, start: int) -> int:
    close, following = text.find(_CLOSE, start), text.find(_OPEN, start)
    if close >= 0 and (following < 0 or close < following):
        return close + len(_CLOSE)
    return following if following >= 0 else len(text)
