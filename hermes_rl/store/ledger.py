"""What is known of every unit, in 24 bytes each: done, given up or open, and how often tried.

Records are kept sorted in shards by the first bits of the id, so that a change moves a few
kilobytes and a lookup is a short binary search; a million units take 24 MB.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from hermes_rl.errors import CAUSES
from hermes_rl.store.commit import Commit
from hermes_rl.store.summary import Summary

Disposition = Literal["done", "given_up", "open"]

LOST_WORKERS_MAX = 3
"""So many workers may die under one unit before it is given up."""

_RECORD = struct.Struct(">16sBBHHH")
_SIZE = _RECORD.size
_EVENT = struct.Struct(">16sHB")
_DONE = 255
"""Code of an attempt that finished its unit; other codes are places in the table of causes."""
_CODES = {cause: code for code, cause in enumerate(CAUSES)}
_COUNTED = [consequence.counted for consequence in CAUSES.values()]
_LAST = [not consequence.retry for consequence in CAUSES.values()]
_LOST = _CODES["worker_lost"]
_NONE = 254
_SHARDS = 4096


class Unit(NamedTuple):
    """What is known of one unit."""

    done: int
    """How many rows `trajectories` has of it: more than one is a broken run."""
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
        """Of all commits that were loaded."""
        self.done = 0
        self.given_up = 0
        self._shards = [bytearray() for _ in range(_SHARDS)]

    def disposition(self, unit_id: str) -> Disposition:
        """done, given_up or open; a unit never heard of is open."""
        return self._judge(self._get(bytes.fromhex(unit_id)))

    def next_attempt(self, unit_id: str) -> int:
        """The number of the unit's next attempt: highest known + 1, from 0."""
        return self._get(bytes.fromhex(unit_id)).attempts

    def counted_failures(self, unit_id: str) -> int:
        """Failures that count against `max_attempts`."""
        return self._get(bytes.fromhex(unit_id)).counted

    def lost_workers(self, unit_id: str) -> int:
        """How many workers died under the unit; from 2 on it runs alone."""
        return self._get(bytes.fromhex(unit_id)).lost

    def apply(self, unit_id: str, attempt: int, *, done: bool, cause: str | None) -> Disposition:
        """Record one attempt's end, from a receipt or from recovery."""
        key = bytes.fromhex(unit_id)
        before = self._get(key)
        after = _step(before, attempt, _DONE if done else _CODES[cause or "harness"])
        self._put(key, after)
        judged = self._judge(after)
        self._recount(self._judge(before), judged)
        return judged

    def load(self, commits: Iterable[Commit]) -> list[str]:
        """Fill an empty ledger; returns the units that stand in `trajectories` more than once."""
        events: list[list[bytes]] = [[] for _ in range(_SHARDS)]
        for commit in commits:
            self.summary.merge(commit.summary)
            for event in _events(commit):
                events[_shard(event)].append(event)
        return [unit for shard in range(_SHARDS) for unit in self._build(shard, events[shard])]

    def reopen_given_up(self) -> int:
        """Open all units that were given up: their failures so far are forgotten here."""
        reopened = 0
        for shard in self._shards:
            for at in range(0, len(shard), _SIZE):
                unit = Unit(*_RECORD.unpack_from(shard, at)[1:])
                if self._judge(unit) == "given_up":
                    key = bytes(shard[at : at + 16])
                    _RECORD.pack_into(shard, at, key, *_NEW._replace(attempts=unit.attempts))
                    reopened += 1
        self.given_up -= reopened
        return reopened

    def units(self) -> Iterator[tuple[str, Disposition]]:
        """All units with their dispositions, in order of id."""
        for shard in self._shards:
            for key, *rest in _RECORD.iter_unpack(bytes(shard)):
                yield key.hex(), self._judge(Unit(*rest))

    def __len__(self) -> int:
        return sum(map(len, self._shards)) // _SIZE

    def _build(self, number: int, events: list[bytes]) -> Iterator[str]:
        """Fold the sorted attempts of one shard into records."""
        events.sort()
        shard, current, unit = self._shards[number], b"", _NEW
        for event in events:
            key, attempt, code = _EVENT.unpack(event)
            if key != current:
                self._append(shard, current, unit)
                current, unit = key, _NEW
            unit = _step(unit, attempt, code)
            if code == _DONE and unit.done == 2:
                yield key.hex()
        self._append(shard, current, unit)
        events.clear()

    def _append(self, shard: bytearray, key: bytes, unit: Unit) -> None:
        if key:
            shard += _RECORD.pack(key, *unit)
            self._recount("open", self._judge(unit))

    def _judge(self, unit: Unit) -> Disposition:
        if unit.done:
            return "done"
        refused = unit.cause != _NONE and _LAST[unit.cause]
        worn = unit.counted >= self.max_attempts or unit.lost >= LOST_WORKERS_MAX
        return "given_up" if refused or worn else "open"

    def _recount(self, before: Disposition, after: Disposition) -> None:
        self.done += (after == "done") - (before == "done")
        self.given_up += (after == "given_up") - (before == "given_up")

    def _get(self, key: bytes) -> Unit:
        shard = self._shards[_shard(key)]
        at = _find(shard, key)
        if shard[at : at + 16] != key:
            return _NEW
        return Unit(*_RECORD.unpack_from(shard, at)[1:])

    def _put(self, key: bytes, unit: Unit) -> None:
        shard = self._shards[_shard(key)]
        at = _find(shard, key)
        known = _SIZE if shard[at : at + 16] == key else 0
        shard[at : at + known] = _RECORD.pack(key, *unit)


def _shard(key: bytes) -> int:
    return key[0] << 4 | key[1] >> 4


def _find(shard: bytearray, key: bytes) -> int:
    low, high = 0, len(shard) // _SIZE
    while low < high:
        middle = (low + high) // 2
        if shard[middle * _SIZE : middle * _SIZE + 16] < key:
            low = middle + 1
        else:
            high = middle
    return low * _SIZE


def _step(unit: Unit, attempt: int, code: int) -> Unit:
    """The unit after one more attempt; attempts are applied in any order."""
    latest = attempt + 1 >= unit.attempts
    if code == _DONE:
        return unit._replace(done=min(unit.done + 1, 255), attempts=max(unit.attempts, attempt + 1))
    return Unit(
        unit.done,
        code if latest else unit.cause,
        min(unit.counted + _COUNTED[code], 0xFFFF),
        min(unit.lost + (code == _LOST), 0xFFFF),
        max(unit.attempts, attempt + 1),
    )


def _events(commit: Commit) -> Iterator[bytes]:
    keys = commit.keys
    codes = [_CODES.get(name, _CODES["harness"]) for name in keys.names]
    ids = bytes.fromhex("".join(keys.unit_id))
    for i, (attempt, table, cause) in enumerate(
        zip(keys.attempt, keys.table, keys.cause, strict=True)
    ):
        code = _DONE if table == "t" else codes[cause]
        yield _EVENT.pack(ids[16 * i : 16 * i + 16], attempt, code)
