"""The fake model server's own account of what it did, to be compared with a client's books."""

from __future__ import annotations

import os
from decimal import Decimal
from pathlib import Path
from typing import Literal

import msgspec

LogOutcome = Literal["served", "refused", "cut", "dropped"]
"""A complete answer; an error before any work; worked, and the answer was lost on purpose; the
client hung up before the answer."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One request."""

    n: int
    """1-based number of the request."""
    request_id: str
    call_id: str | None
    model: str | None
    outcome: LogOutcome
    at: float
    """Unix time, seconds."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Part of prompt_tokens that was read from the cache."""
    cache_write_tokens: int = 0
    """Part of prompt_tokens that was written to it."""
    reasoning_tokens: int = 0
    reported: bool = False
    """The answer that was sent holds a complete usage object."""
    fault: str | None = None
    api_mode: str | None = None
    """The wire that it came in on."""
    dollars: Decimal | None = None
    """What the call costs its account; None when nothing was served, or without a price."""


class ServedLog:
    """Appends entries to a file, one write(2) each, so that a kill tears nothing.

    Args:
        path: created if need be; None keeps no file.
        keep: keep the entries in memory too.
    """

    def __init__(self, path: Path | None, keep: bool) -> None:
        self.entries: list[Entry] = []
        self._keep = keep
        self._file = -1
        if path is not None:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    @property
    def wanted(self) -> bool:
        """Somebody reads the entries."""
        return self._keep or self._file >= 0

    def add(self, entry: Entry) -> None:
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


def read_log(path: Path) -> list[Entry]:
    """The entries of a log file; a line that is still being written is left out."""
    lines = path.read_bytes().split(b"\n")[:-1]
    return [msgspec.json.decode(line, type=Entry) for line in lines]
