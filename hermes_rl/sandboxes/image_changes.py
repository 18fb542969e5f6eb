"""What an agent may not change of an image: the programs that a verifier relies on."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Protocol

OPAQUE_XATTR = "user.overlay.opaque"
"""Marks a folder of an overlay that hides what is below it."""

_ESSENTIAL = {
    "bin": ("bash",),
    "etc": ("ld.so.preload",),
    "lib": ("ld-*", "libc.*", "libtinfo.*"),
    "lib64": ("ld-*", "libc.*", "libtinfo.*"),
}
"""Folder, also below /usr -> what a shell is started from."""
_MULTIARCH = "*-linux-gnu*"


@cache
def graded_programs() -> tuple[str, ...]:
    """Programs that tests rely on."""
    return tuple(Path(__file__).with_name("graded_programs.txt").read_text().split())


class Replaced(Exception):
    """A folder of an image is not the image's any more; the message is its path."""


class Changes(Protocol):
    """What an agent changed of an image."""

    def names(self, folder: str, *, opaque_too: bool) -> Mapping[str, bool]:
        """Changed entries of a folder -> whether it was removed.

        Args:
            folder: a path without a leading slash.
            opaque_too: a folder in place of another, all of which it hides, counts as replaced.

        Raises: Replaced when it, or a folder above it, is one no more, or another.
        """
        ...


class Upper:
    """The upper layer of an overlay. The agent wrote it: no link in it is followed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self, folder: str, *, opaque_too: bool) -> Mapping[str, bool]:
        """See `Changes`."""
        fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in folder.split("/"):
                try:
                    below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
                except FileNotFoundError:
                    return {}
                except OSError:  # a link, or the mark of a removed folder
                    raise Replaced(f"/{folder}") from None
                os.close(fd)
                fd = below
                if opaque_too and is_opaque(fd):
                    raise Replaced(f"/{folder}")
            return {name: _is_whiteout(os.lstat(name, dir_fd=fd)) for name in os.listdir(fd)}
        finally:
            os.close(fd)


def programs_in(lower: Sequence[Path], path: str) -> list[str]:
    """Those of `graded_programs` that an image has in the folders of a PATH."""
    folders = [folder.strip("/") for folder in path.split(":") if folder.startswith("/")]
    return [p for p in graded_programs() if any(_holds(lower, f"{f}/{p}") for f in folders)]


def replaced(
    programs: Sequence[str], changes: Changes, path: str, places: Iterable[str]
) -> str | None:
    """What an agent changed of an image so that no verifier can be believed: the shell, its
    libraries, a program that tests rely on, or a folder on the way to them or to a place; None for
    nothing.

    An agent may install a program that the image lacks, but not put its own in the place of one
    that the image has.

    Args:
        programs: what tests rely on and the image has.
        changes: what the agent did to the image.
        path: the verifier's PATH.
        places: absolute paths at which grading mounts folders.
    """
    try:
        for folder in path.split(":"):
            if folder.startswith("/"):
                _check(changes, folder.strip("/"), programs, opaque_too=False, removed_too=False)
        for name, files in _ESSENTIAL.items():
            for folder in (name, f"usr/{name}"):
                _check(changes, folder, files)
        for place in places:
            parts = place.strip("/").split("/")
            for depth in range(1, len(parts) + 1):
                changes.names("/".join(parts[:depth]), opaque_too=False)
    except Replaced as found:
        return str(found)
    return None


def _check(
    changes: Changes,
    folder: str,
    files: Sequence[str],
    *,
    opaque_too: bool = True,
    removed_too: bool = True,
) -> None:
    """Raises: Replaced for a folder of which one of the files is changed."""
    for name, removed in changes.names(folder, opaque_too=opaque_too).items():
        if any(fnmatch(name, pattern) for pattern in files) and (removed_too or not removed):
            raise Replaced(f"/{folder}/{name}")
        if files and "lib" in folder and fnmatch(name, _MULTIARCH):
            _check(changes, f"{folder}/{name}", files)


def _holds(lower: Sequence[Path], path: str) -> bool:
    return any(os.path.lexists(folder / path) for folder in lower)


def _is_whiteout(found: os.stat_result) -> bool:
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == 0


def is_opaque(folder: int | Path) -> bool:
    """Whether a folder of an overlay, open or by its path, hides what is below it."""
    with contextlib.suppress(OSError):
        return os.getxattr(folder, OPAQUE_XATTR) == b"y"
    return False
