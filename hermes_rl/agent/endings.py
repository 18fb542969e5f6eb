"""How a run of `AIAgent` ended, and what its result says of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hermes_rl import events as ev
from hermes_rl.errors import HermesError, ModelError, cause_of, end_reason_of
from hermes_rl.text import clean
from hermes_rl.trajectory import fold

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    end_reason: str
    final_response: str | None
    error: HermesError | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def by(cls, error: HermesError, final_response: str | None) -> Ended:
        """The end that an error brought about."""
        return cls(end_reason_of(error.cause), final_response, error, error.metrics)

    @property
    def event(self) -> ev.Ended:
        """The last event of the run."""
        cause = "interrupted" if self.end_reason == "interrupted" else None
        error = self.error
        return ev.Ended(
            finished_at=time.time(),
            end_reason=self.end_reason,
            cause=cause if error is None else error.cause,
            error=None if error is None else clean(f"{type(error).__name__}: {error}"),
            metrics=dict(self.metrics),
            final_response=self.final_response,
        )


def error_of(error: HermesError) -> dict[str, str | None]:
    """An error as plain data: class, reason (of model errors), cause and message."""
    reason = error.reason if isinstance(error, ModelError) else None
    named = {"class": type(error).__name__, "reason": reason, "cause": error.cause}
    return {**named, "message": str(error)}


def accounts_of(events: Sequence[ev.Event]) -> dict[str, Any]:
    """Usage, calls and cost, made by the same fold as the rows of a run."""
    row = fold(events)
    usage, calls = msgspec.to_builtins(row.usage), msgspec.to_builtins(row.calls)
    return {"usage": usage, "calls": calls, "cost_usd": row.cost_usd}


def typed(error: Exception) -> HermesError:
    """An error of the harness or of code of the user's, as an ending."""
    if isinstance(error, HermesError):
        return error
    _log.error("the run failed", exc_info=error)
    typed = HermesError(f"{type(error).__name__}: {error}")
    typed.cause, typed.__cause__ = cause_of(error), error
    return typed
