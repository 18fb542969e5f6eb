"""Rollouts of foreign files: as events and as rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hermes_rl import events as ev
from hermes_rl.identity import digest, group_id, trajectory_id, unit_id
from hermes_rl.messages import AssistantMessage, Message, UserMessage, text_of
from hermes_rl.record import Segment
from hermes_rl.store import Finished
from hermes_rl.trajectory import fold

EPOCH = 1
ORIGIN = "import"
"""The endpoint in imported rows."""


@dataclass(frozen=True)
class ForeignRollout:
    """One rollout of a foreign file."""

    messages: Sequence[Message]
    model: str
    end_reason: str = "answered"
    reward: float | None = None
    tools: Sequence[dict[str, Any]] = ()
    toolsets: tuple[str, ...] = ()
    at: float = 0.0
    """Unix time in seconds; 0 when the file has none."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the file."""
    task: Any = None
    """Equal for equal tasks; by default the opening messages."""
    segment: Mapping[str, Any] | None = None
    """Its tokens: columns of `Segment` except those that name the rollout. `call_starts` has one
    entry per model call."""


class RolloutNamer:
    """Gives imported rollouts their ids: rollouts of one task are members of one group.

    Args:
        config_hash: identifies the file.
    """

    def __init__(self, config_hash: str) -> None:
        self.config_hash = config_hash
        self._seen: Counter[str] = Counter()
        self._tasks: dict[str, int] = {}

    def begun(self, rollout: ForeignRollout) -> ev.Begun:
        """Return the first event of the next rollout."""
        opening = _opening(rollout.messages)
        task_hash = digest([rollout.task] if rollout.task is not None else ["prompt", *opening])
        repeat = self._seen[task_hash]
        self._seen[task_hash] += 1
        index = self._tasks.setdefault(task_hash, len(self._tasks))
        unit = unit_id(self.config_hash, task_hash, 0, repeat)
        return ev.Begun(
            key=ev.AttemptKey(unit_id=unit, epoch=EPOCH, attempt=0),
            started_at=rollout.at,
            run_id=self.config_hash[:32],
            group_id=group_id(self.config_hash, task_hash, 0),
            member=repeat,
            repeat=repeat,
            row_index=index,
            task_id=task_hash[:12],
            task_hash=task_hash,
            config_hash=self.config_hash,
            seed=0,
            prompt=opening[-1] if opening else "",
            model=rollout.model,
            api_mode="chat_completions",
            endpoint=ORIGIN,
            toolsets=rollout.toolsets,
            metadata=dict(rollout.metadata),
        )


def _opening(messages: Sequence[Message]) -> list[str]:
    """Return the user's texts before the first answer."""
    texts = []
    for message in messages:
        if isinstance(message, AssistantMessage):
            break
        if isinstance(message, UserMessage):
            texts.append(text_of(message))
    return texts


def finished(rollout: ForeignRollout, namer: RolloutNamer) -> Finished:
    """Return the rows of a rollout, from the same fold as rows of runs."""
    begun = namer.begun(rollout)
    stream: list[ev.Event] = [begun, ev.ToolsOffered(tools=list(rollout.tools))]
    turn = 0
    for message in rollout.messages:
        if isinstance(message, AssistantMessage):
            turn += 1
            stream += _call(turn, rollout)
        stream.append(ev.MessageAdded(message=message, turn=turn))
    segment = rollout.segment
    sampled = len(segment["call_starts"]) if segment is not None else 0
    for further in range(turn + 1, sampled + 1):
        stream += _call(further, rollout)
    if rollout.reward is not None:
        stream.append(ev.Graded(reward=rollout.reward))
    stream.append(ev.Ended(finished_at=rollout.at, end_reason=rollout.end_reason))
    row = fold(stream)
    if segment is None:
        return Finished(key=begun.key, row=row)
    names = ("unit_id", "run_id", "task_id", "group_id", "member", "model")
    made = Segment(
        trajectory_id=trajectory_id(begun.key.unit_id, EPOCH, begun.key.attempt),
        **{name: getattr(row, name) for name in names},
        call_ids=[_call_id(turn) for turn in range(1, sampled + 1)],
        finish_reasons=[""] * sampled,
        **segment,
    )
    # One branch: every call but the first continues the one before.
    counted = {"captured_calls": sampled, "followed_calls": max(0, sampled - 1), "forked_calls": 0}
    metrics = {**row.metrics, **{name: float(count) for name, count in counted.items()}}
    row = msgspec.structs.replace(row, metrics=metrics)
    return Finished(key=begun.key, row=row, segments=(made,))


def _call_id(turn: int) -> str:
    return f"{ORIGIN}-{turn}"


def _call(turn: int, rollout: ForeignRollout) -> list[ev.Event]:
    """Return the events of a call of which nothing else is known."""
    return [
        ev.CallStarted(
            call_id=_call_id(turn),
            turn=turn,
            purpose="agent",
            model=rollout.model,
            started_at=rollout.at,
        ),
        ev.CallEnded(call_id=_call_id(turn), outcome="ok", latency_s=0.0),
    ]
