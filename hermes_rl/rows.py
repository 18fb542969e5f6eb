"""Rows of a dataset whose task is made only when it is needed.

A resume asks a million rows for their identity and runs a few of them, so the identity is found
without making a `Task`: a line of JSON is decoded with its floats in canonical form and encoded
again with sorted keys. Whatever is unusual about a row goes the long way through `parse_row`, whose
hash is the same by definition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from hermes_rl.errors import TaskFault
from hermes_rl.identity import canonical, canonical_float, digest, encoded_digest
from hermes_rl.tasks import Columns, RawRow, TaskRow, renamed, task_row

_decode = msgspec.json.Decoder(dict, float_hook=lambda t: canonical_float(float(t))).decode


class LazyRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One row, with the identity that its `TaskRow` will have."""

    index: int
    """0-based position in the dataset."""
    place: str
    """Where a person finds it."""
    task_hash: str
    repeats: int | None
    """The row's own, when it has any; only with `quick`."""
    quick: bool
    """False when the row was parsed already, or nothing but the hash is sure."""
    raw: RawRow
    columns: Columns

    def parse(self) -> TaskRow:
        """The task, or why it is none."""
        return task_row(self.raw, self.index, self.place, self.columns)


def lazy_rows(rows: Iterable[tuple[RawRow, str]], columns: Columns) -> Iterator[LazyRow]:
    """Lazy rows from (row, place) pairs."""
    for index, (raw, place) in enumerate(rows):
        found = _of_line(raw, columns) if type(raw) is bytes else _of_mapping(raw, columns)
        if found is None:
            task_hash, repeats = task_row(raw, index, place, columns).task_hash, None
        else:
            task_hash, repeats = found
        yield LazyRow(
            index=index,
            place=place,
            task_hash=task_hash,
            repeats=repeats,
            quick=found is not None,
            raw=raw,
            columns=columns,
        )


def _of_line(line: bytes, columns: Columns) -> tuple[str, int | None] | None:
    """Hash and repeats of a row as a JSON line; None when the long way must be gone."""
    try:
        row = _decode(line)
        if columns:
            row = renamed(row, columns)
        repeats = _take_unhashed(row)
        return encoded_digest(row), repeats
    except (TaskFault, ValueError, TypeError, OverflowError, RecursionError):
        return None  # msgspec's errors are ValueErrors


def _of_mapping(raw: RawRow, columns: Columns) -> tuple[str, int | None] | None:
    """The same for a row that is decoded already."""
    if not isinstance(raw, Mapping):
        return None
    try:
        row = renamed(raw, columns)
        repeats = _take_unhashed(row)
        return digest(row), repeats
    except (TaskFault, ValueError, TypeError, OverflowError, RecursionError):
        return None


def _take_unhashed(row: dict[str, Any]) -> int | None:
    """Take what the hash leaves out from a row: absent values, the oracle and the repeats.

    Returns the repeats. Raises: TaskFault for what `parse_row` is to judge.
    """
    row.pop("oracle", None)
    given = row.pop("repeats", None)
    if None in row.values():
        for name in [k for k, v in row.items() if v is None]:
            del row[name]
    if given is None:
        return None
    number = canonical(given)
    if type(number) is not int or number < 1:
        raise TaskFault("'repeats' must be a whole number of 1 or more")
    return number
