"""Token-exact segments: what an RL trainer trains on, made from an attempt's events."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from hermes_rl import events as ev
from hermes_rl.models.tokens import TokenGraph, TokensFault
from hermes_rl.record import Segment, Trajectory
from hermes_rl.segments.branches import DRIFT, MAIN, Branches, happened
from hermes_rl.segments.rows import Exclusion, rows_of
from hermes_rl.segments.rules import (
    Run,
    prove,
    rollout_faults,
    row_faults,
    runs_of,
    usage_faults,
)

__all__ = [
    "DRIFT",
    "MAIN",
    "Exclusion",
    "Run",
    "TokensFault",
    "happened",
    "prove",
    "rollout_faults",
    "row_faults",
    "runs_of",
    "usage_faults",
    "with_segments",
]

_log = logging.getLogger(__name__)

_CHARS = 500
"""Of an error in a row."""


def with_segments(
    events: Sequence[ev.Event], row: Trajectory
) -> tuple[Trajectory, tuple[Segment, ...]]:
    """A row and its segments, checked.

    The row is never lost and never waits: where its tokens break a rule it is written without
    segments, says so in `metrics` (`segments_rejected`) and why in `error`. Nothing of it can be
    trained on. Metrics of rollouts with tokens: `captured_calls`; `followed_calls`, which an exact
    history would make extensions; `forked_calls`, those of them that it did not.
    """
    calls = happened(events)
    if not calls.tokens:
        return row, ()
    metrics = {"captured_calls": float(len(calls.tokens))}
    try:
        branches = Branches(TokenGraph.of(calls.tokens, calls.agents), calls)
        segments = rows_of(branches, calls, row)
        prove(segments, branches.graph, calls.calls, ok=row.status == "ok")
    except Exception as error:  # a bug of ours in the tokens must not lose the row
        _log.error("no segments for %s (%s): %s", row.task_id, row.trajectory_id, error)
        metrics["segments_rejected"] = 1.0
        why = f"segments: {type(error).__name__}: {error}"[:_CHARS]
        noted = why if row.error is None else f"{row.error}; {why}"
        return _measured(msgspec.structs.replace(row, error=noted), metrics), ()
    metrics["followed_calls"] = float(branches.followed)
    metrics["forked_calls"] = float(branches.drifted)
    return _measured(row, metrics), tuple(segments)


def _measured(row: Trajectory, metrics: dict[str, float]) -> Trajectory:
    return msgspec.structs.replace(row, metrics={**row.metrics, **metrics})
