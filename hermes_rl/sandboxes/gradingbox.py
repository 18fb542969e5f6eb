"""One grading box by bubblewrap, held to the limits of the sandbox that it follows.

A verifier may well run what the agent left, so the box is bounded as the agent's sandbox was: its
memory as a whole by a control group, and what is written in it by a look every few seconds.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from pathlib import Path

from hermes_rl.errors import SandboxStartError
from hermes_rl.sandboxes import grading, limits, warden
from hermes_rl.sandboxes.box import Lease, Outer, confined
from hermes_rl.sandboxes.disk import Room
from hermes_rl.sandboxes.files import Beneath
from hermes_rl.sandboxes.workspace import TEMPORARY, measure, remove_tree

_log = logging.getLogger(__name__)

_TEMPORARY = (*TEMPORARY, grading.HOME.lstrip("/"))


@dataclass(frozen=True)
class GradingBox:
    """What one holds on the host."""

    lease: Lease
    """Of the sandbox whose workspace is graded."""
    name: str
    """Of its folder in the lease's box."""
    groups: limits.Cgroups
    room: Room
    """What is written in it; entered by whoever starts the box."""
    cgroup: list[str] = field(default_factory=list)
    """The path of its control group, once there is one."""

    @property
    def folder(self) -> Path:
        """Everything of it that is on the disk."""
        return self.lease.box / self.name

    async def stand(self, outer: Outer) -> None:
        """Bound its memory, now that it stands. Raises: SandboxStartError."""
        name, most = f"{self.lease.box.name}.{self.name}", self.lease.spec.limits.memory_bytes
        try:
            await confined(self.cgroup, name, most, self.groups, outer.inner())
        except (OSError, ValueError) as error:
            raise SandboxStartError(f"the grading box did not start: {error}") from error

    async def excess(self, outer: Outer) -> str | None:
        """Which limit is exceeded by what was written in it, in words."""
        room = self.room
        paths = [room.folder / name for name in ("ws", "layer/up", "root/up")]
        folders = [Beneath(path, self.lease.uid) for path in map(room.seen, paths) if path.is_dir()]
        inner = outer.inner().init
        try:
            usage = await asyncio.to_thread(measure, room, folders, inner, _TEMPORARY)
        except OSError as error:  # out of descriptors: the next look comes soon
            _log.warning("cannot look at a grading box: %s", error)
            return None
        return usage.excess(room.limits)

    def remove(self) -> None:
        """Remove all of it. Blocks."""
        for path in self.cgroup:
            warden.remove_cgroup(path)
        self.room.close()
        remove_tree(self.folder)
