"""The verbs of a sandbox on a shell and a workspace folder of this machine; every backend here has
them."""

from __future__ import annotations

import asyncio
import errno
import logging
import posixpath
import shlex
import shutil
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from hermes_rl.errors import (
    SandboxDied,
    SandboxError,
    SandboxStartError,
    SnapshotLost,
    TaskFault,
)
from hermes_rl.network import AllowedHosts
from hermes_rl.sandboxes import snapshots
from hermes_rl.sandboxes.background import Background
from hermes_rl.sandboxes.base import (
    MAX_OUTPUT_BYTES,
    CommandResult,
    GradingResult,
    GradingSpec,
    Process,
    Sandbox,
    SandboxInfo,
    SandboxSnapshot,
    SandboxSpec,
)
from hermes_rl.sandboxes.files import (
    DOWNLOAD_MAX,
    IN_THREAD,
    READ_MAX,
    UNSAFE,
    UNSIZED_MAX,
    Beneath,
    bounded_size,
    copy_in,
    copy_out,
    read_open,
    too_large,
    write_open,
)
from hermes_rl.sandboxes.grading import UNPACK, Unpackable, pack_in_thread, refused
from hermes_rl.sandboxes.processes import Jobs, Tree, children
from hermes_rl.sandboxes.recipe import NO_CWD
from hermes_rl.sandboxes.shell import (
    Ended,
    Everything,
    HeadTail,
    IntoFile,
    Kind,
    Shell,
    ShellLost,
    ShellPaths,
    ShellSession,
    Sink,
)

if TYPE_CHECKING:
    from hermes_rl.sandboxes.egress import EgressProxy

T = TypeVar("T", bound=Tree)

_log = logging.getLogger(__name__)

TRANSFER_S = 120.0
"""How long a file may take that is read or written inside."""
_FAILURES: dict[int, tuple[type[OSError], str]] = {
    61: (FileNotFoundError, "no such file"),
    62: (IsADirectoryError, "is a directory"),
    63: (PermissionError, "permission denied"),
}
_NOT_REGULAR = (OSError, "not a regular file, or it could not be read or written")
_UNSIZED = 65
"""The file has no size, as those of /proc: `UNSIZED_MAX` is its limit."""
_READ = (
    "p={path}; if [[ -d $p ]]; then exit 62; elif [[ ! -e $p ]]; then exit 61; "
    "elif [[ ! -f $p ]]; then exit 64; elif [[ ! -r $p ]]; then exit 63; fi; "
    f'[[ -s $p ]] && exec cat -- "$p"; head -c {UNSIZED_MAX + 1} -- "$p" || exit 64; exit 65'
)
_WRITE = (
    "p={path}; if [[ -d $p ]]; then exit 62; elif [[ -e $p && ! -f $p ]]; then exit 64; fi; "
    'mkdir -p -- "${{p%/*}}" || exit 63; '
    'cat >|"$p" || exit 63'
)


async def start_shell(
    paths: ShellPaths,
    launch: Callable[[socket.socket], Awaitable[T]],
    explain: Callable[[str], str],
    settle: Callable[[T], Awaitable[None]] | None = None,
) -> tuple[T, Shell]:
    """Start a supervisor and wait until it is ready.

    Args:
        paths: where both sides meet.
        launch: starts it, with the socket as its standard input and output.
        explain: the message for what a shell that did not start has written.
        settle: what else must be done before its first command.

    Raises: SandboxStartError; TaskFault when the task's `cwd` cannot be made.
    """
    host_end, inner_end = socket.socketpair()
    try:
        tree = await launch(inner_end)
    except BaseException:
        host_end.close()
        raise
    shell = Shell(host_end, paths, Jobs(tree.supervisor, tree.orphans, tree.send))
    try:
        await shell.ready()
        if settle is not None:
            await settle(tree)
    except BaseException as error:
        shell.release()
        await asyncio.shield(abandon(tree))
        if not isinstance(error, ShellLost | TimeoutError | OSError | ValueError):
            raise
        message = str(error)
        if NO_CWD in message:
            raise TaskFault(f"{message[message.index(NO_CWD) :].strip()} ('cwd')") from error
        raise SandboxStartError(explain(message)) from error
    return tree, shell


async def open_way_out(spec: SandboxSpec, pid: int, uid: int | None) -> EgressProxy | None:
    """The egress proxy of a sandbox whose network is a list of hosts; None for others.

    Args:
        pid: process 1 of the sandbox.
        uid: who it was started as; None is ourselves.

    Raises: SandboxStartError.
    """
    if isinstance(spec.network, bool):
        return None
    from hermes_rl.sandboxes.egress import open_egress  # most sandboxes have none

    return await open_egress(pid, uid, spec.network, spec.on_connection)


def variables_of(spec: SandboxSpec) -> dict[str, str]:
    """The extra variables of a shell: the user's, and those that lead programs to the proxy."""
    if isinstance(spec.network, bool):
        return dict(spec.env)
    return {**spec.env, **AllowedHosts(spec.network).variables()}


async def abandon(tree: Tree) -> None:
    """End a tree that nobody will use."""
    await tree.end()
    tree.close()


def encode(command: str) -> bytes:
    """A command as bash can read it: NUL bytes, which no program could receive, are left out."""
    return command.replace("\0", "").encode("utf-8", "surrogateescape") + b"\n"


class ShellSandbox(ABC):
    """One leased sandbox (see `base.Sandbox`).

    Args:
        info: what was provided.
        tree: its processes; ended and closed by this sandbox.
        shell: the running session.
        workspace: its folder as commands see it.
    """

    place = ""
    """Where it is on the host, for a sandbox whose commands see that: its state names it."""
    scratch = "/tmp"
    """See `base.Sandbox`."""
    temporary: tuple[str, ...] = ("/tmp", "/dev/shm")
    """Folders of its own in memory."""

    def __init__(self, info: SandboxInfo, tree: Tree, shell: Shell, workspace: str) -> None:
        self.info = info
        self.workspace = workspace
        self.attached: dict[str, Any] = {}
        self._tree = tree
        self._shell = shell
        self._background: Background | None = None
        self._error: SandboxError | None = None
        self._gradings = 0
        self._closing: asyncio.Future[None] | None = None
        self._ending = asyncio.Lock()
        self.egress: EgressProxy | None = None
        """Its way out, where its network is a list of hosts; closed by this sandbox."""

    async def run(
        self,
        command: str,
        *,
        timeout_s: float,
        cwd: str | None = None,
        stdin: bytes | None = None,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
        session: ShellSession | None = None,
    ) -> CommandResult:
        """See `base.Sandbox.run`. Args: session: None is the first one."""
        sink = HeadTail(max_output_bytes)
        text = encode(command)
        if cwd is not None:
            there = shlex.quote(posixpath.join(self.workspace, cwd))
            text = f"_hx_pwd=$PWD; cd -- {there} || exit; _hx_tmp=$PWD\n".encode() + text
        started = time.monotonic()
        ended = await self._execute("r", text, sink, timeout_s, stdin, session)
        seconds = time.monotonic() - started
        await self._after(ended)
        head, tail = sink.parts()
        return CommandResult(
            output=sink.text(),
            exit_code=ended.exit_code,
            output_bytes=sink.total,
            timed_out=ended.timed_out,
            truncated=sink.dropped > 0,
            seconds=seconds,
            raw=head + tail,
        )

    async def new_session(self) -> Sandbox:
        """See `base.Sandbox.new_session`."""
        return cast("Sandbox", SandboxSession(self, self.new_shell_session()))

    def new_shell_session(self, like: ShellSession | None = None) -> ShellSession:
        """Begin another session of the shell, in the present state of one."""
        return self._shell.new_session(like)

    async def start_process(
        self,
        command: str,
        *,
        cwd: str | None = None,
        lossless: bool = False,
        session: ShellSession | None = None,
    ) -> Process:
        """See `base.Sandbox.start_process`. Args: session: None is the first one."""
        text = encode(command)
        if cwd is not None:
            there = shlex.quote(posixpath.join(self.workspace, cwd))
            text = f"cd -- {there} || exit\n".encode() + text
        self._raise_if_dead()
        if self._background is None:
            self._background = Background(self._shell)
        try:
            return await self._background.start(
                text, self._tree.end_process, session, lossless=lossless
            )
        except ShellLost as lost:
            raise await self._dead(lost) from None

    async def read_file(self, path: str) -> bytes:
        """See `base.Sandbox.read_file`. A relative path starts from the workspace."""
        if (fd := self._open(path, Beneath.open_read)) is not None:
            return await read_open(fd, path)
        sink = Everything(READ_MAX)
        await self._inside(_READ, path, sink)
        return sink.value()

    async def write_file(self, path: str, data: bytes) -> None:
        """See `base.Sandbox.write_file`. A relative path starts from the workspace."""
        if (fd := self._open(path, Beneath.open_write)) is None:
            await self._inside(_WRITE, path, HeadTail(4096), data)
        elif len(data) <= IN_THREAD:
            write_open(fd, data)
        else:
            await asyncio.to_thread(write_open, fd, data)

    async def upload(self, local: Path, remote: str) -> None:
        """See `base.Sandbox.upload`."""
        if (fd := self._open(remote, Beneath.open_write)) is not None:
            await asyncio.to_thread(copy_in, local, fd)
            return
        given = self._shell.inputs / f"upload{id(remote)}"
        await asyncio.to_thread(shutil.copyfile, local, given)
        await self._inside(_WRITE, remote, HeadTail(4096), given)

    async def download(self, remote: str, local: Path) -> None:
        """See `base.Sandbox.download`."""
        if (fd := self._open(remote, Beneath.open_read)) is not None:
            await asyncio.to_thread(copy_out, fd, local, bounded_size(fd, remote, DOWNLOAD_MAX))
            return
        try:
            await self._inside(_READ, remote, IntoFile(local, DOWNLOAD_MAX))
        except BaseException:
            local.unlink(missing_ok=True)
            raise

    @abstractmethod
    async def read_left(self, path: str) -> bytes:
        """See `base.Sandbox.read_left`."""

    @abstractmethod
    async def pack_left(self, local: Path) -> None:
        """See `base.Sandbox.pack_left`."""

    async def snapshot(self, folder: Path) -> bool:
        """See `base.Sandbox.snapshot`."""
        self._raise_if_dead()
        if self._shell.busy or await asyncio.to_thread(self._others_run):
            return False
        folder.mkdir()
        try:
            await self._save_files(folder)
        except Unpackable as error:
            raise OSError(errno.EFBIG, str(error)) from error
        await snapshots.save(folder, self._shell, self._script, self.place, self.temporary)
        return True

    async def restore(self, folder: Path) -> None:
        """Bring back what of a snapshot needs a running session. Raises: OSError; SandboxDied."""
        await snapshots.restore(folder, self._shell, self._script, self.place)

    async def _script(self, script: str, sink: Sink, stdin: Path | None) -> int:
        return (await self._execute("i", encode(script), sink, TRANSFER_S, stdin)).exit_code

    def _others_run(self) -> bool:
        """Whether anything runs beside the shell. Blocks."""
        supervisor = self._tree.supervisor()
        orphans = [proc for proc in self._tree.orphans().alive if proc.pid != supervisor]
        return bool(orphans or children(supervisor))

    @abstractmethod
    async def _save_files(self, folder: Path) -> None:
        """Write the files to a snapshot. Raises: Unpackable; OSError."""

    async def unpack(self, local: Path) -> None:
        """See `base.Sandbox.unpack`."""
        archive = f"{self.workspace}/.hermes-archive"
        await self.upload(local, archive)
        where = shlex.quote(archive)
        result = await self.run(f"{UNPACK.format(archive=where)} && rm -f {where}", timeout_s=300.0)
        if result.exit_code != 0:
            raise OSError(f"{local}: cannot be unpacked: {result.output.strip()[-200:]}")

    async def grade(self, spec: GradingSpec) -> GradingResult:
        """See `base.Sandbox.grade`."""
        await self._end_session()
        self._gradings += 1
        try:
            return await self._grade(spec, f"grade{self._gradings}")
        except Unpackable as error:  # by what the agent did
            return refused(error)
        except OSError as error:
            raise SandboxStartError(f"a grading sandbox cannot be made: {error}") from error

    async def aclose(self) -> None:
        """See `base.Sandbox.aclose`."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    @abstractmethod
    async def _grade(self, spec: GradingSpec, name: str) -> GradingResult:
        """Run a verifier over what the ended session left, in a folder of that name."""

    @abstractmethod
    def _check_workspace(self) -> None:
        """Raises: SandboxDied when there is no workspace any more."""

    @abstractmethod
    async def _classify(self, lost: ShellLost) -> SandboxError:
        """Who lost the shell: the agent (SandboxKilled) or the host (SandboxDied)."""

    @abstractmethod
    async def _after(self, ended: Ended) -> None:
        """Check the limits, at each command's end."""

    @abstractmethod
    async def _give_back(self) -> None:
        """Remove everything, now that nothing runs any more."""

    async def _end(self, error: SandboxError) -> None:
        """End all processes for this reason, unless there is an earlier one."""
        self._error = self._error or error
        async with self._ending:
            if self._background is not None:
                self._background.close()
            await self._tree.end()
            self._shell.close()
            if self.egress is not None:
                await self.egress.aclose()

    async def _end_session(self) -> None:
        """End the agent's processes for good. Idempotent. Raises: SandboxDied when there is no
        workspace any more."""
        if self._closing is not None:
            self._raise_if_dead()
        await self._end(SandboxDied("the session is over: the sandbox was graded"))
        self._check_workspace()

    async def _close(self) -> None:
        await self._end(SandboxDied("the sandbox is closed"))
        self._shell.release()
        self._tree.close()
        await self._give_back()

    def _beneath(self, path: str) -> str | None:
        """The path from the workspace on, when it lies in it as written."""
        whole = posixpath.normpath(posixpath.join(self.workspace, path))
        if ".." in path.split("/") or "\0" in path:
            return None  # `..` after a symlink is only known inside
        root = self.workspace.rstrip("/") + "/"
        return whole[len(root) :] if whole.startswith(root) else None

    def _open(self, path: str, how: Callable[[Beneath, str], int]) -> int | None:
        """Open a file of the workspace from the host; None for one that only the sandbox can
        resolve."""
        self._raise_if_dead()
        return None

    async def _inside(
        self, script: str, path: str, sink: Sink, stdin: bytes | Path | None = None
    ) -> None:
        """Run one of our own scripts on a path that only the sandbox can resolve."""
        if "\0" in path:
            raise ValueError("a path cannot hold a NUL byte")
        text = script.format(path=shlex.quote(posixpath.join(self.workspace, path)))
        ended = await self._execute("i", encode(text), sink, TRANSFER_S, stdin)
        limit = UNSIZED_MAX if ended.exit_code == _UNSIZED else sink.limit
        if limit is not None and sink.total > limit:
            raise too_large(path, limit)
        if ended.timed_out:
            raise OSError(f"{path}: took longer than {TRANSFER_S:g} s")
        if ended.exit_code not in (0, _UNSIZED):
            kind, reason = _FAILURES.get(ended.exit_code, _NOT_REGULAR)
            raise kind(f"{path}: {reason}")

    async def _execute(
        self,
        kind: Kind,
        text: bytes,
        sink: Sink,
        timeout_s: float,
        stdin: bytes | Path | None = None,
        session: ShellSession | None = None,
    ) -> Ended:
        self._raise_if_dead()
        stood = not self._shell.lost.is_set()
        try:
            return await self._shell.execute(
                kind, text, sink, timeout_s=timeout_s, stdin=stdin, session=session
            )
        except ShellLost as lost:
            error = await self._dead(lost)
            error.in_command |= stood and not (lost.unsent or lost.vanished)
            raise error from None

    def _raise_if_dead(self) -> None:
        if self._error is not None:
            raise type(self._error)(*self._error.args)

    async def _dead(self, lost: ShellLost) -> SandboxError:
        """The shell is lost: find out why, once."""
        if self._error is None:
            self._error = await self._classify(lost)
        return self._error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


class SandboxSession:
    """A sandbox through another shell session of it (see `base.Sandbox.new_session`)."""

    def __init__(self, sandbox: ShellSandbox, session: ShellSession) -> None:
        self._sandbox, self._session = sandbox, session
        self.attached: dict[str, Any] = {}

    async def run(self, command: str, **options: Any) -> CommandResult:
        """See `base.Sandbox.run`."""
        return await self._sandbox.run(command, session=self._session, **options)

    async def start_process(self, command: str, **options: Any) -> Process:
        """See `base.Sandbox.start_process`."""
        return await self._sandbox.start_process(command, session=self._session, **options)

    async def new_session(self) -> Sandbox:
        """See `base.Sandbox.new_session`."""
        session = self._sandbox.new_shell_session(self._session)
        return cast("Sandbox", SandboxSession(self._sandbox, session))

    async def aclose(self) -> None:
        """Nothing: the sandbox belongs to whoever leased it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)


class FolderSandbox(ShellSandbox):
    """One whose workspace is a folder that the host can open.

    Args:
        files: the workspace as the host opens it.
    """

    def __init__(
        self, info: SandboxInfo, tree: Tree, shell: Shell, workspace: str, files: Beneath
    ) -> None:
        super().__init__(info, tree, shell, workspace)
        self._files = files

    async def read_left(self, path: str) -> bytes:
        """See `base.Sandbox.read_left`."""
        await self._end_session()
        beneath = self._beneath(path)
        if beneath is None:
            raise OSError(errno.EXDEV, "not below the workspace", path)
        return await read_open(self._files.open_read(beneath), path)

    async def _save_files(self, folder: Path) -> None:
        """See `ShellSandbox`."""
        await save_folder(self._files.folder, folder / snapshots.WORKSPACE)

    def _changes(self) -> Path | None:
        """The layer of what was changed over an image, as the host sees it."""
        return None

    async def pack_left(self, local: Path) -> None:
        """See `base.Sandbox.pack_left`."""
        await self._end_session()
        try:
            if (changes := self._changes()) is not None:
                half = await asyncio.to_thread(snapshots.begin_changes, local)
                await save_folder(changes, half / snapshots.ROOT)
                half.rename(snapshots.changes_of(local))
            await pack_in_thread(self._files.folder, lambda packing: packing.pack(local))
        except Unpackable as error:
            _log.warning("what a rollout left is not kept: %s", error)

    def _open(self, path: str, how: Callable[[Beneath, str], int]) -> int | None:
        """See `ShellSandbox`."""
        self._raise_if_dead()
        beneath = self._beneath(path)
        if beneath is None:
            return None
        try:
            return how(self._files, beneath)
        except OSError as error:
            if error.errno not in UNSAFE:
                raise
            return None


async def restored(sandbox: ShellSandbox, snapshot: SandboxSnapshot) -> None:
    """Bring a started sandbox to the state of a snapshot; one that cannot be is closed.

    Raises: SnapshotLost.
    """
    try:
        await sandbox.restore(snapshot.folder)
    except BaseException as error:
        await asyncio.shield(sandbox.aclose())
        if isinstance(error, OSError | SandboxError | ValueError | KeyError):
            raise SnapshotLost(f"a snapshot cannot be put back: {error}") from error
        raise


async def save_folder(folder: Path, archive: Path) -> None:
    """Write a folder to an archive of a snapshot. Raises: Unpackable; OSError."""
    await pack_in_thread(folder, lambda packing: packing.pack(archive, compress=False))
