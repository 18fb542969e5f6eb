"""The usage object of Chat Completions, in the spellings of several providers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hermes_rl.usage import Usage

_ABSURD = 1 << 40
"""No call has so many tokens: a count like this is a server's error, and sums must fit 64 bits."""


def read_usage(form: Any) -> Usage | None:
    """The usage of a response; None unless prompt and completion tokens are both there.

    Cached tokens: `prompt_tokens_details.cached_tokens` (OpenAI, vLLM, SGLang), or
    `prompt_cache_hit_tokens` (DeepSeek), or `cached_tokens` (Moonshot). Where a provider leaves
    reasoning out of `completion_tokens` (its total then is the sum of all three), it is added.
    Rejected predictions are part of `completion_tokens` already. `cost` is OpenRouter's.
    """
    if not isinstance(form, Mapping):
        return None
    prompt, output = count_of(form.get("prompt_tokens")), count_of(form.get("completion_tokens"))
    if prompt is None or output is None:
        return None
    given, taken = (
        part_of(form, "prompt_tokens_details"),
        part_of(form, "completion_tokens_details"),
    )
    reasoning = _first(taken.get("reasoning_tokens"), form.get("reasoning_tokens"))
    if reasoning and form.get("total_tokens") == prompt + output + reasoning:
        output += reasoning
    cached = _first(
        given.get("cached_tokens"), form.get("prompt_cache_hit_tokens"), form.get("cached_tokens")
    )
    written = _first(given.get("cache_write_tokens"), form.get("cache_write_tokens"))
    return Usage(
        input_tokens=prompt,
        cache_read_tokens=within(cached, prompt),
        cache_write_tokens=within(written, prompt),
        output_tokens=output,
        reasoning_tokens=within(reasoning, output),
        reported_cost=_amount(form.get("cost")),
    )


def write_usage(usage: Usage) -> dict[str, Any]:
    """The usage object that a server sends: what is known."""
    counts = {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.total_tokens,
    }
    form: dict[str, Any] = {k: v for k, v in counts.items() if v is not None}
    given = {
        "cached_tokens": usage.cache_read_tokens,
        "cache_write_tokens": usage.cache_write_tokens,
    }
    known = {k: v for k, v in given.items() if v is not None}
    if known:
        form["prompt_tokens_details"] = known
    if usage.reasoning_tokens is not None:
        form["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return form


def count_of(value: Any) -> int | None:
    """A count of tokens as a provider sends it; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < _ABSURD else None


def _amount(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < _ABSURD else None


def _first(*values: Any) -> int | None:
    return next((n for n in map(count_of, values) if n is not None), None)


def within(part: int | None, whole: int) -> int | None:
    """A part larger than its whole is a provider's error: then it is unknown."""
    return part if part is None or part <= whole else None


def part_of(form: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object within a usage object; empty when it is not there."""
    value = form.get(name)
    return value if isinstance(value, Mapping) else {}
