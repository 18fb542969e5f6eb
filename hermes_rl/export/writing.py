"""Writing an export: in steps of bounded size, to a temporary name that is renamed at the end.

The same rows give the same bytes: JSON keys keep their order, and Parquet is cut into row groups by
size alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from hermes_rl.errors import UserError
from hermes_rl.export.base import Row

ROWS_AT_ONCE = 8
"""Rows of Parquet that are converted in one go."""


class RowWriter(Protocol):
    """Takes the rows of a file in order."""

    def write(self, row: Row) -> None:
        """Add one row."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class JsonLines:
    """One JSON object per line."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._encode = msgspec.json.Encoder().encode

    def write(self, row: Row) -> None:
        self._file.write(self._encode(row) + b"\n")

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


class ParquetRows:
    """Parquet with a declared schema; columns of type `arrow.json` take JSON text.

    Row groups hold at most 64 MB of Arrow data, or a single larger step.
    """

    def __init__(self, path: Path, schema: Any) -> None:
        import pyarrow.parquet as pq

        from hermes_rl.store.schema import storage_schema

        self._path = path
        self._schema = schema
        self._plain = storage_schema(schema)
        self._rows: list[Row] = []
        self._tables: list[Any] = []
        self._bytes = 0
        self._writer = pq.ParquetWriter(path, schema, compression="zstd", compression_level=3)

    def write(self, row: Row) -> None:
        self._rows.append(row)
        if len(self._rows) >= ROWS_AT_ONCE:
            self._convert()

    def close(self) -> None:
        self._convert()
        self._flush()
        self._writer.close()
        with self._path.open("rb") as file:
            os.fsync(file.fileno())

    def _convert(self) -> None:
        import pyarrow as pa

        from hermes_rl.store.parts import ROW_GROUP_BYTES

        if not self._rows:
            return
        table = pa.Table.from_pylist(self._rows, schema=self._plain).cast(self._schema)
        self._rows = []
        if self._bytes + table.nbytes > ROW_GROUP_BYTES:
            self._flush()
        self._tables.append(table)
        self._bytes += table.nbytes

    def _flush(self) -> None:
        import pyarrow as pa

        if not self._tables:
            return
        group = pa.concat_tables(self._tables)
        self._tables, self._bytes = [], 0
        self._writer.write_table(group, row_group_size=group.num_rows)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its name at the end; nothing stays on an error.

    Raises: UserError when the folder cannot be written; DiskFull.
    """
    from hermes_rl.store.disk import disk_errors

    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror}. Choose another --out"
        ) from error
    try:
        with disk_errors():
            yield temporary
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
