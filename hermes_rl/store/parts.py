"""Parquet parts: rows as Arrow tables, written whole in tmp/ and published by rename.

Arrays are made from buffers. pyarrow's own conversion of Python objects imports pandas first: 0.2 s
of CPU and 30 MB in every worker. This one takes about as long per value and knows only what our
schemas hold. It refuses what it does not know or what does not fit, and the caller takes pyarrow's
way. It accepts one thing more: a whole number in a column of floats becomes the nearest one.

Conversion goes in small steps, so that the interpreter's lock is never held for long beside a busy
event loop.
"""

from __future__ import annotations

import base64
import hashlib
from array import array
from collections.abc import Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hermes_rl.store.crash import CrashHook
from hermes_rl.store.files import disk_errors
from hermes_rl.store.schema import schema_of, storage_schema

_NUMBERS = {"int32": "i", "int64": "q", "timestamp[us, tz=UTC]": "q", "float": "f", "double": "d"}
"""Type codes of `array`, by the name of the Arrow type."""


def table_of(rows: Sequence[dict[str, Any]], schema: Any) -> Any:
    """A table of a schema from its rows; what a row lacks is null.

    Raises: TypeError, ValueError or OverflowError for what does not fit a column.
    """
    return pa.Table.from_arrays(_fields_of(rows, schema), schema=schema)


def array_of(values: Sequence[Any], kind: Any) -> Any:
    """One array. Times are microseconds since 1970. Raises: as `table_of`."""
    if isinstance(kind, pa.JsonType):
        return pa.ExtensionArray.from_storage(kind, array_of(values, kind.storage_type))
    if pa.types.is_struct(kind):
        _only(values, dict)
        there: list[dict[str, Any]] = [{} if v is None else v for v in values]
        return _made(kind, values, [], _fields_of(there, kind))
    if pa.types.is_list(kind):
        _only(values, list, tuple)
        children = [array_of([*chain.from_iterable(v for v in values if v)], kind.value_type)]
        return _made(kind, values, [_offsets(values)], children)
    return _made(kind, values, _content(values, kind))


def _fields_of(rows: Sequence[dict[str, Any]], fields: Any) -> list[Any]:
    """One array for each field."""
    named = [(field.name, field.type) for field in fields]
    return [array_of([row.get(name) for row in rows], kind) for name, kind in named]


def _content(values: Sequence[Any], kind: Any) -> list[Any]:
    """The buffers of a type without children, its validity left out."""
    if kind == pa.string():
        _only(values, str)
        texts = [b"" if v is None else v.encode() for v in values]
        return [_offsets(texts), pa.py_buffer(b"".join(texts))]
    if kind == pa.binary():
        _only(values, bytes)
        return [_offsets(values), pa.py_buffer(b"".join(v for v in values if v))]
    if kind == pa.bool_():
        _only(values, bool)
        return [_bits(values)]
    code = _NUMBERS.get(str(kind))
    if code is None:
        raise TypeError(f"no way to make an array of {kind}")
    _only(values, *((int, float) if code in "fd" else (int,)))
    return [pa.py_buffer(array(code, [0 if v is None else v for v in values]))]


def _made(
    kind: Any, values: Sequence[Any], buffers: list[Any], children: list[Any] | None = None
) -> Any:
    validity = _bits([v is not None for v in values]) if None in values else None
    return pa.Array.from_buffers(kind, len(values), [validity, *buffers], children=children)


def _only(values: Sequence[Any], *kinds: type) -> None:
    """Raises: TypeError for a value of another type, None apart."""
    strange = {*map(type, values)} - {*kinds, type(None)}
    if strange:
        raise TypeError(f"{strange.pop().__name__} where {kinds[0].__name__} belongs")


def _offsets(values: Sequence[Any]) -> Any:
    """Where each value begins and the last one ends."""
    lengths = (len(v) if v else 0 for v in values)
    return pa.py_buffer(array("i", accumulate(lengths, initial=0)))


def _bits(values: Sequence[Any]) -> Any:
    """One bit a value, the first one lowest."""
    digits = "".join(["1" if v else "0" for v in reversed(values)])
    return pa.py_buffer(int(digits or "0", 2).to_bytes((len(values) + 7) // 8, "little"))


ROW_GROUP_BYTES = 64 * 1024 * 1024
"""Of Arrow data in one row group, at most (a larger single row stands alone)."""

_STEP_BYTES = 2 * 1024 * 1024
"""Of JSON that is converted in one go."""


class PartWriter:
    """Writes the rows of one table to a temporary file. Blocking: for threads.

    Raises: DiskFull from every method.
    """

    def __init__(self, path: Path, table: str, crash: CrashHook) -> None:
        schema = schema_of(table)
        self.path = path
        self.rows = 0
        self._schema = schema
        self._crash = crash
        self._step: list[dict[str, Any]] = []
        self._step_size = 0
        self._tables: list[Any] = []
        with disk_errors():
            self._writer = pq.ParquetWriter(
                path, schema, compression="zstd", compression_level=3, store_schema=True
            )

    def add(self, row: dict[str, Any], size: int) -> None:
        """Add one row; `size` is about its bytes as JSON."""
        self.rows += 1
        self._step.append(row)
        self._step_size += size
        if self._step_size >= _STEP_BYTES:
            self._convert()

    def close(self) -> None:
        """Write the rest and the footer."""
        self._convert()
        self._write()
        self._crash("publish-7-half")
        with disk_errors():
            self._writer.close()

    def abandon(self) -> None:
        """Give the file up."""
        try:
            self._writer.close()
        except OSError:
            pass
        self.path.unlink(missing_ok=True)

    def _convert(self) -> None:
        if not self._step:
            return
        table = to_arrow(self._step, self._schema)
        self._step, self._step_size = [], 0
        if sum(t.nbytes for t in self._tables) + table.nbytes > ROW_GROUP_BYTES:
            self._write()
        self._tables.append(table)

    def _write(self) -> None:
        if not self._tables:
            return
        group = pa.concat_tables(self._tables)
        self._tables = []
        with disk_errors():
            self._writer.write_table(group, row_group_size=group.num_rows)


def to_arrow(rows: list[dict[str, Any]], schema: Any) -> Any:
    """A table of the declared schema from rows as they stand in a `done` line.

    A value that its column cannot hold (an integer beyond 64 bits) becomes null and `error` says
    so: one such row must never keep a batch from being published.
    """
    columns = [_columns(row) for row in rows]
    try:
        return table_of(columns, schema)
    except (TypeError, ValueError, OverflowError):  # a row is strange: the others lose nothing
        return pa.concat_tables([_alone(row, schema) for row in columns])


def _alone(row: dict[str, Any], schema: Any) -> Any:
    try:
        return table_of([row], schema)
    except (TypeError, ValueError, OverflowError):
        pass  # such a row is rare, and pyarrow knows more ways to fit one
    plain = storage_schema(schema)
    try:
        table = pa.Table.from_pylist([row], schema=plain)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        table = pa.Table.from_pylist([_fitted(row, plain)], schema=plain)
    return table.cast(schema)


def _fitted(row: dict[str, Any], plain: Any) -> dict[str, Any]:
    misfits = [field.name for field in plain if not _fits(row[field.name], field.type)]
    if not misfits:
        return row
    note = f"store: {', '.join(misfits)} did not fit the column"
    error = f"{row['error']}; {note}" if row.get("error") else note
    kept = {name: None if name in misfits else value for name, value in row.items()}
    return {**kept, "error": error} if "error" in row else kept


def _fits(value: Any, kind: Any) -> bool:
    try:
        pa.array([value], type=kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return False
    return True


def _columns(row: dict[str, Any]) -> dict[str, Any]:
    """Journal form to column form: metrics as pairs, image bytes out of base64."""
    if "metrics" not in row:
        return row
    out = {**row, "metrics": [{"name": k, "value": v} for k, v in row["metrics"].items()]}
    if row.get("image_data"):
        out["image_data"] = [
            {**i, "bytes": None if i["bytes"] is None else base64.b64decode(i["bytes"])}
            for i in row["image_data"]
        ]
    return out


def file_sha256(path: Path) -> str:
    """The digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
