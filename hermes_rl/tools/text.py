"""Text as models see it: JSON results, cut in the middle when too long, without terminal codes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

HEAD_SHARE = 0.4
"""Share of a cut text that is its beginning; the rest is its end."""

_encode = msgspec.json.Encoder().encode

_ANSI = re.compile(
    r"\x1b(?:"
    r"\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|\][^\x07\x1b]*(?:\x07|\x1b\\)"  # OSC: titles, links
    r"|[PX^_][^\x1b]*\x1b\\"  # DCS, SOS, PM, APC
    r"|[ -/]*[0-~]"  # other escapes
    r")"
)


def strip_ansi(text: str) -> str:
    """Text without terminal control sequences (ECMA-48)."""
    return _ANSI.sub("", text) if "\x1b" in text else text


def cut_middle(text: str, max_chars: int) -> str:
    """Text of at most `max_chars` characters: the first 40 %, a mark, the last 60 %."""
    if len(text) <= max_chars:
        return text
    mark = f"\n\n... [at least {len(text) - max_chars} characters omitted] ...\n\n"
    room = max(0, max_chars - len(mark))
    head = int(room * HEAD_SHARE)
    tail = room - head
    return (text[:head] + mark + (text[-tail:] if tail else ""))[:max_chars]


def to_json(fields: Mapping[str, Any]) -> str:
    """One JSON object as text, keys in the given order."""
    return _encode(fields).decode()


def json_result(fields: dict[str, Any], long_field: str, max_chars: int) -> str:
    """A JSON object of at most `max_chars` characters: one long text field gives way.

    Escaping can make text longer, so the field is shortened until the object fits.
    """
    text = to_json(fields)
    whole = str(fields[long_field])
    keep = len(whole)
    while len(text) > max_chars and keep > 0:
        keep = min(keep - 1, int(keep * max_chars / len(text) * 0.95))
        text = to_json({**fields, long_field: cut_middle(whole, keep)})
    return text
