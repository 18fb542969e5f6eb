"""Which fields of a body are each dialect's own; all others are free for what users add."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hermes_rl.errors import UserError

_SAID_ELSEWHERE = {
    "temperature": "model.temperature",
    "top_p": "model.top_p",
    "top_k": "model.top_k",
    "stop": "model.stop",
    "stop_sequences": "model.stop",
    "seed": "agent.seed",
    "stream": "endpoint.stream",
    "reasoning_effort": "model.reasoning",
    "reasoning": "model.reasoning",
    "thinking": "model.reasoning",
    "output_config": "model.reasoning",
    "prompt_cache_key": "endpoint.prompt_cache",
}
"""Field -> the key of the configuration that sets it."""

_CAPS = {
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "max_new_tokens",
    "n_predict",
}
"""Bounds of an answer, in any spelling: budgets count on the one that they know."""
_SAMPLED = {"temperature", "top_p", "top_k", "min_p", "seed", "stop"}
_COMMON = {"model", "tools", "stream", "n", *_CAPS, *_SAMPLED}

OWN: dict[str, frozenset[str]] = {
    "chat_completions": frozenset(
        {
            *_COMMON,
            "messages",
            "stream_options",
            "reasoning_effort",
            "logprobs",
            "return_token_ids",
            "prompt_cache_key",
        }
    ),
    "codex_responses": frozenset(
        {*_COMMON, "input", "instructions", "store", "include", "reasoning", "prompt_cache_key"}
    ),
    "anthropic_messages": frozenset(
        {
            *_COMMON,
            "messages",
            "system",
            "tool_choice",
            "stop_sequences",
            "thinking",
            "output_config",
        }
    ),
}
"""Dialect -> the fields that it writes, and those that would change what it reads (`n`)."""


def refuse_own(extra: Mapping[str, Any], api_mode: str) -> None:
    """Raises: UserError for fields of the user's that are the dialect's own."""
    for name in extra:
        if name not in OWN.get(api_mode, frozenset()):
            continue
        key = "model.max_tokens" if name in _CAPS else _SAID_ELSEWHERE.get(name)
        mend = f"Use {key}" if key else "Take it out"
        raise UserError(f"extra_body holds {name!r}, which is not free in {api_mode}. {mend}")
