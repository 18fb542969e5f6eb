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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hermes_rl.aio import in_thread
from hermes_rl.errors import (
    SandboxDied,
    SandboxError,
    SandboxKilled,
    SandboxStartError,
    SnapshotLost,
)
from hermes_rl.sandboxes import grading, limits, probe, recipe, watchdog, zygote
from hermes_rl.sandboxes.base import (
    GradingResult,
    GradingSpec,
    SandboxSnapshot,
    SandboxSpec,
)
from hermes_rl.sandboxes.box import (
    GradingSandbox,
    Inside,
    Lease,
    Outer,
    Recycled,
    Spawner,
    confined,
    launch,
    make_groups,
    verifier_mounts,
)
from hermes_rl.sandboxes.disks import Disks, Storage, detach, find_disks
from hermes_rl.sandboxes.files import Beneath
from hermes_rl.sandboxes.forks import Bases, mount_as
from hermes_rl.sandboxes.grading import Packing, pack_in_thread
from hermes_rl.sandboxes.host import OUT_OF_MEMORY, VANISHED, HostBackend, HostSandbox
from hermes_rl.sandboxes.images import OVERLAY_OPTIONS
from hermes_rl.sandboxes.limits import Usage, measure
from hermes_rl.sandboxes.probe import find_binary, reachable
from hermes_rl.sandboxes.session import (
    abandon,
    open_way_out,
    restored,
    save_folder,
    start_shell,
    variables_of,
)
from hermes_rl.sandboxes.shell import Ended, Shell, ShellPaths, supervisor_text
from hermes_rl.sandboxes.slots import Home, Slots, has_slots
from hermes_rl.sandboxes.snapshots import ROOT, WORKSPACE, unpack
from hermes_rl.sandboxes.zygote import Zygote, Zygotes

if TYPE_CHECKING:
    from hermes_rl.sandboxes.egress import EgressProxy

_log = logging.getLogger(__name__)

WATCH_S = 3.0
"""Between two looks at sandboxes in which something runs."""
DISK_S = 0.25
"""Between two looks at the free disk space."""


class Bubblewrap(HostBackend):
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
        self.workspace = None if workspace is None else Path(workspace)
        super().__init__(state_dir)
        self._binary = binary or ""
        self._want_cgroups = cgroups
        self._cgroups = limits.Cgroups("")
        self._spawner = Spawner()
        self._slots: Slots | None = None
        self._etc: dict[bool, Path] = {}
        self._grading: set[GradingSandbox] = set()
        self._overlay = True
        self._in_memory = False  # as at the start: the zygote sees the folders of that moment
        self._disks: Disks | None = None
        self._bases: Bases | None = None
        """Snapshots that sandboxes share, where the machine can."""
        self._recycled = Recycled()
        self._zygotes: Zygotes | None = None

    def _prepare(self) -> Home:
        """See `HostBackend`."""
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
            if self._disks is not None and self._overlay:
                self._bases = Bases(home, self._spawner.call, self._disks)
            # Hundreds of links, which a disk may take a second for.
            memory = home.memory_folder(self._shared)
            memory.chmod(self._shared.stat().st_mode)
            self._in_memory = memory != self._shared
            self._supervisor = memory / recipe.SUPERVISOR
            self._supervisor.write_text(supervisor_text())
            self._supervisor.chmod(0o644)
            self._etc = {
                network: recipe.make_etc(memory / name, network)
                for network, name in ((False, "etc"), (True, "etc-network"))
            }
            operations = zygote.setup(self._etc[False], home.boxes, memory.parent)
            uid = self._slots.take() if self._slots is not None else None
            self._zygotes = Zygotes(
                self._spawner,
                lambda: zygote.spawn(f"{home.owner}.0:zygote", uid, operations, self._cgroups),
            )
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
        layers = recipe.Layers(self._etc[spec.network is True], image)
        simple = not (self.workspace or image.lower or spec.snapshot)
        lease = self._recycled.take(spec, layers) if simple else None
        known = lease is not None
        if lease is None:
            lease = self._new_lease(home, spec, layers)
        try:
            if not known:
                lease = await self._furnish(lease)
            inside, shell, egress = await self._start(lease)
        except BaseException:
            await asyncio.shield(self.give_back(lease))
            raise
        sandbox = BubblewrapSandbox(self, lease, inside, shell)
        sandbox.egress = egress
        self.live.add(sandbox)
        if spec.snapshot is not None:
            await restored(sandbox, spec.snapshot)
        return sandbox

    def _new_lease(self, home: Home, spec: SandboxSpec, layers: recipe.Layers) -> Lease:
        host = recipe.host_folder(self.workspace, home.root) if self.workspace is not None else None
        folder = home.new_box()
        memory = home.memory_folder(folder) if self._in_memory else folder
        slot = self._slots.take() if self._slots is not None and host is None else None
        storage = Storage(folder, self._disks if host is None else None, spec.limits)
        small = memory if memory != folder else None
        return Lease(spec, folder, storage, slot, layers, host=host, small=small)

    async def _furnish(self, lease: Lease) -> Lease:
        """Make the folders of a new lease. Raises: OSError; SnapshotLost."""
        image, snapshot = lease.layers.image, lease.spec.snapshot
        if lease.slot is not None and (owner := recipe.image_owner(image.lower)) is not None:
            lease = await self._own_image(lease, owner)
        lease.admit_user()
        await self._mounting(partial(self._enter, lease))
        if image.lower:
            upper = lease.storage.layer("layer", lease.uid)
            lease = replace(lease, layers=replace(lease.layers, upper=upper))
        if snapshot is not None:
            await self._put_back(lease, snapshot)
        elif lease.host is None:
            lease.make("ws")
            self._recycled.note(lease)
        lease.make_control(self._supervisor)
        return lease

    async def _own_image(self, lease: Lease, owner: int) -> Lease:
        """Have the files of an image belong to the sandbox: by a mount that shows them so, where
        the machine can, else by running it as their owner."""
        store, shown = lease.layers.image.store, lease.make_readable("i")
        layers = replace(lease.layers, shown=shown)
        # The kernel takes so many bytes of names, and these are longer than the store's.
        fits = sum(len(f"/oldroot{layers.find(p)}:") for p in layers.image.lower) < OVERLAY_OPTIONS
        if not fits or not (store and self._bases and await self._bases.can_show(store)):
            return replace(lease, owner=owner)
        return replace(lease, layers=layers, images=owner)

    def _enter(self, lease: Lease) -> None:
        """Mount what a lease needs; in the spawner's thread. Raises: OSError."""
        lease.storage.enter()
        shown, store = lease.layers.shown, lease.layers.image.store
        if shown is not None and store is not None and self._bases is not None:
            mount_as(self._bases.namespace(lease.uid or 0, lease.images), store, shown)

    async def _put_back(self, lease: Lease, snapshot: SandboxSnapshot) -> None:
        """Fill the workspace, and the layer over an image. Raises: SnapshotLost."""
        folder, fork, upper = snapshot.folder, lease.fork, lease.layers.upper
        if lease.host is not None:
            raise SnapshotLost("a snapshot cannot be put into a folder of yours")
        try:
            if snapshot.shared and self._bases is not None and lease.storage.sized:
                fork.base = await self._bases.take(folder, lease.spec.limits)
            workspace = lease.make("ws")
            if fork.base is None:
                await in_thread(unpack, folder / WORKSPACE, lease.workspace, lease.uid)
            else:
                layer = lease.storage.layer("over", lease.uid)
                below = lease.make_readable("below")
                mount = partial(fork.base.mount, fork, lease.uid, below, layer, workspace)
                await self._spawner.call(mount)
            if upper is not None and (folder / ROOT).exists():
                await in_thread(unpack, folder / ROOT, lease.storage.seen(upper.up), lease.uid)
        except OSError as error:
            raise SnapshotLost(f"a snapshot cannot be put back: {error}") from error

    async def _start(self, lease: Lease) -> tuple[Inside, Shell, EgressProxy | None]:
        self._write_environment(lease)
        starter = await self._starter(lease)
        egress: EgressProxy | None = None

        async def launch(stdio: socket.socket) -> Inside:
            if starter is not None:
                request = replace(zygote.session(lease), mounts=await self._workspace(lease))
                return await self._clone(starter, request, lease.cgroup, lease.name, stdio)
            return await self._launch(self._session_box(lease), lease.uid, stdio)

        async def settle(inside: Inside) -> None:
            nonlocal egress
            if isinstance(inside, Outer):
                name, groups = lease.name, self._cgroups
                await confined(lease.cgroup, name, lease.spec.limits, groups, inside)
            if not lease.storage.left:
                await self._mounting(lambda: _leave(lease))
            egress = await open_way_out(lease.spec, inside.init, lease.uid)

        if starter is None and lease.storage.left:
            await self._mounting(partial(self._enter, lease))
        paths = ShellPaths(lease.control, recipe.CONTROL, recipe.STATE)
        inside, shell = await start_shell(paths, launch, probe.explain, settle)
        return inside, shell, egress

    def _write_environment(self, lease: Lease) -> None:
        spec, image = lease.spec, lease.layers.image
        home = recipe.WORKSPACE if lease.host is None else recipe.HOST_FOLDER_HOME
        variables = recipe.environment(home, variables_of(spec), image)
        start = recipe.environment_file(variables, recipe.WORKSPACE, spec.cwd or image.workdir)
        if image.workspace and spec.snapshot is None:
            start = f"cp -a {recipe.IMAGE_WORKSPACE}/. {recipe.WORKSPACE}/\n{start}"
        (lease.control / "env").write_text(start)
        (lease.control / "env").chmod(0o644)

    def _session_box(self, lease: Lease) -> recipe.Box:
        spec = lease.spec
        return recipe.Box(
            layers=lease.layers,
            control=lease.control,
            limits=spec.limits,
            network=spec.network is True,
            workspace=lease.bound,
            command=recipe.command(
                spec.limits, *lease.supervisor, counted=bool(self._cgroups.base)
            ),
        )

    async def _starter(self, lease: Lease) -> Zygote | None:
        """The zygote, if it can start what runs over the folders of a lease."""
        simple = recipe.Layers(self._etc[False]) == lease.layers and lease.spec.network is False
        if self._zygotes is None or not simple or lease.host or lease.fork.base:
            return None
        return await self._zygotes.ready()

    async def _workspace(self, lease: Lease) -> list[int]:
        """The workspace of a lease for a zygote: a mount, if it is in a file system of its own."""
        mount = lease.storage.mount_of("ws")
        if mount is None and lease.storage.sized:
            mount = await self._spawner.call(lambda: lease.storage.mount_attached("ws"))
        return [mount] if mount is not None else []

    async def _clone(
        self,
        starter: Zygote,
        request: zygote.Request,
        held: list[str],
        name: str,
        stdio: socket.socket,
    ) -> Inside:
        """Have a zygote start a sandbox; the mounts of the request are closed here. `held` and
        `name`: see `make_groups`. Raises: SandboxStartError; OSError."""
        groups: list[int] = []
        with stdio:
            try:
                for path in make_groups(held, name, request.limits, self._cgroups):
                    groups.append(os.open(f"{path}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
                return await starter.start(replace(request, stdio=stdio.fileno(), cgroups=groups))
            finally:
                for fd in (*request.mounts, *groups):
                    os.close(fd)

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
        graded = GradingSandbox(lease, name, self._cgroups, storage)
        plain = spec.image is None and not spec.mounts and self._overlay
        starter = await self._starter(lease) if plain else None

        def clear() -> None:
            if starter is None:
                self._spawner.run(lambda: _leave(lease))
            self._spawner.run(graded.leave)
            graded.remove()

        self._grading.add(graded)
        try:
            if starter is not None:
                return await self._grade_plain(starter, graded, spec)
            return await self._grade(graded, spec)
        finally:
            self._grading.discard(graded)
            await asyncio.shield(asyncio.to_thread(clear))

    async def _grade_plain(
        self, starter: Zygote, graded: GradingSandbox, spec: GradingSpec
    ) -> GradingResult:
        """Have a zygote start a verifier. What it needs is made in the spawner's thread, after
        which the clean-up for a cancelled caller comes."""
        lease = graded.lease

        async def launch(stdio: socket.socket) -> Inside:
            mounts, graded.mounts = graded.mounts, []
            request = zygote.grading_session(lease, graded.name, graded.storage.sized)
            request, name = replace(request, mounts=mounts), f"{lease.name}.{graded.name}"
            return await self._clone(starter, request, graded.cgroup, name, stdio)

        control = await self._spawner.call(partial(graded.stage, spec))
        return await grading.judge(spec, control, launch, graded.stand, graded.stop)

    async def _grade(self, graded: GradingSandbox, spec: GradingSpec) -> GradingResult:
        """Have bubblewrap start a verifier."""
        lease = graded.lease

        def enter() -> None:
            self._enter(lease)
            graded.storage.enter()
            if lease.fork.base is not None:
                lease.fork.base.enter(lease.fork)

        async def launch(stdio: socket.socket) -> Outer:
            return await self._launch(stage, lease.uid, stdio)

        graded.make()
        await self._mounting(enter)
        stage = await pack_in_thread(
            lease.workspace, lambda packing: self._stage(lease, spec, graded, packing)
        )
        return await grading.judge(spec, stage.control, launch, graded.stand, graded.stop)

    def _stage(
        self, lease: Lease, spec: GradingSpec, graded: GradingSandbox, packing: Packing
    ) -> recipe.Box:
        """Everything that a grading sandbox needs. Blocks: it may have to copy the workspace."""
        folders = (lease.make_readable(f"{graded.name}/{name}") for name in ("ctl", "verify"))
        control, verify = folders
        mounts = ["--ro-bind", str(verify), grading.VERIFY]
        mounts += ["--size", str(lease.spec.limits.tmp_bytes), "--tmpfs", grading.HOME]
        workspace, storage = None, graded.storage
        layers = self._grading_layers(lease, spec, storage)
        mounts += verifier_mounts(lease, spec, verify, storage)
        variables = dict(layers.image.env)
        if layers.image.workdir is not None:
            variables["WORKDIR"] = layers.image.workdir
        grading.write_stage(control, verify, spec, variables=variables)
        if self._overlay:
            layer = storage.layer("layer", lease.uid)
            below = [part for path in lease.sources for part in ("--overlay-src", str(path))]
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
            command=recipe.command(
                lease.spec.limits,
                f"{recipe.CONTROL}/start",
                lease.tag,
                counted=bool(self._cgroups.base),
            ),
        )

    def _grading_layers(self, lease: Lease, spec: GradingSpec, storage: Storage) -> recipe.Layers:
        """The root of a grading sandbox: the verifier's own image, or the agent's as it left it."""
        image = lease.layers.image
        if spec.image is not None:
            image = recipe.find_image(spec.image)
        elif lease.layers.upper is not None:
            image = replace(image, lower=[*image.lower, lease.layers.upper.up])
        upper = storage.layer("root", lease.uid) if image.lower else None
        shown = lease.layers.shown if image.store == lease.layers.image.store else None
        return recipe.Layers(self._etc[False], image, upper, shown)

    async def _watch(self, home: Home) -> None:
        """Look at sandboxes in which something runs: a limit may be exceeded at any time."""
        clock = asyncio.get_running_loop().time
        reserve, look = limits.Reserve(home.boxes), clock() + WATCH_S
        while True:
            await asyncio.sleep(DISK_S)
            sandboxes: list[BubblewrapSandbox | GradingSandbox] = [*self.live, *self._grading]
            try:
                due = reserve.fell() or clock() >= look
                left = reserve.short(lambda: sum(sandbox.held() for sandbox in sandboxes))  # noqa: B023
            except (OSError, ValueError):  # a sandbox that closes just now, or the disk is gone
                continue
            if due or left is not None:
                look = clock() + WATCH_S
                for sandbox in sandboxes:
                    if left is not None or sandbox.due():
                        await _try(sandbox.look())
            if left is not None and sandboxes:
                await _try(_relieve(sandboxes, left))

    async def give_back(self, lease: Lease, sandbox: BubblewrapSandbox | None = None) -> None:
        """Remove a lease's folders and group, free its slot."""
        if not lease.storage.left:  # a start that failed, or was cancelled before its turn
            await self._mounting(lambda: _leave(lease))
        if lease.fork.base is not None:
            lease.fork.close()
            await lease.fork.base.give_back()
        usable = sandbox is not None and not any(map(limits.out_of_memory, lease.cgroup))
        if not (usable and self._home is not None and await self._recycled.keep(lease)):
            await self._remove(lease)
        if sandbox is not None:
            self.live.discard(sandbox)

    async def _remove(self, lease: Lease) -> None:
        self._recycled.forget(lease)
        await asyncio.to_thread(_remove, lease)
        if lease.slot is not None and self._slots is not None:
            self._slots.give_back(lease.slot)

    async def aclose(self) -> None:
        """End all sandboxes of this process."""
        await asyncio.gather(*(sandbox.aclose() for sandbox in [*self.live]))
        for lease in self._recycled.drain():
            await self._remove(lease)
        if self._zygotes is not None:
            await asyncio.to_thread(self._zygotes.close)
        if self._bases is not None and self._bases.namespaces:
            self._bases.close()
        opened = self._home is not None
        await super().aclose()
        if opened and self._slots is not None:
            self._slots.close()
        self._spawner.close()


async def _try(look: Awaitable[None]) -> None:
    """A sandbox that cannot be looked at, or that ends for what was found, says so itself."""
    try:
        await look
    except (SandboxError, ValueError):
        pass
    except OSError as error:  # out of descriptors: the next look comes soon
        _log.warning("cannot look at a sandbox: %s", error)


async def _relieve(sandboxes: Sequence[BubblewrapSandbox | GradingSandbox], left: int) -> None:
    """End the largest, if it holds enough to be worth it."""
    largest = max(sandboxes, key=lambda sandbox: sandbox.held())
    if (held := largest.held()) >= limits.STEP_BYTES:
        _log.warning("%d MiB left on the disk: ending the largest sandbox", left >> 20)
        mebibytes = held >> 20
        await largest.relieve(
            f"the machine's disk is nearly full, and the sandbox holds {mebibytes} MiB of it"
        )


def _leave(lease: Lease) -> None:
    """What needed the mounts of a lease has found them; in the spawner's thread."""
    if lease.fork.base is not None:
        lease.fork.leave(lease.bound)
    if lease.layers.shown is not None:
        detach(lease.layers.shown)
    lease.storage.leave()


def _remove(lease: Lease) -> None:
    for path in lease.cgroup:
        watchdog.remove_cgroup(path)
    lease.storage.close()
    watchdog.remove_tree(lease.box)
    if lease.small is not None:
        watchdog.remove_tree(lease.small)


IDLE_S = 30.0
"""Between two looks at a sandbox in which no command runs."""


class BubblewrapSandbox(HostSandbox):
    """See `base.Sandbox`."""

    _backend: Bubblewrap

    def __init__(self, backend: Bubblewrap, lease: Lease, outer: Inside, shell: Shell) -> None:
        files = Beneath(lease.workspace, lease.uid)
        bounds = backend.limits_in_force(lease)
        super().__init__(backend, lease.spec, (outer, shell), bounds, files)
        self._lease = lease
        # In a control group the kernel counts its own; to ask of the machine is dear.
        self._machine_kills = 0 if lease.cgroup else limits.machine_kills()
        self._looked = asyncio.get_running_loop().time()
        self._slack = Usage(0, 0).slack_s(lease.spec.limits)
        self._bytes = 0

    @property
    def host_pid(self) -> int:
        """See `Inside.host_pid`."""
        return self._tree.host_pid

    def due(self) -> bool:
        """Time for a look, seen from outside: a command runs, or the last look is long ago."""
        ago = asyncio.get_running_loop().time() - self._looked
        return not self._shell.lost.is_set() and (self._shell.busy or ago > IDLE_S)

    def _beneath(self, path: str) -> str | None:
        """Files of the host are opened by the sandbox alone, with its user's rights."""
        return None if self._lease.host is not None else super()._beneath(path)

    async def _save_files(self, folder: Path) -> None:
        """See `ShellSandbox`. Files of the host stay where they are."""
        if self._lease.host is None:
            await super()._save_files(folder)
        if (changes := self._changes()) is not None:
            await save_folder(changes, folder / ROOT)

    def _changes(self) -> Path | None:
        """See `FolderSandbox`."""
        upper = self._lease.layers.upper
        return None if upper is None else self._lease.storage.seen(upper.up)

    async def _after(self, ended: Ended) -> None:
        if ended.exit_code and self._out_of_memory():
            await self._end(SandboxKilled(OUT_OF_MEMORY))
        if not os.path.isdir(self._lease.box):
            await self._end(SandboxDied(VANISHED))
        self._raise_if_dead()
        if asyncio.get_running_loop().time() - self._looked >= self._slack:
            await self.look()

    def _out_of_memory(self) -> bool:
        return any(limits.out_of_memory(path) for path in self._lease.cgroup)

    async def look(self) -> None:
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

    def _gone(self) -> str | None:
        """See `HostSandbox`."""
        if not self._lease.intact:
            return VANISHED
        if not self._lease.cgroup and limits.machine_kills() > self._machine_kills:
            return "the machine ran out of memory and ended the sandbox, or another"
        return None

    async def _grade(self, spec: GradingSpec, name: str) -> GradingResult:
        return await self._backend.grade(self._lease, spec, name)

    async def _give_back(self) -> None:
        await self._backend.give_back(self._lease, self)
