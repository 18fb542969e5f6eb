"""Checks a run directory: files, schemas, sums, and with `--secrets` texts that look like
secrets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hermes_rl.config import load_config, parse_config
from hermes_rl.errors import CAUSES, ENDINGS, UserError
from hermes_rl.leaks import Leak, find_leaks, leaks_of_row
from hermes_rl.store import (
    FOREIGN,
    LATER,
    TABLES,
    RunDir,
    decode_line,
    file_faults,
    schema_of,
    snapshot_of,
)
from hermes_rl.text import SECRETS

_ALWAYS = ("input_tokens", "output_tokens")
_TOKENS = (*_ALWAYS, "cache_read_tokens", "cache_write_tokens", "reasoning_tokens")


def faults_of(path: Path) -> list[str]:
    """Every fault of a run, one line each. The run may be in use.

    A merge may replace a file or record between two steps of the check, which then looks like a
    loss. What is found while one takes place must be found again.
    """
    run_dir, earlier = RunDir(path), None
    while True:
        before = snapshot_of(run_dir)
        found = list(_find_faults(run_dir))
        if not found or snapshot_of(run_dir) == before:
            return found
        if earlier is not None:
            return [fault for fault in found if fault in earlier]
        earlier = found


def _find_faults(run_dir: RunDir) -> Iterator[str]:
    bad = set()
    for place, fault in file_faults(run_dir):
        if fault != FOREIGN:
            bad.add(place)
        yield f"{place}: {fault}"
    yield from _config_faults(run_dir.path / "run.yaml")
    seen: dict[str, str] = {}
    for table in TABLES:
        for part in run_dir.parts(table):
            if part not in bad:
                yield from _part_faults(run_dir, part, seen)


def _config_faults(place: Path) -> Iterator[str]:
    try:
        if place.exists():
            parse_config(load_config(place), str(place))
        elif place.with_name("manifest.json").exists():
            yield f"{place}: is missing"
    except (UserError, ValueError, RecursionError) as error:
        message = str(error).partition("\n")[0]
        yield message if message.startswith(f"{place}") else f"{place}: {message}"


def _part_faults(run_dir: RunDir, part: Path, seen: dict[str, str]) -> Iterator[str]:
    """The faults of a part, including decoding errors."""
    try:
        yield from _row_faults_of(run_dir, part, seen)
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        yield f"{part}: cannot be read: {str(error).partition(chr(10))[0]}"


def _row_faults_of(run_dir: RunDir, part: Path, seen: dict[str, str]) -> Iterator[str]:
    table = part.parent.name
    with run_dir.read_part(part, pq.ParquetFile) as file:
        if not _has_declared_schema(table, file.schema_arrow):
            yield f"{part}: does not have the declared schema of {table}"
            return
        if table in ("segments", "groups", "grades", "deliveries"):
            return
        number = 0
        for batch in file.iter_batches(batch_size=64):
            for row in batch.to_pylist():
                for fault in row_faults(table, row, seen):
                    yield f"{part} row {number} ({row['task_id']} #{row['repeat']}): {fault}"
                number += 1


def _has_declared_schema(table: str, found: pa.Schema) -> bool:
    """Whether a part has the current schema of its table, or the one before columns were added."""
    declared = schema_of(table)
    later = LATER.get(table, ())
    before = pa.schema([field for field in declared if field.name not in later])
    return any(found.equals(form) is True for form in (declared, before))


def row_faults(table: str, row: dict[str, Any], seen: dict[str, str]) -> Iterator[str]:
    """The faults of one row: table, ending and usage."""
    if row["trajectory_id"] in seen:
        yield f"duplicate trajectory_id, also in {seen[row['trajectory_id']]}"
    seen[row["trajectory_id"]] = table
    if table == "trajectories" and (row["owner"] != "policy" or row["end_reason"] not in ENDINGS):
        yield f"owner {row['owner']}, end_reason {row['end_reason']}: not a row of this table"
    if table == "failures" and (row["reward"] is not None or row["cause"] not in CAUSES):
        yield f"reward {row['reward']}, cause {row['cause']}: not a row of this table"
    if len(row["messages"]) != len(row["message_info"]):
        yield "messages and message_info differ in length"
    yield from _usage_faults(row)


def _usage_known(call: dict[str, Any]) -> bool:
    return all(call[name] is not None for name in _ALWAYS)


def _usage_faults(row: dict[str, Any]) -> Iterator[str]:
    calls = row["calls"]
    refused = all(call["outcome"] == "refused" for call in calls)
    for name in _TOKENS:
        known = [call[name] for call in calls if call[name] is not None]
        nothing = 0 if refused and name in _ALWAYS else None  # refusals cost nothing
        total, wanted = row["usage"][name], sum(known) if known else nothing
        if total != wanted:
            yield f"usage.{name} is {total}, its calls have {wanted}"
    unknown = sum(call["outcome"] != "refused" and not _usage_known(call) for call in calls)
    if row["usage"]["unknown_calls"] != unknown:
        yield f"usage.unknown_calls is {row['usage']['unknown_calls']}, its calls have {unknown}"
    ids = [call["call_id"] for call in calls]
    if len(set(ids)) != len(ids):
        yield "a call is recorded twice"
    yield from _cost_faults(row)


def _cost_faults(row: dict[str, Any]) -> Iterator[str]:
    calls = [call for call in row["calls"] if call["outcome"] != "refused"]
    unpriced = sum(call["cost_usd"] is None for call in calls)
    if row["unpriced_calls"] != unpriced:
        yield f"unpriced_calls is {row['unpriced_calls']}, its calls have {unpriced}"
    if row["cost_usd"] is None:
        return
    if unpriced:
        yield "cost_usd is set although calls are unpriced"
        return
    total = sum(call["cost_usd"] for call in calls)
    if abs(row["cost_usd"] - total) > 1e-9 * max(1.0, total):
        yield f"cost_usd is {row['cost_usd']}, its calls have {total}"


_ROWS = 64
_TEXT = (".json", ".jsonl", ".yaml", ".html", ".txt", ".md")
_ROW_COLUMNS = ("task_id", "repeat", "trajectory_id", "group_id")
"""Columns that identify a row."""


def secrets_in(run: Path) -> Iterator[str]:
    """Each finding as one line: file, unit, column, form and a masked sample.

    Searched are the texts of all tables and all text files of the run directory, for the forms of
    known providers, and for the values that this process's environment has for keys: of variables
    that are named like secrets, and of those that the run names.
    """
    SECRETS.learn_environment()
    _learn_keys_of(run)
    searched = set[Path]()
    again = True
    while again:
        again = not searched  # a batch that is published during one listing may not be in it
        for path in sorted({*run.rglob("*")} - searched):
            searched.add(path)
            try:
                if path.suffix == ".parquet":
                    yield from _in_table(path)
                elif path.suffix in _TEXT and not path.is_dir():
                    yield from _in_text(path)
            except FileNotFoundError:  # published or merged meanwhile: its rows are in another file
                again = True


def count_workspace_archives(run: Path) -> int:
    """How many archives of workspaces there are, which are not searched."""
    return sum(1 for path in run.glob("workspaces/*") if path.suffix not in _TEXT)


def _learn_keys_of(run: Path) -> None:
    """Learn the keys that the run's configuration names, where they are set here."""
    from hermes_rl.models.providers import resolve_env_targets, resolve_targets_by_model

    try:
        config = parse_config(load_config(run / "run.yaml"), str(run / "run.yaml"))
        routes = [*resolve_targets_by_model(config).values(), *resolve_env_targets(config).values()]
    except (UserError, OSError, ValueError):  # reported by `check`
        return
    for place in (target.place for targets in routes for target in targets):
        for name in (*place.key_names, *place.variables):
            SECRETS.learn(name, os.environ.get(name, ""))


def _in_table(path: Path) -> Iterator[str]:
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            columns = [field.name for field in schema if _has_text(field.type)]
            row_columns = [name for name in _ROW_COLUMNS if name in schema.names]
            number = 0
            for batch in file.iter_batches(
                _ROWS, columns=list(dict.fromkeys([*row_columns, *columns]))
            ):
                for row in batch.to_pylist():
                    for column, leak in leaks_of_row(row):
                        unit = _unit(row)
                        yield f"{path} row {number} ({unit}) column {column}: {_shown(leak)}"
                    number += 1
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        yield f"{path}: cannot be read: {str(error).partition(chr(10))[0]}"


def _has_text(kind: Any) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _has_text(kind.storage_type)
    if pa.types.is_nested(kind):
        return any(_has_text(kind.field(n).type) for n in range(kind.num_fields))
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _unit(row: dict[str, Any]) -> str:
    if row.get("repeat") is not None:
        return f"{row['task_id']} #{row['repeat']}"
    return next((str(row[name]) for name in _ROW_COLUMNS if row.get(name) is not None), "no unit")


def _in_text(path: Path) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                unpacked = decode_line(line) or line  # of a journal
                for leak in find_leaks(unpacked.decode("utf-8", "replace")):
                    yield f"{path} line {number}: {_shown(leak)}"
    except FileNotFoundError:
        raise
    except OSError as error:
        yield f"{path}: cannot be read: {error.strerror}"


def _shown(leak: Leak) -> str:
    return f"{leak.kind}: {leak.sample}"
