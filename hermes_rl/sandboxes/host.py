"""What the backends of this machine share: who is blamed for an end, who looks at limits, what is
known of images, and the state folder."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from hermes_rl.aio import in_thread
from hermes_rl.errors import SandboxDied, SandboxError, SandboxKilled
from hermes_rl.sandboxes import recipe
from hermes_rl.sandboxes.base import SandboxInfo, SandboxSpec
from hermes_rl.sandboxes.box import Inside
from hermes_rl.sandboxes.files import Beneath
from hermes_rl.sandboxes.image_changes import Relied, listing_script, read_listing
from hermes_rl.sandboxes.session import FolderSandbox, encode, restored
from hermes_rl.sandboxes.shell import Ended, HeadTail, Shell, ShellLost
from hermes_rl.sandboxes.slots import Home


class HostSandbox(FolderSandbox):
    """One of a backend that starts a launcher on this machine for each.

    Args:
        spec: what was asked for.
    """

    _tree: Inside
    relied = Relied((), (), (), ())
    """What verifiers rely on of its image."""

    def __init__(
        self,
        backend: HostBackend,
        spec: SandboxSpec,
        started: tuple[Inside, Shell],
        bounds: dict[str, object],
        files: Beneath,
    ) -> None:
        info = SandboxInfo(backend.name, spec.image, bounds)
        super().__init__(info, *started, recipe.WORKSPACE, files)
        self.spec = spec
        self._backend = backend

    async def learn(self, image: str, env: Mapping[str, str]) -> None:
        """Find out what verifiers rely on of an image, whose variables are `env`, before an agent
        can change any of it."""
        known = self._backend.relied
        if image not in known:
            sink = HeadTail(1 << 17)
            await self._execute("i", encode(listing_script(env)), sink, 60.0)
            known[image] = read_listing(sink.text())
        self.relied = known[image]

    @abstractmethod
    async def look(self) -> None:
        """Hold it against its limits of the disk. Raises: SandboxKilled; OSError."""

    def _out_of_memory(self) -> bool:
        """Whether the kernel ended one of its processes for its memory."""
        return False

    def _gone(self) -> str | None:
        """What else of the host's doing may have ended it; None for nothing."""
        return None

    async def _after(self, ended: Ended) -> None:
        if ended.exit_code and self._out_of_memory():
            await self._end(SandboxKilled(OUT_OF_MEMORY))
        self._raise_if_dead()

    async def _classify(self, lost: ShellLost) -> SandboxError:
        """What starts a sandbox is out of the agent's reach: a signal to it is the host's doing.
        While it runs, or when it has ended by itself, the agent did it."""
        if lost.vanished:  # it is read-only in the sandbox
            error: SandboxError = SandboxDied(VANISHED)
            await self._end(error)
            return error
        try:
            async with asyncio.timeout(GONE_S if self._shell.lost.is_set() else 0):
                code = await self._tree.ended()
        except TimeoutError:
            error = SandboxKilled(f"the shell of the sandbox no longer answers: {lost}")
            if (why := await self._tree.held_from_outside()) is not None:
                error = SandboxDied(why)
            await self._end(error)
            return error
        out_of_memory = self._out_of_memory()
        if code < 0 and not (self._tree.in_group and out_of_memory):
            return SandboxDied(f"the sandbox was ended by signal {-code} from outside")
        if out_of_memory and self._gone() != VANISHED:
            return SandboxKilled(OUT_OF_MEMORY)
        if (why := self._gone()) is not None:
            return SandboxDied(why)
        return SandboxKilled(f"the shell of the sandbox was killed (exit {code})")

    async def _give_back(self) -> None:
        await in_thread(self._remove)
        self._backend.live.discard(self)

    def _remove(self) -> None:
        """Remove everything that it has on the host. Blocks."""


GONE_S = 10.0
"""How long a launcher may take to end after its shell."""
VANISHED = "the folders of the sandbox vanished"
OUT_OF_MEMORY = "the sandbox ran out of memory"


S = TypeVar("S", bound=HostSandbox)


class HostBackend(ABC):
    """What backends of this machine share; one per process.

    Args:
        state_dir: where sandboxes' folders go; None is a folder of this user below the machine's
            temporary folder.
    """

    name: str
    watch_s = 3.0
    """Between two looks at sandboxes in which something runs."""

    def __init__(self, state_dir: Path | None) -> None:
        self._state_dir = state_dir
        self._home: Home | None = None
        self._opening = asyncio.Lock()
        self._watcher: asyncio.Task[None] | None = None
        self.live: set[Any] = set()
        self.relied: dict[str, Relied] = {}
        """What verifiers rely on, by image."""

    async def _open(self) -> Home:
        """Once: clean up after others that are gone, then make what all sandboxes share."""

        def prepare() -> None:
            self._home = self._prepare()

        async with self._opening:
            if self._home is None:
                # A cancelled caller waits for it: the next one, or `aclose`, finds what was made.
                await in_thread(prepare)
            assert self._home is not None
            if self._watcher is None or self._watcher.done():
                self._watcher = asyncio.create_task(self._watch(self._home))
            return self._home

    def _prepare(self) -> Home:
        """Make what all sandboxes share. Blocks. Raises: SandboxStartError."""
        home = Home(self._state_dir)
        home.guard()
        return home

    async def admit(self, sandbox: S, image: str, env: Mapping[str, str]) -> S:
        """Take a started sandbox in. Raises: SandboxError; SnapshotLost."""
        self.live.add(sandbox)
        try:
            await sandbox.learn(image, env)
        except BaseException:
            await asyncio.shield(sandbox.aclose())
            raise
        if sandbox.spec.snapshot is not None:
            await restored(sandbox, sandbox.spec.snapshot)
        return sandbox

    async def _watch(self, home: Home) -> None:
        """Look at sandboxes in which something runs."""
        while True:
            await asyncio.sleep(self.watch_s)
            for sandbox in [*self.live]:
                with contextlib.suppress(SandboxError, OSError):
                    await sandbox.look()

    async def aclose(self) -> None:
        """End all sandboxes of this process."""
        await asyncio.gather(*(sandbox.aclose() for sandbox in [*self.live]))
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait([self._watcher])
        if self._home is not None:
            await asyncio.to_thread(self._home.close)
            self._home = None
