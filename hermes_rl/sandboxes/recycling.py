"""Folders, disks, user ids and control groups of ended sandboxes, kept for the next ones."""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path

from hermes_rl.sandboxes import recipe, watchdog
from hermes_rl.sandboxes.base import SandboxSpec
from hermes_rl.sandboxes.box import Lease

IDLE = 64
"""How many are kept."""
HELD_BYTES = 4 << 20
"""A disk that takes more of the machine's is not kept: what was removed from it still counts."""
MOST_FILES = 2_000
"""With more files in it a new file system is made sooner than this one is emptied."""
_GET_FLAGS, _GET_ATTRIBUTES = 0x80086601, 0x801C581F
"""ioctls: FS_IOC_GETFLAGS, and FS_IOC_FSGETXATTR, which holds the project."""
_ATTRIBUTES = struct.Struct("=5I8x")

Marks = tuple[object, ...]


def marks(folder: Path) -> Marks:
    """What a folder is, beside its times and its content: mode, owners, extended attributes with
    its access lists, flags and project. Raises: OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        return (
            (found.st_dev, found.st_ino, found.st_mode, found.st_uid, found.st_gid),
            (found.st_size, tuple((name, os.getxattr(fd, name)) for name in os.listxattr(fd))),
            _ask(fd, _GET_FLAGS, 8),
            _ask(fd, _GET_ATTRIBUTES, _ATTRIBUTES.size),
            tuple(os.listdir(fd)),
        )
    finally:
        os.close(fd)


def _ask(fd: int, request: int, size: int) -> bytes:
    try:
        return fcntl.ioctl(fd, request, bytes(size))
    except OSError:  # not known to this file system, so it cannot have changed
        return b""


@dataclass
class Recycled:
    """What one backend keeps.

    Making it is the larger part of a sandbox's start. The next lease must find no trace of an
    earlier one: its processes and temporary file systems are gone with its namespaces, the control
    directory is the host's, and a workspace is either proved to be as it was made, or made again
    in a file system that is proved to hold as many free blocks and inodes as before the lease.
    """

    idle: list[Lease] = field(default_factory=list)
    _made: dict[str, tuple[Marks, tuple[int, int]]] = field(default_factory=dict)
    """Name of a lease -> its workspace as it was made, and what was free then."""

    def note(self, lease: Lease) -> None:
        """A workspace was just made. Raises: OSError."""
        if _plain(lease):
            free = lease.storage.counts() if lease.storage.sized else (0, 0)
            self._made[lease.name] = marks(lease.workspace), free

    def take(self, spec: SandboxSpec, layers: recipe.Layers) -> Lease | None:
        """One for a sandbox with an empty workspace and these limits."""
        for number in range(len(self.idle) - 1, -1, -1):
            if self.idle[number].spec.limits == spec.limits:
                return replace(self.idle.pop(number), spec=spec, layers=layers)
        return None

    async def keep(self, lease: Lease) -> bool:
        """Keep what an ended sandbox held; False when it has to be removed instead."""
        made = self._made.get(lease.name)
        if made is None or len(self.idle) >= IDLE:
            return False
        try:
            for entry in os.scandir(lease.control):
                if entry.name != recipe.SUPERVISOR:
                    os.unlink(entry)
            if marks(lease.workspace) == made[0]:
                os.utime(lease.workspace)
            elif not await asyncio.to_thread(self._make_again, lease, made[1]):
                return False
            if lease.storage.held() > HELD_BYTES:
                return False
        except OSError:
            return False
        self.idle.append(lease)
        return True

    def _make_again(self, lease: Lease, free: tuple[int, int]) -> bool:
        if lease.storage.sized and free[1] - lease.storage.counts()[1] > MOST_FILES:
            return False
        if not watchdog.remove_shallow(lease.workspace):
            return False
        lease.make("ws")
        self.note(lease)
        return self._made[lease.name][1] == free

    def forget(self, lease: Lease) -> None:
        """It is removed."""
        self._made.pop(lease.name, None)

    def drain(self) -> list[Lease]:
        """All that are kept, to be removed."""
        idle, self.idle = self.idle, []
        return idle


def _plain(lease: Lease) -> bool:
    """Whether all that it holds is an empty workspace on a disk, or in a folder, of its own."""
    image = lease.layers.image
    return not (image.lower or lease.host or lease.spec.snapshot or lease.owner)
