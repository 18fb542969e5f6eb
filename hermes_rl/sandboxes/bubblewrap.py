"""Sandboxes by bubblewrap: no daemon, no root, a few milliseconds to start.

The recipe is in `recipe`, processes and folders in `box`, what the machine allows in `probe`, the
grading sandbox in `grading`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from hermes_rl.errors import SandboxError, SandboxStartError
from hermes_rl.sandboxes import grading, limits, probe, recipe, watchdog
from hermes_rl.sandboxes.base import GradingResult, GradingSpec, SandboxSpec
from hermes_rl.sandboxes.box import (
    HOST_FOLDER_HOME,
    Lease,
    Outer,
    confined,
    host_folder,
    launch,
)
from hermes_rl.sandboxes.disk import Disks, Storage, find_disks
from hermes_rl.sandboxes.leased import BubblewrapSandbox, GradingSandbox
from hermes_rl.sandboxes.packing import Packing, Unpackable, pack_in_thread
from hermes_rl.sandboxes.probe import find_binary, reachable
from hermes_rl.sandboxes.session import abandon, environment_file, start_shell
from hermes_rl.sandboxes.shell import Shell, ShellPaths, supervisor_text
from hermes_rl.sandboxes.slots import Home, Slots, has_slots
from hermes_rl.sandboxes.spawn import Spawner

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
            home.guard(self._cgroups.base)
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
        lower = recipe.image_layers(spec.image) if spec.image else ()
        home = await self._open()
        try:
            return await self._lease(home, spec, lower)
        except OSError as error:  # no descriptor, no storage: the machine's fault, at any step
            raise SandboxStartError(f"a sandbox cannot be made: {error}") from error

    async def _lease(
        self, home: Home, spec: SandboxSpec, lower: Sequence[Path]
    ) -> BubblewrapSandbox:
        host = host_folder(self._workspace, home.root) if self._workspace is not None else None
        layers = recipe.Layers(self._etc[spec.network], lower)
        box = home.new_box()
        slot = self._slots.take() if self._slots is not None and host is None else None
        owner = recipe.image_owner(lower) if slot is not None else None
        storage = Storage(box, self._disks if host is None else None, spec.limits)
        lease = Lease(spec, box, storage, slot, layers, owner=owner, host=host)
        try:
            lease.admit_user()
            await self._mounting(storage.enter)
            if lower:
                upper = storage.layer("layer", lease.uid)
                lease = replace(lease, layers=replace(layers, upper=upper))
            outer, shell = await self._start(lease)
        except BaseException:
            await asyncio.shield(self.give_back(lease))
            raise
        sandbox = BubblewrapSandbox(self, lease, outer, shell)
        self._live.add(sandbox)
        return sandbox

    async def _start(self, lease: Lease) -> tuple[Outer, Shell]:
        spec = lease.spec
        if lease.host is None:
            lease.make("ws")
        control = lease.make_readable("ctl")
        os.link(self._shared / "supervisor", control / "supervisor")
        own_home = recipe.WORKSPACE if lease.host is None else HOST_FOLDER_HOME
        variables = recipe.environment(own_home, spec.env)
        (control / "env").write_text(environment_file(variables, recipe.WORKSPACE, spec.cwd))
        (control / "env").chmod(0o644)
        supervisor = f"{recipe.CONTROL}/supervisor"
        arguments = (recipe.CONTROL, recipe.STATE, lease.tag)
        box = recipe.Box(
            layers=lease.layers,
            control=control,
            limits=spec.limits,
            network=spec.network,
            workspace=lease.bound,
            command=recipe.command(supervisor, spec.limits, *arguments),
        )

        async def launch(stdio: socket.socket) -> Outer:
            return await self._launch(box, lease.uid, stdio)

        async def settle(outer: Outer) -> None:
            name, memory = lease.box.name, spec.limits.memory_bytes
            await confined(lease.cgroup, name, memory, self._cgroups, outer)
            await self._mounting(lease.storage.leave)

        paths = ShellPaths(control, recipe.CONTROL, recipe.STATE)
        return await start_shell(paths, launch, probe.explain, settle)

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
        grading.write_stage(control, verify, spec, paths)
        mounts = ["--ro-bind", str(verify), grading.VERIFY]
        mounts += ["--size", str(lease.spec.limits.tmp_bytes), "--tmpfs", grading.HOME]
        workspace, storage = None, graded.storage
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
            layers=self._grading_layers(lease, spec, storage),
            control=control,
            limits=lease.spec.limits,
            workspace=workspace,
            mounts=mounts,
            cwd=grading.HOME,
            command=recipe.command(f"{recipe.CONTROL}/start", lease.spec.limits, lease.tag),
        )

    def _grading_layers(self, lease: Lease, spec: GradingSpec, storage: Storage) -> recipe.Layers:
        """The root of a grading sandbox: the verifier's own image, or the agent's as it left it."""
        lower = [*lease.layers.lower]
        if spec.image is not None:
            lower = [*recipe.image_layers(spec.image)]
        elif lease.layers.upper is not None:
            lower.append(lease.layers.upper.up)
        upper = storage.layer("root", lease.uid) if lower else None
        return recipe.Layers(self._etc[False], lower, upper)

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
