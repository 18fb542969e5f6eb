"""Process trees as /proc shows them, and how to end one without hitting a stranger.

A process is named by its id and start time together: an id alone may have been given away again.

    python -I -S processes.py PROGRAM ARGUMENT...     a guard: ends what PROGRAM leaves behind
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

GRACE_S = 0.1
"""Between SIGTERM and SIGKILL: time for a program to flush what it printed."""
ROUNDS = 200
"""Rounds of SIGKILL, 5 ms apart, before a tree is called unkillable."""
STOP_S = 10.0
"""How long the next process of a tree may take to stop. It stops when it next runs: on a busy
machine, late."""
STOP_MOST_S = 60.0
"""How long all of them may take."""
BUSY_SNAPSHOTS = 10
"""Empty snapshots in a row that suffice while other processes of the machine come and go."""


@dataclass(frozen=True)
class Proc:
    """One process."""

    start: int
    """Start time in clock ticks since boot."""
    pid: int

    def alive(self) -> bool:
        """Still running (a zombie is not)."""
        found = _stat(self.pid)
        return found is not None and found.start == self.start and not found.dead

    def halted(self) -> bool:
        """Neither runs nor will before somebody wakes it: stopped, or gone."""
        found = _stat(self.pid)
        return found is None or found.start != self.start or found.dead or found.stopped

    def younger(self, other: Proc) -> bool:
        """Whether it was started after the other one. Within a tick the ids tell, which begin anew
        after the highest."""
        if self.start != other.start:
            return self.start > other.start
        return 0 < (self.pid - other.pid) % _ids() < _ids() / 2

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


@dataclass(frozen=True)
class _Stat:
    """A line of /proc/PID/stat."""

    parent: int
    start: int
    dead: bool
    """A zombie, and no thread of it still runs."""
    stopped: bool


def _stat(pid: int) -> _Stat | None:
    """What the kernel says of a process; None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    fields = text[text.rfind(b")") + 2 :].split()
    dead = fields[0] in b"ZX" and int(fields[17]) < 2
    return _Stat(int(fields[1]), int(fields[19]), dead, fields[0] in b"Tt")


@lru_cache(maxsize=1)
def _ids() -> int:
    """How many process ids the machine has."""
    try:
        return int(Path("/proc/sys/kernel/pid_max").read_text())
    except (OSError, ValueError):
        return 32_768


def find(pid: int) -> Proc | None:
    """The process that has this id now."""
    found = _stat(pid)
    return Proc(found.start, pid) if found else None


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


@dataclass(frozen=True)
class Snapshot:
    """What /proc showed at one moment."""

    alive: list[Proc]
    dying: frozenset[Proc] = frozenset()
    """Zombies, and what ended during the snapshot: what they forked just before may be missing."""

    def __add__(self, other: Snapshot) -> Snapshot:
        return Snapshot(self.alive + other.alive, self.dying | other.dying)


def snapshot(pids: Iterable[int], *, below: bool = True) -> Snapshot:
    """These processes, and all below them."""
    alive: list[Proc] = []
    dying: set[Proc] = set()
    todo = [*pids]
    while todo:
        pid = todo.pop()
        found = _stat(pid)
        if found is None:
            dying.add(Proc(-1, pid))
            continue
        if found.dead:
            dying.add(Proc(found.start, pid))
        else:
            alive.append(Proc(found.start, pid))
        if below:
            todo += children(pid)
    return Snapshot(alive, frozenset(dying))


def descendants(pid: int) -> list[Proc]:
    """All that live below this one."""
    return snapshot(children(pid)).alive


def end_inside(root: int, inside: int, send: Send | None = None) -> None:
    """End a process below `root`, by its id in its own namespace, and all below it. Blocks.

    Args:
        send: see `Send`.
    """
    for proc in descendants(root):
        if inside_pid(proc.pid) == inside:
            stop_tree(proc, send or signal_all)
            end_tree(proc, send or signal_all)


class Quiescence:
    """Decides, from one snapshot to the next, when all processes are gone.

    One empty snapshot proves nothing: it misses a child that was forked after the list was read
    and whose parent ended before its turn. So the snapshot before it was empty too, and
    nobody was dying that was not dying then.
    """

    def __init__(self) -> None:
        self._empty = 0
        self._dying: frozenset[Proc] = frozenset()

    def gone(self, now: Snapshot) -> bool:
        """Take one more snapshot into account."""
        busy = not now.dying <= self._dying
        self._dying = now.dying
        self._empty = 0 if now.alive else self._empty + 1
        return self._empty >= (BUSY_SNAPSHOTS if busy else 2)


def inside_pid(pid: int) -> int:
    """A process's id in its own namespace; 0 when it is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    except (OSError, ValueError):
        return 0
    return pid


Send = Callable[[Iterable[Proc], int], None]
"""Sends a signal to processes; by default we do so ourselves."""


class Tree(Protocol):
    """A started shell, or a sandbox, with all that runs in it."""

    def supervisor(self) -> int:
        """The host's id of the shell that starts commands; 0 when it is gone."""
        ...

    def orphans(self) -> Snapshot:
        """Those whose parent is gone; the supervisor may be among them."""
        ...

    def send(self, processes_: Iterable[Proc], number: int) -> None:
        """Send a signal to processes of it. Blocks."""
        ...

    def end_process(self, inside: int) -> None:
        """End a process, by its id as the shell sees it, and all below it. Blocks."""
        ...

    async def ended(self) -> int:
        """Wait until all of it is gone. Its code, negative after a signal from outside."""
        ...

    async def end(self) -> int:
        """End all of it. Its code, as `ended` has it. Idempotent."""
        ...

    def close(self) -> None:
        """Close our descriptors, after its end. Idempotent."""
        ...


class Jobs:
    """Which child of a supervisor is the running command, and how to end that with all it started.

    Args:
        supervisor: see `Tree.supervisor`.
        orphans: see `Tree.orphans`.
        send: see `Send`.
    """

    def __init__(
        self,
        supervisor: Callable[[], int],
        orphans: Callable[[], Snapshot],
        send: Send | None = None,
    ) -> None:
        self._supervisor = supervisor
        self._orphans = orphans
        self._send = send or signal_all
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
        signalled: set[Proc] = set()
        quiescence = Quiescence()
        deadline = time.monotonic() + GRACE_S
        pause = 0.001
        while not quiescence.gone(now := self._job_snapshot(job)):
            if time.monotonic() > deadline:
                return _kill(now, quiescence, lambda: self._job_snapshot(job), self._send)
            self._send([proc for proc in now.alive if proc not in signalled], signal.SIGTERM)
            signalled.update(now.alive)
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        return True

    def _job_snapshot(self, job: Proc) -> Snapshot:
        """The job's tree, and what left it (by setsid and double forks).

        An orphan belongs to the job when it is younger; what an older background process started
        stays below that process and lives on. The tree comes first: who leaves it meanwhile is
        among the orphans then.
        """
        tree = _tree(job)
        orphans = self._orphans()
        supervisor = self._supervisor()
        left = [proc.pid for proc in orphans.alive if proc.pid != supervisor and proc.younger(job)]
        return tree + Snapshot([], orphans.dying) + snapshot(left)


def _known(pid: int) -> Proc:
    """A process, or what can equal none."""
    return find(pid) or Proc(-1, pid)


def _tree(root: Proc) -> Snapshot:
    """A process and all below it; not those of a stranger that has its id by now."""
    return snapshot([root.pid]) if find(root.pid) == root else Snapshot([])


def stop_tree(root: Proc, send: Send | None = None) -> None:
    """SIGSTOP a process and everything below it, so that nothing of it forks or leaves it.

    For a tree whose orphans nobody would find. A process in the middle of a fork stops after it:
    so all have stopped before the snapshot that must find nothing new. Gives up when nothing has
    changed for `STOP_S`, as when a process hangs in the kernel, and after `STOP_MOST_S`: processes
    could wake each other for ever. Blocks: call it in a thread.
    """
    send = send or signal_all
    signalled: set[Proc] = set()
    running: list[Proc] | None = None
    deadline = time.monotonic() + STOP_S
    latest = time.monotonic() + STOP_MOST_S
    while time.monotonic() < min(deadline, latest):
        fresh = [proc for proc in _tree(root).alive if proc not in signalled]
        if running == [] and not fresh:
            return
        send([*fresh, *(running or [])], signal.SIGSTOP)
        signalled.update(fresh)
        time.sleep(0.001)
        before, running = running, [proc for proc in signalled if not proc.halted()]
        if fresh or running != before:
            deadline = time.monotonic() + STOP_S


def end_tree(root: Proc, send: Send | None = None) -> bool:
    """SIGKILL a process and everything below it. Blocks: call it in a thread.

    Returns whether all of it is gone. What it forks in this moment may get away; where nobody would
    find that either, `stop_tree` goes first.
    """
    known: set[Proc] = set()

    def again() -> Snapshot:
        """Also those whose parent is gone by now."""
        now = _tree(root)
        known.update(now.alive)
        return Snapshot([proc for proc in known if proc.alive()], now.dying)

    return _kill(again(), Quiescence(), again, send or signal_all)


def _kill(now: Snapshot, quiescence: Quiescence, again: Callable[[], Snapshot], send: Send) -> bool:
    """SIGKILL what a snapshot holds, take another, until all are gone. Returns whether they are."""
    for _ in range(ROUNDS):
        send(now.alive, signal.SIGKILL)
        time.sleep(0.005)
        now = again()
        if quiescence.gone(now):
            return True
    return False


def signal_all(processes: Iterable[Proc], number: int) -> None:
    """Send a signal to each of them."""
    for proc in processes:
        proc.signal(number)


@dataclass(frozen=True)
class MarkedProcesses:
    """Processes that belong together, found among all of the machine.

    By a variable of their environment, and by a pipe that they hold for writing. Each alone has
    gaps: `env -i` drops the variable, and in the middle of an exec no environment can be read; a
    daemon may close what it inherited.
    """

    eldest: Proc
    """The first of them: older processes are skipped."""
    mark: bytes
    """NAME=VALUE of the variable."""
    line: str
    """The pipe, as links in /proc/PID/fd name it."""

    def snapshot(self) -> Snapshot:
        """All of them."""
        dying: set[Proc] = set()
        found = self._found(dying)
        return Snapshot([*found], frozenset(dying))

    def orphans(self) -> Snapshot:
        """Those whose parent is not one of them."""
        dying: set[Proc] = set()
        found = self._found(dying)
        pids = {proc.pid for proc in found}
        return Snapshot([p for p, parent in found.items() if parent not in pids], frozenset(dying))

    def _found(self, dying: set[Proc]) -> dict[Proc, int]:
        """Who lives, with the id of its parent."""
        found = {}
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            pid = int(name)
            stat = _stat(pid)
            if stat is None:
                dying.add(Proc(-1, pid))
            elif stat.start >= self.eldest.start:
                proc = Proc(stat.start, pid)
                if stat.dead:
                    dying.add(proc)
                elif self._knows(proc, stat.parent):
                    found[proc] = stat.parent
        return found

    def _knows(self, proc: Proc, parent: int) -> bool:
        try:
            with open(f"/proc/{proc.pid}/environ", "rb") as file:
                if self.mark in file.read().split(b"\0"):
                    return True
        except OSError:
            return False
        # A process that we forked ourselves, and that has not come to its exec, holds our pipes.
        return (parent != os.getpid() or proc == self.eldest) and _writes(proc.pid, self.line)


def _writes(pid: int, link: str) -> bool:
    """Whether a process has a file open for writing."""
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    for name in names:
        path = f"{folder}/{name}"
        try:
            if os.readlink(path) == link and os.lstat(path).st_mode & 0o200:
                return True
        except OSError:  # closed meanwhile
            continue
    return False


_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 1 << 14, 1 << 18


def main() -> int:
    """Run a program until it ends, or until standard input closes, and end all that it started,
    also what has left its process group and session. Root's mounts end with it, too. Returns the
    program's exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # what is ignored, programs would inherit
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if libc.unshare(_CLONE_NEWNS) == 0:
        libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    with subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL) as program:
        ended = os.pidfd_open(program.pid)
        select.select([0, ended], [], [])
        code = program.poll()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        for child in map(find, children(os.getpid())):
            if child is not None:
                stop_tree(child)
                end_tree(child)
    return 1 if code is None or code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
