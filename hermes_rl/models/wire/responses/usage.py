"""The usage object of the Responses API: input includes what was cached, output reasoning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hermes_rl.models.wire.chat.usage import count_of, part_of, within
from hermes_rl.usage import Usage


def read_usage(form: Any) -> Usage | None:
    """The usage of a response; None unless input and output tokens are both there."""
    if not isinstance(form, Mapping):
        return None
    given, taken = part_of(form, "input_tokens_details"), part_of(form, "output_tokens_details")
    prompt, output = count_of(form.get("input_tokens")), count_of(form.get("output_tokens"))
    if prompt is None or output is None:
        return None
    return Usage(
        input_tokens=prompt,
        cache_read_tokens=within(count_of(given.get("cached_tokens")), prompt),
        cache_write_tokens=within(count_of(given.get("cache_write_tokens")), prompt),
        output_tokens=output,
        reasoning_tokens=within(count_of(taken.get("reasoning_tokens")), output),
    )


def write_usage(usage: Usage) -> dict[str, Any]:
    """The usage object that a server sends: what is known."""
    given = {
        "cached_tokens": usage.cache_read_tokens,
        "cache_write_tokens": usage.cache_write_tokens,
    }
    form = {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": _known(given) or None,
        "output_tokens": usage.output_tokens,
        "output_tokens_details": _known({"reasoning_tokens": usage.reasoning_tokens}) or None,
        "total_tokens": usage.total_tokens,
    }
    return _known(form)


def _known(form: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in form.items() if v is not None}
