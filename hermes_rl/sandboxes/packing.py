"""A workspace as one file, so that what a rollout left can be graded again later."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

FORMAT = "tar.gz"
_LEVEL = 1
"""Of gzip: a workspace is written once for each rollout and seldom read."""


def pack_folder(folder: Path, target: Path) -> None:
    """Write a folder's content as a compressed archive. Blocking: for threads.

    For folders in which nothing runs any more: links are stored as links and never followed, pipes
    are stored as pipes and never opened, sockets are left out. Owners are stored as nobody's.

    Args:
        target: of the archive; it appears whole, or not at all.

    Raises: OSError, as of a full disk.
    """
    half = target.with_name(f".{target.name}.half")
    try:
        with tarfile.open(half, "w:gz", compresslevel=_LEVEL, format=tarfile.PAX_FORMAT) as archive:
            for name in sorted(os.listdir(folder)):
                archive.add(folder / name, arcname=name, filter=_plain)
        with half.open("rb") as file:
            os.fsync(file.fileno())
        half.rename(target)
    finally:
        half.unlink(missing_ok=True)


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


UNPACK = "tar --extract --gzip --no-same-owner --file={archive} --directory=."
"""The command that puts it back, in a sandbox of its own."""
