"""The fake model server's own account of what it did, to be compared with a client's books."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Literal

import msgspec

from hermes_rl.testing.line_log import read_lines

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
    max_tokens: int | None = None
    """The output bound that the request named."""
    reported: bool = False
    """The answer that was sent holds a complete usage object."""
    fault: str | None = None
    api_mode: str | None = None
    """The wire that it came in on."""
    dollars: Decimal | None = None
    """What the call costs its account; None when nothing was served, or without a price."""


def read_log(path: Path) -> list[Entry]:
    """The entries of a log file."""
    return read_lines(path, Entry)
