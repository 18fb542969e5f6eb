"""`import_file`: a file of another program as a run directory."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from hermes_rl.errors import UserError
from hermes_rl.export.imports import atropos, hermes
from hermes_rl.export.imports.base import RolloutNamer, write_run
from hermes_rl.identity import digest
from hermes_rl.store.rows import Finished

Origin = Literal["hermes", "atropos"]

ORIGINS: tuple[Origin, ...] = ("hermes", "atropos")


class ImportReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an import."""

    file: str
    run: str
    """The new run directory."""
    rollouts: int


def import_file(
    file: str | Path, origin: Origin, out: str | Path | None = None, *, exact: bool = False
) -> ImportReport:
    """Make a run directory from a file. It appears at the end, atomically.

    Args:
        file: JSON lines.
        origin: the format: hermes (from/value rows) or atropos (scored groups).
        out: the run directory; default runs/NAME of the file.
        exact: atropos: ids and log-probabilities come from the engine that sampled them.

    Raises: UserError for a file that cannot be read (with the line) or has no rollout, and for an
        existing `out`; DiskFull.
    """
    path = Path(file)
    target = Path(out) if out is not None else Path("runs") / path.stem
    if target.exists():
        raise UserError(f"{target} exists already. Choose another --out")
    config = digest([origin, exact, _sha256(path)])
    rows = _rollouts(path, origin, RolloutNamer(config), exact)
    identity = {"import": {"from": origin, "exact": exact, "file": config}}
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        count = asyncio.run(write_run(temporary, identity, rows, grouped=True))
        if not count:
            raise UserError(f"{path} holds no rollout")
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return ImportReport(file=str(file), run=str(target), rollouts=count)


def _rollouts(path: Path, origin: Origin, namer: RolloutNamer, exact: bool) -> Iterator[Finished]:
    """Yield all rollouts of a file; errors name the line."""
    lines = _Lines(path)
    rollouts = (
        hermes.rollouts(lines.rows(), namer)
        if origin == "hermes"
        else atropos.rollouts(lines.rows(), namer, exact=exact)
    )
    try:
        yield from rollouts
    except UserError as error:
        raise UserError(f"{path}:{lines.number}: {error}") from error


class _Lines:
    """The objects of a JSON lines file, and the line that is being read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.number = 0

    def rows(self) -> Iterator[Mapping[str, Any]]:
        with self._path.open("rb") as file:
            for self.number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = msgspec.json.decode(line)
                except (ValueError, RecursionError) as error:  # invalid JSON or UTF-8
                    raise UserError(f"invalid JSON ({error})") from error
                if not isinstance(row, dict):
                    raise UserError("a line must be a JSON object")
                yield row


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
