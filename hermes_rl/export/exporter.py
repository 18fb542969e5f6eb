"""`export_run`: a run in another format, with a report of what that format cannot hold.

The file is written in steps of bounded size to a temporary name, and renamed at the end. The same
rows give the same bytes: JSON keys keep their order, and Parquet row groups depend on size alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from hermes_rl.errors import UserError
from hermes_rl.export.formats import FORMATS
from hermes_rl.export.losses import LEFT_OUT, Losses, Report
from hermes_rl.export.source import ROWS_AT_ONCE, ExportOptions, Format, Source
from hermes_rl.input_errors import unknown
from hermes_rl.store import TABLES, load_run
from hermes_rl.text import SECRETS, many

_SHOWN = 5
"""Rollouts that an error names."""


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
        when there is nothing to write, or a row contains what looks like a secret (an existing file
        is kept then); DiskFull.
    """
    if to not in FORMATS:
        raise UserError(unknown("format", to, FORMATS))
    form = FORMATS[to]
    path = Path(out) if out is not None else Path(run) / "exports" / f"{to}{form.suffix}"
    if path.is_dir():
        raise UserError(f"{path} is a folder. Name a file: --out {path / (to + form.suffix)}")
    _refuse_run_files(Path(run), path)
    SECRETS.learn_environment()
    losses = Losses(form.supports)
    source = Source(load_run(run), form, options or ExportOptions(), losses)
    if source.options.allow_retokenized and (why := _why_useless(source, form, str(run))):
        raise UserError(f"--allow-retokenized changes nothing: {why}")
    with whole_file(path) as temporary:
        _write(temporary, form, source)
        if source.leaks:
            raise UserError(_why_secret(source.leaks, str(run)))
        if not losses.samples:
            raise UserError(_why_empty(losses, str(run), to))
    return losses.report(run=str(run), format=to, out=str(path), unit=form.unit)


def _refuse_run_files(run: Path, path: Path) -> None:
    """Raises: UserError for a file in a folder of the run's own."""
    folders = {*TABLES, "journal", "commits", "epochs", "tmp"}
    if any(path.resolve().is_relative_to((run / name).resolve()) for name in folders):
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


def _why_secret(leaks: list[str], run: str) -> str:
    shown = ", ".join(leaks[:_SHOWN])
    more = f" and {len(leaks) - _SHOWN:,} more" if len(leaks) > _SHOWN else ""
    return (
        f"{run}: {many(len(leaks), 'rollout')} with what looks like a secret: {shown}{more}. "
        f"Nothing was written. See `hermes-rl check {run} --secrets`, or add --allow-secrets"
    )


def _why_empty(losses: Losses, run: str, to: str) -> str:
    if not losses.rollouts:
        return f"{run} has no finished rollout to export yet"
    why = "; ".join(f"{LEFT_OUT[key]}: {n:,}" for key, n in losses.left_out.items())
    there = many(losses.rollouts, "rollout")
    return f"{run}: none of {there} gives a sample for {to}. Left out: {why}"


def _write(path: Path, form: Format, source: Source) -> None:
    """Write JSON lines, or Parquet with a declared schema, in steps of a few rows."""
    from hermes_rl.store import STEP_BYTES, PartWriter

    schema = form.arrow_schema(source)
    if schema is None:
        with path.open("wb") as file:
            for row in form.rows(source):
                file.write(msgspec.json.encode(row) + b"\n")
                source.losses.samples += 1
        return
    writer = PartWriter(path, schema, strict=True)
    for row in form.rows(source):
        writer.add(row, STEP_BYTES // ROWS_AT_ONCE)
        source.losses.samples += 1
    writer.close()


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path that is renamed to `path` at the end, or removed on an error.

    Raises: UserError when the folder cannot be written; DiskFull.
    """
    from hermes_rl.store import disk_errors

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
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
