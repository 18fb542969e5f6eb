"""A JSON object that tells a call, read in place: where its members stand is known, so that the
arguments are kept as the very text that the model wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

_SPACE = re.compile(r"\s*")
JSON = json.JSONDecoder(strict=False)
"""Reads line breaks within texts too, which models write."""


class Members(NamedTuple):
    """A JSON object in a text."""

    values: dict[str, Any]
    spans: dict[str, tuple[int, int]]
    end: int


def members(text: str, start: int) -> Members:
    """The members of the object that begins at `start`, with the place of each value.

    Raises: ValueError when it is no JSON, RecursionError when it is nested too deeply.
    """
    values: dict[str, Any] = {}
    spans: dict[str, tuple[int, int]] = {}
    place = skip(text, _expect(text, start, "{"))
    if text.startswith("}", place):
        return Members(values, spans, place + 1)
    while True:
        if not text.startswith('"', place):
            raise json.JSONDecodeError("expected a name in double quotes", text, place)
        key, place = JSON.raw_decode(text, place)
        place = _expect(text, skip(text, place), ":")
        at = skip(text, place)
        values[key], place = JSON.raw_decode(text, at)
        spans[key] = (at, place)
        place = skip(text, place)
        if text.startswith("}", place):
            return Members(values, spans, place + 1)
        place = skip(text, _expect(text, place, ","))


def skip(text: str, place: int) -> int:
    """Behind the blank space at a place."""
    found = _SPACE.match(text, place)
    return found.end() if found else place


def _expect(text: str, place: int, char: str) -> int:
    if not text.startswith(char, place):
        raise json.JSONDecodeError(f"expected {char!r}", text, place)
    return place + 1


def arguments_of(text: str, found: Members, keys: Sequence[str] = ("arguments",)) -> str:
    """The model's very text of the arguments; that of the text itself where they are encoded twice,
    and an empty object where there are none.

    Args:
        keys: names under which they may stand, first come first served.
    """
    key = next((k for k in keys if found.values.get(k) is not None), None)
    if key is None:
        return "{}"
    value = found.values[key]
    if isinstance(value, str):
        return value if value.strip() else "{}"
    start, end = found.spans[key]
    return text[start:end]


def name_in(spelled: str) -> str:
    """The name in a JSON string; empty where that string is what cannot be read."""
    try:
        return str(JSON.decode(spelled))
    except ValueError:
        return ""


def why_unread(failure: Exception, *, cut: bool) -> str:
    """What a model is told of a call whose JSON cannot be read.

    Args:
        cut: the answer ends within the call.
    """
    what = failure.msg if isinstance(failure, json.JSONDecodeError) else "nested too deeply"
    why = "the answer ends in the middle of it" if cut else what
    return f"the JSON of the tool call cannot be read: {why}"
