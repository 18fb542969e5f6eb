"""R2: no old writer may write any more. `alive` says who it is, its flock whether it lives."""

from __future__ import annotations

import os

from hermes_rl.errors import StoreError
from hermes_rl.locks import lock_within
from hermes_rl.store.processes import read_holder, this_process
from hermes_rl.store.rundir import RunDir

GRACE_S = 10.0
"""A writer whose driver is gone gets this long to end by itself, and once killed to be gone."""

LEASE_S = 30.0
"""The lease of a writer whose `alive` does not say it."""


class NotFenced(StoreError):
    """A writer still holds its journal, although it had time to end, was killed, or its lease is
    over."""


def fence(run_dir: RunDir, writer: str, *, grace_s: float = GRACE_S) -> None:
    """Return once the writer cannot write any more. Blocking: for threads.

    Waits for the grace, then kills a local process by pid and start time, but not this one. A
    process on another machine gets until its own lease has ended, and the grace once more.
    Raises: NotFenced when the writer still holds its journal after that.
    """
    path = run_dir.writer_path(writer) / "alive"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if lock_within(fd, grace_s):
            return
        holder = read_holder(fd)
        if holder is not None and holder == this_process(holder.lease_s):
            raise NotFenced(
                f"{run_dir.path}: writer {writer} of this process still waits for its disk. "
                "What it finished is published when that answers, or by the next start"
            )
        if holder is not None:
            holder.kill()
        lease_s = holder.lease_s if holder and holder.lease_s is not None else LEASE_S
        if not lock_within(fd, GRACE_S if holder and holder.local else lease_s + grace_s):
            who = f"process {holder.pid} on {holder.host}" if holder else "another process"
            raise NotFenced(f"{run_dir.path}: writer {writer} ({who}) still runs; stop it first")
    finally:
        os.close(fd)  # its owner is dead by now, and its name is never used again
