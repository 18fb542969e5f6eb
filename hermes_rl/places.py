"""Where the tools of an `AIAgent` work: a sandbox and the state of tools for each task id."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from hermes_rl.config_agent import McpSection, read_variables
from hermes_rl.errors import UserError
from hermes_rl.events import SandboxLeased
from hermes_rl.sandboxes import Sandbox, SandboxBackend, SandboxSnapshot, SandboxSpec
from hermes_rl.tools import OpenParts, Tool, mcp_tools, read_offers
from hermes_rl.wiring import BACKENDS, make_backend


@dataclass
class Place:
    """What belongs to one task id."""

    sandbox: Sandbox | None = None
    tool_state: dict[str, Any] = field(default_factory=dict)
    opened: OpenParts = field(default_factory=OpenParts)

    def leased(self, seconds: float) -> SandboxLeased | None:
        """The event of its sandbox; None without one.

        Args:
            seconds: that its start took.
        """
        if self.sandbox is None:
            return None
        info = self.sandbox.info
        return SandboxLeased(
            backend=info.backend, image=info.image, limits=info.limits, seconds=seconds
        )


class Servers:
    """The MCP servers of an agent.

    Args:
        mcp: as the section `mcp` of a configuration. Raises: UserError.
    """

    def __init__(self, mcp: Mapping[str, Any]) -> None:
        section: Any = {"mcp": mcp}
        self._new = McpSection(**section).mcp
        self.shared = OpenParts()
        """Connections; closed by the agent."""

    async def take_tools(self, lease: Callable[[], Awaitable[Sandbox]]) -> dict[str, Tool]:
        """Their tools at the first call, nothing later.

        Raises: UserError; SandboxStartError.
        """
        if not self._new:
            return {}
        variables = read_variables(self._new)
        found = await read_offers(self._new, variables, lease)
        self._new = {}
        return mcp_tools(found, variables, self.shared)


class Places:
    """The sandboxes and tool states of an agent, one for each task id.

    The backend lives on the loop that opened it, so it is closed with its sandboxes.

    Args:
        sandbox: a specification, a backend, a name, or None for the default.
    """

    def __init__(self, sandbox: object) -> None:
        self._wanted = sandbox
        self._backend: SandboxBackend | None = None
        self._places: dict[str, Place] = {}
        self._leases = 0

    async def of(self, task_id: str, *, sandboxed: bool) -> tuple[Place, float]:
        """The place of a task, and the seconds that the start of its sandbox took now.

        Raises: UserError, SandboxStartError.
        """
        place = self._places.setdefault(task_id, Place())
        if not sandboxed or place.sandbox is not None:
            return place, 0.0
        start = time.monotonic()
        place.sandbox = await self.lease()
        return place, time.monotonic() - start

    async def lease(self, agent: str = "main", copy: SandboxSnapshot | None = None) -> Sandbox:
        """Start a sandbox for an agent. Raises: SandboxStartError; UserError."""
        if self._backend is None:
            self._backend = self._open()
        return await self._backend.lease(replace(self._spec(), snapshot=copy))

    def _open(self) -> SandboxBackend:
        wanted = None if isinstance(self._wanted, SandboxSpec) else self._wanted
        if wanted is None or isinstance(wanted, str):
            return make_backend(wanted or BACKENDS[0])
        if not hasattr(wanted, "lease"):
            raise UserError(f"sandbox {wanted!r}: give a backend, a SandboxSpec or a name")
        return cast(SandboxBackend, wanted)

    def _spec(self) -> SandboxSpec:
        self._leases += 1
        if not isinstance(self._wanted, SandboxSpec):
            return SandboxSpec(lease=f"agent-{uuid.uuid4().hex[:16]}")
        more = "" if self._leases == 1 else f"-{self._leases}"
        return replace(self._wanted, lease=self._wanted.lease + more)

    async def end(self, task_id: str) -> None:
        """End a task's sandbox and forget its state."""
        place = self._places.pop(task_id, None)
        if place is not None:
            await place.opened.aclose()
            if place.sandbox is not None:
                await place.sandbox.aclose()

    async def aclose(self) -> None:
        """End all of them."""
        try:
            for task_id in list(self._places):
                await self.end(task_id)
        finally:
            backend, self._backend = self._backend, None
            if backend is not None:
                await backend.aclose()
