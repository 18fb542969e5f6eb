"""CPU, time and memory of a command with all processes that it starts, however deep.

CPU is user plus system time. Where a control group can be made (root), its account is read: nothing
escapes it, not even what daemons reap. Elsewhere this process becomes the reaper of orphans and
takes the sum over all children that it waited for.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
CGROUP = Path("/sys/fs/cgroup/cpuacct")
CGROUP_2 = Path("/sys/fs/cgroup")
_PR_SET_CHILD_SUBREAPER = 36
LIMIT_S = 900.0
"""No command of the bench takes longer."""


@dataclass(frozen=True)
class Memory:
    """Of all processes of a command at one moment."""

    processes: int
    pss_mb: float
    by_name: Mapping[str, float] = field(default_factory=dict)
    """MB by process name."""


@dataclass
class Cost:
    """What a command took."""

    cpu_s: float
    wall_s: float
    out: str
    peak: Memory
    cpu_by_process: Mapping[tuple[int, str], float] = field(default_factory=dict)
    """Seconds by process id and name, as last sampled."""


class Account:
    """The CPU account and the process list of one command; a context manager."""

    kind = "control group"

    def __init__(self, name: str) -> None:
        self._name = f"hermes-rl-bench-{os.getpid()}-{name}"
        self.path: Path | None = None

    def __enter__(self) -> Account:
        for base in (CGROUP, CGROUP_2):
            path = base / self._name
            with contextlib.suppress(OSError):
                path.mkdir()
                if self._reads(path):
                    self.path = path
                    return self
                path.rmdir()
        return self

    def __exit__(self, *_: object) -> None:
        if self.path is None:
            return
        for _ in range(50):
            with contextlib.suppress(OSError):
                self.path.rmdir()
                return
            time.sleep(0.1)

    @staticmethod
    def _reads(path: Path) -> bool:
        return any((path / name).exists() for name in ("cpuacct.usage", "cpu.stat"))

    def wrap(self, argv: Sequence[str]) -> list[str]:
        """The command, joining the group before it starts."""
        if self.path is None:
            return list(argv)
        join = f'echo $$ >{self.path}/cgroup.procs && exec "$@"'
        return ["/bin/sh", "-c", join, "sh", *argv]

    def pids(self, root: int) -> list[int]:
        """All processes of the command now."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                return [int(p) for p in (self.path / "cgroup.procs").read_text().split()]
        return list(tree(root))

    def cpu_s(self) -> float:
        """So far. Without a group: of children that were waited for, by this process."""
        if self.path is None:
            return children_cpu_s()
        old = self.path / "cpuacct.usage"
        if old.exists():
            return int(old.read_text()) / 1e9
        words = (self.path / "cpu.stat").read_text().split()
        return int(words[words.index("usage_usec") + 1]) / 1e6


def children_cpu_s() -> float:
    """User and system time of all children that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def tree(root: int) -> Iterator[int]:
    """A process and its descendants."""
    todo = [root]
    while todo:
        pid = todo.pop()
        yield pid
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                todo += [int(p) for p in (task / "children").read_text().split()]


def memory_of(pids: Sequence[int]) -> Memory:
    """PSS of these processes, as far as they still are."""
    found: dict[str, float] = {}
    count = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError, ValueError):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            line = next(part for part in text.splitlines() if part.startswith("Pss:"))
            found[name] = found.get(name, 0.0) + int(line.split()[1]) / 1024
            count += 1
    return Memory(count, sum(found.values()), found)


def cpu_of(pid: int) -> tuple[str, float]:
    """A process's name and CPU seconds so far. Raises: OSError when it is gone."""
    text = Path(f"/proc/{pid}/stat").read_text()
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return name, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def become_reaper() -> None:
    """Orphans of our commands come to this process."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _reap() -> None:
    """Wait for orphans that ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


class _Sampler(threading.Thread):
    """Takes the memory of a command again and again; keeps the one with the most processes."""

    def __init__(self, account: Account, root: int, every_s: float) -> None:
        super().__init__(daemon=True)
        self.peak = Memory(0, 0.0)
        self.cpu: dict[tuple[int, str], float] = {}
        self._account, self._root, self._every_s = account, root, every_s
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(self._every_s):
            pids = self._account.pids(self._root)
            now = memory_of(pids)
            for pid in pids:
                with contextlib.suppress(OSError):
                    name, seconds = cpu_of(pid)
                    self.cpu[pid, name] = seconds
            if (now.processes, now.pss_mb) > (self.peak.processes, self.peak.pss_mb):
                self.peak = now

    def stop(self) -> None:
        self._over.set()
        self.join()


def measure(
    argv: Sequence[str],
    *,
    name: str = "command",
    sample_s: float | None = None,
    env: Mapping[str, str] | None = None,
    ok: Sequence[int] = (0,),
    stderr: IO[str] | int = subprocess.DEVNULL,
) -> Cost:
    """Run a command to its end.

    Args:
        sample_s: take its memory every so many seconds.
        ok: exit codes that are not failures.

    Raises: RuntimeError when it fails or takes too long.
    """
    with Account(name) as account:
        before = account.cpu_s()
        start = time.perf_counter()
        process = subprocess.Popen(
            account.wrap(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, **(env or {})},
            cwd=ROOT,
            text=True,
        )
        sampler = _Sampler(account, process.pid, sample_s) if sample_s else None
        if sampler:
            sampler.start()
        try:
            out, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise RuntimeError(f"no end within {LIMIT_S:g} s: {' '.join(argv)}") from None
        wall = time.perf_counter() - start
        if sampler:
            sampler.stop()
        _settle(account)
        cpu = account.cpu_s() - before
    if process.returncode not in ok:
        raise RuntimeError(f"exit code {process.returncode}: {' '.join(argv)}\n{out[-2000:]}")
    if sampler is None:
        return Cost(cpu, wall, out, Memory(0, 0.0))
    return Cost(cpu, wall, out, sampler.peak, sampler.cpu)


def _settle(account: Account) -> None:
    """Wait for processes that briefly outlive the command, such as daemons of Ray, and reap them.

    Tens of thousands of dead processes would slow the later rows.
    """
    for _ in range(100):
        _reap()
        if account.path is None or not account.pids(0):
            return
        time.sleep(0.05)


def python(*arguments: str | Path) -> list[str]:
    """A command line of this interpreter."""
    return [sys.executable, *map(str, arguments)]
