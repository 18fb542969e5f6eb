"""A folder that a sandbox writes: how much is in it, and how to copy and remove it."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from hermes_rl.sandboxes import warden
from hermes_rl.sandboxes.base import SandboxLimits
from hermes_rl.sandboxes.files import Beneath

BYTES_PER_S = 8e9
FILES_PER_S = 500_000.0
"""Faster than any sandbox can write: what may have come since the last look."""
LONGEST_S = 10.0
TEMPORARY = ("tmp", "dev/shm", "run")


@dataclass(frozen=True)
class Usage:
    """What a sandbox has written."""

    bytes: int
    """Of the workspace, as the disk holds it."""
    files: int
    """Files and folders: of the workspace, or of the temporary file system that has most."""

    def excess(self, limits: SandboxLimits) -> str | None:
        """Which limit is exceeded, in words."""
        if self.bytes > limits.workspace_bytes:
            return f"the workspace holds more than {limits.workspace_bytes} bytes"
        if self.files > limits.workspace_files:
            return f"more than {limits.workspace_files} files"
        return None

    def slack_s(self, limits: SandboxLimits) -> float:
        """How long even the fastest writer needs to reach a limit from here, in seconds."""
        room = (limits.workspace_bytes - self.bytes) / BYTES_PER_S
        return min(room, (limits.workspace_files - self.files) / FILES_PER_S, LONGEST_S)


def measure(beneath: Beneath, limits: SandboxLimits, root: str) -> Usage:
    """Look through a workspace, no further than its limits, and at the temporary file systems of
    the sandbox whose process 1 sees `root`. Blocks. Raises: FileNotFoundError when it vanished.
    """
    total = files = 0
    todo = [""]
    os.stat(beneath.folder)
    with contextlib.ExitStack() as after:
        while todo and total <= limits.workspace_bytes and files <= limits.workspace_files:
            for name, is_folder, size in beneath.listing(todo.pop(), after):
                total += size
                files += 1
                if is_folder:
                    todo.append(name)
    for name in TEMPORARY:
        try:
            found = os.statvfs(f"{root}/{name}")
        except OSError:
            continue
        files = max(files, found.f_files - found.f_ffree)
    return Usage(total, files)


def copy_tree(source: Path, target: Path, uid: int | None = None) -> None:
    """Copy a folder as it is: links as links, times and modes kept, pipes and sockets left out;
    the copy belongs to `uid`. Nothing may run in it any more. Blocks. Raises: OSError.
    """

    def copy(name: str, to: str) -> str:
        if os.path.isfile(name):
            shutil.copy2(name, to, follow_symlinks=False)
        return to

    shutil.copytree(source, target, symlinks=True, copy_function=copy)
    if uid is not None:
        for folder, folders, names in os.walk(target):
            for name in (".", *folders, *names):
                os.lchown(os.path.join(folder, name), uid, uid)


def remove_tree(path: Path) -> None:
    """Remove a folder whatever was done to it. Blocks: call it in a thread."""
    warden.remove_tree(str(path))
