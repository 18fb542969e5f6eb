"""JSON as servers really send it: bytes that are no UTF-8 and half surrogates do not lose an
answer."""

from __future__ import annotations

import json
from typing import Any

import msgspec

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


def encode_json(value: Any) -> bytes:
    """JSON bytes; half surrogates, which UTF-8 cannot carry, become U+FFFD."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return _encode(json.loads(clean(json.dumps(value, ensure_ascii=False))))


def decode_json(data: bytes) -> Any:
    """A JSON value. Raises: ValueError (msgspec.DecodeError is one) when it is none."""
    try:
        return _decode(data)
    except (ValueError, RecursionError):
        return _decode(repaired(data))


def repaired(data: bytes) -> bytes:
    """The same JSON with bad bytes and half surrogates replaced. Raises: ValueError."""
    try:
        value = json.loads(data.decode("utf-8", "replace"))
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    return encode_json(value)


def clean(text: str) -> str:
    """The text with half surrogates joined to whole characters or replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
