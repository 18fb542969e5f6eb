"""Named groups of tools. Toolsets may include each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hermes_rl.errors import UserError
from hermes_rl.input_errors import unknown
from hermes_rl.tools.base import Tool
from hermes_rl.tools.registry import get_tools


@dataclass(frozen=True)
class Toolset:
    """A group of tools."""

    description: str
    tools: tuple[str, ...] = ()
    includes: tuple[str, ...] = ()
    """Other toolsets whose tools belong to this one too."""


TOOLSETS: dict[str, Toolset] = {
    "terminal": Toolset("Run commands in a shell session.", ("terminal",)),
    "file": Toolset(
        "Read, write, change and search files.",
        ("read_file", "write_file", "patch", "search_files"),
    ),
    "file_read": Toolset("Read and search files.", ("read_file", "search_files")),
    "coding": Toolset("Everything for work on code.", includes=("terminal", "file")),
    "none": Toolset("No tools: the model can only answer."),
}

DEFAULT_TOOLSETS = ("terminal", "file")
"""What an agent has when nothing else is said."""


def tool_names(toolsets: Iterable[str]) -> set[str]:
    """Names of all tools in these toolsets. Raises: UserError that lists the known toolsets."""
    names: set[str] = set()
    seen: set[str] = set()
    waiting = list(toolsets)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name not in TOOLSETS:
            raise UserError(unknown("toolset", name, TOOLSETS))
        names |= set(TOOLSETS[name].tools)
        waiting += TOOLSETS[name].includes
    return names


def resolve(toolsets: Iterable[str]) -> dict[str, Tool]:
    """The tools of these toolsets by name, in the registry's order. Raises: UserError."""
    return get_tools(tool_names(toolsets))
