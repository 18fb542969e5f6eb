"""One leased bubblewrap sandbox, and the grading sandboxes over what it leaves."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Protocol

from hermes_rl.errors import SandboxDied, SandboxError, SandboxKilled, SandboxStartError
from hermes_rl.sandboxes import grading, limits, recipe, watchdog
from hermes_rl.sandboxes.base import GradingResult, GradingSpec, SandboxInfo
from hermes_rl.sandboxes.box import Lease, Outer, confined
from hermes_rl.sandboxes.disk import Storage
from hermes_rl.sandboxes.files import Beneath
from hermes_rl.sandboxes.limits import TEMPORARY, Usage, measure
from hermes_rl.sandboxes.session import ShellSandbox
from hermes_rl.sandboxes.shell import Ended, Shell, ShellLost

_log = logging.getLogger(__name__)

GONE_S = 5.0
"""How long a bubblewrap may take to end after its supervisor."""
IDLE_S = 30.0
"""Between two looks at a sandbox in which no command runs."""
_VANISHED = "the folders of the sandbox vanished"


class Backend(Protocol):
    """What a sandbox needs of the backend that made it."""

    name: str

    def limits_in_force(self, lease: Lease) -> dict[str, object]:
        """By name."""
        ...

    async def grade(self, lease: Lease, spec: GradingSpec, name: str) -> GradingResult:
        """Run a verifier over what a lease left."""
        ...

    async def give_back(self, lease: Lease, sandbox: BubblewrapSandbox | None = None) -> None:
        """Remove what a lease holds."""
        ...


class BubblewrapSandbox(ShellSandbox):
    """See `base.Sandbox`."""

    _tree: Outer

    def __init__(self, backend: Backend, lease: Lease, outer: Outer, shell: Shell) -> None:
        image = lease.spec.image
        info = SandboxInfo(backend.name, image, backend.limits_in_force(lease))
        files = Beneath(lease.workspace, lease.uid)
        super().__init__(info, outer, shell, recipe.WORKSPACE, files)
        self._backend = backend
        self._lease = lease
        # In a control group the kernel counts its own; to ask of the machine is dear.
        self._machine_kills = 0 if lease.cgroup else limits.machine_kills()
        self._looked = asyncio.get_running_loop().time()
        self._slack = Usage(0, 0).slack_s(lease.spec.limits)
        self._bytes = 0

    @property
    def host_pid(self) -> int:
        """The outer bubblewrap's process id: what an operator, or a test, may kill."""
        return self._tree.process.pid

    def due(self) -> bool:
        """Time for a look, seen from outside: a command runs, or the last look is long ago."""
        ago = asyncio.get_running_loop().time() - self._looked
        return not self._shell.lost.is_set() and (self._shell.busy or ago > IDLE_S)

    def _beneath(self, path: str) -> str | None:
        """Files of the host are opened by the sandbox alone, with its user's rights."""
        return None if self._lease.host is not None else super()._beneath(path)

    async def _after(self, ended: Ended) -> None:
        if ended.exit_code and self._out_of_memory():
            await self._end(SandboxKilled("the sandbox ran out of memory"))
            self._raise_if_dead()
        if asyncio.get_running_loop().time() - self._looked >= self._slack:
            await self.check()

    def _out_of_memory(self) -> bool:
        return any(limits.out_of_memory(path) for path in self._lease.cgroup)

    async def check(self) -> None:
        """Hold the sandbox against its limits. Raises: SandboxKilled when one is exceeded,
        SandboxDied when its workspace vanished."""
        if self._lease.host is not None:  # the user's own files are neither counted nor touched
            self._raise_if_dead()
            return
        lease = self._lease
        upper = lease.layers.upper
        folders = [self._files]
        if upper is not None:
            folders.append(Beneath(lease.storage.seen(upper.up), lease.uid))
        try:
            self._check_workspace()
            usage = await asyncio.to_thread(measure, lease.storage, folders, self._tree.init)
        except (FileNotFoundError, SandboxDied):
            await self._end(SandboxDied("the workspace vanished"))
        except OSError as error:
            # Out of descriptors: that says nothing about the sandbox. The next look comes soon.
            _log.warning("cannot look at a sandbox: %s", error)
        else:
            self._looked = asyncio.get_running_loop().time()
            self._slack = usage.slack_s(lease.spec.limits)
            self._bytes = usage.bytes
            excess = usage.excess(lease.spec.limits)
            if excess is not None:
                await self._end(SandboxKilled(f"the sandbox exceeded its limits: {excess}"))
        self._raise_if_dead()

    def _check_workspace(self) -> None:
        if not self._lease.intact:
            raise SandboxDied("the workspace vanished")

    def held(self) -> int:
        """Bytes that it has on the disk while something may write more of them."""
        if self._shell.lost.is_set():
            return 0
        return max(self._bytes, self._lease.storage.held())

    async def relieve(self, why: str) -> None:
        """End it, the one that holds most of the machine's disk, before that is full."""
        await self._end(SandboxKilled(why))

    async def _classify(self, lost: ShellLost) -> SandboxError:
        """The outer bubblewrap is out of the agent's reach: a signal to it is the host's doing.
        While it runs, or when it has ended by itself, the agent did it."""
        if lost.vanished:  # it is read-only in the sandbox
            error: SandboxError = SandboxDied(_VANISHED)
            await self._end(error)
            return error
        try:
            async with asyncio.timeout(GONE_S if self._shell.lost.is_set() else 0):
                code = await self._tree.ended()
        except TimeoutError:
            error = SandboxKilled(f"the shell of the sandbox no longer answers: {lost}")
            await self._end(error)
            return error
        if code < 0:
            return SandboxDied(f"bubblewrap was ended by signal {-code} from outside")
        if not self._lease.intact or not self._shell.paths.control.is_dir():
            return SandboxDied(_VANISHED)
        if self._out_of_memory():
            return SandboxKilled("the sandbox ran out of memory")
        if not self._lease.cgroup and limits.machine_kills() > self._machine_kills:
            return SandboxDied("the machine ran out of memory and ended the sandbox, or another")
        return SandboxKilled(f"the shell of the sandbox was killed (exit {code})")

    async def _grade(self, spec: GradingSpec, name: str) -> GradingResult:
        return await self._backend.grade(self._lease, spec, name)

    async def _give_back(self) -> None:
        await self._backend.give_back(self._lease, self)


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
            await confined(self._cgroup, name, most, self._groups, outer)
        except (OSError, ValueError) as error:
            raise SandboxStartError(f"the grading sandbox did not start: {error}") from error
        self._init = outer.init

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

    def remove(self) -> None:
        """Remove all of it. Blocks."""
        for path in self._cgroup:
            watchdog.remove_cgroup(path)
        self.storage.close()
        watchdog.remove_tree(self.folder)
