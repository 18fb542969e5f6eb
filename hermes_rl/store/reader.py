"""Reads a run directory, also during a run: published parts and unpublished rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hermes_rl.errors import StoreError, UserError
from hermes_rl.events import AttemptKey
from hermes_rl.input_errors import nearest_file
from hermes_rl.locks import try_lock
from hermes_rl.store.commit import (
    BatchSummary,
    Commit,
    part_faults,
    read_commit,
    read_commits,
    rows_of,
)
from hermes_rl.store.files import read_payloads
from hermes_rl.store.html import TrajectoryRow, facts_html
from hermes_rl.store.journal import Dispatched
from hermes_rl.store.ledger import Ledger, open_ledger
from hermes_rl.store.processes import ProcessId, read_holder
from hermes_rl.store.rundir import TABLES, RunDir, epoch_of, order_of, stem_of, url_of
from hermes_rl.store.snapshots import replaced_stems
from hermes_rl.store.stats import compute_stats, run_figures
from hermes_rl.text import many

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


OWNER_COLUMNS = ("task_id", "repeat", "attempt", "status", "unit_id", "trajectory_id")
"""Columns of the trajectory in each row of calls and messages."""

_TEXTS = ("content", "reasoning_content", "tool_calls", "tool_call_id")


def _explode(tables: Sequence[pa.Table], column: str) -> pd.DataFrame:
    """Turn a list of structs into rows with the `OWNER_COLUMNS` of their trajectory."""
    import pandas as pd
    import pyarrow as pa
    import pyarrow.compute as pc

    frames = []
    for table in tables:
        lists = table.column(column).combine_chunks()
        items = pa.Table.from_struct_array(pc.list_flatten(lists))
        owners = table.select(list(OWNER_COLUMNS)).take(pc.list_parent_indices(lists))
        frames.append(pd.concat([owners.to_pandas(), items.to_pandas()], axis=1))
    rows: pd.DataFrame = pd.concat(frames, ignore_index=True)
    return rows


class _Keyed(msgspec.Struct):
    """The key of a `done` line; derived rows have none."""

    key: AttemptKey | None = None


_decode_done = msgspec.json.Decoder(_Keyed).decode
_decode_dispatch = msgspec.json.Decoder(Dispatched).decode


def find_driver(run_dir: RunDir) -> ProcessId | None:
    """The process that drives a run; None when none does."""
    try:
        fd = os.open(run_dir.path / "LOCK", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return None if try_lock(fd, shared=True) else read_holder(fd)
    finally:
        os.close(fd)


def in_flight(run_dir: RunDir) -> set[AttemptKey]:
    """Attempts of the newest epoch that were sent and have no durable end. Reads its commits."""
    epochs = run_dir.epochs()
    if not epochs:
        return set()
    driver = f"{epochs[-1]}-driver"
    sent = _keys(run_dir.journals("dispatch", driver), _decode_dispatch)
    # Journals before commits: an attempt that is published meanwhile is in one of the two.
    sent -= _keys(run_dir.journals("done"), _decode_done)
    for commit in read_commits(run_dir, lambda stem: epoch_of(stem) != epochs[-1]):
        sent -= {outcome.key for outcome in commit.keys.outcomes()}
    return sent


def _keys(
    files: Iterable[tuple[str, Path]], decode: Callable[[bytes], _Keyed | Dispatched]
) -> set[AttemptKey]:
    """The attempts in files; files that are removed meanwhile are skipped."""
    found: set[AttemptKey] = set()
    for _, path in files:
        with suppress(FileNotFoundError):
            found |= {key for line in read_payloads(path) if (key := decode(line).key) is not None}
    return found


_loads = msgspec.json.decode


class _Planned(msgspec.Struct):
    plan: dict[str, int | None]


_decode_planned = msgspec.json.Decoder(_Planned).decode


def load_run(path: str | Path, *, pending: bool = True, verify: bool = False) -> Run:
    """Open a run directory for analysis.

    Args:
        path: the run directory, which may be in use; or a URL, of which an up-to-date copy is
            fetched into the cache of this user.
        pending: include rows that are finished but not published yet.
        verify: compare every committed Parquet file with its sha256 first, which reads all of them.

    Raises: UserError when there is no run; StoreError when it is of a newer version, a file at the
    URL is damaged, or, with `verify`, a file is missing or is not what was committed.
    """
    if url_of(path):
        from hermes_rl.store.remote import local_run  # few runs are at URLs

        path = local_run(path)
    run_dir = RunDir(path)
    epochs = run_dir.epochs()
    if not epochs:
        near = None if run_dir.path.exists() else nearest_file(run_dir.path)
        instead = f" (did you mean '{run_dir.path.with_name(near)}'?)" if near else ""
        raise UserError(
            f"{path} is not a run directory (no epochs/){instead}. Give the path of a run"
        )
    if verify:
        seen: set[Path] = set()
        for commit in (read_commit(run_dir, stem) for stem in run_dir.commit_stems()):
            for place, fault in part_faults(run_dir, commit, seen):
                raise StoreError(f"{place} {fault}. See hermes-rl check {path}")
    return Run(run_dir, pending=pending, max_attempts=run_dir.epoch(epochs[-1]).max_attempts)


class Run:
    """One run: pandas frames with decoded JSON columns, Arrow tables, ledger and statistics.

    Frames are read at the first use and cached; call `load_run` again for newer rows.
    """

    def __init__(self, run_dir: RunDir, *, pending: bool = True, max_attempts: int = 3) -> None:
        self.run_dir = run_dir
        self.path = run_dir.path
        self._pending = pending
        self._max_attempts = max_attempts

    def __repr__(self) -> str:
        return f"<Run {self.path}: {self.ledger.done} done, {self.ledger.given_up} given up>"

    def _repr_html_(self) -> str:
        return facts_html(str(self.path), run_figures(self.stats))

    def trajectory(self, wanted: str) -> TrajectoryRow:
        """One attempt; in a notebook, the value of a cell shows it turn by turn.

        Args:
            wanted: the beginning of a unit's or trajectory's id, or TASK, or TASK#REPEAT. Of
                several attempts, a finished one is taken, else the last.

        Raises: UserError when there is none.
        """
        task, _, repeat = wanted.rpartition("#")
        names = ("unit_id", "trajectory_id", "task_id", "repeat", "attempt")
        for table in ("trajectories", "failures"):
            rows = [
                row
                for row in self.arrow(table, names).to_pylist()
                if row["unit_id"].startswith(wanted)
                or row["trajectory_id"].startswith(wanted)
                or row["task_id"] == wanted
                or (row["task_id"] == task and str(row["repeat"]) == repeat)
            ]
            if rows:
                last = max(rows, key=lambda row: row["attempt"])
                return self._whole_row(table, last["trajectory_id"])
        raise UserError(f"{self.path}: no attempt {wanted!r}. `hermes-rl show` lists them")

    def _whole_row(self, table: str, trajectory_id: str) -> TrajectoryRow:
        import pyarrow.compute as pc

        from hermes_rl.store.schema import schema_of

        for batch in self.batches(table, schema_of(table).names, 64):
            for row in batch.filter(pc.equal(batch["trajectory_id"], trajectory_id)).to_pylist():
                return TrajectoryRow(decode_row(row))
        raise StoreError(f"{self.path}: {trajectory_id} is gone. See hermes-rl check {self.path}")

    @cached_property
    def trajectories(self) -> pd.DataFrame:
        """One row per finished unit."""
        return self.frame("trajectories")

    @cached_property
    def failures(self) -> pd.DataFrame:
        """One row per attempt that did not finish its unit."""
        return self.frame("failures")

    @cached_property
    def subagents(self) -> pd.DataFrame:
        """Transcripts of sub-agents."""
        return self.frame("subagents")

    @cached_property
    def segments(self) -> pd.DataFrame:
        """Token-exact training segments."""
        return self.frame("segments")

    @cached_property
    def groups(self) -> pd.DataFrame:
        """One row per group: rewards, statistics and advantages of the repeats of one task.

        Only the newest row of each group.
        """
        return _keep_newest(self.frame("groups"), ["group_id"])

    @cached_property
    def grades(self) -> pd.DataFrame:
        """One row per regraded rollout and grader."""
        return _keep_newest(self.frame("grades"), ["trajectory_id", "grade_id"])

    @cached_property
    def deliveries(self) -> pd.DataFrame:
        """What became of each group of a live run: acknowledged, rejected or skipped.

        Only the newest row of each group.
        """
        return _keep_newest(self.frame("deliveries"), ["group_id"])

    @cached_property
    def calls(self) -> pd.DataFrame:
        """One row per model call of all attempts, in order within each attempt."""
        return _explode(self._attempts(), "calls")

    @cached_property
    def messages(self) -> pd.DataFrame:
        """One row per message of all attempts: `message_info` and the parts of the message.

        `position` counts from 0 within the trajectory.
        """
        tables = self._attempts()
        frame = _explode(tables, "message_info")
        frame.insert(len(OWNER_COLUMNS), "position", frame.groupby("trajectory_id").cumcount())
        rows = [row for table in tables for row in table.column("messages").to_pylist()]
        messages = [_loads(text) for row in rows for text in row]
        for name in _TEXTS:
            frame[name] = [message.get(name) for message in messages]
        return frame

    @cached_property
    def runs(self) -> pd.DataFrame:
        """One row for this run, to be concatenated with those of other runs."""
        import pandas as pd

        stats = self.stats
        attempts = [t.select(["run_id", "model"]).slice(0, 1) for t in self._attempts()]
        rows: list[dict[str, Any]] = [row for table in attempts for row in table.to_pylist()]
        first = rows[0] if rows else {}
        row = {
            "run": self.path.name,
            "run_id": first.get("run_id"),
            "model": first.get("model"),
            "units": stats["plan"].get("units"),
            **{name: stats["units"][name] for name in ("done", "given_up")},
            "graded": stats["reward"]["graded"],
            "solved": stats["reward"]["solved"],
            "mean_reward": stats["reward"]["mean"],
            "failed_attempts": stats["attempts"]["failed"],
            "turns": stats["turns"],
            "calls": stats["calls"]["total"],
            "unknown_calls": stats["calls"]["unknown"],
            **{name: stats["tokens"][name] for name in ("input_tokens", "output_tokens")},
            "cost_usd": stats["cost_usd"],
            "unpriced_calls": stats["calls"]["unpriced"],
        }
        return pd.DataFrame([row])

    def _attempts(self) -> list[pa.Table]:
        return [self.arrow("trajectories"), self.arrow("failures")]

    def frame(self, table: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """A table (or some columns) as a pandas frame, JSON columns decoded to Python values."""
        frame = _in_pandas(self.arrow(table, columns))
        for name, decode in _DECODERS.items():
            if name in frame.columns:
                try:
                    frame[name] = [None if v is None else decode(v) for v in frame[name]]
                except msgspec.DecodeError as error:
                    raise self._unreadable(f"{name} of {table}", error) from error
        return frame

    def arrow(self, table: str, columns: Sequence[str] | None = None) -> pa.Table:
        """A table as Arrow with the declared schema, JSON columns as text, in the order of writing.

        Args:
            table: trajectories, failures, subagents, segments, groups, grades or deliveries.
            columns: read only these; default all.

        Raises: UserError for an unknown table; StoreError for a file that cannot be read.
        """
        if table not in TABLES:
            raise UserError(f"no table {table!r}; choose one of {', '.join(TABLES)}")
        import pyarrow as pa
        import pyarrow.parquet as pq

        from hermes_rl.store.schema import empty_table, schema_of

        schema = schema_of(table)
        unpublished = self.unpublished([table])[table]
        names = schema.names if columns is None else list(columns)
        parts = self.run_dir.parts(table)
        merged = replaced_stems(self.run_dir, parts) if unpublished else ()
        found = {s: rows.select(names) for s, rows in unpublished.items() if s not in merged}
        for part in parts:
            try:
                read = partial(pq.read_table, schema=schema, columns=names)
                found[stem_of(part)] = self.run_dir.read_part(part, read)
            except (OSError, pa.ArrowException) as error:
                raise self._unreadable(part.name, error) from error
        tables = [found[stem] for stem in sorted(found, key=order_of)]
        return pa.concat_tables(tables) if tables else empty_table(schema).select(names)

    def batches(self, table: str, columns: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
        """The rows of `arrow` in steps, in the order of writing: memory does not follow the run.

        Args:
            rows: of a step, at most.

        Raises: StoreError for a file that cannot be read.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        unpublished = self.unpublished([table])[table]
        parts = {stem_of(part): part for part in self.run_dir.parts(table)}
        merged = replaced_stems(self.run_dir, [*parts.values()]) if unpublished else set()
        for stem in sorted({*unpublished, *parts} - merged, key=order_of):
            if stem not in parts:
                yield from unpublished[stem].select(list(columns)).to_batches(rows)
                continue
            try:
                with self.run_dir.read_part(parts[stem], pq.ParquetFile) as file:
                    yield from file.iter_batches(rows, columns=list(columns))
            except (OSError, pa.ArrowException) as error:
                raise self._unreadable(parts[stem].name, error) from error

    def _unreadable(self, what: str, error: Exception) -> StoreError:
        why = str(error).partition("\n")[0].rstrip(".")
        return StoreError(
            f"{self.path}: {what} cannot be read: {why}. See hermes-rl check {self.path}"
        )

    def unpublished(self, tables: Sequence[str]) -> dict[str, dict[str, pa.Table]]:
        """Rows that are finished but not published yet: table -> stem -> rows.

        Call this before listing parts, since a batch may be published in between.
        """
        return _pending_rows(self.run_dir, tables) if self._pending else {t: {} for t in tables}

    @cached_property
    def ledger(self) -> Ledger:
        """Dispositions of all units, from committed and from unpublished batches."""
        ledger = open_ledger(self.run_dir, self._max_attempts)
        ledger.load(self._batches(ledger.covers))
        return ledger

    def _batches(self, skip: Callable[[str], bool]) -> Iterator[Commit]:
        # Journals first: a batch that is published meanwhile is in both places.
        unpublished = _pending_batches(self.run_dir) if self._pending else {}
        for commit in read_commits(self.run_dir, skip):
            unpublished.pop(commit.stem, None)
            yield commit
        yield from (batch for stem, batch in unpublished.items() if not skip(stem))

    @cached_property
    def stats(self) -> dict[str, Any]:
        """The content of stats.json, computed from the same batches as the ledger."""
        return compute_stats(self.ledger.summary, self.ledger, self._plan())

    @property
    def unfinished(self) -> str | None:
        """What a reader of its scores must know of a run that is not complete; None if it is."""
        left = self.stats["units"]["open"]
        unknown = "how many units are still open is unknown"
        return unknown if left is None else f"{many(left, 'unit')} still open" if left else None

    def _plan(self) -> Mapping[str, Any]:
        try:
            return _decode_planned(self.run_dir.storage.read("stats.json")).plan
        except (OSError, msgspec.DecodeError):  # missing, or damaged, which `check` reports
            return {"units": None}


def _in_pandas(table: pa.Table) -> pd.DataFrame:
    """Convert a table to a frame. Integers in lists and structs stay integers next to nulls."""
    import pyarrow as pa

    nested = [field.name for field in table.schema if pa.types.is_nested(field.type)]
    frame: pd.DataFrame = table.drop_columns(nested).to_pandas()
    for name in nested:
        frame[name] = table.column(name).to_pandas(integer_object_nulls=True)
    ordered: pd.DataFrame = frame[table.column_names]
    return ordered


def _keep_newest(frame: pd.DataFrame, key: list[str]) -> pd.DataFrame:
    """Keep the newest row of each key, in the order of writing."""
    return frame.drop_duplicates(key, keep="last").reset_index(drop=True)


def _pending_rows(run_dir: RunDir, tables: Sequence[str]) -> dict[str, dict[str, pa.Table]]:
    """Rows in `done` files, by table and stem.

    They are read before parts are listed: a batch that is published in between is then taken from
    its part.
    """
    from hermes_rl.store.parts import to_arrow
    from hermes_rl.store.schema import schema_of

    found: dict[str, dict[str, pa.Table]] = {table: {} for table in tables}
    for stem, lines in _pending_lines(run_dir):
        for table in tables:
            rows = [row for line in lines for name, row in rows_of(line) if name == table]
            if rows:
                found[table][stem] = to_arrow(rows, schema_of(table))
    return found


def _pending_batches(run_dir: RunDir) -> dict[str, Commit]:
    """Stem -> the commit that the batch of a `done` file will have, without parts."""
    found = {}
    for stem, lines in _pending_lines(run_dir):
        tally = BatchSummary()
        for line in lines:
            tally.add(line)
        found[stem] = tally.commit(stem)
    return found


def _pending_lines(run_dir: RunDir) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The lines of each `done` file, with the stem of its batch."""
    for stem, done in run_dir.journals("done"):
        with suppress(FileNotFoundError):  # published meanwhile
            yield stem, [_loads(payload) for payload in read_payloads(done, strict=False)]


def decode_metrics(pairs: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Convert a metrics column's pairs of name and value to a mapping."""
    return {pair["name"]: pair["value"] for pair in pairs}


def decode_row(row: dict[str, Any]) -> dict[str, Any]:
    """Decode the JSON columns of a row of a part or of a `done` line, as the frames have them."""
    text = {name for name, value in row.items() if name in _DECODERS and value is not None}
    if isinstance(row.get("metrics"), dict):
        text.discard("metrics")
    return {n: _DECODERS[n](value) if n in text else value for n, value in row.items()}


def _decode_sandbox(sandbox: Mapping[str, Any]) -> dict[str, Any]:
    limits = sandbox["limits"]
    return {**sandbox, "limits": None if limits is None else _loads(limits)}


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "messages": lambda texts: [_loads(text) for text in texts],
    "tools": _loads,
    "metrics": decode_metrics,
    "reward_metrics": lambda members: [decode_metrics(pairs) for pairs in members],
    "sampling": _loads,
    "metadata": _loads,
    "sandbox": _decode_sandbox,
}
