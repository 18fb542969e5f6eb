"""All tools by name. The one place that lists the modules; nothing registers itself."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from hermes_rl.errors import UserError
from hermes_rl.tools.base import Tool, schema
from hermes_rl.tools.patch import patch
from hermes_rl.tools.read_file import read_file
from hermes_rl.tools.search_files import search_files
from hermes_rl.tools.terminal import terminal
from hermes_rl.tools.write_file import write_file

TOOLS: dict[str, Tool] = {
    tool.name: tool for tool in (terminal, read_file, write_file, patch, search_files)
}
"""Name -> tool, in the order in which models see them."""


def get_tool(name: str) -> Tool:
    """The tool of that name. Raises: UserError that lists the known ones."""
    if name not in TOOLS:
        raise UserError(f"unknown tool {name!r} (known: {', '.join(TOOLS)})")
    return TOOLS[name]


def get_tools(names: Iterable[str]) -> dict[str, Tool]:
    """Tools by name, in the registry's order whatever the order of names. Raises: UserError."""
    wanted = {get_tool(name).name for name in names}
    return {name: tool for name, tool in TOOLS.items() if name in wanted}


def with_wording(tools: Mapping[str, Tool], wording: int) -> dict[str, Tool]:
    """Return the tools with the descriptions of that wording (see `agent.prompt.WORDINGS`)."""
    return {name: replace(tool, **schema(name, wording)) for name, tool in tools.items()}


def schemas(tools: Iterable[Tool]) -> tuple[dict[str, Any], ...]:
    """The OpenAI function schemas, for a request and for the record."""
    return tuple(tool.schema for tool in tools)


def schema_digest(tools: Iterable[Tool]) -> str:
    """Sha256 of the schemas that models see: part of a run's identity."""
    encoded = msgspec.json.encode([tool.schema for tool in tools], order="sorted")
    return hashlib.sha256(encoded).hexdigest()
