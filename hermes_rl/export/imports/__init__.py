"""`import_file`: a file of another program as a run directory."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import msgspec

from hermes_rl.aio import in_thread
from hermes_rl.errors import UserError
from hermes_rl.export.imports import atropos, hermes
from hermes_rl.export.imports.base import RolloutNamer, finished
from hermes_rl.identity import digest
from hermes_rl.rl import gather, make_group
from hermes_rl.store import (
    Derived,
    Driver,
    Finished,
    Group,
    JournalWriter,
    Publisher,
    Run,
    file_sha256,
    load_ledger,
    open_run,
    write_stats,
)

Origin = Literal["hermes", "atropos"]

ORIGINS: tuple[Origin, ...] = ("hermes", "atropos")

ROWS_PER_SYNC = 256
"""Rows that one fsync makes durable."""


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
    try:
        config = digest([origin, exact, file_sha256(path)])
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    rows = _rollouts(path, origin, RolloutNamer(config), exact)
    identity = {"import": {"from": origin, "exact": exact, "file": config}}
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        count = asyncio.run(write_run(temporary, identity, rows, grouped=True))
        if not count:
            raise UserError(f"{path} contains no rollout")
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return ImportReport(file=str(file), run=str(target), rollouts=count)


def _rollouts(path: Path, origin: Origin, namer: RolloutNamer, exact: bool) -> Iterator[Finished]:
    """Yield all rollouts of a file; errors name the line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                if line.strip():
                    yield from rollouts_of(_decoded(line), number, origin, namer, exact)
            except UserError as error:
                raise UserError(f"{path}:{number}: {error}") from error


def rollouts_of(
    row: Mapping[str, Any], number: int, origin: Origin, namer: RolloutNamer, exact: bool
) -> Iterator[Finished]:
    """Yield the rollouts of one line. Raises: UserError for a line of another format."""
    found = [hermes.rollout_of(row)] if origin == "hermes" else atropos.rollouts(row, number, exact)
    for rollout in found:
        yield finished(rollout, namer)


def _decoded(line: bytes) -> dict[str, Any]:
    try:
        row = msgspec.json.decode(line)
    except (ValueError, RecursionError) as error:  # invalid JSON or UTF-8
        raise UserError(f"invalid JSON ({error})") from error
    if not isinstance(row, dict):
        raise UserError("a line must be a JSON object")
    return row


async def write_run(
    path: Path, identity: Mapping[str, Any], rows: Iterable[Finished], *, grouped: bool = False
) -> int:
    """Write rows as a run directory; return how many there were.

    Args:
        path: must not be a run directory yet.
        identity: takes the place of a configuration's identity.
        rows: any number; one batch is in memory at a time.
        grouped: also write the groups whose members have rewards.

    Raises: StoreError, DiskFull.
    """
    count = 0
    remaining = iter(rows)
    batch = list(islice(remaining, ROWS_PER_SYNC))  # a bad first line leaves no run directory
    async with await open_run(path, identity) as driver:
        async with JournalWriter(driver.run_dir, driver.epoch, "import") as journal:
            publisher = Publisher(journal)
            while batch:
                await asyncio.gather(*(journal.finish(made) for made in batch))
                count += len(batch)
                if journal.full.is_set():
                    await publisher.drain()
                batch = list(islice(remaining, ROWS_PER_SYNC))
            await publisher.drain()
        driver.ledger = await in_thread(load_ledger, driver.run_dir)
        if grouped and (groups := await in_thread(_groups, driver)):
            await driver.publish(Derived(groups=groups))
        await in_thread(write_stats, driver.run_dir, driver.ledger, {"units": count})
    return count


def _groups(driver: Driver) -> tuple[Group, ...]:
    """Return the groups with rewards to compare."""
    groups = map(make_group, gather(Run(driver.run_dir)))
    return tuple(group for group in groups if group.size > 1 and group.n_valid)
