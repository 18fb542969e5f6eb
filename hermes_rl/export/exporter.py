"""`export_run`: a run in another format, with a report of what that format cannot hold.

The file is written in steps of bounded size to a temporary name, and renamed at the end. The same
rows give the same bytes: JSON keys keep their order, and Parquet row groups depend on size alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from hermes_rl.errors import UserError
from hermes_rl.export.base import ExportOptions, Format, Row
from hermes_rl.export.formats import FORMATS
from hermes_rl.export.losses import LEFT_OUT, Losses, Report
from hermes_rl.export.source import Source
from hermes_rl.input_errors import unknown
from hermes_rl.store.reader import load_run
from hermes_rl.store.rundir import TABLES


def export_run(
    run: str | Path,
    to: str,
    out: str | Path | None = None,
    options: ExportOptions | None = None,
) -> Report:
    """Write a run in another format.

    Args:
        run: the run directory, which may be in use: what is finished is exported.
        to: a name of `hermes_rl.export.FORMATS`.
        out: the file; default `RUN/exports/FORMAT` with the suffix of the format. An existing
            file is replaced at the end, atomically.
        options: which rollouts and samples.

    Returns: what was written, left out and lost.

    Raises: UserError for an unknown format, an unwritable path, an option that changes nothing, and
        when there is nothing to write (an existing file is kept then); DiskFull.
    """
    if to not in FORMATS:
        raise UserError(unknown("format", to, FORMATS))
    form = FORMATS[to]
    path = Path(out) if out is not None else Path(run) / "exports" / f"{to}{form.suffix}"
    if path.is_dir():
        raise UserError(f"{path} is a folder. Name a file: --out {path / (to + form.suffix)}")
    _refuse_run_files(Path(run), path)
    losses = Losses(form.holds)
    source = Source(load_run(run), form, options or ExportOptions(), losses)
    if source.options.allow_retokenized and (why := _why_useless(source, form, str(run))):
        raise UserError(f"--allow-retokenized changes nothing: {why}")
    with whole_file(path) as temporary:
        schema = form.arrow_schema(source)
        writer = _JsonLines(temporary) if schema is None else _ParquetRows(temporary, schema)
        for row in form.rows(source):
            writer.write(row)
            losses.samples += 1
        if not losses.samples:
            raise UserError(_why_empty(losses, str(run), to))
        writer.close()
    return losses.report(run=str(run), format=to, out=str(path), unit=form.unit)


def _refuse_run_files(run: Path, path: Path) -> None:
    """Raises: UserError for a file in a folder of the run's own."""
    own = {*TABLES, "journal", "commits", "epochs", "tmp"}
    if any(path.resolve().is_relative_to((run / name).resolve()) for name in own):
        raise UserError(f"{path} is within the run itself. Choose another --out")


def _why_useless(source: Source, form: Format, run: str) -> str | None:
    """Return why `allow_retokenized` could add nothing; None when it might."""
    if not form.rl:
        rl = ", ".join(name for name, other in FORMATS.items() if other.rl)
        return f"{form.name} leaves no such tokens out. Drop it, or choose {rl}"
    if not source.has_segments:
        return (
            f"{run} has no table segments, so no tokens at all. They are recorded while a run is"
            " made (docs/exact-tokens.md) or come with `hermes-rl import --from atropos`"
        )
    return None


def _why_empty(losses: Losses, run: str, to: str) -> str:
    if not losses.rollouts:
        return f"{run} has no finished rollout to export yet"
    why = "; ".join(f"{n:,} {LEFT_OUT[key]}" for key, n in losses.left_out.items())
    return f"{run}: none of {losses.rollouts:,} rollouts gives a sample for {to}. Left out: {why}"


ROWS_AT_ONCE = 8
"""Rows of Parquet that are converted together."""


class _JsonLines:
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


class _ParquetRows:
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
    """Yield a temporary path that is renamed to `path` at the end, or removed on an error.

    Raises: UserError when the folder cannot be written; DiskFull.
    """
    from hermes_rl.store.files import disk_errors

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
