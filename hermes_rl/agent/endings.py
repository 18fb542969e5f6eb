"""How a run of `AIAgent` ended, as its result says it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from hermes_rl import events as ev
from hermes_rl.errors import HermesError, ModelError
from hermes_rl.trajectory import fold


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    end_reason: str
    final_response: str | None
    error: HermesError | None = None


def error_of(error: HermesError) -> dict[str, str | None]:
    """An error as plain data: class, reason (of model errors), cause and message."""
    reason = error.reason if isinstance(error, ModelError) else None
    named = {"class": type(error).__name__, "reason": reason, "cause": error.cause}
    return {**named, "message": str(error)}


def accounts_of(events: Sequence[ev.Event], end: Ended) -> dict[str, Any]:
    """Usage, calls and cost, made by the same fold as the rows of a run."""
    cause = "interrupted" if end.end_reason == "interrupted" else None
    if end.error is not None:
        cause = end.error.cause
    last = ev.Ended(finished_at=time.time(), end_reason=end.end_reason, cause=cause)
    row = fold([*events, last])
    usage, calls = msgspec.to_builtins(row.usage), msgspec.to_builtins(row.calls)
    return {"usage": usage, "calls": calls, "cost_usd": row.cost_usd}
