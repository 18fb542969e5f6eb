"""# values: Arguments that a model writes as bare text, typed by the tool's JSON schema and nothing
else.

Text stays text wherever the schema allows a string, or says nothing; otherwise it must be JSON of
the type that the schema asks for. What does not fit stays text, and the tool's own check tells the
model so.

# qwen3_coder: Qwen3-Coder's form: `<function=NAME><parameter=KEY>VALUE</parameter></function>`.

Values are bare text without escapes; the tool's schema tells their types. A parameter ends at the
`</parameter>` that another parameter or the end of the function follows, so the tag may stand in
the middle of a value.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from hermes_rl.models.tokens.parsers.base import (
    Parsed,
    ParsedCall,
    call_id,
    outside,
    parameters,
    split_reasoning,
)
from hermes_rl.models.unparsed import Tools, names

_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_DEPTH = 8
"""References and alternatives that are followed."""


def typed(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """The value that a text stands for.

    Args:
        schema: of this argument.
        root: of all arguments: where `$ref` points into.
    """
    kinds = _kinds(schema, root, _DEPTH)
    bare = text.strip()
    if not kinds or "string" in kinds:
        return None if bare == "null" and "null" in kinds else text
    spelled = bare.lower() if bare.lower() in ("true", "false", "null", "none") else bare
    try:
        told = "null" if spelled == "none" else spelled
        value = json.loads(told, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, float) and value.is_integer() and "integer" in kinds:
        value = int(value) if "number" not in kinds else value
    return value if _fits(value, kinds) else text


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def _finite(digits: str) -> float:
    """Of 1e999 a reader makes infinity, which no JSON can say again."""
    value = float(digits)
    return value if math.isfinite(value) else _refuse(digits)


def _fits(value: Any, kinds: set[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in kinds
    return any(isinstance(value, _TYPES.get(kind, ())) for kind in kinds)


def _kinds(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    """The types that a schema allows; empty where it says nothing of types."""
    if not isinstance(schema, Mapping) or not depth:
        return set()
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return _kinds(_resolved(reference, root), root, depth - 1)
    told = schema.get("type")
    if isinstance(told, str):
        return {told}
    if isinstance(told, list):
        return {kind for kind in told if isinstance(kind, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(key)
        if isinstance(choices, list) and choices:
            return set().union(*(_kinds(choice, root, depth - 1) for choice in choices))
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    values = [schema["const"]] if "const" in schema else values
    return {_kind(value) for value in values}


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = ((int, "integer"), (float, "number"), (list, "array"), (dict, "object"))
    if value is None:
        return "null"
    return next((name for kind, name in names if isinstance(value, kind)), "string")


def _resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """What `#/$defs/NAME` and the like point to; None for anything else."""
    if not reference.startswith("#/"):
        return None
    found: Any = root
    for part in reference[2:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


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
