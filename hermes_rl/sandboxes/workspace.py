"""A folder that a sandbox writes: how much is in it, and how to copy and remove it."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hermes_rl.sandboxes import processes, warden
from hermes_rl.sandboxes.base import SandboxLimits
from hermes_rl.sandboxes.disk import Storage
from hermes_rl.sandboxes.files import Beneath, Look

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


def remove_tree(path: Path) -> None:
    """Remove a folder whatever was done to it. Blocks: call it in a thread."""
    warden.remove_tree(str(path))
