"""Token-exact segments for RL trainers, made from the events of an attempt."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from hermes_rl import events as ev
from hermes_rl.models.tokens import TokenGraph, TokensFault
from hermes_rl.record import Segment, Trajectory
from hermes_rl.segments.branches import DRIFT, MAIN, Branches, captured_calls
from hermes_rl.segments.rows import Exclusion, build_segments
from hermes_rl.segments.rules import (
    AnswerSpan,
    answer_spans,
    rollout_faults,
    row_faults,
    usage_faults,
    verify_segments,
)

__all__ = [
    "DRIFT",
    "MAIN",
    "Exclusion",
    "AnswerSpan",
    "TokensFault",
    "captured_calls",
    "verify_segments",
    "rollout_faults",
    "row_faults",
    "answer_spans",
    "usage_faults",
    "with_segments",
]

_log = logging.getLogger(__name__)

_CHARS = 500
"""Most characters of an error in a row."""


def with_segments(
    events: Sequence[ev.Event], row: Trajectory
) -> tuple[Trajectory, tuple[Segment, ...]]:
    """Return a row with metrics of its tokens, and its segments, verified.

    If the tokens break a rule, the row has no segments, the metric `segments_rejected`, and the
    reason in `error`. Other metrics of rollouts with tokens: `captured_calls`; `followed_calls`,
    which extend their history if the history is exact; `forked_calls`, those of them that do not.
    """
    calls = captured_calls(events)
    if not calls.tokens:
        return row, ()
    metrics = {"captured_calls": float(len(calls.tokens))}
    try:
        branches = Branches(TokenGraph.of(calls.tokens, calls.agents), calls)
        segments = build_segments(branches, row)
        verify_segments(segments, branches.graph, calls.calls, ok=row.status == "ok")
    except Exception as error:  # a bug in this package must not lose the row
        _log.error("no segments for %s (%s): %s", row.task_id, row.trajectory_id, error)
        metrics["segments_rejected"] = 1.0
        why = f"segments: {type(error).__name__}: {error}"[:_CHARS]
        noted = why if row.error is None else f"{row.error}; {why}"
        return _with_metrics(msgspec.structs.replace(row, error=noted), metrics), ()
    metrics["followed_calls"] = float(branches.followed)
    metrics["forked_calls"] = float(branches.drifted)
    return _with_metrics(row, metrics), tuple(segments)


def _with_metrics(row: Trajectory, metrics: dict[str, float]) -> Trajectory:
    return msgspec.structs.replace(row, metrics={**row.metrics, **metrics})
