"""A checkpoint of the ledger: the state of every unit after some commits, sorted and memory-mapped.

A start learns from `ledger.checkpoint` in the run directory what the commits that it covers say, so
only later ones are read. It is a cache: without it, where it is damaged, and where the
run has lost any file of those commits or was repaired since, all commits are read.

The file: the size of the header in 8 bytes; the header, JSON; the first and the second half of each
key as integers of 8 bytes, sorted by the first; two bytes for each state, an index into those of
the header; the sha256 of all that. 18 bytes for each unit, in the order of bytes of the machine.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hermes_rl.errors import CAUSES, HermesError
from hermes_rl.store.commit import Unit, part_fault
from hermes_rl.store.files import disk_errors
from hermes_rl.store.rundir import CHECKPOINT, RunDir
from hermes_rl.store.snapshots import Part, find_part
from hermes_rl.store.summary import Summary

if TYPE_CHECKING:
    import numpy as np

    Column = np.ndarray[Any, Any]

_VERSION = 1
_SIZE = struct.Struct("<Q")
_KEY = struct.Struct(">QQ")
_DIGEST_BYTES = 32
_STEP = 2**20
"""Units, or bytes, that are copied at once."""
_SLICE = 2**14
"""Keys that are looked up at once. No call may keep other threads waiting, such as the event loop,
so sorting is left to numpy, and no loop over all units is one of C."""


class Header(msgspec.Struct, kw_only=True):
    """What a checkpoint has beside the states."""

    version: int = _VERSION
    byteorder: str = sys.byteorder
    causes: list[str] = msgspec.field(default_factory=lambda: [*CAUSES])
    """The names of the causes, whose indices are in states."""
    run_id: str
    epoch: int
    """Of the driver that wrote it."""
    covered: dict[str, list[list[int]]]
    """Writer -> its covered batches, as ranges of their sequence: first, and one after the last."""
    units: int
    states: list[Unit]
    counts: list[int]
    """Units in each of these states."""
    fatal_commands: dict[str, tuple[str, ...]]
    summary: Summary
    parts: dict[str, list[Part]]
    """Stem -> parts of one covered batch for each Parquet file that has rows of any."""


class Checkpoint:
    """The states of all units after some commits. Lookups are thread-safe.

    Args:
        header: of the file.
        body: what follows the header, without the digest.
    """

    def __init__(self, header: Header, body: memoryview) -> None:
        self.summary = header.summary
        self.fatal_commands = {bytes.fromhex(k): v for k, v in header.fatal_commands.items()}
        self.counts = Counter(dict(zip(header.states, header.counts, strict=True)))
        """State -> units."""
        self.parts = header.parts
        self.covered = header.covered
        self.states = header.states
        n = header.units
        self.first, self.second = body[: 8 * n].cast("Q"), body[8 * n : 16 * n].cast("Q")
        self.codes = body[16 * n : 18 * n].cast("H")

    def __len__(self) -> int:
        return len(self.codes)

    def covers(self, stem: str) -> bool:
        """Whether the states are those after this batch."""
        writer, _, sequence = stem.rpartition("-")
        ranges = self.covered.get(writer, [])
        at = bisect_left(ranges, [int(sequence) + 1])
        return at > 0 and int(sequence) < ranges[at - 1][1]

    def get(self, key: bytes) -> Unit | None:
        """The state of a unit; None for an unknown one."""
        at = self._place(*_KEY.unpack(key))
        return None if at < 0 else self.states[self.codes[at]]

    def open_among(self, keys: bytes) -> list[bytes]:
        """Those of these keys, of 16 bytes each, whose units are not known as done."""
        import numpy as np  # of large runs only

        at = self._find(*_columns(keys))
        done = np.array([state.done > 0 for state in self.states])
        found = (at >= 0) & done[np.asarray(self.codes)[at]]
        return [keys[16 * n : 16 * (n + 1)] for n in np.flatnonzero(~found).tolist()]

    def known_among(self, keys: Iterable[bytes]) -> Iterator[tuple[bytes, Unit]]:
        """Those of these keys that are known, with their states. Other threads run meanwhile."""
        import numpy as np

        rest = iter(keys)
        while some := [*islice(rest, _SLICE)]:
            at = self._find(*_columns(b"".join(some)))
            found = np.flatnonzero(at >= 0)
            codes = np.asarray(self.codes)[at[found]]
            for n, code in zip(found.tolist(), codes.tolist(), strict=True):
                yield some[n], self.states[code]

    def keys_of(self, wanted: Callable[[Unit], bool] = lambda _: True) -> Iterator[bytes]:
        """The keys of units in some states, in order."""
        import numpy as np

        codes = [code for code, state in enumerate(self.states) if wanted(state)]
        for begin in range(0, len(self), _STEP):
            found = np.flatnonzero(np.isin(self.codes[begin : begin + _STEP], codes))
            for at in (found + begin).tolist():
                yield _KEY.pack(self.first[at], self.second[at])

    def _place(self, first: int, second: int) -> int:
        at = bisect_left(self.first, first)
        while at < len(self.first) and self.first[at] == first:
            if self.second[at] == second:
                return at
            at += 1
        return -1

    def _find(self, first: Column, second: Column) -> Column:
        """Where each key of these halves is; -1 for an unknown one."""
        import numpy as np

        at = np.searchsorted(np.asarray(self.first), first)
        at[at == len(self)] = 0
        same = np.asarray(self.first)[at] == first
        # Another key may have the same first half.
        for n in np.flatnonzero(same & (np.asarray(self.second)[at] != second)).tolist():
            at[n] = self._place(int(first[n]), int(second[n]))
        at[~same] = -1
        return at

    def places(self, first: Column, second: Column) -> tuple[Column, Column]:
        """Where each key of these halves is, and whether it is there; else, where it belongs."""
        import numpy as np

        at = self._find(first, second)
        there = at >= 0
        return np.where(there, at, np.searchsorted(np.asarray(self.first), first)), there


def open_checkpoint(run_dir: RunDir) -> Checkpoint | None:
    """The checkpoint of a run; None for none, and for one that does not fit the run. Blocking."""
    with suppress(OSError, ValueError, msgspec.MsgspecError, HermesError):
        header, body = _map(run_dir.path / CHECKPOINT)
        known = header.version, header.byteorder, header.causes
        if known != (_VERSION, sys.byteorder, [*CAUSES]):
            return None
        epochs = [run_dir.epoch(n) for n in run_dir.epochs() if n >= header.epoch]
        # A repair writes commits again.
        if any(e.run_id != header.run_id or e.meta.get("repair") for e in epochs):
            return None
        found = Checkpoint(header, body)
        covered = sum(end - begin for ranges in found.covered.values() for begin, end in ranges)
        if sum(map(found.covers, run_dir.commit_stems())) != covered:
            return None
        batches = found.parts.items()
        if not any(part_fault(run_dir, stem, part) for stem, parts in batches for part in parts):
            return found
    return None


class Parts:
    """One batch for each Parquet file, so that all files are looked at, and each once."""

    def __init__(self, run_dir: RunDir) -> None:
        self.found: dict[str, list[Part]] = {}
        self.faulty = False
        self._run_dir = run_dir
        self._seen: set[Path] = set()

    def add(self, stem: str, parts: Iterable[Part]) -> None:
        for part in parts:
            place, _ = find_part(self._run_dir, stem, part)
            if place not in self._seen:
                self._seen.add(place)
                self.found.setdefault(stem, []).append(part)
                self.faulty |= part_fault(self._run_dir, stem, part) is not None


def add_ranges(covered: dict[str, list[list[int]]], stems: list[str]) -> dict[str, list[list[int]]]:
    """The covered batches and some more."""
    found = {writer: [*ranges] for writer, ranges in covered.items()}
    for stem in stems:
        writer, _, sequence = stem.rpartition("-")
        found.setdefault(writer, []).append([int(sequence), int(sequence) + 1])
    for writer, ranges in found.items():
        joined: list[list[int]] = []
        for begin, end in sorted(ranges):
            if joined and joined[-1][1] == begin:
                joined[-1] = [joined[-1][0], end]
            else:
                joined.append([begin, end])
        found[writer] = joined
    return found


def _columns(keys: bytes) -> tuple[Column, Column]:
    import numpy as np

    halves = np.frombuffer(keys, ">u8").astype("=u8")
    return halves[::2], halves[1::2]


def save(
    run_dir: RunDir, header: Header, base: Checkpoint | None, changed: Mapping[bytes, Unit]
) -> Checkpoint:
    """Write the states of `base`, with those that changed since, and open what was written.
    Blocking. Raises: StoreError when another driver has begun; DiskFull."""
    local = run_dir.storage.temporary(CHECKPOINT)
    try:
        with disk_errors():
            _write(local, header, base, changed)
        run_dir.storage.put_file(CHECKPOINT, local)
    finally:
        local.unlink(missing_ok=True)
    return Checkpoint(*_map(run_dir.path / CHECKPOINT))


def _write(
    local: Path, header: Header, base: Checkpoint | None, changed: Mapping[bytes, Unit]
) -> None:
    import numpy as np

    code_of = {state: code for code, state in enumerate(header.states)}
    codes = np.fromiter((code_of[state] for state in changed.values()), np.uint16, len(changed))
    keys = np.fromiter((key for key in changed), "S16", len(changed)).tobytes()
    first, second = _columns(keys)
    order = np.lexsort((second, first))
    columns = [column[order] for column in (first, second, codes)]
    if base is not None:
        at, there = base.places(*columns[:2])
        order = np.argsort(at, kind="stable")
        at, there, columns = at[order], there[order], [column[order] for column in columns]
        renumbered = np.array([code_of.get(state, 0) for state in base.states], np.uint16)
    with local.open("wb") as file:
        digest = hashlib.sha256()

        def write(data: bytes | memoryview) -> None:
            digest.update(data)
            file.write(data)

        encoded = msgspec.json.encode(header)
        write(_SIZE.pack(len(encoded)))
        write(encoded)
        for n, column in enumerate(columns):
            if base is None:
                write(column.tobytes())
                continue
            old = np.asarray((base.first, base.second, base.codes)[n])
            for begin in range(0, len(old), _STEP):
                piece = old[begin : begin + _STEP]
                piece = renumbered[piece] if n == 2 else piece.copy()
                end = len(at) if begin + _STEP >= len(old) else np.searchsorted(at, begin + _STEP)
                here = slice(np.searchsorted(at, begin), end)
                place, known, new = at[here] - begin, there[here], column[here]
                piece[place[known]] = new[known]
                write(np.insert(piece, place[~known], new[~known]).tobytes())
        file.write(digest.digest())


def _map(path: Path) -> tuple[Header, memoryview]:
    """The header and the body of a file. Raises: OSError; ValueError when it is damaged."""
    with path.open("rb") as file:
        digest, left = hashlib.sha256(), path.stat().st_size - _DIGEST_BYTES
        while left > 0 and (data := file.read(min(left, _STEP))):
            digest.update(data)
            left -= len(data)
        if file.read() != digest.digest():
            raise ValueError(f"{path} is damaged")
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    (size,) = _SIZE.unpack_from(content)
    header = msgspec.json.decode(content[_SIZE.size : _SIZE.size + size], type=Header)
    body = content[_SIZE.size + size : -_DIGEST_BYTES]
    if len(body) != 18 * header.units:
        raise ValueError(f"{path} has another length")
    return header, body
