"""Rollouts of a run with their token-exact segments, read a part at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import pyarrow.parquet as pq

from hermes_rl.messages import AssistantMessage, Message, conversation_from_openai
from hermes_rl.models.tokens.renderer import Renderer
from hermes_rl.segments.rules import row_faults
from hermes_rl.store.rundir import RunDir

Row = dict[str, Any]

_ROWS = ("trajectories", "failures")
_FEW = (
    "task_id",
    "repeat",
    "trajectory_id",
    "status",
    "reward",
    "metrics",
    "calls",
    "sampling",
    "prompt_sha256",
)
_TEXTS = ("messages", "message_info", "tools", "contexts")
_AT_ONCE = 16


@dataclass(frozen=True)
class Rollout:
    """A row and its segments."""

    row: Row
    """Of `trajectories` or `failures`; with its texts undecoded."""
    segments: list[Row]

    @property
    def name(self) -> str:
        """For people: task and repeat."""
        return f"{self.row['task_id']} #{self.row['repeat']}"

    @cached_property
    def unsound(self) -> list[str]:
        """What is wrong with single segments; others may then not be looked at further."""
        return [f"branch {s['branch_index']}: {f}" for s in self.segments for f in row_faults(s)]

    @property
    def metrics(self) -> dict[str, float]:
        """Column `metrics`, by name."""
        return {pair["name"]: pair["value"] for pair in self.row["metrics"]}

    def messages(self) -> list[Message]:
        """The conversation, with the arguments of calls as the model wrote them."""
        forms = [msgspec.json.decode(text) for text in self.row["messages"]]
        told = conversation_from_openai(forms)
        infos = self.row["message_info"]
        return [_exactly(m, info["raw_arguments"]) for m, info in zip(told, infos, strict=True)]

    def tools(self) -> list[Row]:
        """The schemas that the model saw."""
        found: list[Row] = msgspec.json.decode(self.row["tools"])
        return found


@dataclass(frozen=True)
class Renderers:
    """The models that were named to look at a run with; a run may have rows of several."""

    named: Sequence[Renderer] = ()

    def of(self, segment: Row) -> Renderer | None:
        """The one whose tokenizer a row was made with, its template too where there are several.
        None where it is not among them. Of a row that does not know (ids by chat), the first."""
        made_with = segment["tokenizer_hash"]
        fitting = [one for one in self.named if made_with in (None, one.tokenizer_hash)]
        same = (one for one in fitting if one.template_hash == segment["template_hash"])
        return next(same, fitting[0] if fitting else None)


def rollouts(run_dir: RunDir, *, texts: bool = False) -> Iterator[Rollout]:
    """All published rollouts, those without segments too.

    Args:
        texts: read the messages as well.
    """
    columns = [*_FEW, *(_TEXTS if texts else ())]
    for stem in sorted({part.name for table in _ROWS for part in run_dir.parts(table)}):
        rows = {
            row["trajectory_id"]: row
            for table in _ROWS
            for row in _rows(run_dir, table, stem, columns)
        }
        for segments in _by_rollout(_rows(run_dir, "segments", stem, None)):
            owner = segments[0]["trajectory_id"]
            lost = {"task_id": owner, "repeat": 0, "status": "absent", "calls": [], "metrics": []}
            yield Rollout(rows.pop(owner, lost), segments)
        yield from (Rollout(row, []) for row in rows.values())


def _rows(run_dir: RunDir, table: str, stem: str, columns: Sequence[str] | None) -> Iterator[Row]:
    place = run_dir.path / table / stem
    if not place.exists():
        return
    with pq.ParquetFile(place) as file:
        for batch in file.iter_batches(_AT_ONCE, columns=columns):
            yield from batch.to_pylist()


def _by_rollout(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """The segments of a rollout stand side by side."""
    held: list[Row] = []
    for row in rows:
        if held and held[0]["trajectory_id"] != row["trajectory_id"]:
            yield held
            held = []
        held.append(row)
    if held:
        yield held


def _exactly(message: Message, raw: list[str] | None) -> Message:
    if not isinstance(message, AssistantMessage) or not raw:
        return message
    calls = tuple(
        msgspec.structs.replace(call, arguments=text)
        for call, text in zip(message.tool_calls, raw, strict=True)
    )
    return msgspec.structs.replace(message, tool_calls=calls)
