"""Root file system directories as images: what names their content."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from hermes_rl.errors import TaskFault


def digest_of(image: str) -> str:
    """A digest of a root file system directory: over names, kinds, modes, sizes and times.

    Contents are not read, since an image holds gigabytes; a file that changes without changing its
    size or its time of modification goes unseen.

    Raises: TaskFault when it is no directory.
    """
    root = Path(image).expanduser()
    if not root.is_dir():
        raise TaskFault(f"no such image: {image}. Name a root file system directory")
    state = hashlib.sha256()
    for folder, names, files in os.walk(root):
        names.sort()
        for name in sorted([*names, *files]):
            path = os.path.join(folder, name)
            found = os.lstat(path)
            link = os.readlink(path) if stat.S_ISLNK(found.st_mode) else ""
            moment = 0 if stat.S_ISDIR(found.st_mode) else found.st_mtime_ns
            size = found.st_size if stat.S_ISREG(found.st_mode) else 0
            line = (os.path.relpath(path, root), found.st_mode, size, moment, link)
            state.update(repr(line).encode("utf-8", "surrogateescape"))
    return "listing-sha256:" + state.hexdigest()
