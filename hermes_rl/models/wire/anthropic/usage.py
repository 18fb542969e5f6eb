"""The usage object of the Messages API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hermes_rl.usage import Usage

_ABSURD = 1 << 40
"""No call has so many tokens: a count like this is a server's error, and sums must fit 64 bits."""


def read_usage(form: Any) -> Usage | None:
    """The usage of a response; None unless input and output tokens are both there.

    The wire's `input_tokens` leaves out what was read from the cache and written to it; here they
    are parts of it. `output_tokens` includes thinking.
    """
    if not isinstance(form, Mapping):
        return None
    fresh, output = _count(form.get("input_tokens")), _count(form.get("output_tokens"))
    if fresh is None or output is None:
        return None
    read = _count(form.get("cache_read_input_tokens"))
    written = _count(form.get("cache_creation_input_tokens"))
    hour = _count(_part(form, "cache_creation").get("ephemeral_1h_input_tokens"))
    thought = _count(_part(form, "output_tokens_details").get("thinking_tokens"))
    return Usage(
        input_tokens=fresh + (read or 0) + (written or 0),
        cache_read_tokens=read,
        cache_write_tokens=written,
        cache_write_1h_tokens=_within(hour, written),
        output_tokens=output,
        reasoning_tokens=_within(thought, output),
    )


def write_usage(usage: Usage) -> dict[str, Any]:
    """The usage object that a server sends: what is known."""
    read, written = usage.cache_read_tokens, usage.cache_write_tokens
    form: dict[str, Any] = {}
    if usage.input_tokens is not None:
        form["input_tokens"] = usage.input_tokens - (read or 0) - (written or 0)
    if read is not None:
        form["cache_read_input_tokens"] = read
    if written is not None:
        hour = usage.cache_write_1h_tokens or 0
        form["cache_creation_input_tokens"] = written
        form["cache_creation"] = {
            "ephemeral_5m_input_tokens": written - hour,
            "ephemeral_1h_input_tokens": hour,
        }
    if usage.output_tokens is not None:
        form["output_tokens"] = usage.output_tokens
    if usage.reasoning_tokens is not None:
        form["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return form


def _count(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < _ABSURD else None


def _within(part: int | None, whole: int | None) -> int | None:
    """A part larger than its whole is a provider's error: then it is unknown."""
    return part if part is not None and whole is not None and part <= whole else None


def _part(form: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = form.get(name)
    return value if isinstance(value, Mapping) else {}
