"""One grading sandbox by bubblewrap, held to the limits of the sandbox that it follows.

A verifier may well run what the agent left, so the box is bounded as the agent's sandbox was: its
memory as a whole by a control group, and what is written in it by a look every few seconds.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from hermes_rl.errors import SandboxStartError
from hermes_rl.sandboxes import grading, limits, warden
from hermes_rl.sandboxes.box import Lease, Outer, confined
from hermes_rl.sandboxes.disk import Storage
from hermes_rl.sandboxes.files import Beneath
from hermes_rl.sandboxes.workspace import TEMPORARY, measure, remove_tree

_TEMPORARY = (*TEMPORARY, grading.HOME.lstrip("/"))


class GradingSandbox:
    """What one holds on the host.

    Args:
        lease: of the sandbox whose workspace is graded.
        name: of its folder in the lease's box.
        groups: where its control group is made.
        storage: what is written in it; entered by whoever starts the box.
    """

    def __init__(self, lease: Lease, name: str, groups: limits.Cgroups, storage: Storage) -> None:
        self.lease = lease
        self.name = name
        self.storage = storage
        self.stop: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why its verifier must end, once it must."""
        self._groups = groups
        self._cgroup: list[str] = []
        self._init = 0
        self._bytes = 0

    @property
    def folder(self) -> Path:
        """Everything of it that is on the disk."""
        return self.lease.box / self.name

    async def stand(self, outer: Outer) -> None:
        """Bound its memory, now that it stands. Raises: SandboxStartError."""
        name, most = f"{self.lease.box.name}.{self.name}", self.lease.spec.limits.memory_bytes
        try:
            await confined(self._cgroup, name, most, self._groups, outer.inner())
        except (OSError, ValueError) as error:
            raise SandboxStartError(f"the grading sandbox did not start: {error}") from error
        self._init = outer.inner().init

    def due(self) -> bool:
        """Time for a look: its verifier runs."""
        return self._init > 0 and not self.stop.done()

    async def check(self) -> None:
        """Hold it against its limits. Raises: OSError, as without a descriptor to look with."""
        storage = self.storage
        paths = [storage.folder / name for name in ("ws", "layer/up", "root/up")]
        folders = [
            Beneath(path, self.lease.uid) for path in map(storage.seen, paths) if path.is_dir()
        ]
        usage = await asyncio.to_thread(measure, storage, folders, self._init, _TEMPORARY)
        self._bytes = usage.bytes
        if (excess := usage.excess(storage.limits)) is not None:
            self._end(excess)

    def held(self) -> int:
        """Bytes that it has on the disk while something may write more of them."""
        return max(self._bytes, self.storage.held()) if self.due() else 0

    async def relieve(self, why: str) -> None:
        """End its verifier, the one that holds most of the machine's disk, before that is full."""
        self._end(why)

    def _end(self, why: str) -> None:
        if self.due():
            self.stop.set_result(why)

    def close(self, outer: Outer) -> None:
        """Its verifier has ended."""
        self._init = 0
        outer.close()

    def remove(self) -> None:
        """Remove all of it. Blocks."""
        for path in self._cgroup:
            warden.remove_cgroup(path)
        self.storage.close()
        remove_tree(self.folder)
