"""Token-exact segments: what an RL trainer trains on, made from an attempt's events.

`with_segments` makes and checks them for a worker. `check_segments` compares rows with events.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from hermes_rl import events as ev
from hermes_rl.models.tokens.capture import TokenGraph, TokensFault
from hermes_rl.record import Segment, Trajectory
from hermes_rl.segments.branches import DRIFT, Branches, Happened, branches_of, happened
from hermes_rl.segments.rows import Exclusion, rows_of
from hermes_rl.segments.rules import prove

__all__ = [
    "DRIFT",
    "Exclusion",
    "TokensFault",
    "check_segments",
    "with_segments",
]

_log = logging.getLogger(__name__)

_CHARS = 500
"""Of an error in a row."""


def check_segments(segments: Sequence[Segment], events: Sequence[ev.Event]) -> None:
    """Hold segments against every rule and against the events that they were made from.

    Raises: TokensFault that names the first fault.
    """
    told = happened(events)
    ended = next((e for e in events if isinstance(e, ev.Ended)), None)
    ok = ended is not None and ended.cause is None
    prove(segments, TokenGraph.of(told.tokens, told.agents), told.calls, ok=ok)


def with_segments(
    events: Sequence[ev.Event], row: Trajectory
) -> tuple[Trajectory, tuple[Segment, ...]]:
    """A row and its segments, checked.

    The row is never lost and never waits: where its tokens break a rule it is written without
    segments, says so in `metrics` (`segments_rejected`) and why in `error`. Nothing of it can be
    trained on. Metrics of rollouts with tokens: `captured_calls`; `followed_calls`, which an exact
    history would make extensions; `forked_calls`, those of them that it did not.
    """
    told = happened(events)
    if not told.tokens:
        return row, ()
    metrics = {"captured_calls": float(len(told.tokens))}
    try:
        branches = _branches(told)
        segments = rows_of(branches, told, row)
        prove(segments, branches.graph, told.calls, ok=row.status == "ok")
    except Exception as error:  # a bug of ours in the tokens must not lose the row
        _log.error("no segments for %s (%s): %s", row.task_id, row.trajectory_id, error)
        metrics["segments_rejected"] = 1.0
        told_why = f"segments: {type(error).__name__}: {error}"[:_CHARS]
        noted = told_why if row.error is None else f"{row.error}; {told_why}"
        return _measured(msgspec.structs.replace(row, error=noted), metrics), ()
    metrics["followed_calls"] = float(branches.followed)
    metrics["forked_calls"] = float(branches.drifted)
    return _measured(row, metrics), tuple(segments)


def _branches(told: Happened) -> Branches:
    return branches_of(TokenGraph.of(told.tokens, told.agents), told)


def _measured(row: Trajectory, metrics: dict[str, float]) -> Trajectory:
    return msgspec.structs.replace(row, metrics={**row.metrics, **metrics})
