"""The contract of tools: a schema, an async handler and limits (DESIGN 5.10).

A handler returns a `ToolResult`; a failure that the model should see is a `ToolError`. Everything
else that a handler raises ends the attempt.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from hermes_rl.sandboxes import Sandbox


@dataclass(frozen=True)
class ToolContext:
    """What a tool may use: given by the agent for each rollout."""

    sandbox: Sandbox | None
    state: dict[str, Any] = field(default_factory=dict)
    """State of this rollout's tools (read markers, todo lists); dies with the rollout."""
    max_timeout_s: float = 600.0
    """What is left of the rollout's active time, at most the tool's own limit."""
    env: dict[str, Any] = field(default_factory=dict)
    """State of the environment's rollout (`hermes_rl.rl.RolloutContext.state`)."""


@dataclass(frozen=True)
class ToolResult:
    """What a tool gives back."""

    text: str
    """For the model."""
    ok: bool = True
    data: Mapping[str, Any] | None = None
    """Structured form, for programs."""


Handler = Callable[[ToolContext, dict[str, Any]], Awaitable[ToolResult]]


@dataclass(frozen=True)
class Tool:
    """A tool as registered."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments, an object."""
    handler: Handler
    toolset: str
    parallel: bool = False
    """May run beside other parallel tools of the same turn."""
    needs_sandbox: bool = True
    max_chars: int = 100_000
    """Characters of the result that the model sees."""

    @property
    def schema(self) -> dict[str, Any]:
        """The OpenAI function schema."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": self.parameters,
            },
        }


@cache
def _schemas() -> dict[str, dict[str, dict[str, Any]]]:
    text = Path(__file__).with_name("schemas.json").read_bytes()
    read: dict[str, dict[str, dict[str, Any]]] = msgspec.json.decode(text)
    return read


def schema(name: str, wording: int | None = None) -> dict[str, Any]:
    """Return the description and the parameters of a tool of this package, as `tool` takes them.

    They are texts that models read, and part of a run's identity: schemas.json keeps every wording.

    Args:
        wording: a key of schemas.json; None is the latest.
    """
    wordings = _schemas()
    return wordings[max(wordings, key=int) if wording is None else str(wording)][name]


def tool(
    *,
    name: str,
    description: str,
    parameters: dict[str, Any],
    toolset: str,
    parallel: bool = False,
    max_chars: int = 100_000,
) -> Callable[[Handler], Tool]:
    """Make a `Tool` of an async handler that works in the sandbox; `registry` lists it by name.

    Args:
        parameters: JSON schema of the arguments.
        parallel: may run beside other parallel tools of the same turn.
        max_chars: characters of the result that the model sees.
    """

    def make(handler: Handler) -> Tool:
        return Tool(
            name=name,
            description=description,
            parameters=parameters,
            handler=handler,
            toolset=toolset,
            parallel=parallel,
            max_chars=max_chars,
        )

    return make
