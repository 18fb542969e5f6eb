"""Which attempts are to be made: the dataset's units in order, minus those that need none."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from batch_runner.manifest import read_manifest
from batch_runner.settings import Settings
from batch_runner.units import Unit, UnitReader
from hermes_rl.config import RunConfig, is_rows_file
from hermes_rl.errors import UserError
from hermes_rl.identity import group_id, unit_seed
from hermes_rl.ports import WorkItem
from hermes_rl.sources import read_rows
from hermes_rl.store.ledger import LOST_WORKERS_MAX, Ledger
from hermes_rl.store.rundir import RunDir

ALONE_AFTER = LOST_WORKERS_MAX - 1
"""After so many lost workers, which may have died of a neighbour, a unit runs alone in a fresh one:
the loss for which it is given up is its own."""

_REMOTE_ROWS = 1000
"""Rows of a dataset on the hub that are searched for a unit of the run."""

_STEP = 256
"""Units looked up in one go: well under a millisecond of the loop."""


@dataclass
class Counts:
    """Units of the dataset as far as it was read, as they stood when they went by."""

    rows: int = 0
    bad_rows: int = 0
    units: int = 0
    done: int = 0
    given_up: int = 0
    known: int = 0
    """Units with at least one recorded attempt."""
    complete: bool = False
    """The whole dataset was read."""

    @property
    def open(self) -> int:
        """Units that are to be run."""
        return self.units - self.done - self.given_up


@dataclass(frozen=True)
class PlanRules:
    """What a unit's attempt is given beside the unit itself."""

    config_hash: str
    seed: int
    """The configuration's; a unit's own derives from it."""
    epoch: int


class Plan:
    """The open units as work items, read lazily, in a thread that also passes over what is done.

    Args:
        reader: the dataset's units.
        ledger: what is known of units; only read here.
    """

    def __init__(self, reader: UnitReader, rules: PlanRules, ledger: Ledger) -> None:
        self.counts = Counts()
        self._reader = reader
        self._rules = rules
        self._ledger = ledger
        self._passed = 0

    async def take(self) -> list[WorkItem]:
        """Some next open units; maybe none, until `counts.complete`. Raises: UserError."""
        reader = self._reader
        units = await asyncio.to_thread(reader.take, _STEP, done=self._ledger.is_done)
        items = [item for unit in units if (item := self._item(unit)) is not None]
        passed = reader.passed - self._passed
        self._passed = reader.passed
        self.counts.units += passed
        self.counts.known += passed
        self.counts.done += passed
        self.counts.rows = self._reader.rows
        self.counts.bad_rows = self._reader.bad_rows
        self.counts.complete = self._reader.ended
        return items

    def members_of(self, row_index: int) -> int | None:
        """How many units a row of the dataset has; None for one that was not read yet."""
        return self._reader.members_of(row_index)

    def _item(self, unit: Unit) -> WorkItem | None:
        attempt = self._ledger.next_attempt(unit.unit_id)
        self.counts.units += 1
        if attempt:
            self.counts.known += 1
            match self._ledger.disposition(unit.unit_id):
                case "done":
                    self.counts.done += 1
                    return None
                case "given_up":
                    self.counts.given_up += 1
                    return None
        return self._work(unit, attempt)

    def _work(self, unit: Unit, attempt: int) -> WorkItem:
        rules, row = self._rules, unit.row
        return WorkItem(
            unit_id=unit.unit_id,
            group_id=group_id(rules.config_hash, row.task_hash, unit.occurrence),
            epoch=rules.epoch,
            attempt=attempt,
            repeat=unit.repeat,
            row_index=row.index,
            task_id=row.task.id if row.task else row.raw_id or row.task_hash[:12],
            task=row.task,
            task_hash=row.task_hash,
            seed=unit_seed(rules.seed, unit.unit_id),
            enqueued_at=time.time(),
            bad_row=f"{row.place}: {row.error}" if row.task is None else None,
            alone=self._ledger.lost_workers(unit.unit_id) >= ALONE_AFTER,
            fatal_commands=self._ledger.fatal_commands(unit.unit_id),
        )


def open_reader(settings: Settings) -> UnitReader:
    """The units of the run's dataset, or of its environment's tasks."""
    dataset = settings.config.dataset
    if settings.opened is not None:
        from hermes_rl.rl.loading import env_rows

        rows = env_rows(settings.opened, dataset.limit)
    else:
        rows = read_rows(dataset.path, columns=dataset.map, limit=dataset.limit)
    return UnitReader(rows, settings.config_hash, dataset.repeats, dataset.path)


def with_kept_rows(config: RunConfig, run_dir: RunDir) -> RunConfig:
    """Keep rows that a program passed in the run directory, where a resume finds them. Blocking.

    Returns the configuration with the path of that copy.
    Raises: DiskFull.
    """
    path = Path(config.dataset.path)
    if not is_rows_file(config.dataset.path):
        return config
    kept = run_dir.path.absolute() / path.name
    if not kept.exists():
        run_dir.storage.put(path.name, path.read_bytes())
    dataset = config.dataset.model_copy(update={"path": str(kept)})
    return config.model_copy(update={"dataset": dataset})


def refuse_other_dataset(settings: Settings, run_dir: RunDir, ledger: Ledger) -> None:
    """A run goes on with a dataset that grew or changed, but not with another one. Blocking.

    Raises: UserError when the run knows units, and none of them is in the dataset.
    """
    dataset, known = settings.config.dataset, read_manifest(run_dir).get("dataset")
    before = known.get("path") if isinstance(known, dict) else None
    local = Path(dataset.path).expanduser().exists()
    if settings.opened is not None or not len(ledger) or (dataset.path == before and not local):
        return  # an environment has its own tasks; the hub is not asked twice for one dataset
    limit = None if local else _REMOTE_ROWS  # with a lower --limit it is still the same dataset
    rows = read_rows(dataset.path, columns=dataset.map, limit=limit)
    reader = UnitReader(rows, settings.config_hash, dataset.repeats, dataset.path)
    if not _shares_units(reader, ledger):
        made_from = "other rows of it" if dataset.path == before else before or "another dataset"
        raise UserError(
            f"no unit of {dataset.path} is in {settings.out}, which was made from {made_from}. "
            "Choose another --out"
        )


def _shares_units(reader: UnitReader, ledger: Ledger) -> bool:
    """Whether the run knows any unit of a dataset, which is read up to the first such unit.
    Blocking.

    Raises: UserError when the dataset cannot be read.
    """
    while not reader.ended:
        units = reader.take(_STEP, done=ledger.is_done)
        if reader.passed or any(ledger.next_attempt(unit.unit_id) for unit in units):
            return True
    return False


async def survey(reader: UnitReader, rules: PlanRules, ledger: Ledger) -> Counts:
    """Count the units of a dataset without running one. Raises: UserError."""
    plan = Plan(reader, rules, ledger)
    while not plan.counts.complete:
        await plan.take()
    return plan.counts
