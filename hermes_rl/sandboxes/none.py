"""No sandbox: plain processes in a temporary workspace, with the same shell protocol.

Nothing is locked in. What a command does, it does to this machine as this user; only an operator
who allows that by name gets this backend.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

from hermes_rl.aio import in_thread
from hermes_rl.errors import (
    SandboxDied,
    SandboxError,
    SandboxKilled,
    SandboxStartError,
    SnapshotLost,
    TaskFault,
)
from hermes_rl.sandboxes import grading, processes, recipe
from hermes_rl.sandboxes.base import GradingResult, GradingSpec, SandboxInfo, SandboxSpec
from hermes_rl.sandboxes.box import exited
from hermes_rl.sandboxes.files import Beneath
from hermes_rl.sandboxes.grading import pack_in_thread
from hermes_rl.sandboxes.host import HostBackend
from hermes_rl.sandboxes.session import (
    FolderSandbox,
    restored,
    start_shell,
)
from hermes_rl.sandboxes.shell import Ended, Shell, ShellLost, ShellPaths, supervisor_text
from hermes_rl.sandboxes.slots import Home, Launch, start
from hermes_rl.sandboxes.snapshots import WORKSPACE, unpack
from hermes_rl.sandboxes.watchdog import MARK, remove_tree

_PLAIN = ("--norc", "--noprofile")


class PlainSandbox(FolderSandbox):
    """A workspace and a shell, nothing around them.

    Args:
        box: its folder.
        memory: the folder of its control and state files.
    """

    _tree: Tree
    temporary = ()

    def __init__(self, box: Path, memory: Path, tree: Tree, shell: Shell) -> None:
        info = SandboxInfo(Subprocess.name, None, {"open_files": recipe.OPEN_FILES})
        workspace = box / "ws"
        super().__init__(info, tree, shell, str(workspace), Beneath(workspace))
        self._folders = (memory, box)
        self.place = self.scratch = str(self._folders[-1])

    async def _classify(self, lost: ShellLost) -> SandboxError:
        if not self._shell.lost.is_set():
            return SandboxKilled(f"the shell no longer answers: {lost}")
        return SandboxKilled(f"the shell ended: {lost}")

    async def _after(self, ended: Ended) -> None:
        """Nothing here is limited but the number of open files."""

    def _check_workspace(self) -> None:
        """Here an agent can remove its own workspace: then it left an empty one."""
        self._files.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    async def _grade(self, spec: GradingSpec, name: str) -> GradingResult:
        """A fresh shell on a copy of the workspace is all that keeps the verifier apart.

        /workspace and /verify in its script stand for the folders that take their place here.
        """
        box = self._folders[-1]
        stage = box / name
        control, verify, home = stage / "ctl", stage / "verify", stage / "home"
        for path in (stage, control, verify, home):
            path.mkdir(mode=0o755)
        workspace = stage / "ws"
        await pack_in_thread(self._files.folder, lambda packing: packing.copy(workspace))
        paths = grading.Paths(str(control), str(home), str(verify), str(workspace))
        script = spec.script.replace("/workspace", paths.workspace).replace("/verify", paths.verify)
        extra = {MARK: str(box)}
        grading.write_stage(control, verify, replace(spec, script=script), paths, extra)

        async def launch(stdio: socket.socket) -> Tree:
            return start_tree([find_bash(), *_PLAIN, str(control / "start")], box, stdio)

        try:
            return await grading.judge(spec, control, launch)
        finally:
            await asyncio.to_thread(remove_tree, stage)

    async def _close(self) -> None:
        """End what runs, then remove the folders: one way through a thread, not three."""
        self._error = self._error or SandboxDied("the sandbox is closed")
        if self._background is not None:
            self._background.close()
        idle = self._shell.idle
        self._shell.close()

        def clear() -> None:
            self._tree.end_now(idle=idle)
            _remove(*self._folders)

        try:
            async with self._ending:
                await asyncio.to_thread(clear)
        finally:
            self._shell.release()

    async def _give_back(self) -> None:
        """Done by `_close`."""


class Tree:
    """A shell and all that it started.

    Every process inherits the writing end of a pipe, the life line: at its end nobody is left, and
    no search through the whole machine is needed. (A daemon that closed what it inherited escapes
    this look; the watchdog finds it by its mark when the worker ends.)

    Args:
        process: the shell.
        mark: the variable of the environment that all of them have.
        alive: our end of the life line; owned from here on.
    """

    def __init__(self, process: subprocess.Popen[bytes], mark: str, alive: int) -> None:
        self.process = process
        eldest = processes.find(process.pid) or processes.Proc(0, process.pid)
        line = f"pipe:[{os.fstat(alive).st_ino}]"
        self._members = processes.MarkedProcesses(eldest, f"{MARK}={mark}".encode(), line)
        self._alive = alive
        self._ending = threading.Lock()

    def supervisor(self) -> int:
        """The shell itself."""
        return self.process.pid

    def orphans(self) -> processes.Snapshot:
        """Found among all processes of the machine."""
        return self._members.orphans()

    def send(self, processes_: Iterable[processes.Proc], number: int) -> None:
        """See `processes.Tree`."""
        processes.signal_all(processes_, number)

    def end_process(self, inside: int) -> None:
        """See `processes.Tree`."""
        processes.end_inside(self.process.pid, inside)

    async def ended(self) -> int:
        """Wait for the shell, then end what it left."""
        code = await exited(self.process)
        await asyncio.to_thread(self.end_now)
        return 128 - code if code < 0 else code  # whoever kills it is the agent's or the verifier's

    async def end(self) -> int:
        """See `processes.Tree`."""
        await asyncio.to_thread(self.end_now)
        return await self.ended()

    def close(self) -> None:
        """Nothing: its end closes the life line."""

    def end_now(self, *, idle: bool = False) -> None:
        """SIGKILL all of it. Blocks. Idempotent.

        Args:
            idle: the shell waits for its next command, and so forks nothing. Then, if it has no
                children either, it is ended without a search for them.
        """
        with self._ending:  # the thread of a cancelled caller may still be at it
            self._end(idle=idle)

    def _end(self, *, idle: bool) -> None:
        if self.process.poll() is None:
            if idle and not processes.children(self.process.pid):
                self.process.kill()
            else:
                processes.end_tree(self._members.eldest)
            self.process.wait()
        if self._alive < 0:
            return
        for _ in range(processes.ROUNDS):
            if not self._held():
                break
            processes.signal_all(self._members.snapshot().alive, signal.SIGKILL)
            time.sleep(0.001)
        os.close(self._alive)
        self._alive = -1

    def _held(self) -> bool:
        """Somebody still has the life line."""
        try:
            return os.read(self._alive, 1) != b""
        except BlockingIOError:
            return True


def start_tree(argv: list[str], folder: Path, stdio: socket.socket) -> Tree:
    """Start a shell with a life line; `stdio` is closed here.

    In the calling thread: nothing here dies with the thread that started it, and the start takes
    half a millisecond, of which another thread would cost a tenth. In one go: a process that forks
    while both ends of the line are open would hold it too.
    """
    with stdio:
        alive, line = os.pipe()
        try:
            os.set_blocking(alive, False)
            launch = Launch(argv, argv[0], pass_fds=(line,), env={MARK: str(folder)})
            return Tree(start(launch, stdio), str(folder), alive)
        except BaseException:
            os.close(alive)
            raise
        finally:
            os.close(line)


@cache
def find_bash() -> str:
    """The bash of this machine. Raises: SandboxStartError."""
    found = shutil.which("bash", path=recipe.PATH)
    if found is None:
        raise SandboxStartError("no bash on this machine: install bash")
    return found


class Subprocess(HostBackend):
    """The backend `none`: one per process.

    Args:
        state_dir: where workspaces go; None is a folder of this user below the machine's temporary
            folder.
    """

    name = "none"

    def __init__(self, *, state_dir: Path | None = None) -> None:
        super().__init__(state_dir)

    async def lease(self, spec: SandboxSpec) -> PlainSandbox:
        """Start a shell. Raises: SandboxStartError; TaskFault when an image is asked for."""
        if spec.image is not None:
            raise TaskFault(f"image {spec.image!r}: the sandbox 'none' has no images")
        if not isinstance(spec.network, bool):
            raise SandboxStartError("the sandbox 'none' cannot limit the network to hosts")
        home = await self._open()
        box = home.new_box()
        memory = home.memory_folder(box)
        try:
            sandbox = PlainSandbox(box, memory, *await self._start(box, memory, spec))
        except BaseException:
            await asyncio.to_thread(_remove, memory, box)
            raise
        if spec.snapshot is not None:
            await restored(sandbox, spec.snapshot)
        return sandbox

    def _prepare(self) -> Home:
        """See `HostBackend`."""
        home = super()._prepare()
        self._supervisor = home.new_box() / "supervisor"
        self._supervisor.write_text(supervisor_text())
        return home

    async def _start(self, box: Path, control: Path, spec: SandboxSpec) -> tuple[Tree, Shell]:
        # Folders are dear to make and remove: control and state share one here.
        workspace = box / "ws"
        workspace.mkdir(mode=0o700)
        if spec.snapshot is not None:
            try:
                await in_thread(unpack, spec.snapshot.folder / WORKSPACE, workspace, None)
            except OSError as error:
                raise SnapshotLost(f"a snapshot cannot be put back: {error}") from error
        variables = recipe.environment(str(workspace), {MARK: str(box), **spec.env})
        (control / "env").write_text(recipe.environment_file(variables, str(workspace), spec.cwd))
        limits = ("-n", str(recipe.OPEN_FILES), "-c", "0", f"{box.name}:{spec.lease}")
        command = [find_bash(), *_PLAIN, str(self._supervisor), str(control), str(control), *limits]

        async def launch(stdio: socket.socket) -> Tree:
            return start_tree(command, box, stdio)

        return await start_shell(
            ShellPaths(control, str(control), str(control), inputs=box),
            launch,
            explain=lambda error: f"the shell did not start: {error}",
        )


def _remove(memory: Path, box: Path) -> None:
    """Remove a sandbox's folders; one, where memory had no storage."""
    remove_tree(memory)
    remove_tree(box)
