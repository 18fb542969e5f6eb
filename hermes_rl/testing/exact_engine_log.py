"""The token-exact fake engine's own account: every id that it saw and sampled. The truth."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from hermes_rl.testing.line_log import read_lines

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


def read_truth(path: Path) -> list[Truth]:
    """The entries of a log file."""
    return read_lines(path, Truth)
