"""Text that is safe to store, send and show: lone surrogates, control characters, secrets, JSON.

JSON is read and written as servers really send it: bytes that are not valid UTF-8 and lone
surrogates do not lose an answer. Models see results as JSON, cut in the middle when too long,
without terminal codes.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
"""Control characters, line breaks included: they could command a terminal."""

_KEYS = re.compile(
    r"(?i)\bbearer\s+[^\s\"',;]+|\b(?:sk|pk|gsk|xai|key|hf|nvapi|or)[-_][a-z0-9_\-*.]{8,}"
)
"""What API keys look like."""
_LONGEST_LINE = 500

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


def clean(text: str) -> str:
    """Join surrogate pairs and replace lone surrogates by U+FFFD; other text is returned as is."""
    if text.isascii():  # a flag of the object: it costs nothing
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def one_line(text: str) -> str:
    """Replace each run of control characters and white space by one space."""
    return " ".join(CONTROL.sub(" ", text).split())


def mask(text: str, secrets: Iterable[str], shown: str = "***") -> str:
    """Replace secrets by `shown`, both as they are and in base64."""
    for secret in secrets:
        text = text.replace(secret, shown)
        text = text.replace(base64.b64encode(secret.encode()).decode(), shown)
    return text


def scrub(text: str, secrets: Iterable[str] = ()) -> str:
    """One line of at most 500 characters without the secrets or anything that looks like a key."""
    text = _KEYS.sub("***", one_line(mask(text, secrets)))
    return text if len(text) <= _LONGEST_LINE else text[: _LONGEST_LINE - 1] + "…"


def encode_json(value: Any) -> bytes:
    """Encode a value as JSON; lone surrogates, which UTF-8 cannot carry, become U+FFFD."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return _encode(json.loads(clean(json.dumps(value, ensure_ascii=False))))


def decode_json(data: bytes) -> Any:
    """Decode JSON, repaired where it is not valid UTF-8. Raises: ValueError."""
    try:
        return _decode(data)
    except (ValueError, RecursionError):
        return _decode(repair_json(data))


def repair_json(data: bytes) -> bytes:
    """Replace bad bytes and lone surrogates in a JSON text. Raises: ValueError."""
    try:
        value = json.loads(data.decode("utf-8", "replace"))
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    return encode_json(value)


HEAD_SHARE = 0.4
"""Share of a cut text that is its beginning; the rest is its end."""

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
    space = max(0, max_chars - len(mark))
    head = int(space * HEAD_SHARE)
    tail = space - head
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
