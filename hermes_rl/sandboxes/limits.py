"""Limits of the machine: memory of a whole sandbox by a control group, free disk space."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hermes_rl.sandboxes import warden

RESERVE_BYTES = 1 << 30
STEP_BYTES = 64 << 20
"""A further fall of the free space that is worth ending another sandbox, and what one must hold."""
FALL_BYTES = 256 << 20
"""A fall of the free space that is worth a look at once."""


class Reserve:
    """Free disk space where sandboxes write: the run's own files may be there too.

    What is kept free is 1 GiB, less on a small or nearly full disk.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        found = os.statvfs(folder)
        self._seen = free = found.f_bavail * found.f_frsize
        self._least = self._level = min(
            RESERVE_BYTES, found.f_blocks * found.f_frsize // 20, free // 2
        )

    def fell(self) -> bool:
        """Whether somebody wrote much since the last time that this was true."""
        free = self._free()
        fell = free < self._seen - FALL_BYTES
        self._seen = free if fell else max(free, self._seen)
        return fell

    def short(self, held: Callable[[], int]) -> int | None:
        """Bytes that are free, when they are fewer than is kept free and no ended sandbox is about
        to give some back.

        Args:
            held: bytes in the file systems of sandboxes, of which some are yet to be written.
        """
        free = self._free()
        unwritten = _unwritten()
        if free - unwritten < self._level:
            free -= min(unwritten, held())
        if free >= self._least:
            self._level = self._least
        if free >= self._level:
            return None
        self._level = free - STEP_BYTES
        return max(free, 0)

    def _free(self) -> int:
        found = os.statvfs(self._folder)
        return found.f_bavail * found.f_frsize


def _unwritten() -> int:
    """Bytes of files that are in memory alone; 0 where the machine does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    kinds = ("Dirty:", "Writeback:")
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(kinds))


@dataclass(frozen=True)
class Cgroups:
    """A folder below our own control group where we may make more."""

    base: str
    """Its path; empty where the machine does not let us."""
    unified: bool = False
    """Version 2."""

    @property
    def works(self) -> bool:
        """Memory of a whole sandbox can be limited."""
        return bool(self.base)

    def make(self, name: str, memory_bytes: int) -> str:
        """Make a group with a memory limit. Returns its path. Raises: OSError."""
        path = f"{self.base}/hermes-rl-{name}"
        os.mkdir(path)
        try:
            if self.unified:
                _write(f"{path}/memory.max", memory_bytes)
                _write(f"{path}/memory.oom.group", 0)
            else:
                _write(f"{path}/memory.limit_in_bytes", memory_bytes)
        except OSError:
            warden.remove_cgroup(path)
            raise
        return path


def add(path: str, pid: int) -> None:
    """Put a process into a group. Raises: OSError."""
    _write(f"{path}/cgroup.procs", pid)


def out_of_memory(path: str) -> bool:
    """Whether the kernel killed something in the group for its memory."""
    for name in ("memory.oom_control", "memory.events"):
        try:
            words = Path(path, name).read_text().split()
        except OSError:
            continue
        counts = dict(zip(words[::2], words[1::2], strict=False))
        return int(counts.get("oom_kill", "0")) > 0
    return False


def machine_kills() -> int:
    """How often the kernel of this machine has killed for want of memory since it started; 0 where
    it does not say."""
    try:
        with open("/proc/vmstat", "rb") as file:
            lines = file.read().split(b"\n")
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(b"oom_kill ")), 0)


def detect(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Cgroups:
    """Find out, by making one, whether control groups can be made below our own."""
    for base, unified in _candidates(own, root):
        groups = Cgroups(base, unified)
        name = f"probe-{os.getpid()}-{os.urandom(3).hex()}"
        try:
            path = groups.make(name, 64 << 20)
        except OSError:
            continue
        warden.remove_cgroup(path)
        return groups
    return Cgroups("")


def _candidates(own: Path, root: Path) -> list[tuple[str, bool]]:
    """Folders of our own control group, version 1's memory controller first."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            found.append((os.path.normpath(f"{root}/memory/{path}"), False))
        elif not controllers:
            found.append((os.path.normpath(f"{root}/{path}"), True))
    return found


def _write(path: str, value: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, b"%d" % value)
    finally:
        os.close(fd)
