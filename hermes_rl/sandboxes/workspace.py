"""A folder that a sandbox wrote: how large it is, and how to remove it whatever was done to it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def copy_tree(source: Path, target: Path) -> None:
    """Copy a folder as it is: links as links, times and modes kept, pipes and sockets left out.
    Blocks: call it in a thread. Raises: OSError.
    """

    def copy(name: str, to: str) -> str:
        if os.path.isfile(name):
            shutil.copy2(name, to, follow_symlinks=False)
        return to

    shutil.copytree(source, target, symlinks=True, copy_function=copy)


def remove_tree(path: Path) -> None:
    """Remove a folder, also with folders of mode 000 in it. Blocks: call it in a thread."""

    def open_up(function: Callable[..., object], name: str, _: object) -> None:
        try:
            os.chmod(os.path.dirname(name), 0o700)
            if not os.path.islink(name):
                os.chmod(name, 0o700)
            if function in (os.open, os.scandir, os.lstat):
                shutil.rmtree(name, ignore_errors=True)
            else:
                function(name)
        except OSError:
            return

    for _ in range(3):
        shutil.rmtree(path, onerror=open_up)
        if not os.path.lexists(path):
            return
