"""Arguments of tool calls, for the wire only: corrupt JSON repaired, valid JSON in one spelling.

What is stored keeps the model's text. Servers parse the arguments of earlier calls (chat templates
want an object, so does Anthropic), and one that cannot refuses the whole conversation for good.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable
from typing import Any

import msgspec

from hermes_rl.messages import UNPARSED, AssistantMessage, Message, ToolCall, parse_arguments
from hermes_rl.text import clean

_sorted = msgspec.json.Encoder(order="sorted").encode

_first_value = json.JSONDecoder(strict=False).raw_decode

_COMMA = re.compile(r",(\s*[}\]])")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*', re.DOTALL)
"""A string of JSON without its end, if it has one."""
_CONTROL = re.compile(r"[\x00-\x1f]")
_LITERAL_CHARS = 100_000
"""Longer texts are not tried as a Python literal: its parser is slow and deep."""
_MOST_CHARS = 1_000_000
"""Longer texts are not repaired: each character is looked at while nothing else runs."""


def repair_arguments(messages: list[Message]) -> list[Message]:
    """Every call's arguments are a JSON object; see `repaired_arguments`."""
    return _each_call(messages, repaired_arguments)


def canonical_arguments(messages: list[Message]) -> list[Message]:
    """JSON objects in one spelling: keys sorted, no spaces. Other text stays."""
    return _each_call(messages, canonical_json)


def canonical_json(text: str) -> str:
    """One spelling of a JSON object; text that is none, or that cannot be written, stays."""
    value = parse_arguments(text)
    if value is None:
        return text
    try:
        return _sorted(value).decode()
    except (ValueError, RecursionError, OverflowError):
        return text


def repaired_arguments(text: str) -> str:
    """A JSON object for any text: the text itself, what it must have meant (cut short, in a code
    fence, with a comma too many, as a Python literal, encoded twice), else
    `{"_unparsed": text}`."""
    if parse_arguments(text) is not None:
        return text
    stripped = text.strip()
    if not stripped:
        return "{}"
    inner = _unfenced(stripped)
    attempts = (_lenient, _without_commas, _literal, _closed)
    for attempt in attempts if len(inner) <= _MOST_CHARS else ():
        value = attempt(inner)
        if isinstance(value, str):  # encoded twice
            value = parse_arguments(value)
        written = _written(value)
        if written is not None:
            return written
    return _written({UNPARSED: text}) or "{}"


def _unfenced(text: str) -> str:
    """What stands in a code fence, where the text is one."""
    if not text.startswith("```"):
        return text
    _, _, inner = text.removesuffix("```").partition("\n")
    return inner.strip()


def _lenient(text: str) -> Any:
    """JSON with control characters in its strings."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _without_commas(text: str) -> Any:
    return _lenient(_COMMA.sub(r"\1", text))


def _literal(text: str) -> Any:
    if len(text) > _LITERAL_CHARS or not text.startswith("{"):
        return None
    with warnings.catch_warnings():  # on odd escapes
        warnings.simplefilter("ignore")
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return None


def _closed(text: str) -> Any:
    """JSON that was cut short: open strings and brackets are closed, and what is left of a pair or
    element without a value is left out. Brackets too many at the end do no harm."""
    if not text.startswith("{"):
        return None
    from pydantic import TypeAdapter  # only broken arguments need it

    try:
        value, end = _first_value(text)
        return value if not text[end:].strip("}] \n") else None
    except (ValueError, RecursionError):
        pass
    try:
        plain = _STRING.sub(_escaped, clean(text))
        value = TypeAdapter(dict[str, Any]).validate_json(
            plain, experimental_allow_partial="trailing-strings"
        )
    except ValueError:
        return None
    return value


def _escaped(string: re.Match[str]) -> str:
    """A string of JSON without raw control characters."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", string[0])


def _written(value: Any) -> str | None:
    """The object as JSON that every reader takes; None when it is no such object."""
    if not isinstance(value, dict):
        return None
    try:
        written = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        written = clean(written)
    except (ValueError, TypeError, RecursionError):
        return None
    return written if parse_arguments(written) is not None else None


def _each_call(messages: list[Message], change: Callable[[str], str]) -> list[Message]:
    """`change` applied to the arguments of every call; what it leaves alone is the same object."""

    def changed(call: ToolCall) -> ToolCall:
        text = change(call.arguments)
        return call if text == call.arguments else msgspec.structs.replace(call, arguments=text)

    def of(message: Message) -> Message:
        if not isinstance(message, AssistantMessage) or not message.tool_calls:
            return message
        calls = tuple(map(changed, message.tool_calls))
        if all(a is b for a, b in zip(calls, message.tool_calls, strict=True)):
            return message
        return msgspec.structs.replace(message, tool_calls=calls)

    return [of(message) for message in messages]
