"""What an importer makes of a line: a rollout told by somebody else, as events, then as a row."""

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
from hermes_rl.store.rows import Finished
from hermes_rl.trajectory import fold

EPOCH = 1
ORIGIN = "import"
"""Stands where a row names an endpoint."""


@dataclass(frozen=True)
class Told:
    """One rollout of a foreign file."""

    messages: Sequence[Message]
    model: str
    end_reason: str = "answered"
    reward: float | None = None
    tools: Sequence[dict[str, Any]] = ()
    toolsets: tuple[str, ...] = ()
    at: float = 0.0
    """Unix time, seconds; 0 when the file does not say."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What else the file says."""
    task: Any = None
    """What equal tasks have in common; default the opening messages."""
    calls: int = 0
    """Model calls, where there are more than assistant messages."""


class Namer:
    """Gives imported rollouts their place: rollouts of one task are members of one group.

    Args:
        config_hash: names the file.
    """

    def __init__(self, config_hash: str) -> None:
        self.config_hash = config_hash
        self._seen: Counter[str] = Counter()
        self._tasks: dict[str, int] = {}

    def begun(self, told: Told) -> ev.Begun:
        """The first event of the next rollout."""
        opening = _opening(told.messages)
        task_hash = digest([told.task] if told.task is not None else ["prompt", *opening])
        repeat = self._seen[task_hash]
        self._seen[task_hash] += 1
        index = self._tasks.setdefault(task_hash, len(self._tasks))
        unit = unit_id(self.config_hash, task_hash, 0, repeat)
        return ev.Begun(
            key=ev.AttemptKey(unit_id=unit, epoch=EPOCH, attempt=0),
            started_at=told.at,
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
            model=told.model,
            api_mode="chat_completions",
            endpoint=ORIGIN,
            toolsets=told.toolsets,
            metadata=dict(told.metadata),
        )


def _opening(messages: Sequence[Message]) -> list[str]:
    """The user's texts before the first answer."""
    texts = []
    for message in messages:
        if isinstance(message, AssistantMessage):
            break
        if isinstance(message, UserMessage):
            texts.append(text_of(message))
    return texts


def finished(told: Told, begun: ev.Begun, segments: Sequence[Segment] = ()) -> Finished:
    """The row of a rollout, by the same fold that makes rows of our own."""
    stream: list[ev.Event] = [begun, ev.ToolsOffered(tools=list(told.tools))]
    turn = 0
    for message in told.messages:
        if isinstance(message, AssistantMessage):
            turn += 1
            stream += _call(turn, told)
        stream.append(ev.MessageAdded(message=message, turn=turn))
    for further in range(turn + 1, told.calls + 1):
        stream += _call(further, told)
    if told.reward is not None:
        stream.append(ev.Graded(reward=told.reward))
    stream.append(ev.Ended(finished_at=told.at, end_reason=told.end_reason))
    row = fold(stream)
    if segments:  # one branch each: every call but the first goes on from the one before
        calls = sum(len(segment.call_ids) for segment in segments)
        counted = {"captured_calls": calls, "followed_calls": calls - len(segments)}
        metrics = {name: float(max(0, count)) for name, count in counted.items()}
        row = msgspec.structs.replace(row, metrics={**row.metrics, **metrics, "forked_calls": 0.0})
    return Finished(key=begun.key, row=row, segments=tuple(segments))


def call_id(turn: int) -> str:
    """The id of the model call of a turn."""
    return f"{ORIGIN}-{turn}"


def _call(turn: int, told: Told) -> list[ev.Event]:
    """A call of which nothing is known but that it was made."""
    return [
        ev.CallStarted(
            call_id=call_id(turn),
            turn=turn,
            purpose="agent",
            model=told.model,
            started_at=told.at,
        ),
        ev.CallEnded(call_id=call_id(turn), outcome="ok", latency_s=0.0),
    ]


def name_of(begun: ev.Begun) -> str:
    """The trajectory's id."""
    return trajectory_id(begun.key.unit_id, EPOCH, begun.key.attempt)
