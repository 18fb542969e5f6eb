"""The attempts of a run in memory: their light columns. Messages and tokens stay on disk.

Published parts never change, so each is read once. Of a `done` file, which a running writer
appends to, only new lines are read.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from json import dumps
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hermes_rl.errors import StoreError
from hermes_rl.record import Timing, ToolStat
from hermes_rl.store import RunDir, decode_line, rows_of, schema_of, stem_of, to_arrow
from hermes_rl.usage import UsageTotal

ATTEMPTS = ("trajectories", "failures")
_PLAIN = (
    *("unit_id", "trajectory_id", "task_id", "repeat", "attempt", "status", "reward"),
    *("end_reason", "cause", "truncated", "turns", "cost_usd", "unpriced_calls"),
    *("error", "model", "group_id", "row_index", "started_at"),
)
_USAGE = ("input_tokens", "output_tokens", "total_tokens")
_READ = (
    *(*_PLAIN, "tool_stats.list.element.errors", "timing.total_s"),
    *(f"usage.{name}" for name in _USAGE),
)
_ERROR_CHARS = 300
FRESH_S = 1.0
"""The index is brought up to date at most this often."""
_QUERIES_KEPT = 8
_ROWS_AT_ONCE = 50
_READERS = 4

_Rows = np.ndarray[Any, Any]


class _Row(msgspec.Struct):
    """The columns of the index in a line of a `done` file; others are skipped unparsed."""

    unit_id: str
    trajectory_id: str
    task_id: str
    repeat: int
    attempt: int
    status: str
    reward: float | None
    end_reason: str
    cause: str | None
    truncated: bool
    turns: int
    cost_usd: float | None
    unpriced_calls: int
    error: str | None
    model: str
    group_id: str
    row_index: int
    started_at: int
    usage: UsageTotal
    timing: Timing
    tool_stats: list[ToolStat]


class _Line(msgspec.Struct):
    row: _Row | None = None


_decode_line = msgspec.json.Decoder(_Line).decode


@dataclass
class _Source:
    """A file with rows: a part, or a `done` file."""

    path: Path
    stem: str
    rows: pa.Table
    groups: tuple[int, ...] = ()
    """Rows of each row group of a part."""
    read: int = 0
    """Bytes of a `done` file that were read; 0 for a part."""

    @property
    def published(self) -> bool:
        return self.path.suffix == ".parquet"


class RunIndex:
    """The light columns of all attempts of a run, as one Arrow table. Thread-safe.

    Columns: those of `trajectories` with the same names, tokens, `total_s`, `tool_errors`, and
    `source` and `at`, the place of the whole row.
    """

    def __init__(self, path: Path) -> None:
        self.run_dir = RunDir(path)
        self._sources: dict[Path, _Source] = {}
        self._table: pa.Table = _light([])
        self._order: list[_Source] = []
        self._checked = -FRESH_S
        self._lock = threading.RLock()
        self._found: OrderedDict[str, dict[tuple[Path, int], Future[set[int]]]] = OrderedDict()
        self._searcher = ThreadPoolExecutor(1)
        self._recent: OrderedDict[tuple[Path, int], pa.Table] = OrderedDict()

    @property
    def table(self) -> pa.Table:
        """The current table."""
        with self._lock:
            if time.monotonic() - self._checked >= FRESH_S:
                self._refresh()
                self._checked = time.monotonic()
            return self._table

    def _refresh(self) -> None:
        # Journals before parts: a batch that is published in between is then taken from its part.
        done = dict(self.run_dir.journals("done"))
        parts = [part for table in ATTEMPTS for part in self.run_dir.parts(table)]
        published = {stem_of(part) for part in parts}
        new = [part for part in parts if part not in self._sources]
        with ThreadPoolExecutor(_READERS) as pool:
            read = dict(zip(new, pool.map(partial(_read_part, self.run_dir), new), strict=True))
        found = {part: read.get(part) or self._sources[part] for part in parts}
        for stem, path in done.items():
            if stem not in published:
                old = self._sources.get(path) or _Source(path, stem, _light([]))
                found[path] = _read_new_lines(old)
        if list(found.values()) != self._order:
            self._sources, self._order = found, list(found.values())
            self._table = _combine(self._order)

    def place(self, trajectory_id: str) -> tuple[Path, int, str]:
        """The file of a row, its position there, and the stem of its batch.

        Raises: StoreError when there is no such row.
        """
        table = self.table
        with self._lock:
            found = pc.index(table["trajectory_id"], trajectory_id).as_py()
            if found < 0:
                raise StoreError(f"{self.run_dir.path}: no trajectory {trajectory_id!r}")
            source = self._order[table["source"][found].as_py()]
            return source.path, table["at"][found].as_py(), source.stem

    def row(self, trajectory_id: str) -> dict[str, Any]:
        """A whole row, JSON columns as text. Raises: StoreError when it is gone."""
        path, at, _ = self.place(trajectory_id)
        with self._lock:
            kept = self._recent.pop((path, at), None)
        if kept is None:
            kept = _whole_row(self.run_dir, path, at)
        with self._lock:
            self._recent[path, at] = kept
            while len(self._recent) > 2:
                self._recent.popitem(last=False)
        row: dict[str, Any] = kept.to_pylist()[0]
        return row

    def related(self, table: str, trajectory_id: str, column: str) -> list[dict[str, Any]]:
        """Rows of another table that were published with a trajectory and name it in a column."""
        path, at, stem = self.place(trajectory_id)
        if path.suffix == ".parquet":
            wanted = [(column, "=", trajectory_id)]
            read = partial(pq.read_table, schema=schema_of(table), filters=wanted)
            try:
                found = self.run_dir.read_part(self.run_dir.part_path(table, stem), read)
            except FileNotFoundError:
                return []
            rows: list[dict[str, Any]] = found.to_pylist()
            return rows
        line = _line_at(path, at)
        return [r for t, r in rows_of(line) if t == table and r.get(column) == trajectory_id]

    def search(
        self, text: str, chosen: pa.Table, seconds: float
    ) -> tuple[np.ndarray[Any, Any], int]:
        """Find a text in the messages, errors and grading output of some rows.

        Args:
            text: what to find; capitals do not matter.
            chosen: rows of the table.
            seconds: how long to wait. The search continues in a thread, until another text is
                searched; what was found is kept for the next call.

        Returns: which rows contain it, and how many rows were not searched yet.
        """
        sources, places = chosen["source"].to_numpy(), chosen["at"].to_numpy()
        pieces: list[tuple[_Rows, Future[set[int]]]] = []
        with self._lock:
            order, found = self._order, self._searches(text.casefold())
            for number in np.unique(sources):
                here = np.flatnonzero(sources == number)
                for start, stop, key in _groups_of(order[number]):
                    rows = here[(places[here] >= start) & (places[here] < stop)]
                    if rows.size and key not in found:
                        arguments = (self.run_dir, order[number], key[1], start, text)
                        found[key] = self._searcher.submit(_search_group, *arguments)
                    if rows.size:
                        pieces.append((rows, found[key]))
        wait([future for _, future in pieces], timeout=seconds)
        matches, left = np.zeros(len(chosen), dtype=bool), 0
        for rows, future in pieces:
            if future.done() and not future.cancelled():
                matches[rows] = np.isin(places[rows], list(future.result()))
            else:
                left += rows.size
        return matches, left

    def close(self) -> None:
        """End a search."""
        self._searcher.shutdown(cancel_futures=True)

    def _searches(self, text: str) -> dict[tuple[Path, int], Future[set[int]]]:
        """The searches for a text by piece of a file; those for other texts end."""
        for other, futures in self._found.items():
            if other != text:
                for key in [key for key, future in futures.items() if future.cancel()]:
                    del futures[key]
        found = self._found.setdefault(text, {})
        self._found.move_to_end(text)
        while len(self._found) > _QUERIES_KEPT:
            self._found.popitem(last=False)
        return found


def _light(rows: list[_Row], places: list[int] | None = None) -> pa.Table:
    """The columns of the index for lines of a `done` file."""
    schema = schema_of("trajectories")
    columns = {n: pa.array([getattr(r, n) for r in rows], _plain_type(schema, n)) for n in _PLAIN}
    for name in _USAGE:
        columns[name] = pa.array([getattr(row.usage, name) for row in rows], pa.int64())
    columns["total_s"] = pa.array([row.timing.total_s for row in rows], pa.float64())
    errors = [sum(one.errors for one in row.tool_stats) for row in rows]
    columns["tool_errors"] = pa.array(errors, pa.int64())
    return _finished(pa.table(columns), places or [])


def _plain_type(schema: pa.Schema, name: str) -> pa.DataType:
    kind = schema.field(name).type
    return pa.int64() if pa.types.is_timestamp(kind) else kind


def _finished(table: pa.Table, places: Any) -> pa.Table:
    """Times as numbers, long errors cut, and the place of each row."""
    started = table["started_at"].cast(pa.int64())
    table = table.set_column(table.schema.get_field_index("started_at"), "started_at", started)
    error = pc.utf8_slice_codeunits(table["error"], 0, _ERROR_CHARS)
    table = table.set_column(table.schema.get_field_index("error"), "error", error)
    return table.append_column("at", pa.array(places, pa.int64()))


def _read_part(run_dir: RunDir, part: Path) -> _Source:
    try:
        with run_dir.read_part(part, pq.ParquetFile) as file:
            table = file.read(columns=list(_READ))
            every = range(file.num_row_groups)
            groups = tuple(file.metadata.row_group(n).num_rows for n in every)
        columns = {name: table[name] for name in _PLAIN}
        for name in _USAGE:
            columns[name] = pc.struct_field(table["usage"], name)
        columns["total_s"] = pc.struct_field(table["timing"], "total_s")
        columns["tool_errors"] = _sums(table["tool_stats"], "errors")
    except (OSError, pa.ArrowException, KeyError) as error:
        why = str(error).partition("\n")[0].rstrip(".")
        fix = f"See hermes-rl check {run_dir.path}"
        raise StoreError(f"{part} cannot be read: {why}. {fix}") from error
    return _Source(part, stem_of(part), _finished(pa.table(columns), range(len(table))), groups)


def _sums(lists: pa.ChunkedArray, field: str) -> pa.Array:
    """The sum of a field of each list of structs."""
    lists = lists.combine_chunks()
    values = pc.struct_field(pc.list_flatten(lists), field)
    owners = pc.list_parent_indices(lists)
    sums = np.bincount(owners.to_numpy(), values.to_numpy(), minlength=len(lists))
    return pa.array(sums.astype(np.int64))


def _read_new_lines(old: _Source) -> _Source:
    """A `done` file with the lines that were appended since; the same object without any."""
    try:
        with old.path.open("rb") as file:
            file.seek(old.read)
            data = file.read()
    except FileNotFoundError:  # published meanwhile
        return old
    rows, places, at = [], [], old.read
    for line in data.splitlines(keepends=True):
        payload = decode_line(line)
        if payload is None and not line.endswith(b"\n"):
            break  # still being written
        row = _decode_line(payload).row if payload is not None else None
        if row is not None:
            rows.append(row)
            places.append(at)
        at += len(line)
    if at == old.read:
        return old
    return _Source(old.path, old.stem, pa.concat_tables([old.rows, _light(rows, places)]), read=at)


def _combine(sources: list[_Source]) -> pa.Table:
    tables = [
        one.rows.append_column("source", pa.array(np.full(len(one.rows), n, np.int32)))
        for n, one in enumerate(sources)
    ]
    empty = _light([]).append_column("source", pa.array([], pa.int32()))
    return pa.concat_tables(tables or [empty]).combine_chunks()


def _whole_row(run_dir: RunDir, path: Path, at: int) -> pa.Table:
    if path.suffix != ".parquet":
        (row,) = (r for t, r in rows_of(_line_at(path, at)) if t in ATTEMPTS)
        return to_arrow([row], schema_of("trajectories"))
    try:
        with run_dir.read_part(path, pq.ParquetFile) as file:
            for group in range(file.num_row_groups):
                count = file.metadata.row_group(group).num_rows
                if at < count:
                    return _read_one(file, group, at)
                at -= count
    except (OSError, pa.ArrowException) as error:
        raise StoreError(f"{path} cannot be read: {error}. See hermes-rl check") from error
    raise StoreError(f"{path} has changed. Reload the page")


def _read_one(file: pq.ParquetFile, group: int, at: int) -> pa.Table:
    """One row of a row group, which is decoded in steps: all of it may need much memory."""
    for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, row_groups=[group]):
        if at < len(batch):
            # A copy: a slice would keep its whole batch in memory.
            return pa.Table.from_batches([batch]).take([at])
        at -= len(batch)
    raise StoreError("a row group is shorter than its metadata")


def _line_at(path: Path, at: int) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            file.seek(at)
            payload = decode_line(file.readline())
    except FileNotFoundError:
        payload = None
    if payload is None:
        raise StoreError(f"{path}: the row was published meanwhile. Reload the page")
    line: dict[str, Any] = msgspec.json.decode(payload)
    return line


def _groups_of(source: _Source) -> Iterator[tuple[int, int, tuple[Path, int]]]:
    """First position, end and key of each piece of a file that is searched at once."""
    if not source.published:
        for at in source.rows["at"].to_pylist():
            yield at, at + 1, (source.path, at)
        return
    start = 0
    for group, rows in enumerate(source.groups):
        yield start, start + rows, (source.path, group)
        start += rows


def _search_group(run_dir: RunDir, source: _Source, group: int, start: int, text: str) -> set[int]:
    """The positions of the rows that contain a text."""
    names = ["messages", "error", "rewards"]
    found: set[int] = set()
    try:
        if not source.published:
            table = _whole_row(run_dir, source.path, start).select(names)
            return _search_rows(table, start, text)
        with run_dir.read_part(source.path, pq.ParquetFile) as file:
            for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=names):
                found |= _search_rows(pa.Table.from_batches([batch]), start, text)
                start += len(batch)
    except (OSError, pa.ArrowException) as error:
        raise StoreError(f"{source.path} cannot be read: {error}. See hermes-rl check") from error
    except StoreError:  # published meanwhile; its part is searched the next time
        pass
    return found


def _search_rows(table: pa.Table, start: int, text: str) -> set[int]:
    found: set[int] = set()
    lists = table["messages"].combine_chunks()
    texts = pc.list_flatten(lists)
    texts = texts.storage if isinstance(texts, pa.ExtensionArray) else texts
    pattern = dumps(text, ensure_ascii=False)[1:-1]
    likely = pc.indices_nonzero(pc.match_substring(texts, pattern, ignore_case=True)).to_numpy()
    owners = pc.list_parent_indices(lists).to_numpy()
    wanted = text.casefold()
    for index in likely:  # the names of fields match too
        row = int(owners[index])
        if row not in found and _contains(msgspec.json.decode(texts[int(index)].as_py()), wanted):
            found.add(row)
    details = table["rewards"].combine_chunks()
    printed = pc.struct_field(pc.list_flatten(details), "detail")
    hits = pc.indices_nonzero(pc.match_substring(printed, text, ignore_case=True)).to_numpy()
    found |= {int(row) for row in pc.list_parent_indices(details).to_numpy()[hits]}
    hits = pc.match_substring(table["error"].combine_chunks(), text, ignore_case=True)
    found |= {int(row) for row in pc.indices_nonzero(hits).to_numpy()}
    return {start + row for row in found}


def _contains(value: Any, wanted: str) -> bool:
    if isinstance(value, str):
        return wanted in value.casefold()
    if isinstance(value, dict):
        return any(_contains(one, wanted) for key, one in value.items() if key != "role")
    return isinstance(value, list) and any(_contains(one, wanted) for one in value)
