"""`import_file`: somebody else's file as a run directory."""

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
from hermes_rl.export.imports.base import Namer
from hermes_rl.export.imports.writing import write_run
from hermes_rl.identity import digest
from hermes_rl.store.rows import Finished

Origin = Literal["hermes", "atropos"]

ORIGINS: tuple[Origin, ...] = ("hermes", "atropos")


class ImportReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an import did."""

    file: str
    run: str
    """The run directory that was made."""
    rollouts: int


def import_file(
    file: str | Path, origin: Origin, out: str | Path | None = None, *, exact: bool = False
) -> ImportReport:
    """Make a run directory of a file. It appears at the end, whole.

    Args:
        file: JSON lines.
        origin: whose form it has: hermes (from/value rows) or atropos (scored groups).
        out: the run directory; default runs/NAME of the file.
        exact: atropos: ids and log-probabilities are those of the engine that sampled.

    Raises: UserError for a file that cannot be read, naming the line, or that holds nothing, and
    for a place that is taken; DiskFull.
    """
    path = Path(file)
    target = Path(out) if out is not None else Path("runs") / path.stem
    if target.exists():
        raise UserError(f"{target} exists already. Choose another --out")
    config = digest([origin, exact, _sha256(path)])
    rows = _rollouts(path, origin, Namer(config), exact)
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


def _rollouts(path: Path, origin: Origin, namer: Namer, exact: bool) -> Iterator[Finished]:
    """All rollouts of a file; errors name the line."""
    lines = _Lines(path)
    made = (
        hermes.rollouts(lines.rows(), namer)
        if origin == "hermes"
        else atropos.rollouts(lines.rows(), namer, exact=exact)
    )
    try:
        yield from made
    except UserError as error:
        raise UserError(f"{path}:{lines.number}: {error}") from error


class _Lines:
    """The objects of a file of JSON lines, and where the reader is."""

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
                except (ValueError, RecursionError) as error:  # no JSON, or no UTF-8
                    raise UserError(f"no JSON ({error})") from error
                if not isinstance(row, dict):
                    raise UserError("a line must be a JSON object")
                yield row


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
