"""What the Messages API refuses with status 400, as far as an agent's requests can meet it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hermes_rl.models.wire.anthropic.requests import Body, Turn

_MARKS = 4
_LEAST_BUDGET = 1_024


def check(body: Body) -> list[str]:
    """The lifetimes of a request's cache markers.

    Raises: ValueError with the API's complaint.
    """
    if not body.messages:
        raise ValueError("messages: at least one message is required")
    if body.max_tokens < 1:
        raise ValueError("max_tokens: must be greater than or equal to 1")
    budgeted = _check_thinking(body)
    called: set[str] = set()
    known: set[str] = set()
    for place, turn in enumerate(body.messages):
        called = _check_turn(turn, called, f"messages.{place}")
        _check_new(turn, known, f"messages.{place}")
    if called:
        raise ValueError(
            f"messages.{len(body.messages) - 1}: `tool_use` ids were found without `tool_result`"
            f" blocks immediately after: {', '.join(sorted(called))}"
        )
    if budgeted:
        _check_thought(body.messages)
    marks = [_lifetime(block) for block in _blocks(body) if "cache_control" in block]
    if len(marks) > _MARKS:
        raise ValueError(
            f"A maximum of {_MARKS} blocks with cache_control may be provided. Found {len(marks)}."
        )
    return marks


def _check_thinking(body: Body) -> bool:
    """Whether the model thinks within a budget."""
    thinking = body.thinking or {}
    kind = thinking.get("type")
    if kind not in ("enabled", "adaptive"):
        return False
    if body.temperature not in (None, 1) or body.top_k is not None:
        raise ValueError("`temperature` may only be set to 1 when thinking is enabled.")
    if kind == "adaptive":
        return False
    budget = thinking.get("budget_tokens")
    if not isinstance(budget, int) or budget < _LEAST_BUDGET:
        raise ValueError(f"thinking.enabled.budget_tokens: at least {_LEAST_BUDGET} is required")
    if budget >= body.max_tokens:
        raise ValueError("`max_tokens` must be greater than `thinking.budget_tokens`.")
    return True


def _check_thought(turns: list[Turn]) -> None:
    """The last answer thinks before the calls whose results are sent: so is it with a budget."""
    answers = [(place, turn) for place, turn in enumerate(turns) if turn.role == "assistant"]
    place, last = answers[-1] if answers else (0, Turn(role="assistant", content=""))
    blocks = last.content if isinstance(last.content, list) else []
    first = blocks[0].get("type") if blocks else None
    if _ids(blocks, "tool_use", "id") and first not in ("thinking", "redacted_thinking"):
        raise ValueError(
            f"messages.{place}.content.0.type: Expected `thinking` or `redacted_thinking`, but"
            f" found `{first}`. When `thinking` is enabled, a final `assistant` message must start"
            " with a thinking block."
        )


def _check_turn(turn: Turn, called: set[str], place: str) -> set[str]:
    """The ids of the calls that a turn leaves open.

    Args:
        called: those that the turn before it left open.
    """
    if turn.role not in ("user", "assistant"):
        raise ValueError(f"{place}.role: Input should be 'user' or 'assistant'")
    blocks = turn.content
    if isinstance(blocks, str):
        blocks = [{"type": "text", "text": blocks}]
    if not blocks:
        raise ValueError(f"{place}: all messages must have non-empty content")
    for block in blocks:
        if block.get("type") == "text" and not str(block.get("text", "")).strip():
            raise ValueError("messages: text content blocks must be non-empty")
        if block.get("type") == "thinking" and not isinstance(block.get("signature"), str):
            raise ValueError(f"{place}.content.thinking.signature: Field required")
    results = _ids(blocks, "tool_result", "tool_use_id")
    if turn.role == "user" and (stray := results - called):
        raise ValueError(
            f"{place}: unexpected `tool_use_id` found in `tool_result` blocks:"
            f" {', '.join(sorted(stray))}"
        )
    if missing := called - results:
        raise ValueError(
            f"{place}: `tool_use` ids were found without `tool_result` blocks immediately after:"
            f" {', '.join(sorted(missing))}"
        )
    return _ids(blocks, "tool_use", "id") if turn.role == "assistant" else set()


def _check_new(turn: Turn, known: set[str], place: str) -> None:
    """Each call has an id that none before it had; all are added to `known`."""
    for block in turn.content if isinstance(turn.content, list) else ():
        if block.get("type") != "tool_use":
            continue
        name = str(block.get("id"))
        if name in known:
            raise ValueError(f"{place}: `tool_use` ids must be unique")
        known.add(name)


def _ids(blocks: list[dict[str, Any]], kind: str, name: str) -> set[str]:
    return {str(block.get(name)) for block in blocks if block.get("type") == kind}


def _blocks(body: Body) -> Iterator[dict[str, Any]]:
    """All that can carry a marker."""
    yield from body.tools or ()
    yield from body.system if isinstance(body.system, list) else ()
    for turn in body.messages:
        yield from turn.content if isinstance(turn.content, list) else ()


def _lifetime(block: dict[str, Any]) -> str:
    control = block["cache_control"]
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        raise ValueError("cache_control: Input should be {'type': 'ephemeral'}")
    if block.get("type") in ("thinking", "redacted_thinking"):
        raise ValueError("cache_control cannot be set for thinking blocks")
    return str(control.get("ttl", "5m"))
