"""The token-exact fake engine's own account: every id that it saw and sampled. The truth."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

Outcome = Literal["served", "refused", "cut"]
"""A complete answer; an error before any work; sampled, and the answer was lost on purpose."""


class Truth(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request."""

    n: int
    """1-based number of the request."""
    request_id: str
    call_id: str | None
    """The client's `x-hermes-call-id`."""
    route: str
    outcome: Outcome
    prompt_ids: tuple[int, ...] = ()
    sampled_ids: tuple[int, ...] = ()
    raw_logprobs: tuple[float, ...] = ()
    """Of the model before temperature."""
    scaled_logprobs: tuple[float, ...] = ()
    """Of the distribution at the request's temperature."""
    finish: str | None = None
    temperature: float | None = None
    fault: str | None = None
    scripted: bool = False
    """A script said what to sample."""


class TruthLog:
    """Appends entries to a file, one write(2) each, and keeps them.

    Args:
        path: created if need be; None keeps no file.
    """

    def __init__(self, path: Path | None) -> None:
        self.entries: list[Truth] = []
        self._file = -1
        if path is not None:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def add(self, entry: Truth) -> None:
        """Append one entry."""
        self.entries.append(entry)
        if self._file >= 0:
            os.write(self._file, msgspec.json.encode(entry) + b"\n")

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_truth(path: Path) -> list[Truth]:
    """The entries of a log file; a line that is still being written is left out."""
    lines = path.read_bytes().split(b"\n")[:-1]
    return [msgspec.json.decode(line, type=Truth) for line in lines]
