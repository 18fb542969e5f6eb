"""The state of every unit: done, given up or open, and its attempts.

A dictionary of 16-byte ids over a checkpoint, which is a sorted file. In the dictionary, units with
equal histories share one record: a million units take about 110 MB. Lookups are thread-safe.
"""

from __future__ import annotations

import functools
import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from hermes_rl.errors import CAUSES
from hermes_rl.store.commit import Commit, Unit, read_commit, read_commits
from hermes_rl.store.rundir import CHECKPOINT, RunDir
from hermes_rl.store.summary import Summary

if TYPE_CHECKING:
    from hermes_rl.store.checkpoint import Checkpoint

Disposition = Literal["done", "given_up", "open"]

LOST_WORKERS_MAX = 3
"""A unit is given up when this many workers died under it. The last one ran only this unit; other
units may have killed the earlier ones."""

_DONE = 255
"""Code of an attempt that finished its unit; other codes are indices of `CAUSES`."""
_CODES = {cause: code for code, cause in enumerate(CAUSES)}
_COUNTED = [consequence.counted for consequence in CAUSES.values()]
_NO_RETRY = [not consequence.retry for consequence in CAUSES.values()]
_LOST = _CODES["worker_lost"]
_NONE = 254


_NEW = Unit(0, _NONE, 0, 0, 0)


class Ledger:
    """Dispositions of all units with at least one recorded attempt.

    Args:
        max_attempts: counted failures after which a unit is given up.
        base: the states to begin with.
    """

    def __init__(self, max_attempts: int = 3, base: Checkpoint | None = None) -> None:
        self.max_attempts = max_attempts
        self.base = base
        self.summary = Summary()
        """Summary of all loaded commits."""
        self.done = 0
        self.given_up = 0
        self._known = 0
        self._units: dict[bytes, Unit] = {}
        self._fatal_commands: dict[bytes, tuple[str, ...]] = {}
        """Only of units whose sandbox died during a tool call."""
        if base is not None:
            self.summary.merge(base.summary)
            self._fatal_commands |= base.fatal_commands
            self._count()

    def disposition(self, unit_id: str) -> Disposition:
        """done, given_up or open; an unknown unit is open."""
        return self._disposition_of(self._get(unit_id))

    def is_done(self, key: bytes) -> bool:
        """Whether `trajectories` has the unit with this `identity.unit_key`. A resume calls this
        for every unit."""
        return self._of(key).done > 0

    def all_done(self, keys: bytes) -> bool:
        """Whether `is_done` for each of these keys, of 16 bytes each."""
        left: Iterable[bytes]
        if self.base is None:
            left = (keys[at : at + 16] for at in range(0, len(keys), 16))
        else:
            left = self.base.open_among(keys)
        units = self._units
        return all((unit := units.get(key)) is not None and unit.done for key in left)

    def next_attempt(self, unit_id: str) -> int:
        """The number of the unit's next attempt: highest known + 1, from 0."""
        return self._get(unit_id).attempts

    def counted_failures(self, unit_id: str) -> int:
        """Failures that count against `max_attempts`."""
        return self._get(unit_id).counted

    def lost_workers(self, unit_id: str) -> int:
        """How many workers died under the unit; from 2 on it runs alone."""
        return self._get(unit_id).lost

    def fatal_commands(self, unit_id: str) -> tuple[str, ...]:
        """Tool calls during which sandboxes of the unit died."""
        return self._fatal_commands.get(bytes.fromhex(unit_id), ())

    def apply(
        self,
        unit_id: str,
        attempt: int,
        *,
        done: bool,
        cause: str | None,
        fatal_command: str | None = None,
    ) -> Disposition:
        """Record one attempt's end, from a receipt or from recovery."""
        before = self._get(unit_id)
        self._known += not before.attempts
        after = _record_attempt(before, attempt, _DONE if done else _CODES[cause or "harness"])
        key = bytes.fromhex(unit_id)
        self._units[key] = after
        if fatal_command is not None:
            self._add_fatal(key, fatal_command)
        disposition = self._disposition_of(after)
        self._recount(self._disposition_of(before), -1)
        self._recount(disposition, 1)
        return disposition

    def load(self, commits: Iterable[Commit]) -> list[str]:
        """Add the attempts of some commits. Returns units that are done more than once."""
        duplicates: set[bytes] = set()
        for commit in commits:
            self.summary.merge(commit.summary)
            self._load_commit(commit, duplicates)
        self._count()
        return sorted(key.hex() for key in duplicates)

    def states(self) -> Counter[Unit]:
        """How many units have each state."""
        counts = Counter(state for state in self._units.values())
        if self.base is not None:
            counts += self.base.counts
            counts -= Counter(state for _, state in self.base.known_among(self._units))
        return counts

    @property
    def changed(self) -> Mapping[bytes, Unit]:
        """The units that have changed since the checkpoint."""
        return self._units

    def covers(self, stem: str) -> bool:
        """Whether the checkpoint has this batch."""
        return self.base is not None and self.base.covers(stem)

    def rebase(self, base: Checkpoint) -> None:
        """Use a newer checkpoint, and free what it has. Other threads may use the ledger."""
        self.base = base
        for key, state in base.known_among(list(self._units)):
            # Finished units do not change any more; another one may at this moment.
            if state.done and self._units.get(key) == state:
                self._units.pop(key, None)

    def reopen_given_up(self) -> int:
        """Reopen all units that were given up, and reset their failures."""

        def given_up(unit: Unit) -> bool:
            return self._disposition_of(unit) == "given_up"

        found = {key for key, unit in self._units.items() if given_up(unit)}
        if self.base is not None:
            found |= {key for key in self.base.keys_of(given_up) if key not in self._units}
        return self.reopen(key.hex() for key in found)

    def reopen(self, unit_ids: Iterable[str]) -> int:
        """Reopen units that were given up, and reset their failures. Returns their number."""
        reopened = 0
        for unit_id in unit_ids:
            key = bytes.fromhex(unit_id)
            self._units[key] = _NEW._replace(attempts=self._of(key).attempts)
            self._fatal_commands.pop(key, None)
            reopened += 1
        self.given_up -= reopened
        return reopened

    def forget(self, unit_ids: Iterable[str]) -> None:
        """Free the memory of units that are never looked up again in this start. They stay
        counted."""
        for unit_id in unit_ids:
            key = bytes.fromhex(unit_id)
            self._units.pop(key, None)
            self._fatal_commands.pop(key, None)

    def units(self) -> Iterator[tuple[str, Disposition]]:
        """All units with their dispositions, in order of id."""
        changed: Iterable[bytes] = sorted(self._units)
        if self.base is not None:
            others = (key for key in self.base.keys_of() if key not in self._units)
            changed = heapq.merge(others, changed)
        for key in changed:
            yield key.hex(), self._disposition_of(self._of(key))

    def __len__(self) -> int:
        return self._known

    def _load_commit(self, commit: Commit, duplicates: set[bytes]) -> None:
        keys, units = commit.keys, self._units
        codes = [_CODES.get(name, _CODES["harness"]) for name in keys.names]
        ids = [*map(bytes.fromhex, keys.unit_id)]
        known = dict(self.base.known_among(ids)) if self.base is not None else {}
        attempts = zip(ids, keys.attempt, keys.table, keys.cause, strict=True)
        for key, attempt, table, cause in attempts:
            before = units.get(key)
            if before is None:
                before = known.get(key, _NEW)
            unit = _record_attempt(before, attempt, _DONE if table == "t" else codes[cause])
            units[key] = unit
            if unit.done > 1:
                duplicates.add(key)
        for place, command in keys.fatal_commands.items():
            self._add_fatal(ids[place], command)

    def _add_fatal(self, key: bytes, command: str) -> None:
        known = self._fatal_commands.get(key, ())
        if command not in known:
            self._fatal_commands[key] = (*known, command)

    def _disposition_of(self, unit: Unit) -> Disposition:
        if unit.done:
            return "done"
        refused = unit.cause != _NONE and _NO_RETRY[unit.cause]
        worn = unit.counted >= self.max_attempts or unit.lost >= LOST_WORKERS_MAX
        return "given_up" if refused or worn else "open"

    def _recount(self, disposition: Disposition, units: int) -> None:
        if disposition == "done":
            self.done += units
        elif disposition == "given_up":
            self.given_up += units

    def _count(self) -> None:
        self.done = self.given_up = self._known = 0
        for unit, count in self.states().items():
            self._known += count
            self._recount(self._disposition_of(unit), count)

    def _get(self, unit_id: str) -> Unit:
        return self._of(bytes.fromhex(unit_id))

    def _of(self, key: bytes) -> Unit:
        unit = self._units.get(key)
        if unit is None and (base := self.base) is not None:
            unit = base.get(key)
        return _NEW if unit is None else unit


@functools.lru_cache(maxsize=4096)  # units with equal histories share one record
def _record_attempt(unit: Unit, attempt: int, code: int) -> Unit:
    """Return the unit after one more attempt; attempts may be applied in any order."""
    if code == _DONE:
        return unit._replace(done=min(unit.done + 1, 255), attempts=max(unit.attempts, attempt + 1))
    latest = attempt + 1 >= unit.attempts
    return Unit(
        unit.done,
        code if latest else unit.cause,
        unit.counted + _COUNTED[code],
        unit.lost + (code == _LOST),
        max(unit.attempts, attempt + 1),
    )


def open_ledger(run_dir: RunDir, max_attempts: int = 3) -> Ledger:
    """The ledger after the commits that the checkpoint covers, if there is one. Blocking."""
    if not (run_dir.path / CHECKPOINT).exists():
        return Ledger(max_attempts)
    from hermes_rl.store.checkpoint import open_checkpoint  # large runs only

    return Ledger(max_attempts, open_checkpoint(run_dir))


def load_ledger(run_dir: RunDir, max_attempts: int = 3) -> Ledger:
    """The ledger after all commits. Blocking. Raises: StoreError when one cannot be read."""
    ledger = open_ledger(run_dir, max_attempts)
    ledger.load(read_commits(run_dir, ledger.covers))
    return ledger


def write_checkpoint(run_dir: RunDir, epoch: int, base: Checkpoint | None) -> Checkpoint | None:
    """Cover all commits that are there. Commits may be written, and tables merged, meanwhile.
    Blocking.

    Args:
        epoch: of this driver.
        base: the checkpoint so far.

    Returns None, and leaves the file alone, when a file is missing or damaged, or a unit finished
    twice. Raises: StoreError when another driver has begun, or a commit cannot be read; DiskFull.
    """
    from hermes_rl.store.checkpoint import Header, Parts, add_ranges, save  # large runs only

    reading = RunDir(run_dir.path)  # it is not for several threads
    ledger = Ledger(base=base)
    stems = [stem for stem in reading.commit_stems() if base is None or not base.covers(stem)]
    parts = Parts(reading)
    for stem, known in base.parts.items() if base is not None else ():
        parts.add(stem, known)

    def commits() -> Iterator[Commit]:
        for stem in stems:
            commit = read_commit(reading, stem)
            parts.add(stem, commit.parts)
            yield commit

    if ledger.load(commits()) or parts.faulty or not len(ledger):
        return None
    counts = ledger.states()
    header = Header(
        run_id=reading.epoch(epoch).run_id,
        epoch=epoch,
        covered=add_ranges(base.covered if base is not None else {}, stems),
        units=len(ledger),
        states=[*counts],
        counts=[*counts.values()],
        fatal_commands={k.hex(): v for k, v in ledger._fatal_commands.items()},
        summary=ledger.summary,
        parts=parts.found,
    )
    return save(run_dir, header, base, ledger.changed)
