"""Which neighbouring tool calls may run side by side without changing what any of them sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hermes_rl.errors import ToolError
from hermes_rl.messages import ToolCall
from hermes_rl.tools import Tool, ToolContext, read_arguments, resolve_paths


@dataclass(frozen=True)
class _Access:
    """What a call does with the sandbox's files."""

    path: str | None
    """The one file; None is any."""
    writes: bool

    def conflicts(self, other: _Access) -> bool:
        """Whether the order of the two matters."""
        if not (self.writes or other.writes):
            return False
        if self.path is None or other.path is None:
            return True
        one, two = self.path.rstrip("/") + "/", other.path.rstrip("/") + "/"
        return one.startswith(two) or two.startswith(one)


async def independent(
    context: ToolContext, calls: Sequence[ToolCall], tools: Sequence[Tool | None]
) -> int:
    """How many calls, from the first one on, may run side by side.

    Calls that work on one file are independent of those on other files: paths are resolved in the
    sandbox's working directory, links followed. A call that reads files at large, such as a
    search, is independent of no call that writes.

    Raises: SandboxDied, SandboxKilled.
    """
    accesses = [_access(call, tool) for call, tool in zip(calls, tools, strict=True)]
    paths = [a.path for a in accesses if a is not None and a.path is not None]
    if len(paths) > 1:
        try:
            resolved = iter(await resolve_paths(context, paths))
        except ToolError:
            return 1  # then one after the other is safe
        accesses = [
            _Access(next(resolved), a.writes) if a is not None and a.path is not None else a
            for a in accesses
        ]
    for number, access in enumerate(accesses):
        before = accesses[:number]
        if access and any(other and access.conflicts(other) for other in before):
            return number
    return len(accesses)


def _access(call: ToolCall, tool: Tool | None) -> _Access | None:
    """None for a call that touches no files of the sandbox."""
    if tool is None or not tool.needs_sandbox:
        return None
    if tool.path_argument is None:
        return _Access(None, tool.writes)
    try:
        path = read_arguments(call.arguments, tool.parameters).get(tool.path_argument)
    except ToolError:
        return None  # it will not run
    return _Access(path if isinstance(path, str) and path else None, tool.writes)
