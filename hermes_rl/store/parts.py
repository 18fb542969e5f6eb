"""Parquet parts: rows as Arrow tables, written to tmp/ and published by rename.

Arrays are built from buffers, because pyarrow's own conversion of Python objects imports pandas:
0.2 s of CPU and 30 MB in every worker. This one is as fast per value and supports the types of our
schemas. Integers in a column of floats are rounded; values of other types are refused.

Rows are converted in small steps, so that the interpreter lock is never held for long.
"""

from __future__ import annotations

from array import array
from base64 import b64decode
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hermes_rl.errors import StoreError
from hermes_rl.store.files import disk_errors

_NUMBERS = {
    "int8": "b",
    "int32": "i",
    "int64": "q",
    "timestamp[us, tz=UTC]": "q",
    "float": "f",
    "double": "d",
}
"""Type codes of `array`, by the name of the Arrow type."""


def table_of(rows: Sequence[dict[str, Any]], schema: Any) -> Any:
    """Build a table with a schema from rows; missing values are null.

    Raises: TypeError, ValueError or OverflowError for values that do not fit their column.
    """
    return pa.Table.from_arrays(_fields_of(rows, schema), schema=schema)


def array_of(values: Sequence[Any], kind: Any) -> Any:
    """Build an array. Times are microseconds since 1970. Raises: as `table_of`."""
    if isinstance(kind, pa.JsonType):
        return pa.ExtensionArray.from_storage(kind, array_of(values, kind.storage_type))
    if pa.types.is_struct(kind):
        _check_types(values, dict)
        rows: list[dict[str, Any]] = [{} if v is None else v for v in values]
        return _build_array(kind, values, [], _fields_of(rows, kind))
    if pa.types.is_list(kind):
        _check_types(values, list, tuple)
        children = [array_of([*chain.from_iterable(v for v in values if v)], kind.value_type)]
        return _build_array(kind, values, [_offsets(values)], children)
    if pa.types.is_null(kind):
        _check_types(values)
        return pa.nulls(len(values))
    return _build_array(kind, values, _value_buffers(values, kind))


def _fields_of(rows: Sequence[dict[str, Any]], fields: Any) -> list[Any]:
    """One array for each field."""
    named = [(field.name, field.type) for field in fields]
    return [array_of([row.get(name) for row in rows], kind) for name, kind in named]


def _value_buffers(values: Sequence[Any], kind: Any) -> list[Any]:
    """The buffers of a type without children, except for validity."""
    if kind == pa.string():
        _check_types(values, str)
        texts = [b"" if v is None else v.encode() for v in values]
        return [_offsets(texts), pa.py_buffer(b"".join(texts))]
    if kind == pa.binary():
        _check_types(values, bytes)
        return [_offsets(values), pa.py_buffer(b"".join(v for v in values if v))]
    if kind == pa.bool_():
        _check_types(values, bool)
        return [_bits(values)]
    code = _NUMBERS.get(str(kind))
    if code is None:
        raise TypeError(f"arrays of {kind} are not supported")
    _check_types(values, *((int, float, bool) if code in "fd" else (int,)))
    return [pa.py_buffer(array(code, [0 if v is None else v for v in values]))]


def _build_array(
    kind: Any, values: Sequence[Any], buffers: list[Any], children: list[Any] | None = None
) -> Any:
    validity = _bits([v is not None for v in values]) if None in values else None
    return pa.Array.from_buffers(kind, len(values), [validity, *buffers], children=children)


def _check_types(values: Sequence[Any], *kinds: type) -> None:
    """Raises: TypeError for a value of another type, except None."""
    others = {*map(type, values)} - {*kinds, type(None)}
    if others:
        raise TypeError(f"{others.pop().__name__} is not one of {kinds}")


def _offsets(values: Sequence[Any]) -> Any:
    """The start of each value, and the end of the last one."""
    lengths = (len(v) if v else 0 for v in values)
    return pa.py_buffer(array("i", accumulate(lengths, initial=0)))


def _bits(values: Sequence[Any]) -> Any:
    """One bit per value, starting with the lowest."""
    digits = "".join(["1" if v else "0" for v in reversed(values)])
    return pa.py_buffer(int(digits or "0", 2).to_bytes((len(values) + 7) // 8, "little"))


ROW_GROUP_BYTES = 64 * 1024 * 1024
"""Maximum Arrow data in a row group (a larger single row gets its own)."""

STEP_BYTES = 2 * 1024 * 1024
"""JSON that is converted in one step."""


class PartWriter:
    """Writes rows to a temporary Parquet file. Blocking: for threads.

    Args:
        strict: refuse a row with a value that does not fit its column; see `to_arrow`.

    Raises: DiskFull from every method; StoreError for a refused row.
    """

    def __init__(self, path: Path, schema: Any, *, strict: bool = False) -> None:
        self.path = path
        self.rows = 0
        self._schema, self._strict = schema, strict
        self._step: list[dict[str, Any]] = []
        self._step_size = 0
        self._tables: list[Any] = []
        self._bytes = 0
        with disk_errors():
            self._writer = pq.ParquetWriter(path, schema, compression="zstd", compression_level=3)

    def add(self, row: dict[str, Any], size: int) -> None:
        """Add one row; `size` is about its bytes as JSON."""
        self.rows += 1
        self._step.append(row)
        self._step_size += size
        if self._step_size >= STEP_BYTES:
            self._convert()

    def close(self, crash: Callable[[str], None] = lambda name: None) -> None:
        """Write the remaining rows and the footer."""
        self._convert()
        self._write()
        crash("publish-7-half")
        with disk_errors():
            self._writer.close()

    def abandon(self) -> None:
        """Remove the file unless it was published."""
        with suppress(OSError):
            self._writer.close()
        self.path.unlink(missing_ok=True)

    def _convert(self) -> None:
        if not self._step:
            return
        table = to_arrow(self._step, self._schema, strict=self._strict)
        self._step, self._step_size = [], 0
        if self._bytes + table.nbytes > ROW_GROUP_BYTES:
            self._write()
        self._tables.append(table)
        self._bytes += table.nbytes

    def _write(self) -> None:
        if not self._tables:
            return
        group = pa.concat_tables(self._tables)
        self._tables, self._bytes = [], 0
        with disk_errors():
            self._writer.write_table(group, row_group_size=group.num_rows)


def to_arrow(rows: list[dict[str, Any]], schema: Any, *, strict: bool = False) -> Any:
    """Build a table with a schema from the rows of `done` lines.

    A value that does not fit its column (an integer beyond 64 bits) becomes null and is named in
    `error`, since one row must not prevent the publishing of a batch. Raises: StoreError instead,
    if `strict`.
    """
    columns = [_to_columns(row) for row in rows]
    try:
        return table_of(columns, schema)
    except _MISFIT:  # other rows keep all values
        fitted = (_fitted(row, schema, strict=strict) for row in columns)
        return pa.concat_tables([table_of([row], schema) for row in fitted])


_MISFIT = (TypeError, ValueError, OverflowError)


def _fitted(row: dict[str, Any], schema: Any, *, strict: bool) -> dict[str, Any]:
    misfits = [field.name for field in schema if not _fits(row.get(field.name), field.type)]
    if not misfits:
        return row
    if strict:
        raise StoreError(f"a value does not fit its column: {', '.join(misfits)}")
    note = f"store: {', '.join(misfits)} did not fit the column"
    error = f"{row['error']}; {note}" if row.get("error") else note
    return {**row, **dict.fromkeys(misfits), "error": error}


def _fits(value: Any, kind: Any) -> bool:
    try:
        array_of([value], kind)
    except _MISFIT:
        return False
    return True


def _to_columns(row: dict[str, Any]) -> dict[str, Any]:
    """Convert a journal row to columns: metrics as pairs, image bytes from base64."""
    out = row
    if isinstance(row.get("metrics"), dict):
        out = {**row, "metrics": [{"name": k, "value": v} for k, v in row["metrics"].items()]}
    if row.get("image_data"):
        images = [
            {**i, "bytes": None if i["bytes"] is None else b64decode(i["bytes"])}
            for i in row["image_data"]
        ]
        out = {**out, "image_data": images}
    return out
