"""Process trees as /proc shows them, and how to end one without hitting a stranger.

A process is named by its id and start time together: an id alone may have been given away again.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

GRACE_S = 0.1
"""Between SIGTERM and SIGKILL: time for a program to flush what it printed."""
ROUNDS = 200
"""Rounds of SIGKILL, 5 ms apart, before a tree is called unkillable."""


Orphans = Callable[[], Iterable[int]]


@dataclass(frozen=True, order=True)
class Proc:
    """One process."""

    start: int
    """Start time in clock ticks since boot."""
    pid: int

    def alive(self) -> bool:
        """Still running (a zombie is not)."""
        found = _stat(self.pid)
        return found is not None and found[1] == self.start and found[2] not in "ZX"

    def signal(self, number: int) -> None:
        """Send a signal to this very process, or to nobody."""
        try:
            handle = os.pidfd_open(self.pid)
        except OSError:
            return
        try:
            if self.alive():
                signal.pidfd_send_signal(handle, number)
        except OSError:
            pass
        finally:
            os.close(handle)


def _stat(pid: int) -> tuple[int, int, str] | None:
    """Parent, start time and state of a process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    fields = text[text.rfind(b")") + 2 :].split()
    return int(fields[1]), int(fields[19]), fields[0].decode()


def find(pid: int) -> Proc | None:
    """The process that has this id now."""
    found = _stat(pid)
    return Proc(found[1], pid) if found else None


def children(pid: int) -> list[int]:
    """Ids of the direct children, oldest first. Empty for a process that is gone."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    found: list[int] = []
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += [int(word) for word in file.read().split()]
        except OSError:
            continue
    return found


def descendants(pid: int) -> list[Proc]:
    """All processes below this one."""
    found: list[Proc] = []
    todo = children(pid)
    while todo:
        current = todo.pop()
        proc = find(current)
        if proc is not None:
            found.append(proc)
            todo += children(current)
    return found


def inside_pid(pid: int) -> int:
    """A process's id in its own namespace; 0 when it is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    except (OSError, ValueError):
        return 0
    return pid


def job_members(orphans: Orphans, supervisor: int, job: Proc) -> list[Proc]:
    """The job's tree, and what left it for process 1 (by setsid and double forks).

    An orphan belongs to the job when it is younger; what an older background process started stays
    below that process and lives on.
    """
    members = [job, *descendants(job.pid)]
    for pid in orphans():
        proc = find(pid)
        if proc is not None and pid != supervisor and proc > job:
            members += [proc, *descendants(pid)]
    return [proc for proc in members if proc.alive()]


class Jobs:
    """Which child of a supervisor is the running command, and how to end that with all it started.

    Args:
        supervisor: the id of the session's shell, which lives on; 0 when it is gone.
        orphans: lists the session's processes whose parent is gone.
    """

    def __init__(self, supervisor: Callable[[], int], orphans: Orphans) -> None:
        self._supervisor = supervisor
        self._orphans = orphans
        self._kept: frozenset[Proc] = frozenset()

    def keep(self) -> None:
        """No command is running: what the supervisor has now are background processes."""
        self._kept = frozenset(map(_known, children(self._supervisor())))

    def running(self) -> Proc | None:
        """The command that the supervisor waits for: its oldest child but the background ones."""
        for pid in children(self._supervisor()):
            proc = find(pid)
            if proc is not None and proc not in self._kept:
                return proc
        return None

    def end(self) -> bool:
        """End the running command's tree: SIGTERM, a moment, then SIGKILL until nothing is left.

        Blocks up to about a second: call it in a thread. Returns whether all of it is gone; also
        when no command was found, as one that is not forked yet.
        """
        job = self.running()
        if job is None:
            return True
        send(self._members(job), signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        pause = 0.001
        while time.monotonic() < deadline:
            time.sleep(pause)
            if not self._members(job):
                return True
            pause = min(2 * pause, 0.01)
        for _ in range(ROUNDS):
            members = self._members(job)
            if not members:
                return True
            send(members, signal.SIGKILL)
            time.sleep(0.005)
        return False

    def _members(self, job: Proc) -> list[Proc]:
        return job_members(self._orphans, self._supervisor(), job)


def _known(pid: int) -> Proc:
    """A process, or what can equal none."""
    return find(pid) or Proc(-1, pid)


def end_tree(root: Proc) -> bool:
    """SIGKILL a process and everything below it. Blocks: call it in a thread."""
    for _ in range(ROUNDS):
        members = [proc for proc in [*descendants(root.pid), root] if proc.alive()]
        if not members:
            return True
        send(members, signal.SIGKILL)
        time.sleep(0.005)
    return False


def send(processes: Iterable[Proc], number: int) -> None:
    """Send a signal to each of them."""
    for proc in processes:
        proc.signal(number)


def marked(mark: bytes) -> list[Proc]:
    """All processes of this machine that have `mark` as a variable of their environment."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                variables = file.read()
        except OSError:
            continue
        if mark in variables.split(b"\0"):
            proc = find(int(name))
            if proc is not None and proc.alive():
                found.append(proc)
    return found


def marked_orphans(mark: bytes) -> list[int]:
    """Those of `marked` whose parent does not have the mark."""
    found = {proc.pid for proc in marked(mark)}
    return [pid for pid in found if (_stat(pid) or (0, 0, ""))[0] not in found]
