"""Attempts of other programs, added to a run directory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hermes_rl.events import AttemptKey, Begun, Event
from hermes_rl.store.driver import open_run
from hermes_rl.store.journal import JournalWriter, Publisher
from hermes_rl.store.rows import Finished
from hermes_rl.trajectory import fold


async def append_attempts(
    path: str | Path, identity: Mapping[str, Any], attempts: Iterable[Sequence[Event]]
) -> None:
    """Add finished attempts to a run directory, which is created if needed, and publish them.
    Attempts at a unit that the run already has are skipped.

    Args:
        identity: used as the identity of the configuration.
        attempts: the events of each, from `Begun` to `Ended`; epoch and run id are replaced.

    Raises: UserError, StoreError and DiskFull, as `open_run`.
    """
    async with (
        await open_run(path, identity) as driver,
        JournalWriter(driver.run_dir, driver.epoch, 0) as journal,
    ):
        for begun, *rest in attempts:
            if not isinstance(begun, Begun):
                raise ValueError("an attempt's first event must be 'begun'")
            unit = begun.key.unit_id
            if driver.ledger.next_attempt(unit):
                continue
            key = AttemptKey(unit_id=unit, epoch=driver.epoch, attempt=0)
            first = msgspec.structs.replace(begun, key=key, run_id=driver.run_id)
            await journal.finish(Finished(key=key, row=fold([first, *rest])))
        await Publisher(journal).drain()
