"""`hermes-rl check RUN --secrets`: what looks like a secret in the texts of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hermes_rl.config import load_config, parse_config
from hermes_rl.errors import UserError
from hermes_rl.leaks import Leak, find_leaks, leaks_of_row
from hermes_rl.models.providers import resolve_env_targets, resolve_targets_by_model
from hermes_rl.text import SECRETS

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
    for path in sorted(run.rglob("*")):
        if path.suffix == ".parquet":
            yield from _in_table(path)
        elif path.suffix in _TEXT and path.is_file():
            yield from _in_text(path)


def unsearched(run: Path) -> int:
    """How many archives of workspaces there are, which are not searched."""
    return sum(1 for path in run.glob("workspaces/*") if path.suffix not in _TEXT)


def _learn_keys_of(run: Path) -> None:
    """Learn the keys that the run's configuration names, where they are set here."""
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
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, start=1):
                for leak in find_leaks(line):
                    yield f"{path} line {number}: {_shown(leak)}"
    except OSError as error:
        yield f"{path}: cannot be read: {error.strerror}"


def _shown(leak: Leak) -> str:
    return f"{leak.kind}: {leak.sample}"
