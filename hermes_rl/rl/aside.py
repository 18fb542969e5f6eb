"""Asking an environment beside a run's attempts: about stored rollouts, whole groups, in trials.

Nothing here is an attempt: no journal takes its events. Its model calls stand in the one row that
is made of it, a grade or a group.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from hermes_rl import events as ev
from hermes_rl.episode import Tape
from hermes_rl.ports import Recorder, WorkItem
from hermes_rl.record import Trajectory
from hermes_rl.tasks import Task
from hermes_rl.trajectory import fold

_OF_ITEM = ("unit_id", "group_id", "attempt", "repeat", "row_index", "task_id", "task_hash", "seed")
_OF_BEGUN = (
    *("run_id", "group_id", "member", "repeat", "row_index", "task_id", "task_hash"),
    *("config_hash", "seed", "model", "api_mode", "endpoint"),
)


class Nowhere:
    """A recorder for those who keep nothing."""

    def record(self, event: ev.Event) -> None:
        """See `ports.Recorder`."""


def item_of(row: Mapping[str, Any], task: Task | None, *, bad_row: str | None = None) -> WorkItem:
    """What an environment is told of a rollout that is no attempt of a run.

    Args:
        row: a row of `trajectories`, or the same columns.
        bad_row: why there is no task.
    """
    columns = {name: row[name] for name in _OF_ITEM}
    return WorkItem(**columns, epoch=0, task=task, bad_row=bad_row)


def tape_of(row: Mapping[str, Any], recorder: Recorder) -> Tape:
    """A tape for calls about a stored rollout.

    Args:
        row: a row of `trajectories`.
    """
    tape = Tape(recorder)
    key = ev.AttemptKey(unit_id=row["unit_id"], epoch=0, attempt=row["attempt"])
    columns = {name: row[name] for name in _OF_BEGUN}
    tape.record(ev.Begun(**columns, key=key, started_at=time.time(), prompt=""))
    return tape


CUT = "driver_lost: killed"
"""The error of a row whose making was cut."""


def books_of(tape: Tape) -> Trajectory:
    """The calls of a tape with their usage and cost; `metrics` bounds what nobody knows."""
    return fold([*tape.events, ev.Ended(finished_at=time.time(), end_reason="answered")])
