"""Reads the rows of a live run: what earlier starts left, and the members of complete groups."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec

from batch_runner.plan import Unit, UnitReader
from hermes_rl.errors import StoreError
from hermes_rl.identity import group_id
from hermes_rl.ports import WorkItem
from hermes_rl.record import Segment
from hermes_rl.rl import Member, gather
from hermes_rl.store import (
    Delivery,
    Driver,
    Place,
    Run,
    RunDir,
    decode_line,
    decode_metrics,
    decode_row,
    file_of,
    schema_of,
    stem_of,
)
from hermes_rl.tasks import LazyRow, Task

_HEAD_BYTES = 32
"""The length of a journal line is in its first bytes."""

_ROW_COLUMNS = (
    *("group_id", "task_id", "members", "unit_ids", "trajectory_ids", "rewards", "valid"),
    *("why_invalid", "mean", "std", "grpo", "rloo", "dr_grpo", "size", "n_valid", "equal_scores"),
)


@dataclass
class OpenGroup:
    """A group that is not complete."""

    item: Unit
    group_id: str
    size: int
    level: str | None
    seen: int = 0
    """Members that were planned."""
    waiting: list[WorkItem] = field(default_factory=list)
    """Members that have not started."""
    started: bool = False
    early: int = 0
    """Members after which it may end; 0 for none."""
    version: int | None = None
    """Of the policy when it started."""
    stale: str | None = None
    """Why it ends before all of its members have started."""
    passed: int = 0
    """How often the curriculum preferred another task."""
    extra: int = 0
    """Members beyond its size, in place of members that failed."""
    members: dict[int, Member] = field(default_factory=dict)
    """Members that ended, by index."""

    @property
    def task(self) -> Task | None:
        """Its task; None for a bad row."""
        return self.item.row.task

    @property
    def row_index(self) -> int:
        """Position of its task in the stream."""
        return self.item.row.index

    @property
    def task_id(self) -> str:
        """See `WorkItem.task_id`."""
        row = self.item.row
        return row.task.id if row.task else row.raw_id or row.task_hash[:12]


class GroupReader(UnitReader):
    """Reads the units of a task stream, but not those of groups that are closed. Tasks of a stream
    differ by their position, so none are counted."""

    def __init__(self, rows: Iterable[LazyRow], config_hash: str, repeats: int, name: str) -> None:
        super().__init__(rows, config_hash, repeats, name)
        self.closed: set[bytes] = set()
        """Ids of groups that are complete, rejected or skipped."""

    def _read(self, row: LazyRow, done: Callable[[bytes], bool] | None) -> int:
        self.rows += 1
        members = row.repeats or self._repeats
        if bytes.fromhex(group_id(self.config_hash, row.task_hash, 0)) in self.closed:
            return members
        parsed = row.parse()
        self.bad_rows += parsed.task is None
        self._units = self._members(parsed, 0, 1 if parsed.task is None else members)
        return 0


@dataclass
class State:
    """What earlier starts of a live run left."""

    closed: set[bytes] = field(default_factory=set)
    """Ids of groups that need no rollouts."""
    pending: list[dict[str, Any]] = field(default_factory=list)
    """Complete groups that wait for an acknowledgement, in their order."""
    reopened: list[Delivery] = field(default_factory=list)
    results: list[tuple[str | None, float | None]] = field(default_factory=list)
    """Levels and solve rates, in their order."""
    known: dict[str, Member] = field(default_factory=dict)
    """Unit -> member, of incomplete groups."""
    places: dict[str, Place] = field(default_factory=dict)
    """Trajectory -> its place, for pending and incomplete groups."""


def load_state(driver: Driver, resume_step: int | None) -> State:
    """Read the state of a run. Blocking; takes time in proportion to the run, once per start.

    Args:
        resume_step: groups that were acknowledged with a later step are reopened.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    run, state = Run(driver.run_dir, max_attempts=driver.ledger.max_attempts), State()
    newest: dict[str, dict[str, Any]] = {}
    for row in run.arrow("deliveries").to_pylist():
        newest[row["group_id"]] = row
        if row["solve_rate"] is not None and row["event"] != "reopened":
            state.results.append((row["level"], row["solve_rate"]))
    if resume_step is not None:
        for name, row in newest.items():
            if row["event"] == "acknowledged" and (row["step"] or 0) > resume_step:
                now = time.time_ns() // 1000
                row |= {"event": "reopened", "step": resume_step, "created_at": now}
                newest[name] = row
                state.reopened.append(Delivery(**row))
    decided = {name for name, row in newest.items() if row["event"] != "reopened"}
    groups = run.arrow("groups", [*_ROW_COLUMNS, "error"])
    groups = groups.filter(pc.is_null(groups["error"]))
    ended = set(groups["group_id"].to_pylist())
    undecided = pa.array(sorted(ended - decided), pa.string())
    newest_rows = groups.filter(pc.is_in(groups["group_id"], undecided)).to_pylist()
    pending = {row["group_id"]: row for row in newest_rows}
    wanted = {one for row in pending.values() for one in row["trajectory_ids"] if one is not None}
    state.places = _find_places(driver.run_dir, wanted)
    for name, row in pending.items():
        if all(one is None or one in state.places for one in row["trajectory_ids"]):
            state.pending.append(row)
        else:  # the rows were lost, and their units are open again
            ended.remove(name)
    state.closed = {bytes.fromhex(name) for name in ended | decided}
    seen = [run.arrow(t, ["group_id"])["group_id"] for t in ("trajectories", "failures")]
    partial = {one for column in seen for one in pc.unique(column).to_pylist()} - ended - decided
    for gathered in gather(run, only=pa.array(sorted(partial), pa.string())) if partial else ():
        state.known |= {member.unit_id: member for member in gathered.members}
    wanted = {m.trajectory_id for m in state.known.values() if m.trajectory_id is not None}
    state.places |= _find_places(driver.run_dir, wanted)
    return state


def _find_places(run_dir: RunDir, wanted: set[str]) -> dict[str, Place]:
    import pyarrow.parquet as pq

    found: dict[str, Place] = {}
    for part in run_dir.parts("trajectories") if wanted else ():
        ids = pq.read_table(part, columns=["trajectory_id"])["trajectory_id"].to_pylist()
        place = Place(stem=stem_of(part), offset=-1)
        found |= dict.fromkeys(wanted.intersection(ids), place)
    return found


@dataclass(frozen=True)
class MemberRow:
    """A row of `trajectories` with JSON columns as text, and its segments."""

    row: dict[str, Any]
    segments: list[Segment]

    def decoded(self) -> tuple[dict[str, Any], list[Segment]]:
        """Return the row with decoded JSON columns, and the segments."""
        return decode_row(self.row), self.segments


Rows = Mapping[str, MemberRow]


class MemberRows:
    """Finds rows by trajectory id. Thread-safe.

    Args:
        places: of rows that earlier starts left.
    """

    def __init__(self, run_dir: RunDir, places: dict[str, Place]) -> None:
        self._run_dir = run_dir
        self._places = places
        self._files: dict[str, int | None] = {}
        """Stem -> its open `done` file; None if it is published already."""
        self._uses: Counter[str] = Counter()
        self._lock = threading.Lock()

    def note(self, name: str, place: Place) -> None:
        """Remember where a row is, and keep its file open."""
        with self._lock:
            self._places[name] = place
            if not self._uses[place.stem]:
                writer, _, number = place.stem.rpartition("-")
                path = self._run_dir.writer_path(writer) / f"done-{number}.jsonl"
                try:
                    self._files[place.stem] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except FileNotFoundError:
                    self._files[place.stem] = None
            self._uses[place.stem] += 1

    def read(self, ids: Iterable[str]) -> dict[str, MemberRow]:
        """Read some rows. Blocking."""
        found: dict[str, MemberRow] = {}
        published: dict[str, list[str]] = {}
        for name in ids:
            place = self._places[name]
            file = self._files.get(place.stem) if place.offset >= 0 else None
            if file is None:
                published.setdefault(place.stem, []).append(name)
            else:
                line = _read_line(file, place.offset)
                segments = msgspec.convert(line["segments"], list[Segment])
                found[name] = MemberRow(line["row"], segments)
        for stem, names in published.items():
            found |= self._read_part(stem, names)
        return found

    def _read_part(self, stem: str, ids: list[str]) -> dict[str, MemberRow]:
        rows = self._of_part("trajectories", stem, ids)
        segments: dict[str, list[Segment]] = {one: [] for one in ids}
        for columns in self._of_part("segments", stem, ids):
            segments[columns["trajectory_id"]].append(msgspec.convert(columns, Segment))
        for row in rows:
            row["metrics"] = decode_metrics(row["metrics"])
            for part in (row, *row["calls"]):  # microseconds, as in a journal
                times = {n: value for n, value in part.items() if isinstance(value, datetime)}
                part |= {name: round(at.timestamp() * 1e6) for name, at in times.items()}
        return {r["trajectory_id"]: MemberRow(r, segments[r["trajectory_id"]]) for r in rows}

    def _of_part(self, table: str, stem: str, ids: list[str]) -> list[dict[str, Any]]:
        import pyarrow.parquet as pq

        chosen = [("trajectory_id", "in", ids)]
        path, before = file_of(self._run_dir, table, stem), None
        while path != before:  # it may be merged meanwhile
            try:
                found = pq.read_table(path, schema=schema_of(table), filters=chosen)
            except FileNotFoundError:
                path, before = file_of(self._run_dir, table, stem), path
                continue
            rows: list[dict[str, Any]] = found.to_pylist()
            return rows
        return []

    def drop(self, ids: Iterable[str | None]) -> None:
        """Forget rows; files without further rows are closed."""
        with self._lock:
            for name in ids:
                place = self._places.pop(name, None) if name is not None else None
                if place is None or place.offset < 0:
                    continue
                self._uses[place.stem] -= 1
                if not self._uses[place.stem]:
                    del self._uses[place.stem]
                    if (file := self._files.pop(place.stem)) is not None:
                        os.close(file)

    def close(self) -> None:
        """Close all files."""
        self.drop(list(self._places))


def _read_line(file: int, offset: int) -> dict[str, Any]:
    """Read one line of a `done` file, which is durable. Raises: StoreError for damage."""
    head = os.pread(file, _HEAD_BYTES, offset).split(b" ", 2)
    length = len(head[0]) + len(head[1]) + 2 + int(head[0]) + 1
    payload = decode_line(os.pread(file, length, offset))
    if payload is None:
        raise StoreError(f"a finished row of the journal is damaged (byte {offset})")
    line: dict[str, Any] = msgspec.json.decode(payload)
    return line
