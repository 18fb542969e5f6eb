"""The units of a dataset, in order: rows, their repeats and their ids. Reads; decides nothing."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from hermes_rl.errors import UserError
from hermes_rl.identity import unit_id, unit_key
from hermes_rl.tasks import LazyRow, TaskRow


class OccurrenceCounter:
    """Counts equal digests; 16 bytes of each are kept, so that a million rows take about 100 MB.

    Only digests that come again get an entry in a dictionary.
    """

    def __init__(self) -> None:
        self._seen: set[bytes] = set()
        self._again: dict[bytes, int] = {}

    def next(self, digest: str) -> int:
        """The occurrence of this digest (hex, at least 32 digits): 0 for the first."""
        key = bytes.fromhex(digest[:32])
        before = len(self._seen)
        self._seen.add(key)
        if len(self._seen) > before:
            return 0
        self._again[key] = self._again.get(key, 0) + 1
        return self._again[key]


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit of the dataset that is not known to be done."""

    unit_id: str
    row: TaskRow
    occurrence: int
    """Of the row among identical rows."""
    repeat: int


Done = Callable[[bytes], bool]
"""Whether the unit of a `unit_key` is done. Called on the reader's thread."""


def _none_is_done(key: bytes) -> bool:
    return False


class UnitReader:
    """Reads a dataset's units lazily. Blocking and for one thread at a time.

    The task of a row whose units are all done is never made. Memory: one short digest per row that
    was read, and a number for one with repeats of its own.
    """

    def __init__(
        self, rows: Iterable[LazyRow], config_hash: str, repeats: int, name: str = "rows"
    ) -> None:
        self.rows = 0
        self.bad_rows = 0
        self.passed = 0
        """Units that went by because they and all repeats of their row are done."""
        self.ended = False
        self._name = name
        self._config_hash = config_hash
        self._repeats = repeats
        self._seen = OccurrenceCounter()
        self._rows = iter(rows)
        self._own_members: dict[int, int] = {}
        """Units of rows that have another number of them than the dataset's."""
        self._units: Iterator[Unit] = iter(())
        """What is left of the row that was read last."""

    def prime(self) -> None:
        """Read the first row, so that a dataset that cannot be read shows before anything starts.

        Raises: UserError for no such dataset, an unknown kind, no rows, or no `prompt`.
        """
        first = next(self._rows, None)
        if first is None:
            raise UserError(f"{self._name}: the dataset holds no rows. Check the file, or --limit")
        self._rows = itertools.chain((first,), self._rows)
        _refuse_unmapped(first.parse())

    def take(self, wanted: int, seconds: float = 0.25, done: Done = _none_is_done) -> list[Unit]:
        """The next units: at most `wanted`, fewer or none when that takes too long.

        Args:
            done: rows of which all units are so are passed over, and counted in `passed`.

        Raises: UserError when the dataset cannot be read.
        """
        deadline = time.monotonic() + seconds
        taken = list(itertools.islice(self._units, wanted))
        for row in itertools.islice(self._rows, None if len(taken) < wanted else 0):
            if passed := self._read(row, done):
                self.passed += passed
            else:
                taken += itertools.islice(self._units, wanted - len(taken))
                if len(taken) >= wanted:
                    return taken
            if time.monotonic() > deadline:
                return taken
        self.ended = len(taken) < wanted
        return taken

    def members_of(self, row_index: int) -> int | None:
        """How many units a row has; None for one that was not read."""
        read = row_index < self.rows
        return self._own_members.get(row_index, self._repeats) if read else None

    def _read(self, row: LazyRow, done: Done) -> int:
        """Take up a row: its units are next, unless they are done; then returns how many."""
        self.rows += 1
        task_hash = row.task_hash
        occurrence = self._seen.next(task_hash)
        if row.quick:
            members = self._note(row, row.repeats) if row.repeats else self._repeats
            for repeat in range(members):
                if not done(unit_key(self._config_hash, task_hash, occurrence, repeat)):
                    break
            else:
                return members
        parsed = row.parse()
        if parsed.task_hash != task_hash:  # nested too deep for the long way
            occurrence = self._seen.next(parsed.task_hash)
        if row.index == 0:
            _refuse_unmapped(parsed)
        self.bad_rows += parsed.task is None
        # A bad row is one failed unit, however often it was meant to run.
        members = self._note(row, 1 if parsed.task is None else parsed.repeats or self._repeats)
        self._units = self._members(parsed, occurrence, members)
        return 0

    def _note(self, row: LazyRow, members: int) -> int:
        if members != self._repeats:
            self._own_members[row.index] = members
        return members

    def _members(self, row: TaskRow, occurrence: int, members: int) -> Iterator[Unit]:
        for repeat in range(members):
            unit = unit_id(self._config_hash, row.task_hash, occurrence, repeat)
            yield Unit(unit, row, occurrence, repeat)


def _refuse_unmapped(first: TaskRow) -> None:
    """A first row without a prompt means wrong column names, not one bad row.

    Raises: UserError, before anything is run.
    """
    if first.error is not None and first.error.startswith("no column 'prompt'"):
        raise UserError(f"{first.place}: {first.error}")
