"""Text that is safe to store, send and show: lone surrogates, control characters, secrets, JSON.

JSON is read and written as servers really send it: bytes that are not valid UTF-8 and lone
surrogates do not lose an answer.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable
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
