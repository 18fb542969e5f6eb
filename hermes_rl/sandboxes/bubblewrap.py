"""Sandboxes by bubblewrap: no daemon, no root, a few milliseconds to start.

The recipe is in `recipe`, processes and folders in `box`, what the machine allows in `probe`, the
verifier's side of grading in `grading`. Here are the backend, its leased sandboxes, and the grading
sandboxes over what they leave.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hermes_rl.errors import (
    SandboxDied,
    SandboxError,
    SandboxKilled,
    SandboxStartError,
    TaskFault,
)
from hermes_rl.sandboxes import grading, limits, probe, recipe, watchdog
from hermes_rl.sandboxes.base import GradingResult, GradingSpec, SandboxInfo, SandboxSpec
from hermes_rl.sandboxes.box import (
    HOST_FOLDER_HOME,
    Lease,
    Outer,
    Spawner,
    confined,
    host_folder,
    launch,
)
from hermes_rl.sandboxes.files import Beneath
from hermes_rl.sandboxes.grading import Packing, Unpackable, pack_in_thread
from hermes_rl.sandboxes.image_changes import Upper, relied_on, replaced
from hermes_rl.sandboxes.limits import TEMPORARY, Usage, measure
from hermes_rl.sandboxes.probe import find_binary, reachable
from hermes_rl.sandboxes.session import (
    FolderSandbox,
    abandon,
    environment_file,
    open_way_out,
    start_shell,
    variables_of,
)
from hermes_rl.sandboxes.shell import Ended, Shell, ShellLost, ShellPaths, supervisor_text
from hermes_rl.sandboxes.slots import Disks, Home, Slots, Storage, find_disks, has_slots

if TYPE_CHECKING:
    from hermes_rl.sandboxes.egress import EgressProxy

_log = logging.getLogger(__name__)

WATCH_S = 3.0
"""Between two looks at sandboxes in which something runs."""
DISK_S = 0.25
"""Between two looks at the free disk space."""


class Bubblewrap:
    """The backend: one per process.

    Args:
        state_dir: where sandboxes' folders go; None is a folder of this user below the machine's
            temporary folder.
        binary: the bubblewrap to use; None takes the package's, else the one on PATH.
        workspace: a folder of the host in which all sandboxes of this backend work, instead of an
            empty one each: it stays when they end, and its size is not limited.
        cgroups: limit the memory of whole sandboxes by control groups where the machine lets us.
    """

    name = "bubblewrap"

    def __init__(
        self,
        *,
        workspace: str | Path | None = None,
        state_dir: Path | None = None,
        binary: str | None = None,
        cgroups: bool = True,
    ) -> None:
        self._workspace = None if workspace is None else Path(workspace)
        self._state_dir = state_dir
        self._binary = binary or ""
        self._want_cgroups = cgroups
        self._cgroups = limits.Cgroups("")
        self._spawner = Spawner()
        self._home: Home | None = None
        self._slots: Slots | None = None
        self._etc: dict[bool, Path] = {}
        self._live: set[BubblewrapSandbox] = set()
        self._grading: set[GradingSandbox] = set()
        self._opening = asyncio.Lock()
        self._watcher: asyncio.Task[None] | None = None
        self._overlay = True
        self._disks: Disks | None = None

    async def _open(self) -> Home:
        """Once: clean up after others that are gone, then make what all sandboxes share."""
        async with self._opening:
            if self._home is None:
                self._home = await asyncio.to_thread(self._prepare)
                self._watcher = asyncio.create_task(self._watch(self._home))
            return self._home

    def _prepare(self) -> Home:
        if self._want_cgroups:
            self._cgroups = limits.detect()
        home = Home(self._state_dir)
        self._spawner = Spawner()
        try:
            self._binary = reachable(self._binary or find_binary(), home.root)
            home.guard(self._cgroups.bases)
            self._overlay = "--overlay-src" in probe.options(self._binary)
            if has_slots():
                self._slots = Slots()
            self._shared = home.new_box()
            self._shared.chmod(0o700 if self._slots is None else 0o711)
            made = self._spawner.run(lambda: find_disks(self._shared))
            self._disks = made if isinstance(made, Disks) else None
            (self._shared / "supervisor").write_text(supervisor_text())
            (self._shared / "supervisor").chmod(0o644)
            # Hundreds of links, which a disk may take a second for.
            memory = home.memory_folder(self._shared)
            memory.chmod(self._shared.stat().st_mode)
            self._etc = {
                network: recipe.make_etc(memory / name, network)
                for network, name in ((False, "etc"), (True, "etc-network"))
            }
        except BaseException:
            home.close()
            raise
        return home

    async def lease(self, spec: SandboxSpec) -> BubblewrapSandbox:
        """Start a sandbox.

        Raises: SandboxStartError; TaskFault when the image is missing; UserError when the
            workspace of the host cannot be used.
        """
        image = await asyncio.to_thread(recipe.find_image, spec.image) if spec.image else None
        home = await self._open()
        try:
            return await self._lease(home, spec, image or recipe.Root())
        except OSError as error:  # no descriptor, no storage: the machine's fault, at any step
            raise SandboxStartError(f"a sandbox cannot be made: {error}") from error

    async def _lease(self, home: Home, spec: SandboxSpec, image: recipe.Root) -> BubblewrapSandbox:
        host = host_folder(self._workspace, home.root) if self._workspace is not None else None
        layers = recipe.Layers(self._etc[spec.network is True], image)
        box = home.new_box()
        slot = self._slots.take() if self._slots is not None and host is None else None
        owner = recipe.image_owner(image.lower) if slot is not None else None
        storage = Storage(box, self._disks if host is None else None, spec.limits)
        lease = Lease(spec, box, storage, slot, layers, owner=owner, host=host)
        try:
            lease.admit_user()
            await self._mounting(storage.enter)
            if image.lower:
                upper = storage.layer("layer", lease.uid)
                lease = replace(lease, layers=replace(layers, upper=upper))
            outer, shell, egress = await self._start(lease)
        except BaseException:
            await asyncio.shield(self.give_back(lease))
            raise
        sandbox = BubblewrapSandbox(self, lease, outer, shell)
        sandbox.egress = egress
        self._live.add(sandbox)
        return sandbox

    async def _start(self, lease: Lease) -> tuple[Outer, Shell, EgressProxy | None]:
        spec, egress = lease.spec, None
        if lease.host is None:
            lease.make("ws")
        control = lease.make_readable("ctl")
        os.link(self._shared / "supervisor", control / "supervisor")
        own_home = recipe.WORKSPACE if lease.host is None else HOST_FOLDER_HOME
        image = lease.layers.image
        variables = recipe.environment(own_home, variables_of(spec), image)
        start = environment_file(variables, recipe.WORKSPACE, spec.cwd or image.workdir)
        if image.workspace:
            start = f"cp -a {recipe.IMAGE_WORKSPACE}/. {recipe.WORKSPACE}/\n{start}"
        (control / "env").write_text(start)
        (control / "env").chmod(0o644)
        supervisor = f"{recipe.CONTROL}/supervisor"
        arguments = (recipe.CONTROL, recipe.STATE, lease.tag)
        box = recipe.Box(
            layers=lease.layers,
            control=control,
            limits=spec.limits,
            network=spec.network is True,
            workspace=lease.bound,
            command=recipe.command(supervisor, spec.limits, *arguments),
        )

        async def launch(stdio: socket.socket) -> Outer:
            return await self._launch(box, lease.uid, stdio)

        async def settle(outer: Outer) -> None:
            name, groups = lease.box.name, self._cgroups
            await confined(lease.cgroup, name, spec.limits, groups, outer)
            await self._mounting(lease.storage.leave)
            nonlocal egress
            egress = await open_way_out(spec, outer.init, lease.uid)

        paths = ShellPaths(control, recipe.CONTROL, recipe.STATE)
        outer, shell = await start_shell(paths, launch, probe.explain, settle)
        return outer, shell, egress

    async def _mounting(self, work: Callable[[], None]) -> None:
        """Enter or leave rooms, which only the spawner's thread can, and only with disks needs."""
        if self._disks is not None:
            await self._spawner.call(work)

    async def _launch(self, box: recipe.Box, uid: int | None, stdio: socket.socket) -> Outer:
        """Start a bubblewrap in the spawner's thread; a cancelled caller leaves none behind."""
        started = asyncio.ensure_future(
            self._spawner.call(lambda: launch(self._binary, box, uid, stdio))
        )
        try:
            return await asyncio.shield(started)
        except asyncio.CancelledError:
            await abandon(await started)
            raise

    def limits_in_force(self, lease: Lease) -> dict[str, object]:
        """By name; what the machine cannot enforce is absent."""
        asked = lease.spec.limits
        found: dict[str, object] = {
            "processes": asked.processes,
            "address_space_bytes_per_process": asked.memory_bytes,
            "file_bytes": asked.file_bytes,
            "workspace_bytes": asked.workspace_bytes,
            "workspace_files": asked.workspace_files,
            "tmp_bytes": asked.tmp_bytes,
            "shm_bytes": asked.shm_bytes,
            "own_uid": lease.slot is not None and lease.owner is None,
        }
        if lease.host is not None:
            del found["workspace_bytes"], found["workspace_files"]
        else:
            found["workspace_held_by"] = "kernel" if lease.storage.sized else "watching"
        if lease.cgroup:
            found["memory_bytes"] = asked.memory_bytes
        if (cpus := lease.spec.limits.cpus) and any(map(limits.has_quota, lease.cgroup)):
            found["cpus"] = cpus
        return found

    async def grade(self, lease: Lease, spec: GradingSpec, name: str) -> GradingResult:
        """Run a verifier over what a lease left. Raises: SandboxStartError, SandboxDied, TaskFault
        when its image is missing."""
        asked = lease.spec.limits
        # A copy of the workspace, where there are no overlays, takes as much again.
        storage = Storage(
            lease.box / name, self._disks, asked if self._overlay else asked.doubled()
        )
        box = GradingSandbox(lease, name, self._cgroups, storage)

        def enter() -> None:
            lease.storage.enter()
            storage.enter()

        def leave() -> None:
            lease.storage.leave()
            storage.leave()

        async def launch(stdio: socket.socket) -> Outer:
            return await self._launch(stage, lease.uid, stdio)

        self._grading.add(box)
        try:
            box.folder.mkdir()
            box.folder.chmod(0o711)  # in the lease's box, which is closed to others
            await self._mounting(enter)
            stage = await pack_in_thread(
                lease.workspace, lambda packing: self._stage(lease, spec, box, packing)
            )
            return await grading.judge(spec, stage.control, launch, box.stand, box.stop)
        except Unpackable as error:
            return grading.refused(error)
        except OSError as error:
            raise SandboxStartError(f"a grading sandbox cannot be made: {error}") from error
        finally:
            self._grading.discard(box)
            await asyncio.shield(self._mounting(leave))
            await asyncio.shield(asyncio.to_thread(box.remove))

    def _stage(
        self, lease: Lease, spec: GradingSpec, graded: GradingSandbox, packing: Packing
    ) -> recipe.Box:
        """Everything that a grading sandbox needs. Blocks: it may have to copy the workspace."""
        folders = (lease.make_readable(f"{graded.name}/{name}") for name in ("ctl", "verify"))
        control, verify = folders
        paths = grading.Paths(recipe.CONTROL, grading.HOME, grading.VERIFY, recipe.WORKSPACE)
        mounts = ["--ro-bind", str(verify), grading.VERIFY]
        mounts += ["--size", str(lease.spec.limits.tmp_bytes), "--tmpfs", grading.HOME]
        workspace, storage = None, graded.storage
        layers = self._grading_layers(lease, spec, storage)
        mounts += _verifier_mounts(lease, spec, verify, storage)
        variables = dict(layers.image.env)
        if layers.image.workdir is not None:
            variables["WORKDIR"] = layers.image.workdir
        grading.write_stage(control, verify, spec, paths, variables)
        if self._overlay:
            layer = storage.layer("layer", lease.uid)
            below = ["--overlay-src", str(lease.bound)]
            mounts += [*below, *layer.arguments(), recipe.WORKSPACE]
        else:
            workspace = storage.folder / "ws"
            try:
                packing.copy(storage.seen(workspace), lease.uid)
            except OSError as error:
                raise SandboxStartError(f"the workspace cannot be copied: {error}") from error
        return recipe.Box(
            layers=layers,
            control=control,
            limits=lease.spec.limits,
            workspace=workspace,
            mounts=mounts,
            cwd=grading.HOME,
            command=recipe.command(f"{recipe.CONTROL}/start", lease.spec.limits, lease.tag),
        )

    def _grading_layers(self, lease: Lease, spec: GradingSpec, storage: Storage) -> recipe.Layers:
        """The root of a grading sandbox: the verifier's own image, or the agent's as it left it."""
        image = lease.layers.image
        if spec.image is not None:
            image = recipe.find_image(spec.image)
        elif lease.layers.upper is not None:
            image = replace(image, lower=[*image.lower, lease.layers.upper.up])
        upper = storage.layer("root", lease.uid) if image.lower else None
        return recipe.Layers(self._etc[False], image, upper)

    async def _watch(self, home: Home) -> None:
        """Look at sandboxes in which something runs: a limit may be exceeded at any time."""
        clock = asyncio.get_running_loop().time
        reserve, look = limits.Reserve(home.boxes), clock() + WATCH_S
        while True:
            await asyncio.sleep(DISK_S)
            boxes: list[BubblewrapSandbox | GradingSandbox] = [*self._live, *self._grading]
            try:
                due = reserve.fell() or clock() >= look
                left = reserve.short(lambda: sum(box.held() for box in boxes))  # noqa: B023
            except (OSError, ValueError):  # a sandbox that closes just now, or the disk is gone
                continue
            if due or left is not None:
                look = clock() + WATCH_S
                for box in boxes:
                    if left is not None or box.due():
                        await _try(box.check())
            if left is not None and boxes:
                await _try(_relieve(boxes, left))

    async def give_back(self, lease: Lease, sandbox: BubblewrapSandbox | None = None) -> None:
        """Remove a lease's folders and group, free its slot."""
        if not lease.storage.left:  # a start that failed, or was cancelled before its turn
            await self._mounting(lease.storage.leave)
        await asyncio.to_thread(_remove, lease)
        if lease.slot is not None and self._slots is not None:
            self._slots.give_back(lease.slot)
        if sandbox is not None:
            self._live.discard(sandbox)

    async def aclose(self) -> None:
        """End all sandboxes of this process."""
        await asyncio.gather(*(sandbox.aclose() for sandbox in self._live))
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait([self._watcher])
        if self._home is not None:
            await asyncio.to_thread(self._home.close)
            self._home = None
            if self._slots is not None:
                self._slots.close()
        self._spawner.close()


def _verifier_mounts(lease: Lease, spec: GradingSpec, verify: Path, storage: Storage) -> list[str]:
    """Arguments for the folders that a verifier wants at places of its own.

    Raises: Unpackable when the agent left an image in which no verifier can be trusted to start.
    """
    if spec.image is None and lease.layers.upper is not None:
        image, changes = lease.layers.image, Upper(lease.storage.seen(lease.layers.upper.up))
        search = image.env.get("PATH", recipe.PATH)
        relied = relied_on(image.lower, image.env, search)
        places = (*spec.mounts, grading.HOME, grading.VERIFY)
        if (found := replaced(relied, changes, places)) is not None:
            raise Unpackable(f"the agent replaced {found}, which grading relies on")
    arguments = []
    for number, (place, folder) in enumerate(spec.mounts.items()):
        if not folder:
            arguments += ["--size", str(lease.spec.limits.tmp_bytes), "--tmpfs", place]
            continue
        shown = (verify / folder).resolve()
        if not shown.is_relative_to(verify.resolve()):
            raise TaskFault(f"verify.mounts: {folder!r} is not a folder of the verifier's files")
        shown.mkdir(parents=True, exist_ok=True)
        if lease.uid is not None:  # an overlay takes no writes to other users' files
            for path in (shown, *shown.rglob("*")):
                os.chown(path, lease.uid, lease.uid)
        layer = storage.layer(f"mount{number}", lease.uid)
        arguments += ["--overlay-src", str(shown), *layer.arguments(), place]
    return arguments


async def _try(look: Awaitable[None]) -> None:
    """A sandbox that cannot be looked at, or that ends for what was found, says so itself."""
    try:
        await look
    except (SandboxError, ValueError):
        pass
    except OSError as error:  # out of descriptors: the next look comes soon
        _log.warning("cannot look at a sandbox: %s", error)


async def _relieve(boxes: Sequence[BubblewrapSandbox | GradingSandbox], left: int) -> None:
    """End the largest, if it holds enough to be worth it."""
    largest = max(boxes, key=lambda box: box.held())
    if (held := largest.held()) >= limits.STEP_BYTES:
        _log.warning("%d MiB left on the disk: ending the largest sandbox", left >> 20)
        mebibytes = held >> 20
        await largest.relieve(
            f"the machine's disk is nearly full, and the sandbox holds {mebibytes} MiB of it"
        )


def _remove(lease: Lease) -> None:
    for path in lease.cgroup:
        watchdog.remove_cgroup(path)
    lease.storage.close()
    watchdog.remove_tree(lease.box)


GONE_S = 5.0
"""How long a bubblewrap may take to end after its supervisor."""
IDLE_S = 30.0
"""Between two looks at a sandbox in which no command runs."""
_VANISHED = "the folders of the sandbox vanished"


class BubblewrapSandbox(FolderSandbox):
    """See `base.Sandbox`."""

    _tree: Outer

    def __init__(self, backend: Bubblewrap, lease: Lease, outer: Outer, shell: Shell) -> None:
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
        """Bound its memory and CPU time, now that it stands. Raises: SandboxStartError."""
        name, most = f"{self.lease.box.name}.{self.name}", self.lease.spec.limits
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
