"""A line of `hermes-rl doctor`."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    subject: str
    name: str
    good: bool | None
    """None for a fact that is neither."""
    text: str


def library(subject: str, name: str, mend: str = "reinstall hermes-rl") -> Finding:
    """Whether a library is installed."""
    try:
        return Finding(subject, name, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(subject, name, False, f"not installed: {mend}")
