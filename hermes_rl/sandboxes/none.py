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
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hermes_rl.errors import SandboxDied, SandboxError, SandboxKilled, SandboxStartError, TaskFault
from hermes_rl.sandboxes import grading, processes, recipe
from hermes_rl.sandboxes.base import GradingResult, GradingSpec, SandboxInfo, SandboxSpec
from hermes_rl.sandboxes.files import Beneath
from hermes_rl.sandboxes.packing import Unpackable, pack_in_thread
from hermes_rl.sandboxes.session import Place, ShellSandbox, environment_file, not_started
from hermes_rl.sandboxes.shell import Ended, Shell, ShellLost, ShellPaths, supervisor_text
from hermes_rl.sandboxes.slots import Home, Watchdog, reap
from hermes_rl.sandboxes.spawn import Launch, exited, start
from hermes_rl.sandboxes.watchdog import MARK, remove_tree


@dataclass(frozen=True)
class Running:
    """The live parts of one."""

    box: Path
    memory: Path
    """Where its control and state files are."""
    tree: Tree
    shell: Shell


class PlainSandbox(ShellSandbox):
    """A workspace and a shell, nothing around them."""

    def __init__(self, backend: Subprocess, spec: SandboxSpec, running: Running) -> None:
        workspace = running.box / "ws"
        info = SandboxInfo(backend.name, None, None, {"open_files": recipe.OPEN_FILES})
        super().__init__(info, running.shell, Place(str(workspace), Beneath(workspace)))
        self._backend = backend
        self._spec = spec
        self._running = running
        self._closed = False
        self._boxes = 0

    def _end_background(self, inside: int) -> None:
        for proc in processes.descendants(self._running.tree.process.pid):
            if proc.pid == inside:
                processes.stop_tree(proc)
                processes.end_tree(proc)

    async def _classify(self, lost: ShellLost) -> SandboxError:
        if not self._shell.lost.is_set():
            return SandboxKilled(f"the shell no longer answers: {lost}")
        return SandboxKilled(f"the shell ended: {lost}")

    async def _after(self, ended: Ended) -> None:
        """Nothing here is limited but the number of open files."""

    async def _end_processes(self) -> None:
        """End the shell's tree, and what escaped from it while it still holds the life line."""
        await asyncio.to_thread(self._running.tree.end)
        await exited(self._running.tree.process)

    async def _end_session(self) -> None:
        if self._closed:
            self._raise_if_dead()
        self._background.close()
        self._shell.close()
        await self._end_processes()
        self._error = self._error or SandboxDied("the sandbox is being graded: its session is over")
        # Here an agent can remove its own workspace: then it left an empty one.
        (self._running.box / "ws").mkdir(mode=0o700, parents=True, exist_ok=True)

    async def grade(self, spec: GradingSpec) -> GradingResult:
        """See `base.Sandbox.grade`; a fresh shell is all that keeps the verifier apart."""
        await self._end_session()
        self._boxes += 1
        return await self._backend.grade(self._running.box, spec, self._boxes)

    async def aclose(self) -> None:
        """End all processes and remove the folder. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._error = self._error or SandboxDied("the sandbox is closed")
        self._background.close()
        idle = self._shell.idle
        self._shell.close()
        try:
            await asyncio.to_thread(_clear, self._running, idle)
        finally:
            self._shell.release()


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
        self.members = processes.MarkedProcesses(eldest, f"{MARK}={mark}".encode(), line)
        self._alive = alive

    def _held(self) -> bool:
        """Somebody still has the life line."""
        try:
            return os.read(self._alive, 1) != b""
        except BlockingIOError:
            return True

    def end(self, *, idle: bool = False) -> None:
        """SIGKILL all of it. Blocks: call it in a thread. Idempotent.

        Args:
            idle: the shell waits for its next command, and so forks nothing. Then, if it has no
                children either, it is ended without a search for them.
        """
        if self.process.poll() is None:
            if idle and not processes.children(self.process.pid):
                self.process.kill()
                self.process.wait()
            else:
                processes.end_tree(self.members.eldest)
        if self._alive < 0:
            return
        for _ in range(processes.ROUNDS):
            if not self._held():
                break
            processes.send(self.members.snapshot().alive, signal.SIGKILL)
            time.sleep(0.001)
        os.close(self._alive)
        self._alive = -1


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


class Subprocess:
    """The backend `none`: one per process.

    Args:
        state_dir: where workspaces go; None is a folder of this user below the machine's temporary
            folder.
    """

    name = "none"

    def __init__(self, *, state_dir: Path | None = None) -> None:
        self._state_dir = state_dir
        self._home: Home | None = None
        self._watchdog: Watchdog | None = None
        self._opening = asyncio.Lock()

    async def lease(self, spec: SandboxSpec) -> PlainSandbox:
        """Start a shell. Raises: SandboxStartError; TaskFault when an image is asked for."""
        if spec.image is not None:
            raise TaskFault(f"image {spec.image!r}: the sandbox 'none' has no images")
        home = await self._open()
        box = home.new_box()
        memory = home.memory_folder(box)
        try:
            sandbox = PlainSandbox(self, spec, await self._start(box, memory, spec))
        except BaseException:
            await asyncio.to_thread(_remove, box, memory)
            raise
        return sandbox

    async def _open(self) -> Home:
        """Once: clean up after others that are gone, then make what all share."""
        async with self._opening:
            if self._home is None:
                self._home = await asyncio.to_thread(self._prepare)
            return self._home

    def _prepare(self) -> Home:
        home = Home(self._state_dir)
        reap(home.root)
        self._watchdog = Watchdog(home.root, home.owner, "")
        self._shared = home.new_box()
        (self._shared / "supervisor").write_text(supervisor_text())
        return home

    async def _start(self, box: Path, memory: Path, spec: SandboxSpec) -> Running:
        # Folders are dear to make and remove: control and state share one here.
        control, workspace = memory, box / "ws"
        workspace.mkdir(mode=0o700)
        variables = recipe.environment(str(workspace), {MARK: str(box), **spec.env})
        (control / "env").write_text(environment_file(variables, str(workspace), spec.cwd))
        bash = find_bash()
        limits = ["-n", str(recipe.OPEN_FILES), "-c", "0"]
        argv = [
            bash,
            "--norc",
            "--noprofile",
            str(self._shared / "supervisor"),
            str(control),
            str(control),
        ]
        host_end, inner_end = socket.socketpair()
        command = [*argv, *limits, f"{box.name}:{spec.lease}"]
        tree = start_tree(command, box, inner_end)
        process = tree.process
        shell = Shell(
            host_end,
            ShellPaths(control, str(control), str(control), inputs=box),
            processes.Jobs(lambda: process.pid, tree.members.orphans),
        )
        try:
            await shell.ready()
        except (ShellLost, TimeoutError) as error:
            shell.release()
            await asyncio.to_thread(tree.end)
            await exited(process)
            raise not_started(error, f"the shell did not start: {error}") from error
        return Running(box, memory, tree, shell)

    async def grade(self, box: Path, spec: GradingSpec, number: int) -> GradingResult:
        """Run a verifier on a copy of the workspace. /workspace and /verify in its script stand for
        the folders that take their place here."""
        stage = box / f"grade{number}"
        control, verify, home = stage / "ctl", stage / "verify", stage / "home"
        for path in (stage, control, verify, home):
            path.mkdir(mode=0o755)
        workspace = stage / "ws"
        try:
            await pack_in_thread(box / "ws", lambda packing: packing.copy(workspace))
        except Unpackable as error:
            return grading.refused(error)
        except OSError as error:
            raise SandboxStartError(f"the workspace cannot be copied: {error}") from error
        paths = grading.Paths(str(control), str(home), str(verify), str(workspace))
        variables = {**grading.environment(paths, recipe.PATH), MARK: str(box)}
        script = spec.script.replace("/workspace", paths.workspace).replace("/verify", paths.verify)
        grading.write_stage(
            control,
            verify,
            GradingSpec(script=script, files=spec.files),
            grading.starter(paths, variables, spec.score),
        )

        async def begin(stdio: socket.socket) -> grading.Running:
            command = [find_bash(), "--norc", "--noprofile", str(control / "start")]
            tree = start_tree(command, box, stdio)

            async def ended() -> int:
                code = await exited(tree.process)
                await asyncio.to_thread(tree.end)
                return 128 - code if code < 0 else code

            async def end() -> int:
                tree.process.kill()
                return await ended()

            return grading.Running(
                ended=ended,
                end=end,
                standing=_nothing,
                stop=asyncio.get_running_loop().create_future(),
                close=lambda: None,
            )

        try:
            return await grading.judge(spec, control, begin)
        finally:
            await asyncio.to_thread(remove_tree, stage)

    async def aclose(self) -> None:
        """Give the state folder up; all sandboxes are closed by their owners."""
        if self._home is not None:
            await asyncio.to_thread(remove_tree, self._shared)
            self._home.close()
            self._home = None
        if self._watchdog is not None:
            await asyncio.to_thread(self._watchdog.close)


async def _nothing() -> None:
    """This backend enforces no limits."""


def _clear(running: Running, idle: bool) -> None:
    """End what runs, then remove the folders: one way through a thread, not three."""
    running.tree.end(idle=idle)
    running.tree.process.wait()
    _remove(running.box, running.memory)


def _remove(box: Path, memory: Path) -> None:
    """Remove a box's folders; one, where memory had no storage."""
    remove_tree(memory)
    remove_tree(box)
