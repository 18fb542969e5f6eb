"""Logs of the fake servers: one JSON line per request, complete even if the server is killed."""

from __future__ import annotations

import os
from decimal import Decimal
from pathlib import Path
from typing import Generic, Literal, TypeVar

import msgspec

E = TypeVar("E", bound=msgspec.Struct)


class LineLog(Generic[E]):
    """Appends entries to a file, one write(2) each, so that a kill cuts no line.

    Args:
        path: created if needed; None writes no file.
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
        """Whether entries are kept anywhere."""
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
    """Read the entries of a log file, without a last line that is still being written."""
    lines = path.read_bytes().split(b"\n")[:-1]
    return [msgspec.json.decode(line, type=kind) for line in lines]


# fake_server

LogOutcome = Literal["served", "refused", "cut", "dropped"]
"""A complete answer; an error before any work; an answer that was lost on purpose; the client
closed the connection before the answer."""


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
    """Part of prompt_tokens that was written to the cache."""
    reasoning_tokens: int = 0
    max_tokens: int | None = None
    """The request's limit of output tokens."""
    reported: bool = False
    """Whether the answer has a complete usage object."""
    fault: str | None = None
    api_mode: str | None = None
    """The wire of the request."""
    dollars: Decimal | None = None
    """The price of the call; None when nothing was served or there is no price."""


def read_log(path: Path) -> list[Entry]:
    """The entries of a log file."""
    return read_lines(path, Entry)


# exact_engine

ExactOutcome = Literal["served", "refused", "cut"]
"""A complete answer; an error before any work; an answer that was lost on purpose."""


class Truth(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request."""

    n: int
    """1-based number of the request."""
    request_id: str
    call_id: str | None
    """The client's `x-hermes-call-id`."""
    route: str
    outcome: ExactOutcome
    prompt_ids: tuple[int, ...] = ()
    sampled_ids: tuple[int, ...] = ()
    raw_logprobs: tuple[float, ...] = ()
    """Of the model before temperature."""
    scaled_logprobs: tuple[float, ...] = ()
    """Of the distribution at the request's temperature."""
    finish: str | None = None
    """`abort` if `sampled_ids` are only the beginning of the answer."""
    drawn: int = 0
    """Tokens of the whole answer; 0 if this is the rest of one that was cut off."""
    versions: tuple[tuple[str | None, int], ...] = ()
    """Of the weights, each with the index after its last token."""
    temperature: float | None = None
    fault: str | None = None
    scripted: bool = False
    """Whether a script chose the tokens."""


def read_truth(path: Path) -> list[Truth]:
    """The entries of a log file."""
    return read_lines(path, Truth)
