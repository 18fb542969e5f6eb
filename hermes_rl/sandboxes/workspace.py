"""A folder that a sandbox writes: how much is in it, and how to copy and remove it."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hermes_rl.sandboxes import warden
from hermes_rl.sandboxes.base import SandboxLimits
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
        room = (limits.workspace_bytes - self.bytes) / BYTES_PER_S
        return min(room, (limits.workspace_files - self.files) / FILES_PER_S, LONGEST_S)


def measure(
    folders: Sequence[Beneath],
    limits: SandboxLimits,
    root: str,
    temporary: Sequence[str] = TEMPORARY,
) -> Usage:
    """Look through what a sandbox writes on the disk, no further than its limits, and at the
    temporary file systems of the sandbox whose process 1 sees `root`. Blocks.

    Args:
        folders: the workspace, and the layer over an image.
        temporary: where those are, below `root`.

    Raises: FileNotFoundError when one vanished; OSError without a descriptor to look with.
    """
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
    for name in temporary:
        try:
            found = os.statvfs(f"{root}/{name}")
        except OSError:
            continue
        files = max(files, found.f_files - found.f_ffree)
    return Usage(total, files)


def copy_tree(source: Path, target: Path, uid: int | None = None) -> None:
    """Copy a folder as it is: links as links, times and modes kept, pipes and sockets left out;
    the copy belongs to `uid`. What its owner locked is opened for the copy, which then is locked
    as well. Nothing may run in it any more. Blocks. Raises: OSError.
    """
    locked = _unlock(source)

    def copy(name: str, to: str) -> str:
        if stat.S_ISREG(os.lstat(name).st_mode):
            shutil.copy2(name, to, follow_symlinks=False)
        return to

    shutil.copytree(source, target, symlinks=True, copy_function=copy)
    for path, mode in reversed(locked):
        os.chmod(path, mode)
        if os.path.lexists(copied := target / path.relative_to(source)):
            os.chmod(copied, mode)
    if uid is not None:
        for folder, folders, names in os.walk(target):
            for name in (".", *folders, *names):
                os.lchown(os.path.join(folder, name), uid, uid)


def _unlock(source: Path) -> list[tuple[Path, int]]:
    """Open what an ordinary user locked for himself; returns paths with their former modes."""
    locked: list[tuple[Path, int]] = []
    if os.geteuid() == 0:
        return locked

    def unlock(path: Path, needed: int) -> None:
        mode = stat.S_IMODE(path.lstat().st_mode)
        if mode & needed != needed:
            locked.append((path, mode))
            path.chmod(mode | needed)

    unlock(source, 0o700)
    for folder, folders, names in os.walk(source):
        for name in folders:
            if not (path := Path(folder, name)).is_symlink():
                unlock(path, 0o700)
        for name in names:
            if stat.S_ISREG((path := Path(folder, name)).lstat().st_mode):
                unlock(path, 0o400)
    return locked


def remove_tree(path: Path) -> None:
    """Remove a folder whatever was done to it. Blocks: call it in a thread."""
    warden.remove_tree(str(path))
