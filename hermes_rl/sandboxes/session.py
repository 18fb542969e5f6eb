"""What all sandboxes with a shell and a workspace folder on this machine have in common."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import posixpath
import shlex
import shutil
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hermes_rl.errors import SandboxError, SandboxStartError, TaskFault
from hermes_rl.sandboxes.base import MAX_OUTPUT_BYTES, CommandResult, Process, SandboxInfo
from hermes_rl.sandboxes.files import DOWNLOAD_MAX, READ_MAX, UNSAFE, UNSIZED_MAX, Beneath
from hermes_rl.sandboxes.packing import UNPACK, Unpackable, pack_in_thread
from hermes_rl.sandboxes.shell import Background, Ended, Shell, ShellLost
from hermes_rl.sandboxes.streams import Everything, HeadTail, IntoFile, Sink

_log = logging.getLogger(__name__)

IN_THREAD = 1 << 18
"""Files above this size are read and written in a thread."""
TRANSFER_S = 120.0
"""How long a file may take that is read or written inside."""
_CODES: dict[int, type[OSError]] = {
    61: FileNotFoundError,
    62: IsADirectoryError,
    63: PermissionError,
    64: OSError,
}
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


@dataclass(frozen=True)
class Place:
    """Where the workspace is."""

    inside: str
    """As commands see it."""
    files: Beneath
    """As the host opens it."""


NO_CWD = "no working directory"
"""What the shell says when a task's `cwd` cannot be made."""


def not_started(error: BaseException, text: str) -> TaskFault | SandboxStartError:
    """The error for a shell that did not come up: the task's fault when it was its `cwd`."""
    message = str(error)
    if NO_CWD in message:
        return TaskFault(f"{message[message.index(NO_CWD) :].strip()} ('cwd')")
    return SandboxStartError(text)


def environment_file(variables: dict[str, str], workspace: str, cwd: str | None) -> str:
    """The state that a session starts from, as bash reads it."""
    there = shlex.quote(posixpath.join(workspace, cwd or ""))
    made = f"{{ mkdir -p -- {there} && cd -- {there}; }}"
    failed = f"{{ printf '{NO_CWD} %s\\n' {there} >&4; exit 125; }}"
    go = f"cd -- {there} 2>/dev/null || {made} || {failed}"
    lines = [_export(name, value) for name, value in variables.items()]
    names = " ".join(name for name in variables if name != "LANG")  # unsetting that one is slow
    return "\n".join([f"_hx_names='{names}'", "umask 022", *lines, go, ""])


def _export(name: str, value: str) -> str:
    word = shlex.quote(value)
    # Loading a locale is a tenth of a shell's start: not again when the sandbox came with it.
    unless = f"[[ ${{LANG-}} = {word} ]] || " if name == "LANG" else ""
    return f"{unless}export {name}={word}"


def encode(command: str) -> bytes:
    """A command as bash can read it: NUL bytes, which no program could receive, are left out."""
    return command.replace("\0", "").encode("utf-8", "surrogateescape") + b"\n"


class ShellSandbox(ABC):
    """One leased sandbox: the verbs of `base.Sandbox` on a shell and a workspace folder.

    Args:
        info: what was given.
        shell: the running session.
        place: its workspace.
    """

    def __init__(self, info: SandboxInfo, shell: Shell, place: Place) -> None:
        self.info = info
        self.workspace = place.inside
        self._shell = shell
        self._place = place
        self._background = Background(shell)
        self._error: SandboxError | None = None

    async def run(
        self,
        command: str,
        *,
        timeout_s: float,
        cwd: str | None = None,
        stdin: bytes | None = None,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
    ) -> CommandResult:
        """See `base.Sandbox.run`."""
        sink = HeadTail(max_output_bytes)
        text = encode(command)
        if cwd is not None:
            there = shlex.quote(posixpath.join(self.workspace, cwd))
            text = f"_hx_pwd=$PWD; cd -- {there} || exit; _hx_tmp=$PWD\n".encode() + text
        started = time.monotonic()
        ended = await self._execute("r", text, sink, timeout_s, stdin)
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

    async def start_process(self, command: str, *, cwd: str | None = None) -> Process:
        """See `base.Sandbox.start_process`."""
        text = encode(command)
        if cwd is not None:
            there = shlex.quote(posixpath.join(self.workspace, cwd))
            text = f"cd -- {there} || exit\n".encode() + text
        self._raise_if_dead()
        try:
            return await self._background.start(text, self._end_background)
        except ShellLost as lost:
            raise await self._dead(lost) from None

    async def read_file(self, path: str) -> bytes:
        """See `base.Sandbox.read_file`. A relative path starts from the workspace."""
        self._raise_if_dead()
        beneath = self._beneath(path)
        if beneath is not None:
            try:
                return await _read_all(self._place.files.open_read(beneath), path)
            except OSError as error:
                if error.errno not in UNSAFE:
                    raise
        sink = Everything(READ_MAX)
        await self._inside(_READ, path, sink)
        return sink.value()

    async def write_file(self, path: str, data: bytes) -> None:
        """See `base.Sandbox.write_file`. A relative path starts from the workspace."""
        self._raise_if_dead()
        beneath = self._beneath(path)
        if beneath is not None:
            try:
                await _write_all(self._place.files.open_write(beneath), data)
            except OSError as error:
                if error.errno not in UNSAFE:
                    raise
            else:
                return
        await self._inside(_WRITE, path, HeadTail(4096), data)

    async def upload(self, local: Path, remote: str) -> None:
        """See `base.Sandbox.upload`."""
        self._raise_if_dead()
        beneath = self._beneath(remote)
        if beneath is not None:
            try:
                fd = self._place.files.open_write(beneath)
            except OSError as error:
                if error.errno not in UNSAFE:
                    raise
            else:
                await asyncio.to_thread(_copy_in, local, fd)
                return
        given = self._shell.inputs / f"upload{id(remote)}"
        await asyncio.to_thread(shutil.copyfile, local, given)
        await self._inside(_WRITE, remote, HeadTail(4096), given)

    async def download(self, remote: str, local: Path) -> None:
        """See `base.Sandbox.download`."""
        self._raise_if_dead()
        beneath = self._beneath(remote)
        if beneath is not None:
            try:
                fd = self._place.files.open_read(beneath)
            except OSError as error:
                if error.errno not in UNSAFE:
                    raise
            else:
                await asyncio.to_thread(_copy_out, fd, remote, local)
                return
        sink = IntoFile(local, DOWNLOAD_MAX)
        try:
            await self._inside(_READ, remote, sink)
        except BaseException:
            local.unlink(missing_ok=True)
            raise

    async def read_left(self, path: str) -> bytes:
        """See `base.Sandbox.read_left`."""
        await self._end_session()
        beneath = self._beneath(path)
        if beneath is None:
            raise OSError(errno.EXDEV, "not below the workspace", path)
        return await _read_all(self._place.files.open_read(beneath), path)

    async def pack_left(self, local: Path) -> None:
        """See `base.Sandbox.pack_left`."""
        await self._end_session()
        try:
            await pack_in_thread(self._place.files.folder, lambda packing: packing.pack(local))
        except Unpackable as error:
            _log.warning("what a rollout left is not kept: %s", error)

    async def unpack(self, local: Path) -> None:
        """See `base.Sandbox.unpack`."""
        archive = f"{self.workspace}/.hermes-archive"
        await self.upload(local, archive)
        where = shlex.quote(archive)
        result = await self.run(f"{UNPACK.format(archive=where)} && rm -f {where}", timeout_s=300.0)
        if result.exit_code != 0:
            raise OSError(f"{local}: cannot be unpacked: {result.output.strip()[-200:]}")

    @abstractmethod
    async def _end_session(self) -> None:
        """End the agent's processes for good. Idempotent. Raises: SandboxDied when there is no
        workspace any more."""

    def _beneath(self, path: str) -> str | None:
        """The path from the workspace on, when it lies in it as written."""
        whole = posixpath.normpath(posixpath.join(self.workspace, path))
        if ".." in path.split("/") or "\0" in path:
            return None  # `..` after a symlink is only known inside
        root = self.workspace.rstrip("/") + "/"
        return whole[len(root) :] if whole.startswith(root) else None

    async def _inside(
        self, script: str, path: str, sink: Sink, stdin: bytes | Path | None = None
    ) -> None:
        """Run one of our own scripts on a path that only the sandbox can resolve."""
        if "\0" in path:
            raise ValueError("a path cannot hold a NUL byte")
        whole = posixpath.join(self.workspace, path)
        text = script.format(path=shlex.quote(whole))
        ended = await self._execute("i", encode(text), sink, TRANSFER_S, stdin)
        limit = UNSIZED_MAX if ended.exit_code == _UNSIZED else sink.limit
        if limit is not None and sink.total > limit:
            raise _too_large(path, limit)
        if ended.timed_out:
            raise OSError(f"{path}: took longer than {TRANSFER_S:g} s")
        if ended.exit_code not in (0, _UNSIZED):
            kind = _CODES.get(ended.exit_code, OSError)
            raise kind(f"{path}: {_reason(kind)}")

    async def _execute(
        self,
        kind: str,
        text: bytes,
        sink: Sink,
        timeout_s: float,
        stdin: bytes | Path | None = None,
    ) -> Ended:
        self._raise_if_dead()
        stood = not self._shell.lost.is_set()
        try:
            return await self._shell.execute(
                "r" if kind == "r" else "i", text, sink, timeout_s=timeout_s, stdin=stdin
            )
        except ShellLost as lost:
            error = await self._dead(lost)
            error.in_command |= stood
            raise error from None

    def _raise_if_dead(self) -> None:
        if self._error is not None:
            raise type(self._error)(*self._error.args)

    async def _dead(self, lost: ShellLost) -> SandboxError:
        """The shell is lost: find out why, once."""
        if self._error is None:
            self._error = await self._classify(lost)
        return self._error

    @abstractmethod
    async def _classify(self, lost: ShellLost) -> SandboxError:
        """Whose deed was it? Backends know."""

    @abstractmethod
    async def _after(self, ended: Ended) -> None:
        """Called at each command's end: backends check their limits."""

    @abstractmethod
    def _end_background(self, inside: int) -> None:
        """End a background process's tree by its id in the sandbox. Called in a thread."""

    @abstractmethod
    async def aclose(self) -> None:
        """See `base.Sandbox.aclose`."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


def _reason(kind: type[OSError]) -> str:
    return {
        FileNotFoundError: "no such file",
        IsADirectoryError: "is a directory",
        PermissionError: "permission denied",
    }.get(kind, "not a regular file, or it could not be read or written")


def _too_large(path: str, limit: int) -> OSError:
    more = ": download it instead" if limit == READ_MAX else ""
    return OSError(f"{path}: more than {limit} bytes{more}")


def _bounded_size(fd: int, path: str, limit: int) -> int:
    """Size of an open file. Closes it and raises OSError when that is above the limit."""
    size = os.fstat(fd).st_size
    if size > limit:
        os.close(fd)
        raise _too_large(path, limit)
    return size


async def _read_all(fd: int, path: str) -> bytes:
    size = _bounded_size(fd, path, READ_MAX)
    if size <= IN_THREAD:
        return _read_fd(fd, size)
    return await asyncio.to_thread(_read_fd, fd, size)


def _read_fd(fd: int, size: int) -> bytes:
    """What was in the file when it was looked at: its owner may be writing on."""
    with open(fd, "rb") as file:
        return file.read(size)


async def _write_all(fd: int, data: bytes) -> None:
    def write() -> None:
        with open(fd, "wb") as file:
            file.write(data)

    if len(data) <= IN_THREAD:
        write()
    else:
        await asyncio.to_thread(write)


def _copy_in(local: Path, fd: int) -> None:
    with open(fd, "wb") as target, open(local, "rb") as source:
        shutil.copyfileobj(source, target, 1 << 20)


def _copy_out(fd: int, path: str, local: Path) -> None:
    left = _bounded_size(fd, path, DOWNLOAD_MAX)
    with open(fd, "rb") as source, open(local, "wb") as target:
        while data := source.read(min(left, 1 << 20)):
            target.write(data)
            left -= len(data)
