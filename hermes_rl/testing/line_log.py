"""The fake servers' own accounts: one JSON line per request, whatever happens to the server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

E = TypeVar("E", bound=msgspec.Struct)


class LineLog(Generic[E]):
    """Appends entries to a file, one write(2) each, so that a kill tears nothing.

    Args:
        path: created if need be; None keeps no file.
        keep: keep the entries in memory too.
    """

    def __init__(self, path: Path | None = None, *, keep: bool = True) -> None:
        self.entries: list[E] = []
        self._keep = keep
        self._file = -1
        if path is not None:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    @property
    def wanted(self) -> bool:
        """Somebody reads the entries."""
        return self._keep or self._file >= 0

    def add(self, entry: E) -> None:
        """Append one entry."""
        if self._keep:
            self.entries.append(entry)
        if self._file >= 0:
            os.write(self._file, msgspec.json.encode(entry) + b"\n")

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_lines(path: Path, kind: type[E]) -> list[E]:
    """The entries of a log file; a line that is still being written is left out."""
    lines = path.read_bytes().split(b"\n")[:-1]
    return [msgspec.json.decode(line, type=kind) for line in lines]
