"""Limits of a sandbox and of the machine: memory, disk space, what is written."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hermes_rl.sandboxes import processes, watchdog
from hermes_rl.sandboxes.base import SandboxLimits
from hermes_rl.sandboxes.disks import Storage
from hermes_rl.sandboxes.files import Beneath, Look
from hermes_rl.sandboxes.slots import reap, workers

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
    cpu_base: str = ""
    """The like of version 1's CPU controller, which has folders of its own."""
    cpus: bool = False
    """CPU time can be bounded."""

    @property
    def bases(self) -> str:
        """All of its folders, one a line."""
        return "\n".join(filter(None, (self.base, self.cpu_base)))

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
            watchdog.remove_cgroup(path)
            raise
        return path

    def bound_cpus(self, name: str, cpus: float) -> str:
        """Give the group of a name a quota of CPU time. Returns the path of the group that has it.
        Raises: OSError."""
        quota = max(1_000, round(cpus * _PERIOD_US))
        if self.unified:
            path = f"{self.base}/hermes-rl-{name}"
            _write(f"{path}/cpu.max", f"{quota} {_PERIOD_US}")
            return path
        if not self.cpu_base:
            raise FileNotFoundError("no controller of CPU time")
        path = f"{self.cpu_base}/hermes-rl-{name}"
        os.mkdir(path)
        try:
            _write(f"{path}/cpu.cfs_period_us", _PERIOD_US)
            _write(f"{path}/cpu.cfs_quota_us", quota)
        except OSError:
            watchdog.remove_cgroup(path)
            raise
        return path


_PERIOD_US = 100_000


def has_quota(path: str) -> bool:
    """Whether a group has a quota of CPU time."""
    for name in ("cpu.max", "cpu.cfs_quota_us"):
        with contextlib.suppress(OSError):
            return Path(path, name).read_text().split()[0] not in ("max", "-1")
    return False


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
    for base, unified, cpu_base in _candidates(own, root):
        groups = Cgroups(base, unified, cpu_base)
        name = f"probe-{os.getpid()}-{os.urandom(3).hex()}"
        try:
            path = groups.make(name, 64 << 20)
        except OSError:
            continue
        made = [path]
        with contextlib.suppress(OSError):
            made.append(groups.bound_cpus(name, 1.0))
            groups = replace(groups, cpus=True)
        for path in dict.fromkeys(made):
            watchdog.remove_cgroup(path)
        return groups
    return Cgroups("")


def memory_groups(pid: int) -> list[str]:
    """Folders of the control groups that may bound a process's memory."""
    return [path for path, _, _ in _candidates(Path(f"/proc/{pid}/cgroup"), Path("/sys/fs/cgroup"))]


def _candidates(own: Path, root: Path) -> list[tuple[str, bool, str]]:
    """Folders of our own control group, version 1's memory controller first: with it, the CPU
    controller's."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    found, cpu = [], ""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            cpu = os.path.normpath(f"{root}/cpu/{path}")
        if "memory" in controllers.split(","):
            found.append((os.path.normpath(f"{root}/memory/{path}"), False))
        elif not controllers:
            found.append((os.path.normpath(f"{root}/{path}"), True))
    return [(base, unified, "" if unified else cpu) for base, unified in found]


def _write(path: str, value: int | str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, str(value).encode())
    finally:
        os.close(fd)


BYTES_PER_S = 8e9
FILES_PER_S = 500_000.0
"""Faster than any sandbox can write: what may have come since the last look."""
LONGEST_S = 10.0
TEMPORARY = ("tmp", "dev/shm", "run")
"""Where the temporary file systems of a sandbox are."""


@dataclass(frozen=True)
class Usage:
    """What a sandbox has written."""

    bytes: int
    """Of the workspace and the layer over an image, as the disk holds them."""
    files: int
    """Files and folders: of the workspace, or of the temporary file system that has most."""

    def excess(self, limits: SandboxLimits) -> str | None:
        """Which limit is exceeded, in words."""
        if self.bytes > limits.workspace_bytes:
            return f"its files hold more than {limits.workspace_bytes} bytes"
        if self.files > limits.workspace_files:
            return f"more than {limits.workspace_files} files"
        return None

    def slack_s(self, limits: SandboxLimits) -> float:
        """How long even the fastest writer needs to reach a limit from here, in seconds."""
        left = (limits.workspace_bytes - self.bytes) / BYTES_PER_S
        return min(left, (limits.workspace_files - self.files) / FILES_PER_S, LONGEST_S)


def measure(
    storage: Storage, folders: Sequence[Beneath], init: int, temporary: Sequence[str] = TEMPORARY
) -> Usage:
    """Look at what a sandbox writes, no further than its limits: on the disk, unless the kernel
    holds it to its size there, and in the temporary file systems. Blocks.

    Args:
        storage: where it writes on the disk.
        folders: the workspace, and the layer over an image.
        init: process 1 of the sandbox.
        temporary: where the temporary file systems are, in the sandbox.

    Raises: FileNotFoundError when a folder vanished; OSError without a descriptor to look with.
    """
    root = f"/proc/{init}/root"
    if storage.sized:
        total, files = min(storage.used(), storage.limits.workspace_bytes), 0
    else:
        total, files = _walk(storage.limits, folders)
        total += _unlinked(init)
    for name in temporary:
        try:
            found = os.statvfs(f"{root}/{name}")
        except OSError:
            continue
        files = max(files, found.f_files - found.f_ffree)
    return Usage(total, files)


def _walk(limits: SandboxLimits, folders: Sequence[Beneath]) -> tuple[int, int]:
    """Bytes and files below folders, counted until a limit is exceeded."""
    total = files = 0
    for beneath in folders:
        os.stat(beneath.folder)
    todo = [(beneath, "") for beneath in folders]
    with Look() as look:
        while todo and total <= limits.workspace_bytes and files <= limits.workspace_files:
            beneath, path = todo.pop()
            for name, is_folder, size in beneath.listing(path, look):
                total += size
                files += 1
                if is_folder:
                    todo.append((beneath, name))
    return total, files


def _unlinked(init: int) -> int:
    """Bytes of files of the workspace, or over an image, that have no name any more and are held
    open; 0 for a sandbox that is gone."""
    devices, found = set(), dict[tuple[int, int], int]()
    for folder in ("", "workspace"):
        with contextlib.suppress(OSError):
            devices.add(os.stat(f"/proc/{init}/root/{folder}").st_dev)
    for proc in processes.descendants(init):
        with contextlib.suppress(OSError), os.scandir(f"/proc/{proc.pid}/fd") as opened:
            for entry in opened:
                with contextlib.suppress(OSError):
                    file = entry.stat()
                    if file.st_nlink == 0 and file.st_dev in devices and stat.S_ISREG(file.st_mode):
                        found[file.st_dev, file.st_ino] = file.st_blocks * 512
    return sum(found.values())


def reap_counted(state: Path) -> dict[str, int]:
    """Clean up after all owners that are gone. Blocks. Returns how many sandboxes were `removed`,
    of how many `dead` workers, and how many of these are `left`."""
    found = [w for w in workers(state) if not w.alive]
    gone = reap(state, detect().bases) if found else []
    after = [w for w in workers(state) if not w.alive]
    kept = {w.name for w in after}
    removed = sum(len(w.sandboxes) for w in found if w.name in gone and w.name not in kept)
    # A process with several backends is one worker to its user.
    return {
        "removed": removed,
        "dead": len({w.pid for w in found}),
        "left": len({w.pid for w in after}),
    }
