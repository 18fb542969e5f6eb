"""The rollout that an environment sees: equal from live events and from a stored row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hermes_rl import events as ev
from hermes_rl.errors import ENDINGS
from hermes_rl.images import with_images
from hermes_rl.messages import UNPARSED, to_openai
from hermes_rl.record import replacements

_COLUMNS = ("task_id", "member", "final_response", "end_reason", "turns")

_Mark = tuple[int, bool, bool | None]
"""Facts about a message: its turn, whether the harness wrote it, whether the tool succeeded."""


@dataclass(frozen=True)
class ToolUse:
    """One call of a tool, with its result."""

    turn: int
    name: str
    arguments: dict[str, Any]
    """`{"_unparsed": text}` if the model's text is not a JSON object."""
    result: str | None
    """Text that the model saw; None if the rollout ended earlier."""
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
        return tuple(text for m in self._model_messages() if (text := m.get("content") or ""))

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
        added = [e for e in stream if isinstance(e, ev.MessageAdded) and not e.compressed]
        calls = [e for e in stream if isinstance(e, ev.CallStarted) and e.agent == "main"]
        ran = {e.turn for e in calls if e.purpose == "agent"}
        rollout = cls._of_messages(
            [to_openai(e.message, parsed_arguments=True) for e in added],
            [(e.turn, e.synthetic, e.tool_ok) for e in added],
            task_id=begun.task_id,
            member=begun.member,
            final_response=final_response,
            end_reason=end_reason,
            turns=len(ran),
            metrics=dict(metrics or {}),
        )
        texts = [m["content"] for m in rollout._model_messages()]
        if final_response is None and texts:
            return replace(rollout, final_response=texts[-1])
        return rollout

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Rollout:
        """Build a rollout from a row of `trajectories` (JSON columns as text or decoded)."""
        decoded = [json.loads(m) if isinstance(m, str | bytes) else m for m in row["messages"]]
        replaced = replacements(row) if row.get("contexts") is not None else ()
        pairs = zip(
            with_images(decoded, row.get("image_data") or ()), row["message_info"], strict=True
        )
        kept = [pair for index, pair in enumerate(pairs) if index not in replaced]
        return cls._of_messages(
            [form for form, _ in kept],
            [(i["turn"], i["synthetic"], i["tool_ok"]) for _, i in kept],
            metrics=_metrics(row["metrics"]),
            **{name: row[name] for name in _COLUMNS},
        )

    @classmethod
    def _of_messages(
        cls, messages: Sequence[dict[str, Any]], marks: Sequence[_Mark], **columns: Any
    ) -> Rollout:
        return cls(
            messages=tuple(messages),
            turn_of=tuple(turn for turn, _, _ in marks),
            tool_calls=_tool_uses(messages, marks),
            synthetic=frozenset(at for at, (_, synthetic, _) in enumerate(marks) if synthetic),
            **columns,
        )

    def _model_messages(self) -> Iterator[dict[str, Any]]:
        """Yield what the model wrote."""
        for at, (message, turn) in enumerate(zip(self.messages, self.turn_of, strict=True)):
            if turn and message["role"] == "assistant" and at not in self.synthetic:
                yield message


def _metrics(metrics: Any) -> dict[str, float]:
    """Convert metrics from Parquet (a list of name and value), JSON text or a mapping."""
    if isinstance(metrics, str | bytes):
        metrics = json.loads(metrics)
    if not isinstance(metrics, Mapping):
        metrics = {one["name"]: one["value"] for one in metrics or ()}
    return {name: float(value) for name, value in metrics.items() if value is not None}


def _tool_uses(
    messages: Sequence[Mapping[str, Any]], marks: Sequence[_Mark]
) -> tuple[ToolUse, ...]:
    """Return the calls of the rollout's turns; a result belongs to the latest call with its id."""
    uses: list[ToolUse] = []
    waiting: dict[str, int] = {}
    for message, (turn, _, tool_ok) in zip(messages, marks, strict=True):
        if not turn:
            continue
        for call in message.get("tool_calls") or ():
            function = call["function"]
            arguments = function["arguments"]
            if not isinstance(arguments, dict):
                arguments = {UNPARSED: arguments}
            waiting[call["id"]] = len(uses)
            uses.append(ToolUse(turn, function["name"], arguments, None, ok=False))
        at = waiting.pop(message["tool_call_id"], None) if message["role"] == "tool" else None
        if at is not None:
            uses[at] = replace(uses[at], result=message["content"], ok=tool_ok is not False)
    return tuple(uses)
