"""The rollout that an environment sees: equal from live events and from a stored row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hermes_rl import events as ev
from hermes_rl.errors import ENDINGS
from hermes_rl.images import with_images
from hermes_rl.messages import UNPARSED, to_openai


@dataclass(frozen=True)
class ToolUse:
    """One call of a tool, with its result."""

    turn: int
    name: str
    arguments: dict[str, Any]
    """`{"_unparsed": text}` if the model's text is not a JSON object."""
    result: str | None
    """What the model saw; None when the rollout ended earlier."""
    ok: bool
    """Whether the tool ran and succeeded."""

    @property
    def parsed(self) -> bool:
        """Whether the arguments were a JSON object."""
        return UNPARSED not in self.arguments


@dataclass(frozen=True)
class Rollout:
    """One rollout, for rewards."""

    task_id: str
    member: int
    """0-based index in the group."""
    messages: tuple[dict[str, Any], ...]
    """OpenAI messages: the system message first, arguments as objects."""
    turn_of: tuple[int, ...]
    """The turn of each message: 0 for the prompt."""
    final_response: str | None
    """The model's last text."""
    end_reason: str | None
    """A key of `errors.ENDINGS`; None while the rollout runs."""
    turns: int
    """Model calls of the agent."""
    tool_calls: tuple[ToolUse, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    synthetic: frozenset[int] = frozenset()
    """Indices of the messages that the harness wrote; none with the preset `rl`."""

    @property
    def truncated(self) -> bool:
        """Whether a limit cut the rollout."""
        return self.end_reason in ENDINGS and ENDINGS[self.end_reason or ""].truncated

    @property
    def answers(self) -> tuple[str, ...]:
        """The model's texts that are not empty, in order."""
        own = (
            message
            for place, (message, turn) in enumerate(zip(self.messages, self.turn_of, strict=True))
            if turn and message["role"] == "assistant" and place not in self.synthetic
        )
        return tuple(text for message in own if (text := message.get("content") or ""))

    @classmethod
    def of_events(
        cls,
        events: Iterable[ev.Event],
        *,
        final_response: str | None = None,
        end_reason: str | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Rollout:
        """Build a rollout from the events so far; the first is `Begun`.

        Args:
            final_response: if it is not the last text.
            end_reason: of the agent; None while it runs.
        """
        stream = list(events)
        begun = stream[0]
        assert isinstance(begun, ev.Begun)
        added = [e for e in stream if isinstance(e, ev.MessageAdded)]
        ran = {e.turn for e in stream if isinstance(e, ev.CallStarted) and e.purpose == "agent"}
        messages = [to_openai(e.message, parsed_arguments=True) for e in added]
        marks = [_Mark(e.turn, e.synthetic, e.tool_ok) for e in added]
        last = _last_text(messages, marks)
        return cls(
            task_id=begun.task_id,
            member=begun.member,
            messages=tuple(messages),
            turn_of=tuple(e.turn for e in added),
            final_response=last if final_response is None else final_response,
            end_reason=end_reason,
            turns=len(ran),
            tool_calls=_uses(messages, marks),
            metrics=dict(metrics or {}),
            synthetic=_synthetic(marks),
        )

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Rollout:
        """Build a rollout from a row of `trajectories` (JSON columns as text or decoded)."""
        decoded = [json.loads(m) if isinstance(m, str | bytes) else m for m in row["messages"]]
        messages = with_images(decoded, row.get("image_data") or ())
        infos = row["message_info"]
        marks = [_Mark(i["turn"], i["synthetic"], i["tool_ok"]) for i in infos]
        return cls(
            task_id=row["task_id"],
            member=row["member"],
            messages=tuple(messages),
            turn_of=tuple(m.turn for m in marks),
            final_response=row["final_response"],
            end_reason=row["end_reason"],
            turns=row["turns"],
            tool_calls=_uses(messages, marks),
            metrics=_metrics(row["metrics"]),
            synthetic=_synthetic(marks),
        )


@dataclass(frozen=True)
class _Mark:
    turn: int
    synthetic: bool
    tool_ok: bool | None


def _synthetic(marks: Sequence[_Mark]) -> frozenset[int]:
    return frozenset(place for place, mark in enumerate(marks) if mark.synthetic)


def _metrics(metrics: Any) -> dict[str, float]:
    """Convert metrics from Parquet (a list of name and value), JSON text or a mapping."""
    if isinstance(metrics, str | bytes):
        metrics = json.loads(metrics)
    if not isinstance(metrics, Mapping):
        metrics = {one["name"]: one["value"] for one in metrics or ()}
    return {name: float(value) for name, value in metrics.items() if value is not None}


def _last_text(messages: Sequence[Mapping[str, Any]], marks: Sequence[_Mark]) -> str | None:
    texts = [
        m["content"]
        for m, mark in zip(messages, marks, strict=True)
        if m["role"] == "assistant" and mark.turn and not mark.synthetic
    ]
    return texts[-1] if texts else None


def _uses(messages: Sequence[Mapping[str, Any]], marks: Sequence[_Mark]) -> tuple[ToolUse, ...]:
    """Return the calls of the rollout's turns; a result belongs to the latest call with its id."""
    uses: list[ToolUse] = []
    waiting: dict[str, int] = {}
    for message, mark in zip(messages, marks, strict=True):
        if not mark.turn:
            continue
        for call in message.get("tool_calls") or ():
            function = call["function"]
            arguments = function["arguments"]
            if not isinstance(arguments, dict):
                arguments = {UNPARSED: arguments}
            waiting[call["id"]] = len(uses)
            uses.append(ToolUse(mark.turn, function["name"], arguments, None, ok=False))
        if (
            message["role"] == "tool"
            and (at := waiting.pop(message["tool_call_id"], None)) is not None
        ):
            use = uses[at]
            uses[at] = ToolUse(
                use.turn, use.name, use.arguments, message["content"], ok=mark.tool_ok is not False
            )
    return tuple(uses)
