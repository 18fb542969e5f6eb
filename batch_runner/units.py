"""The units of a dataset, in order: rows, their repeats and their ids. Reads; decides nothing."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from batch_runner.seen import OccurrenceCounter
from hermes_rl.errors import UserError
from hermes_rl.identity import unit_id
from hermes_rl.tasks import TaskRow


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit of the dataset, run before or not."""

    unit_id: str
    row: TaskRow
    occurrence: int
    """Of the row among identical rows."""
    repeat: int


class UnitReader:
    """Reads a dataset's units lazily. Blocking and for one thread at a time.

    Memory: one short digest per row that was read.
    """

    def __init__(
        self, rows: Iterable[TaskRow], config_hash: str, repeats: int, name: str = "rows"
    ) -> None:
        self._name = name
        self.rows = 0
        self.bad_rows = 0
        self.ended = False
        self._units: Iterator[Unit] = self._read(rows, config_hash, repeats)

    def prime(self) -> None:
        """Read the first unit, so that a dataset that cannot be read shows before anything starts.

        Raises: UserError for no such dataset, an unknown kind, no rows, or no `prompt`.
        """
        first = next(self._units, None)
        if first is None:
            raise UserError(f"{self._name}: the dataset holds no rows. Check the file, or --limit")
        self._units = itertools.chain((first,), self._units)

    def take(self, wanted: int, seconds: float = 0.25) -> list[Unit]:
        """The next units: at most `wanted`, fewer when that takes too long; empty at the end.

        Raises: UserError when the dataset cannot be read.
        """
        taken: list[Unit] = []
        deadline = time.monotonic() + seconds
        for unit in self._units:
            taken.append(unit)
            if len(taken) >= wanted or time.monotonic() > deadline:
                return taken
        self.ended = True
        return taken

    def _read(self, rows: Iterable[TaskRow], config_hash: str, repeats: int) -> Iterator[Unit]:
        seen = OccurrenceCounter()
        for row in rows:
            if row.index == 0:
                _refuse_unmapped(row)
            self.rows += 1
            self.bad_rows += row.task is None
            occurrence = seen.next(row.task_hash)
            # A bad row is one failed unit, however often it was meant to run.
            members = 1 if row.task is None else row.repeats or repeats
            for repeat in range(members):
                unit = unit_id(config_hash, row.task_hash, occurrence, repeat)
                yield Unit(unit, row, occurrence, repeat)


def _refuse_unmapped(first: TaskRow) -> None:
    """A first row without a prompt means wrong column names, not one bad row.

    Raises: UserError, before anything is run.
    """
    if first.error is not None and first.error.startswith("no column 'prompt'"):
        raise UserError(f"{first.place}: {first.error}")
