"""The state of every unit: done, given up or open, and its attempts.

A dictionary of 16-byte ids. Units with equal histories share one record: a million units take about
110 MB. Lookups are thread-safe.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from hermes_rl.errors import CAUSES
from hermes_rl.store.commit import Commit
from hermes_rl.store.summary import Summary

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


class Unit(NamedTuple):
    """The history of one unit."""

    done: int
    """Its rows in `trajectories`; more than one means that the run is damaged."""
    cause: int
    """Code of the last attempt's cause."""
    counted: int
    """Failures that count against `max_attempts`."""
    lost: int
    """Workers that died under it."""
    attempts: int
    """Number of the next attempt."""


_NEW = Unit(0, _NONE, 0, 0, 0)


class Ledger:
    """Dispositions of all units with at least one recorded attempt.

    Args:
        max_attempts: counted failures after which a unit is given up.
    """

    def __init__(self, max_attempts: int = 3) -> None:
        self.max_attempts = max_attempts
        self.summary = Summary()
        """Summary of all loaded commits."""
        self.done = 0
        self.given_up = 0
        self._units: dict[bytes, Unit] = {}
        self._fatal_commands: dict[bytes, tuple[str, ...]] = {}
        """Only of units whose sandbox died during a tool call."""

    def disposition(self, unit_id: str) -> Disposition:
        """done, given_up or open; an unknown unit is open."""
        return self._disposition_of(self._get(unit_id))

    def is_done(self, key: bytes) -> bool:
        """Whether `trajectories` has the unit with this `identity.unit_key`. A resume calls this
        for every unit."""
        unit = self._units.get(key)
        return unit is not None and unit.done > 0

    def all_done(self, keys: bytes) -> bool:
        """Whether `is_done` for each of these keys, of 16 bytes each."""
        units = self._units
        for at in range(0, len(keys), 16):
            unit = units.get(keys[at : at + 16])
            if unit is None or not unit.done:
                return False
        return True

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
        self.done = self.given_up = 0
        for unit, count in Counter(self._units.values()).items():
            self._recount(self._disposition_of(unit), count)
        return sorted(key.hex() for key in duplicates)

    def reopen_given_up(self) -> int:
        """Reopen all units that were given up, and reset their failures."""
        return self.reopen(unit for unit, state in [*self.units()] if state == "given_up")

    def reopen(self, unit_ids: Iterable[str]) -> int:
        """Reopen units that were given up, and reset their failures. Returns their number."""
        reopened = 0
        for unit_id in unit_ids:
            key = bytes.fromhex(unit_id)
            self._units[key] = _NEW._replace(attempts=self._units[key].attempts)
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
        for key in sorted(self._units):
            yield key.hex(), self._disposition_of(self._units[key])

    def __len__(self) -> int:
        return len(self._units)

    def _load_commit(self, commit: Commit, duplicates: set[bytes]) -> None:
        keys, units = commit.keys, self._units
        codes = [_CODES.get(name, _CODES["harness"]) for name in keys.names]
        ids = bytes.fromhex("".join(keys.unit_id))
        at = 0
        for attempt, table, cause in zip(keys.attempt, keys.table, keys.cause, strict=True):
            key = ids[at : at + 16]
            at += 16
            unit = _record_attempt(
                units.get(key, _NEW), attempt, _DONE if table == "t" else codes[cause]
            )
            units[key] = unit
            if unit.done > 1:
                duplicates.add(key)
        for place, command in keys.fatal_commands.items():
            self._add_fatal(ids[16 * place : 16 * (place + 1)], command)

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

    def _get(self, unit_id: str) -> Unit:
        return self._units.get(bytes.fromhex(unit_id), _NEW)


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
