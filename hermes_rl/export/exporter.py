"""`export_run`: a run in another format, with a report of what that format cannot hold."""

from __future__ import annotations

from pathlib import Path

from hermes_rl.errors import UserError
from hermes_rl.export.base import ExportOptions, Format
from hermes_rl.export.formats import FORMATS, format_named
from hermes_rl.export.losses import LEFT_OUT, Losses, Report
from hermes_rl.export.source import Source
from hermes_rl.export.writing import JsonLines, ParquetRows, RowWriter, whole_file
from hermes_rl.store.reader import load_run
from hermes_rl.store.version import TABLES


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
            file is replaced at the end, whole.
        options: which rollouts and samples.

    Returns what was written, left out and lost.
    Raises: UserError for an unknown format, a place that cannot be written, an option that changes
        nothing, and when there is nothing to write: an existing file is kept then; DiskFull.
    """
    form = format_named(to)
    path = Path(out) if out is not None else Path(run) / "exports" / f"{to}{form.suffix}"
    if path.is_dir():
        raise UserError(f"{path} is a folder. Name a file: --out {path / (to + form.suffix)}")
    _spare(Path(run), path)
    losses = Losses(form.holds)
    source = Source(load_run(run), form, options or ExportOptions(), losses)
    if source.options.allow_retokenized and (why := _no_use(source, form, str(run))):
        raise UserError(f"--allow-retokenized changes nothing: {why}")
    with whole_file(path) as temporary:
        writer = _writer(form, source, temporary)
        for row in form.rows(source):
            writer.write(row)
            losses.samples += 1
        if not losses.samples:
            raise UserError(_nothing(losses, str(run), to))
        writer.close()
    return losses.report(run=str(run), format=to, out=str(path), unit=form.unit)


def _spare(run: Path, path: Path) -> None:
    """Raises: UserError for a file among the parts of the run."""
    own = {*TABLES, "journal", "commits", "epochs", "tmp"}
    if any(path.resolve().is_relative_to((run / name).resolve()) for name in own):
        raise UserError(f"{path} is within the run itself. Choose another --out")


def _no_use(source: Source, form: Format, run: str) -> str | None:
    """Why there is nothing that `allow_retokenized` could add; None when there may be."""
    if not form.rl:
        rl = ", ".join(name for name in FORMATS if format_named(name).rl)
        return f"{form.name} leaves no such tokens out. Drop it, or choose {rl}"
    if not source.has_segments:
        return (
            f"{run} has no table segments, so no tokens at all. They are recorded while a run is"
            " made (docs/exact-tokens.md) or come with `hermes-rl import --from atropos`"
        )
    return None


def _nothing(losses: Losses, run: str, to: str) -> str:
    if not losses.rollouts:
        return f"{run} has no finished rollout to export yet"
    why = "; ".join(f"{n:,} {LEFT_OUT[key]}" for key, n in losses.left_out.items())
    return f"{run}: none of {losses.rollouts:,} rollouts gives a sample for {to}. Left out: {why}"


def _writer(form: Format, source: Source, path: Path) -> RowWriter:
    return JsonLines(path) if form.schema is None else ParquetRows(path, form.schema(source))
