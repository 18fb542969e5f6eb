"""Many sandboxes over the files of one snapshot, where we are root.

The snapshot is unpacked once. Each sandbox sees it below a layer of its own, through a mount that
shows its files as the sandbox's (id-mapped mounts, mount_setattr(2)).
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import struct
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hermes_rl.sandboxes.base import SandboxLimits
from hermes_rl.sandboxes.disks import (
    Disks,
    Storage,
    Writable,
    check_call,
    detach,
    open_tree,
)
from hermes_rl.sandboxes.files import libc
from hermes_rl.sandboxes.slots import Home
from hermes_rl.sandboxes.snapshots import WORKSPACE, unpack
from hermes_rl.sandboxes.watchdog import remove_tree

InMountThread = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs something in the thread whose mounts sandboxes start with."""

_MOVE_MOUNT, _MOUNT_SETATTR = 429, 442
_FROM_EMPTY_PATH, _EMPTY_PATH, _IDMAP = 4, 0x1000, 0x100000
_AT_FDCWD = -100
_ATTRIBUTES = struct.Struct("=4Q")
"""The kernel's `struct mount_attr`: flags to set and to clear, propagation, a user namespace."""


def user_namespace(uid: int, owner: int) -> int:
    """Make a user namespace that shows files of `owner` as `uid`'s. Returns a descriptor.

    Raises: OSError.
    """
    # It lives as long as its first process, and then as our descriptor of it.
    made = subprocess.Popen(
        ["unshare", "--user", "sh", "-c", "echo; read line"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"PATH": "/usr/bin:/bin"},
    )
    with made:
        assert made.stdin is not None
        assert made.stdout is not None
        if not made.stdout.readline():
            raise OSError(errno.EPERM, "no user namespace can be made")
        for kind in ("uid", "gid"):
            Path(f"/proc/{made.pid}/{kind}_map").write_text(f"{owner} {uid} 1")
        return os.open(f"/proc/{made.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)


def mount_as(namespace: int, source: Path, where: Path) -> None:
    """Show a folder at another one in this thread's mounts, its owners as a user namespace maps
    them. Raises: OSError."""
    tree = open_tree(source)
    try:
        attributes = ctypes.create_string_buffer(_ATTRIBUTES.pack(_IDMAP, 0, 0, namespace), 32)
        done = libc().syscall(_MOUNT_SETATTR, tree, b"", _EMPTY_PATH, attributes, 32)
        check_call(done, f"mount_setattr {source}")
        target = os.fsencode(where)
        check_call(
            libc().syscall(_MOVE_MOUNT, tree, b"", _AT_FDCWD, target, _FROM_EMPTY_PATH),
            f"move_mount {where}",
        )
    finally:
        os.close(tree)


BASES = 16
"""Unpacked snapshots that are kept, beside those in use."""


@dataclass(eq=False)
class Base:
    """One snapshot, unpacked for many sandboxes."""

    bases: Bases
    folder: Path
    storage: Storage
    ready: asyncio.Future[bool]
    """Whether it can be shared."""
    users: int = 0

    def mount(self, fork: Fork, uid: int | None, below: Path, layer: Writable, where: Path) -> None:
        """Mount the files below a layer of one sandbox; in the mounting thread.

        Args:
            uid: the user that the sandbox runs as.
            below: an empty folder, where the shared files are shown.
            layer: takes what the sandbox writes.
            where: an empty folder: the workspace.

        Raises: OSError.
        """
        fork.uid, fork.below, fork.layer = uid or 0, below, layer
        self.enter(fork)
        parts = {"lowerdir": below, "upperdir": layer.up, "workdir": layer.work}
        options = ",".join([*(f"{name}={path}" for name, path in parts.items()), "userxattr"])
        done = libc().mount(b"overlay", os.fsencode(where), b"overlay", 0, options.encode())
        check_call(done, f"mount {where}")
        fork.opened = os.open(where, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def enter(self, fork: Fork) -> None:
        """Mount the files alone, for a grading sandbox. Raises: OSError."""
        mount_as(self.bases.namespace(fork.uid), self.storage.folder / "ws", fork.below)

    async def give_back(self) -> None:
        """A sandbox no longer uses it."""
        await self.bases.give_back(self)


@dataclass
class Bases:
    """The unpacked snapshots of a backend.

    Args:
        home: where their folders are made.
        mounting: see `InMountThread`.
        disks: what files of limited size are made of.
    """

    home: Home
    mounting: InMountThread
    disks: Disks
    unpacked: dict[Path, Base] = field(default_factory=dict)
    """Snapshot -> what it became."""
    namespaces: dict[tuple[int, int], int] = field(default_factory=dict)
    """Descriptors by user and owner (see `namespace`); what is unpacked has one."""
    _shows: dict[Path, bool] = field(default_factory=dict)

    async def can_show(self, folder: Path) -> bool:
        """Whether a folder can be shown with other owners, below an overlay too."""
        if folder not in self._shows:
            trial = self.home.new_box()
            self._shows[folder] = await self.mounting(lambda: self._try_to_show(folder, trial))
            await asyncio.to_thread(remove_tree, trial)
        return self._shows[folder]

    def _try_to_show(self, folder: Path, trial: Path) -> bool:
        shown, empty, overlay = (trial / name for name in ("shown", "empty", "overlay"))
        for path in (shown, empty, overlay):
            path.mkdir()
        options = f"lowerdir={empty}:{shown},userxattr".encode()
        try:
            mount_as(self.namespace(1), folder, shown)
            done = libc().mount(b"overlay", os.fsencode(overlay), b"overlay", 0, options)
            check_call(done, "mount")
        except OSError:
            return False
        finally:
            detach(overlay)
            detach(shown)
        return True

    async def take(self, snapshot: Path, limits: SandboxLimits) -> Base | None:
        """A snapshot to be shared by one more sandbox; None where that cannot be done.

        Raises: OSError when it cannot be unpacked.
        """
        base = self.unpacked.get(snapshot)
        known = base is not None
        if base is None:
            folder = self.home.new_box()
            storage = Storage(folder, self.disks, limits.doubled())
            base = Base(self, folder, storage, asyncio.get_running_loop().create_future())
            self.unpacked[snapshot] = base
        base.users += 1
        try:
            if not known:
                await self._prepare(snapshot, base)
            shared = await asyncio.shield(base.ready)
        except BaseException:
            await asyncio.shield(self.give_back(base))
            raise
        if not shared:
            await self.give_back(base)
        return base if shared else None

    async def _prepare(self, snapshot: Path, base: Base) -> None:
        def fill() -> bool:
            unpack(snapshot / WORKSPACE, base.storage.seen(base.storage.make("ws", None)), None)
            return True

        def shareable() -> bool:
            trial = base.folder / "trial"
            trial.mkdir()
            return self._try_to_show(base.storage.folder, trial)

        try:
            await self.mounting(base.storage.enter)
            shared = base.storage.sized and await self.mounting(shareable)
            base.ready.set_result(shared and await asyncio.to_thread(fill))
        except OSError as error:
            self.unpacked.pop(snapshot, None)
            base.ready.set_exception(error)
        except BaseException:  # cancelled: the others see for themselves
            self.unpacked.pop(snapshot, None)
            base.ready.set_result(False)
            raise

    async def give_back(self, base: Base) -> None:
        """A sandbox no longer uses it."""
        base.users -= 1
        unused = [path for path, other in self.unpacked.items() if other.users == 0]
        for path in unused[: max(0, len(self.unpacked) - BASES)]:
            await self._remove(self.unpacked.pop(path))
        if base.users == 0 and base not in self.unpacked.values():
            await self._remove(base)

    async def _remove(self, base: Base) -> None:
        await self.mounting(base.storage.leave)
        base.storage.close()
        await asyncio.to_thread(remove_tree, base.folder)

    def namespace(self, uid: int, owner: int = 0) -> int:
        """The user namespace that shows an owner's files as a sandbox's; users are used again and
        again."""
        if (uid, owner) not in self.namespaces:
            self.namespaces[uid, owner] = user_namespace(uid, owner)
        return self.namespaces[uid, owner]

    def close(self) -> None:
        """Give all of it back to the machine; their folders go with the backend's."""
        for base in self.unpacked.values():
            base.storage.close()
        for fd in self.namespaces.values():
            os.close(fd)
        self.unpacked, self.namespaces, self._shows = {}, {}, {}


@dataclass
class Fork:
    """What one sandbox has of a shared snapshot; nothing without `base`."""

    base: Base | None = None
    uid: int = 0
    below: Path = Path()
    """Where the spawner's thread, and what it starts, finds the shared files."""
    layer: Writable | None = None
    """Where its writes go."""
    opened: int = -1
    """The workspace, once it was mounted."""

    @property
    def workspace(self) -> Path:
        """The workspace, as this process finds it."""
        return Path(f"/proc/{os.getpid()}/fd/{self.opened}")

    def leave(self, where: Path) -> None:
        """What needed the mounts has found them."""
        if self.layer is not None:
            detach(where)
            detach(self.below)

    def close(self) -> None:
        """Let the workspace go. Idempotent."""
        if self.opened >= 0:
            os.close(self.opened)
            self.opened = -1
