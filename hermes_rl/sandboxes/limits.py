"""Limits that need the machine's consent: memory of a whole sandbox by a control group."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hermes_rl.sandboxes import warden


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
