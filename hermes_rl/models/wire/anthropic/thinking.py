"""How much a model of the Messages API thinks."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

BUDGETS = {
    "minimal": 1_024,
    "low": 4_096,
    "medium": 8_192,
    "high": 16_384,
    "xhigh": 24_576,
    "max": 32_768,
}
"""Effort -> thinking tokens, for models that take a budget."""

_LEAST = 1_024
"""The API takes no smaller budget."""

_OFF = ("none", "off", "disabled")
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_ALWAYS = ("claude-fable", "claude-mythos")
"""They refuse to have their thinking turned off."""

_CLAUDE = re.compile(r"claude-(?:[a-z]+)-(\d{1,2})(?:[-.](\d{1,2}))?(?!\d)")


class Thinking(NamedTuple):
    """What a body says of thinking."""

    on: bool
    fields: dict[str, Any]


def thinking_config(
    model: str, effort: str | None, max_tokens: int, *, replayed: bool = True
) -> Thinking:
    """The fields of a body for a reasoning effort.

    Claude models since 4.6 decide for themselves how much to think (`adaptive`) and take the effort
    as it is; their thinking is asked for as text. Others take a budget: `BUDGETS`, or the number
    that `effort` is, but at most three quarters of `max_tokens`, of which it is a part; where less
    than 1,024 tokens are left for it the model does not think. `none` turns thinking off, and is
    not said to the models that always think.

    Args:
        replayed: thinking blocks of earlier turns are sent. Without them a model that takes a
            budget does not think, because the API wants every tool turn to begin with its thinking.
    """
    if effort is None:
        return Thinking(False, {})
    if effort in _OFF:
        always = any(family in model for family in _ALWAYS)
        return Thinking(False, {} if always else {"thinking": {"type": "disabled"}})
    if is_adaptive(model) and not effort.isdigit():
        level = effort if effort in _EFFORTS else "low"
        shown = {"type": "adaptive", "display": "summarized"}
        return Thinking(True, {"thinking": shown, "output_config": {"effort": level}})
    wanted = int(effort) if effort.isdigit() else BUDGETS.get(effort, BUDGETS["medium"])
    budget = min(wanted, max_tokens * 3 // 4)
    if budget < _LEAST or not replayed:
        return Thinking(False, {})
    return Thinking(True, {"thinking": {"type": "enabled", "budget_tokens": budget}})


def is_adaptive(model: str) -> bool:
    """The model decides for itself how much to think, and may refuse a budget."""
    if "claude-mythos-preview" in model:
        return True
    found = _CLAUDE.search(model)
    return found is not None and (int(found[1]), int(found[2] or 0)) >= (4, 6)
