"""Llama 3's form: an answer that is `{"name": ..., "parameters": {...}}`, maybe behind
`<|python_tag|>`; several stand one after the other, apart or with `;` between them.

Nothing else marks a call, so it counts where the answer begins with it: an object that names an
offered tool, or one that has both members and is the whole answer. Any other JSON is text.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from hermes_rl.models.tokens.parsers.base import (
    Parsed,
    ParsedCall,
    call_id,
    outside,
    split_reasoning,
)
from hermes_rl.models.tokens.parsers.json_call import arguments_of, members, name_in, why_unread
from hermes_rl.models.unparsed import Tools, names

_KEYS = ("parameters", "arguments")
_FIRST = re.compile(r"\s*((?:<\|python_tag\|>\s*)?)(?=\{)")
_FURTHER = re.compile(r"\s*((?:;\s*)?(?:<\|python_tag\|>\s*)?)(?=\{)")
_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:parameters|arguments)"\s*:\s*')
_NEXT = re.compile(r'(?:;|\n)\s*(?:<\|python_tag\|>\s*)?(?=\{\s*"name"\s*:)')


class Llama3JsonParser:
    """Reads `{"name": ..., "parameters": {...}}` at the beginning of an answer."""

    name = "llama3_json"

    def parse(
        self, text: str, tools: Tools = (), *, opened: bool = False, salt: str = ""
    ) -> Parsed:
        """See `ToolCallParser.parse`. Without tools an answer holds no calls."""
        thought = split_reasoning(text, opened=opened)
        calls: list[ParsedCall] = []
        offered = names(tools)
        begin = _FIRST.match(text, thought.start) if tools else None
        while begin and (call := _call(text, begin, len(calls), offered, salt)):
            calls.append(call)
            begin = _FURTHER.match(text, call.end)
        content = outside(text, thought.start, calls)
        return Parsed.of(content, thought.reasoning, calls, tools)


def _call(
    text: str, begin: re.Match[str], position: int, offered: Collection[str], salt: str
) -> ParsedCall | None:
    """The call that begins here; None for what is none."""
    start = begin.start(1)
    try:
        found = members(text, begin.end())
    except (ValueError, RecursionError) as failure:
        return _broken(text, begin, position, offered, salt, failure)
    name = found.values.get("name")
    if not isinstance(name, str):
        return None
    alone = not text[found.end :].strip() and any(key in found.values for key in _KEYS)
    if name not in offered and not alone:
        return None
    return ParsedCall(
        name=name,
        arguments_text=arguments_of(text, found, _KEYS),
        start=start,
        end=found.end,
        id=call_id(position, text[start : found.end], salt),
        error=None if name else 'the tool call has no "name"',
    )


def _broken(
    text: str,
    begin: re.Match[str],
    position: int,
    offered: Collection[str],
    salt: str,
    failure: Exception,
) -> ParsedCall | None:
    """A call of an offered tool whose JSON cannot be read: it ends where the next begins."""
    head = _HEAD.match(text, begin.end())
    if head is None or (name := name_in(head.group(1))) not in offered:
        return None
    following = _NEXT.search(text, head.end())
    end = following.start() if following else len(text)
    start = begin.start(1)
    return ParsedCall(
        name=name,
        arguments_text=text[head.end() : end].rstrip(),
        start=start,
        end=end,
        id=call_id(position, text[start:end], salt),
        error=why_unread(failure, cut=_is_cut(text, end)),
    )


def _is_cut(text: str, end: int) -> bool:
    return end == len(text) and not text.rstrip().endswith("}")
