"""Which tools an agent has: all tools by name, named groups of them, and distributions of groups.

The one place that lists the modules of tools; nothing registers itself.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from hermes_rl.errors import UserError
from hermes_rl.input_errors import unknown
from hermes_rl.tools.base import Tool, schema
from hermes_rl.tools.browser import BROWSER_TOOLS
from hermes_rl.tools.delegate_task import delegate_task
from hermes_rl.tools.patch import patch
from hermes_rl.tools.read_file import read_file
from hermes_rl.tools.search_files import search_files
from hermes_rl.tools.terminal import terminal
from hermes_rl.tools.todo import todo
from hermes_rl.tools.write_file import write_file

TOOLS: dict[str, Tool] = {
    tool.name: tool
    for tool in (terminal, read_file, write_file, patch, search_files, delegate_task, todo)
} | BROWSER_TOOLS
"""Name -> tool, in the order in which models see them."""


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
    "delegation": Toolset("Give tasks to sub-agents.", ("delegate_task",)),
    "todo": Toolset("Keep a list of the steps of the task.", ("todo",)),
    "browser": Toolset("Use web pages in a browser.", tuple(BROWSER_TOOLS)),
    "none": Toolset("No tools: the model can only answer."),
}
DEFAULT_TOOLSETS = ("terminal", "file")

Distribution = Mapping[str, float]
"""Toolset -> the percentage of units that have it."""
DISTRIBUTIONS: dict[str, Distribution] = {
    "default": {"terminal": 100, "file": 100},
    "terminal_only": {"terminal": 100},
    "file_only": {"file": 100},
    "development": {"terminal": 80, "file": 80},
    "balanced": {"terminal": 50, "file": 50},
    "terminal_tasks": {"terminal": 97, "file": 97},
    "mostly_terminal": {"terminal": 95, "file": 40},
    "mostly_file": {"file": 95, "terminal": 40},
}


def tool_names(toolsets: Iterable[str]) -> set[str]:
    """Names of all tools in these toolsets. Raises: UserError that lists the known toolsets."""
    names: set[str] = set()
    for name in toolsets:
        if name not in TOOLSETS:
            raise UserError(unknown("toolset", name, TOOLSETS))
        names |= {*TOOLSETS[name].tools, *tool_names(TOOLSETS[name].includes)}
    return names


def resolve(toolsets: Iterable[str]) -> dict[str, Tool]:
    """The tools of these toolsets by name, in the order of `TOOLS`. Raises: UserError."""
    names = tool_names(toolsets)
    return {name: tool for name, tool in TOOLS.items() if name in names}


def with_wording(tools: Mapping[str, Tool], wording: int) -> dict[str, Tool]:
    """Return the tools with the descriptions of that wording (see `agent.prompt.WORDINGS`)."""
    return {name: replace(tool, **schema(name, wording)) for name, tool in tools.items()}


def schemas(tools: Iterable[Tool]) -> tuple[dict[str, Any], ...]:
    """The OpenAI function schemas, for a request and for the record."""
    return tuple(tool.schema for tool in tools)


def schema_digest(tools: Iterable[Tool]) -> str:
    """Sha256 of the schemas that models see: part of a run's identity."""
    encoded = msgspec.json.encode(schemas(tools), order="sorted")
    return hashlib.sha256(encoded).hexdigest()


def get_distribution(name: str) -> Distribution:
    """The definition of a distribution. Raises: UserError that lists the known ones."""
    if name not in DISTRIBUTIONS:
        raise UserError(unknown("distribution", name, DISTRIBUTIONS))
    return DISTRIBUTIONS[name]


def draw_toolsets(name: str, seed: int) -> tuple[str, ...]:
    """The toolsets of one unit: each drawn by itself; if none is drawn, the most likely one.

    Args:
        seed: the unit's seed; equal seeds draw equal toolsets, on every machine.

    Raises: UserError.
    """
    distribution = get_distribution(name)
    rng = random.Random(f"toolsets:{name}:{seed}")
    drawn = tuple(t for t, percent in distribution.items() if rng.random() * 100 < percent)
    return drawn or (max(distribution, key=lambda t: distribution[t]),)
