"""The usage objects of the three wires, read into one record.

Every reader returns None unless the counts of input and output tokens are both present.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hermes_rl.models.wire.decoding import part_of
from hermes_rl.usage import Usage

_ABSURD = 1 << 40
"""No call has so many tokens: a count like this is a server's error, and sums must fit 64 bits."""


def read_chat_usage(form: Any) -> Usage | None:
    """The usage of Chat Completions, in the spellings of several providers.

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
        cache_read_tokens=_within(cached, prompt),
        cache_write_tokens=_within(written, prompt),
        output_tokens=output,
        reasoning_tokens=_within(reasoning, output),
        reported_cost=_amount(form.get("cost")),
    )


def read_responses_usage(form: Any) -> Usage | None:
    """The usage of the Responses API: input includes cached tokens, output includes reasoning."""
    if not isinstance(form, Mapping):
        return None
    prompt, output = count_of(form.get("input_tokens")), count_of(form.get("output_tokens"))
    if prompt is None or output is None:
        return None
    given, taken = part_of(form, "input_tokens_details"), part_of(form, "output_tokens_details")
    return Usage(
        input_tokens=prompt,
        cache_read_tokens=_within(count_of(given.get("cached_tokens")), prompt),
        cache_write_tokens=_within(count_of(given.get("cache_write_tokens")), prompt),
        output_tokens=output,
        reasoning_tokens=_within(count_of(taken.get("reasoning_tokens")), output),
    )


def read_anthropic_usage(form: Any) -> Usage | None:
    """The usage of the Messages API.

    The wire's `input_tokens` leaves out tokens read from and written to the cache; our record
    includes them. `output_tokens` includes thinking.
    """
    if not isinstance(form, Mapping):
        return None
    fresh, output = count_of(form.get("input_tokens")), count_of(form.get("output_tokens"))
    if fresh is None or output is None:
        return None
    read = count_of(form.get("cache_read_input_tokens"))
    written = count_of(form.get("cache_creation_input_tokens"))
    hour = count_of(part_of(form, "cache_creation").get("ephemeral_1h_input_tokens"))
    thought = count_of(part_of(form, "output_tokens_details").get("thinking_tokens"))
    return Usage(
        input_tokens=fresh + (read or 0) + (written or 0),
        cache_read_tokens=read,
        cache_write_tokens=written,
        cache_write_1h_tokens=_within(hour, written),
        output_tokens=output,
        reasoning_tokens=_within(thought, output),
    )


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


def _within(part: int | None, whole: int | None) -> int | None:
    """A part that is larger than its whole is a provider's error: it counts as unknown."""
    return part if part is not None and whole is not None and part <= whole else None
