"""Looking at a run from outside while its driver works: who drives it, and what is in flight."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from hermes_rl.events import AttemptKey
from hermes_rl.locks import try_lock
from hermes_rl.store.commit import read_commits
from hermes_rl.store.dispatch import Dispatched
from hermes_rl.store.lines import payloads
from hermes_rl.store.processes import ProcessId, read_holder
from hermes_rl.store.replay import journal_files
from hermes_rl.store.rundir import RunDir


class _Keyed(msgspec.Struct):
    """The part of a `done` line that names its attempt; rows made from others have none."""

    key: AttemptKey | None = None


_decode_done = msgspec.json.Decoder(_Keyed).decode
_decode_dispatch = msgspec.json.Decoder(Dispatched).decode


def driver_of(run_dir: RunDir) -> ProcessId | None:
    """The process that drives a run now; None when nobody does."""
    try:
        fd = os.open(run_dir.path / "LOCK", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return None if try_lock(fd, shared=True) else read_holder(fd)
    finally:
        os.close(fd)


def in_flight(run_dir: RunDir) -> set[AttemptKey]:
    """Attempts of the newest epoch that were sent and have no durable end.

    It reads the commits of that epoch whole: for people who ask now and then.
    """
    epochs = run_dir.epochs()
    if not epochs:
        return set()
    now = epochs[-1]
    sent: set[AttemptKey] = set()
    for path in journal_files(run_dir.writer_path(f"{now}-driver"), "dispatch"):
        sent |= _keys(path, _decode_dispatch)
    # Journals before commits: an attempt that is published in between stands in one of the two.
    for writer in run_dir.writers():
        for done in journal_files(run_dir.writer_path(writer), "done"):
            sent -= _keys(done, _decode_done)
    for commit in read_commits(run_dir):
        columns = zip(commit.keys.unit_id, commit.keys.epoch, commit.keys.attempt, strict=True)
        sent -= {AttemptKey(unit_id=u, epoch=e, attempt=a) for u, e, a in columns if e == now}
    return sent


def _keys(path: Path, decode: Callable[[bytes], _Keyed | Dispatched]) -> set[AttemptKey]:
    """The attempts that a file names; none when its owner has just removed it."""
    try:
        found = [decode(line).key for line in payloads(path)]
    except FileNotFoundError:
        return set()
    return {key for key in found if key is not None}
