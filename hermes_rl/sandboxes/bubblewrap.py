"""Sandboxes by bubblewrap: no daemon, no root, a few milliseconds to start.

The recipe is in `recipe`, what the machine allows in `probe`, the grading box in `grading`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from hermes_rl.errors import SandboxDied, SandboxError, SandboxKilled, SandboxStartError
from hermes_rl.sandboxes import grading, recipe
from hermes_rl.sandboxes.base import GradingResult, GradingSpec, SandboxInfo, SandboxSpec
from hermes_rl.sandboxes.box import Inner, Lease, find_binary, launch
from hermes_rl.sandboxes.files import Beneath
from hermes_rl.sandboxes.session import Place, ShellSandbox, environment_file
from hermes_rl.sandboxes.shell import Shell, ShellLost, ShellPaths, supervisor_text
from hermes_rl.sandboxes.slots import Home, Slots
from hermes_rl.sandboxes.spawn import Spawner, exited, gone
from hermes_rl.sandboxes.workspace import remove_tree


class BubblewrapSandbox(ShellSandbox):
    """One leased sandbox."""

    def __init__(self, backend: Bubblewrap, lease: Lease, running: Running) -> None:
        place = Place(recipe.WORKSPACE, Beneath(lease.box / "ws", lease.uid))
        info = SandboxInfo(backend.name, lease.spec.image, None, backend.limits_in_force(lease))
        super().__init__(info, running.shell, place)
        self._backend = backend
        self._lease = lease
        self._running = running
        self._closed = False
        self._boxes = 0

    def _end_background(self, inside: int) -> None:
        self._running.inner.end_process(inside)

    async def _classify(self, lost: ShellLost) -> SandboxError:
        """Whose deed? The outer bubblewrap is out of the agent's reach: a signal to it is the
        host's doing, its ordinary exit the sandbox's own."""
        if not self._running.shell.lost.is_set():
            await self._end_processes()
            return SandboxKilled(f"sandbox ended: {lost}")
        try:
            async with asyncio.timeout(5):
                code = await exited(self._running.outer)
        except TimeoutError:
            await self._end_processes()
            return SandboxDied("the sandbox's channel is closed, bubblewrap still there")
        if code < 0:
            return SandboxDied(f"bubblewrap ended by signal {-code} from outside")
        if not (self._lease.box / "ws").is_dir() or not (self._lease.box / "ctl").is_dir():
            return SandboxDied("the sandbox's folders vanished")
        return SandboxKilled(f"the sandbox's shell was killed (exit {code})")

    async def _end_processes(self) -> None:
        """End everything in the sandbox; returns once its process 1 is gone."""
        outer = self._running.outer
        if outer.poll() is None:
            outer.kill()
        await exited(outer)
        await gone(self._running.inner.pidfd)

    async def grade(self, spec: GradingSpec) -> GradingResult:
        """See `base.Sandbox.grade`."""
        if self._closed:
            self._raise_if_dead()
        self._background.close()
        self._shell.close()
        await self._end_processes()
        self._error = self._error or SandboxDied("the sandbox is being graded: its session is over")
        if not (self._lease.box / "ws").is_dir():
            raise SandboxDied("the workspace vanished")
        self._boxes += 1
        return await self._backend.grade(self._lease, spec, self._boxes)

    async def aclose(self) -> None:
        """End all processes, remove the folders, give the slot back. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._error is None:
            self._error = SandboxDied("the sandbox is closed")
        self._background.close()
        self._shell.close()
        await self._end_processes()
        self._shell.release()
        os.close(self._running.inner.pidfd)
        await self._backend.give_back(self._lease)


@dataclass(frozen=True)
class Running:
    """The live parts of one sandbox."""

    outer: subprocess.Popen[bytes]
    inner: Inner
    shell: Shell


class Bubblewrap:
    """The backend: one per process.

    Args:
        state_dir: where sandboxes' folders go; None is a folder of this user below the machine's
            temporary folder.
        binary: the bubblewrap to use; None takes the package's, else the one on PATH.
    """

    name = "bubblewrap"

    def __init__(self, *, state_dir: Path | None = None, binary: str | None = None) -> None:
        self._state_dir = state_dir
        self._binary = binary
        self._spawner = Spawner()
        self._home: Home | None = None
        self._slots = Slots() if os.geteuid() == 0 else None
        self._etc: dict[bool, Path] = {}
        self._live: set[BubblewrapSandbox] = set()

    def _prepare(self) -> Home:
        """Once: the state folder and the /etc to show."""
        if self._home is None:
            home = Home(self._state_dir)
            shared = home.new_box()
            os.chmod(shared, 0o755)
            (shared / "supervisor").write_text(supervisor_text())
            (shared / "supervisor").chmod(0o644)
            self._etc[False] = recipe.make_etc(shared / "etc")
            self._shared = shared
            self._binary = self._binary or find_binary()
            self._home = home
        return self._home

    def limits_in_force(self, lease: Lease) -> dict[str, object]:
        """By name; what the machine cannot enforce is absent."""
        limits = lease.spec.limits
        return {
            "processes": limits.processes,
            "memory_bytes_per_process": limits.memory_bytes,
            "file_bytes": limits.file_bytes,
            "workspace_bytes": limits.workspace_bytes,
            "workspace_files": limits.workspace_files,
            "tmp_bytes": limits.tmp_bytes,
            "shm_bytes": limits.shm_bytes,
        }

    async def lease(self, spec: SandboxSpec) -> BubblewrapSandbox:
        """Start a sandbox. Raises: SandboxStartError; TaskFault when the image is missing."""
        home = self._prepare()
        lower = recipe.image_layers(spec.image) if spec.image else ()
        slot = self._slots.take() if self._slots is not None else None
        lease = Lease(spec, home.new_box(), slot, recipe.Layers(self._etc[False], lower))
        try:
            sandbox = BubblewrapSandbox(self, lease, await self._start(lease))
        except BaseException:
            await self.give_back(lease)
            raise
        self._live.add(sandbox)
        return sandbox

    async def _start(self, lease: Lease) -> Running:
        spec = lease.spec
        lease.make("ws")
        control = lease.box / "ctl"
        control.mkdir(mode=0o755)
        os.link(self._shared / "supervisor", control / "supervisor")
        variables = recipe.environment(recipe.WORKSPACE, spec.env)
        (control / "env").write_text(environment_file(variables, recipe.WORKSPACE, spec.cwd))
        layers = lease.layers
        if layers.lower:
            layers = replace(layers, upper=lease.make("layer"))
            for name in ("layer/up", "layer/work"):
                lease.make(name)
        box = recipe.Box(
            layers=layers,
            control=control,
            limits=spec.limits,
            network=spec.network,
            workspace=lease.box / "ws",
            command=recipe.shell_command(recipe.CONTROL, recipe.STATE, spec.lease, spec.limits),
        )
        ours, theirs = socket.socketpair()
        assert self._binary is not None
        binary = self._binary
        started = await self._spawner.call(lambda: launch(binary, box, lease.uid, theirs))
        paths = ShellPaths(control, recipe.CONTROL, recipe.STATE)
        late: list[Inner] = []
        shell = Shell(ours, paths, lambda: late[0].end_job())
        try:
            await shell.ready()
            late.append(Inner(started.info))
        except (ShellLost, TimeoutError, OSError, ValueError) as error:
            shell.release()
            started.outer.kill()
            await exited(started.outer)
            raise SandboxStartError(f"bubblewrap did not start: {error}") from error
        return Running(started.outer, late[0], shell)

    async def grade(self, lease: Lease, spec: GradingSpec, number: int) -> GradingResult:
        """Run a verifier over what a lease left. Raises: SandboxStartError, SandboxDied."""
        box = lease.box / f"grade{number}"
        box.mkdir(mode=0o711)
        control, verify = box / "ctl", box / "verify"
        for path in (control, verify):
            path.mkdir(mode=0o755)
        paths = grading.Paths(recipe.CONTROL, grading.HOME, grading.VERIFY, recipe.WORKSPACE)
        variables = grading.environment(paths, recipe.PATH)
        limits = recipe.ulimits(lease.spec.limits)
        grading.write_stage(
            control, verify, spec, grading.starter(paths, variables, limits, spec.score)
        )
        mounts = [*lease.layered(f"grade{number}", recipe.WORKSPACE)]
        mounts += ["--ro-bind", str(verify), grading.VERIFY]
        mounts += ["--size", str(lease.spec.limits.tmp_bytes), "--tmpfs", grading.HOME]
        described = recipe.Box(
            layers=lease.layers,
            control=control,
            limits=lease.spec.limits,
            mounts=mounts,
            cwd=grading.HOME,
            command=["bash", "--norc", "--noprofile", f"{recipe.CONTROL}/start", lease.spec.lease],
        )

        async def begin(stdio: socket.socket) -> grading.Running:
            binary = self._binary or find_binary()
            started = await self._spawner.call(lambda: launch(binary, described, lease.uid, stdio))

            async def ended() -> int:
                code = await exited(started.outer)
                inner = await asyncio.to_thread(Inner, started.info)
                await gone(inner.pidfd)
                os.close(inner.pidfd)
                return code

            return grading.Running(ended, started.outer.kill)

        try:
            return await grading.judge(spec, control, begin)
        finally:
            await asyncio.to_thread(remove_tree, box)

    async def give_back(self, lease: Lease) -> None:
        """Remove a lease's folders and free its slot."""
        await asyncio.to_thread(remove_tree, lease.box)
        if lease.slot is not None and self._slots is not None:
            self._slots.give_back(lease.slot)

    async def aclose(self) -> None:
        """End all sandboxes of this process."""
        for sandbox in [*self._live]:
            await sandbox.aclose()
        if self._home is not None:
            await asyncio.to_thread(remove_tree, self._shared)
            self._home.close()
            self._home = None
        if self._slots is not None:
            self._slots.close()
        self._spawner.close()
