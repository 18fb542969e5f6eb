"""The grading sandbox: a verifier in a fresh sandbox over the workspace that the agent left.

Nothing of the agent's runs any more, and nothing that it left is found by accident: HOME and the
working directory are empty and outside the workspace, Python and git read no configuration from
them, the verifier's files are read-only. The workspace is shown through a layer that is thrown
away (or as a copy, where the machine has no overlays), so the same state can be graded again.

`Packing` makes an archive or a copy of what a rollout left, in bounded time and space whatever the
agent made. It can leave folders thousands of levels deep, folders and files that it locked, and
files that are nothing but holes. So the walk is a loop, only data is read, and what exceeds the
bounds is refused: that is no fault of the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import posixpath
import shlex
import shutil
import socket
import stat
import struct
import tarfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from hermes_rl.aio import in_thread
from hermes_rl.errors import SandboxDied, SandboxStartError, TaskFault
from hermes_rl.sandboxes.base import MAX_OUTPUT_BYTES, GradingResult, GradingSpec
from hermes_rl.sandboxes.image_changes import OPAQUE_XATTR, Changes, Relied, is_opaque, replaced
from hermes_rl.sandboxes.processes import Tree
from hermes_rl.sandboxes.recipe import CONTROL, PATH, WORKSPACE
from hermes_rl.sandboxes.shell import DRAIN_PAUSE_S, LINE_MAX, HeadTail, Pipe

T = TypeVar("T")
Running = TypeVar("Running", bound=Tree)

HOME = "/grading"
VERIFY = "/verify"
REPORT_BYTES = 4096
START_S = 30.0
_CREDENTIALS = struct.Struct("3i")
"""The kernel's `struct ucred`: process, user and group id of who wrote."""
KILLED = 137
"""Exit code of a verifier that was ended because its sandbox exceeded a limit."""


@dataclass(frozen=True)
class Paths:
    """Where things are, as the verifier sees them."""

    control: str = CONTROL
    home: str = HOME
    verify: str = VERIFY
    workspace: str = WORKSPACE
    shell: str | None = None
    """What runs the verifier; None is /bin/bash, or the bash on PATH."""


_VARIABLES = {
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "TERM": "dumb",
    "SHELL": "/bin/bash",
    "PYTHONNOUSERSITE": "1",
    "PYTHONSAFEPATH": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
}
"""The verifier's variables, beside those that name places: nothing of the agent's."""


def _starter(paths: Paths, variables: Mapping[str, str], score: bool) -> str:
    """The script that sets the stage, reports on the channel that it is ready, waits for the
    host's answer, and becomes the verifier. Descriptor 3 of the verifier is the channel."""
    control = shlex.quote(paths.control)
    places = {"HOME": paths.home, "WORKSPACE": paths.workspace, "VERIFY": paths.verify}
    exported = {"PATH": PATH, **_VARIABLES, **places, **variables}
    find_shell = "shell=bash\n[ ! -x /bin/bash ] || shell=/bin/bash"
    if paths.shell is not None:
        find_shell = f"shell={shlex.quote(paths.shell)}"
    return f"""ulimit -c 0 || exit 125
trap - HUP INT QUIT TERM USR1 USR2
{{ printf 1000 >/proc/self/oom_score_adj; }} 2>/dev/null
unset BASH_ENV ENV OLDPWD
export {" ".join(f"{name}={shlex.quote(value)}" for name, value in exported.items())}
cd -- {shlex.quote(paths.home)} || exit 125
umask 022
{find_shell}
echo R
IFS= read -r go || exit 125
unset go
exec </dev/null {"3>&1 " if score else ""}>{control}/out 2>&1 "$shell" --norc --noprofile \
    {control}/script
"""


def write_stage(
    control: Path,
    verify: Path,
    spec: GradingSpec,
    paths: Paths = Paths(),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Put starter, script and the verifier's files where the sandbox shows them read-only.

    Args:
        control: the folder for starter and script, on the host.
        verify: the folder for the verifier's files, on the host.
        paths: these folders and others as the verifier sees them.
        variables: further variables of the verifier.

    Raises: TaskFault for files that cannot be put there.
    """
    (control / "start").write_text(_starter(paths, variables, spec.score))
    (control / "script").write_bytes(spec.script.encode("utf-8", "surrogateescape"))
    for name, data in spec.files.items():
        clean = posixpath.normpath(name)
        if clean.startswith(("/", "..")) or "\0" in clean or clean == ".":
            raise TaskFault(f"verifier file {name!r} is not a relative path below /verify")
        target = verify / clean
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            why = "is both a file and a folder, with another of the verifier's files"
            raise TaskFault(f"verifier file {name!r} {why}") from None
    for folder, _, names in os.walk(verify):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            os.chmod(path, 0o755)
    for name in ("start", "script"):
        os.chmod(control / name, 0o644)


def shown_folder(verify: Path, folder: str) -> Path:
    """A folder of the verifier's files that is mounted elsewhere. Raises: TaskFault."""
    shown = (verify / folder).resolve()
    if not shown.is_relative_to(verify.resolve()):
        raise TaskFault(f"verify.mounts: {folder!r} is not a folder of the verifier's files")
    return shown


def writable_copy(verify: Path, folder: str, copied: Path) -> Path:
    """Copy it, or make an empty one, for a verifier that may write in it. Raises: TaskFault."""
    if folder and (shown := shown_folder(verify, folder)).is_dir():
        shutil.copytree(shown, copied)
    else:
        copied.mkdir(parents=True)
    for path in (copied, *copied.rglob("*")):
        path.chmod(0o777)
    return copied


def check_image(relied: Relied, changes: Changes, places: Iterable[str]) -> None:
    """Raises: Unpackable when an agent left an image in which no verifier can be trusted to start.

    Args:
        relied: what the image had.
        changes: what the agent changed of it.
        places: of folders that are mounted for the verifier.
    """
    if (found := replaced(relied, changes, (*places, HOME, VERIFY))) is not None:
        raise Unpackable(f"the agent replaced {found}, which grading relies on")


def refused(reason: object) -> GradingResult:
    """The result for a workspace that no verifier can be shown, by the agent's doing."""
    return GradingResult(exit_code=KILLED, timed_out=False, output=f"[ended: {reason}]")


class Report:
    """What arrives on descriptor 3, by who wrote it.

    The descriptor is a socket, so no program can open it by a name, and the kernel names the writer
    of each piece. What the verifier's own shell writes is the report, and nothing else is. Only
    when it has written nothing, what programs wrote to which it left its descriptor.

    Args:
        channel: our end of the socket pair; not blocking.
    """

    def __init__(self, channel: socket.socket) -> None:
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._channel = channel
        self._verifier = 0
        self._by_shell, self._by_programs = HeadTail(_KEPT), HeadTail(_KEPT)

    async def started(self) -> None:
        """Wait for the starter's line: its writer becomes the verifier. Raises: SandboxStartError
        with what came instead."""
        received = b""
        try:
            async with asyncio.timeout(START_S):
                while not received.endswith(b"R\n") and len(received) < LINE_MAX:
                    await _readable(self._channel)
                    data, self._verifier = self._receive() or (b"", 0)
                    if not data:
                        break
                    received += data
        except TimeoutError:
            received += b"it did not start in time"
        if not received.endswith(b"R\n"):
            why = received.decode("utf-8", "replace")
            raise SandboxStartError(f"the grading sandbox did not start: {why}")

    def read(self) -> None:
        """Take what has arrived."""
        for _ in range(_PIECES):
            data, writer = self._receive() or (b"", 0)
            if not data:
                return
            (self._by_shell if writer == self._verifier else self._by_programs).feed(data)

    def _receive(self) -> tuple[bytes, int] | None:
        """What one process wrote, and its id; None when nothing is there. No space is left for
        descriptors that a program may send along: the kernel drops them."""
        try:
            data, extra, _, _ = self._channel.recvmsg(4096, socket.CMSG_LEN(_CREDENTIALS.size))
        except OSError:
            return None
        writers = (v for _, kind, v in extra if kind == socket.SCM_CREDENTIALS)
        return data, next((_CREDENTIALS.unpack(value)[0] for value in writers), 0)

    @property
    def value(self) -> bytes:
        """The report so far, at most `REPORT_BYTES`."""
        return (self._by_shell if self._by_shell.total else self._by_programs).parts()[0][
            :REPORT_BYTES
        ]


_KEPT = REPORT_BYTES * 5 // 2
_PIECES = 64
"""Taken at once: a program that writes without end must not keep the loop busy."""


async def _readable(channel: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(channel, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(channel)


async def judge(
    spec: GradingSpec,
    control: Path,
    launch: Callable[[socket.socket], Awaitable[Running]],
    standing: Callable[[Running], Awaitable[None]] | None = None,
    stop: asyncio.Future[str] | None = None,
    *,
    any_user: bool = False,
) -> GradingResult:
    """Run a verifier whose stage stands in `control`.

    Args:
        launch: starts the stage's starter, with the socket as its standard input and output.
        standing: called once when the verifier is about to start.
        stop: done when the verifier must end: the reason, such as a limit that is exceeded.
            Cancelled at the verifier's end.
        any_user: see `ShellPaths.any_user`.

    Raises: SandboxStartError when the sandbox does not start; SandboxDied when the host lost it.
    """
    stop = stop or asyncio.get_running_loop().create_future()
    out = Pipe(control, "out", any_user=any_user)
    host_end, inner_end = socket.socketpair()
    host_end.setblocking(False)
    kept, report = HeadTail(MAX_OUTPUT_BYTES), Report(host_end)
    timed_out, excess = False, None
    try:
        tree = await launch(inner_end)
        end: asyncio.Future[int] | None = None
        try:
            await report.started()
            if standing is not None:
                await standing(tree)
            await asyncio.get_running_loop().sock_sendall(host_end, b"G\n")
            end = asyncio.ensure_future(tree.ended())
            began = time.monotonic()
            async with asyncio.timeout(spec.timeout_s):
                excess = await _until(end, stop, (out, kept), report)
        except TimeoutError:
            timed_out = True
        finally:
            try:
                code = await asyncio.shield(asyncio.ensure_future(_end(end, tree)))
            finally:
                stop.cancel()
                tree.close()
        out.read_into(kept, 4 << 20)
        report.read()
    finally:
        host_end.close()
        out.close()
    if code < 0 and not timed_out and excess is None:
        raise SandboxDied(f"the grading sandbox was ended by signal {-code} from outside")
    return GradingResult(
        exit_code=124 if timed_out else code if excess is None else KILLED,
        timed_out=timed_out,
        output=kept.text() + (f"\n[ended: {excess}]" if excess else ""),
        report=report.value if spec.score else b"",
        seconds=time.monotonic() - began,
    )


async def _end(end: asyncio.Future[int] | None, tree: Tree) -> int:
    """The code of a verifier that has ended, or is ended now."""
    if end is not None and not end.done():
        end.cancel()
        await asyncio.wait([end])
    return await tree.end() if end is None or end.cancelled() else end.result()


async def _until(
    end: asyncio.Future[int],
    stop: asyncio.Future[str],
    output: tuple[Pipe, HeadTail],
    report: Report,
) -> str | None:
    """Read what comes until a verifier's end. Returns why it must end, if it must."""
    while not (end.done() or stop.done()):
        before = output[1].total
        output[0].read_into(output[1], 1 << 20)
        report.read()
        pause = DRAIN_PAUSE_S if output[1].total == before else 0.001
        either: list[asyncio.Future[Any]] = [end, stop]
        await asyncio.wait(either, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
    return stop.result() if stop.done() else None


FORMAT = "tar.gz"
OPAQUE_HEADER = f"SCHILY.xattr.{OPAQUE_XATTR}"
"""How archives note that a folder of an overlay hides what is below it."""
_LEVEL = 1
"""Of gzip: a workspace is written once for each rollout and seldom read."""
MAX_ENTRIES = 400_000
MAX_BYTES = 4 << 30
"""Of data; holes are not counted. Both are twice what a sandbox may hold."""
MAX_S = 300.0
MAX_PATH = 3_500
"""Bytes of a path: the machine's limit is 4,096, with the folders above the workspace."""
CHUNK = 1 << 20
_BLOCK = 512
_REFUSED = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP)
"""Errors of reading that the agent can bring about."""
Extent = tuple[int, int]
"""Offset and length of data in a file."""


class Unpackable(Exception):
    """What an agent left exceeds the bounds; the message says which."""


class Packing:
    """One walk through a folder in which nothing runs any more; it blocks, for threads. `reading`
    makes them."""

    def __init__(self, folder: Path, cancelled: threading.Event) -> None:
        self._prefix = os.path.join(folder, "")
        """Paths are joined as text: a Path of a deep folder parses all its parts each time."""
        self._entries = self._bytes = 0
        self._deadline = time.monotonic() + MAX_S
        self.locked: list[tuple[str, int]] = []
        """Paths that were unlocked, with their modes before."""
        self._cancelled = cancelled

    def pack(self, target: Path, *, compress: bool = True) -> None:
        """Write the folder's content as an archive, which appears whole or not at all.

        Links are stored as links, pipes as pipes, sockets are left out; owners are stored as
        nobody's. Raises: Unpackable; OSError, as of a full disk.
        """
        half = target.with_name(f".{target.name}.half")
        known: dict[tuple[int, int], str] = {}
        how: dict[str, Any] = (
            {"mode": "w:gz", "compresslevel": _LEVEL} if compress else {"mode": "w"}
        )
        try:
            with tarfile.open(half, format=tarfile.PAX_FORMAT, **how) as archive:
                for path, found in self._walk():
                    self._add(archive, path, found, known)
            with half.open("rb") as file:
                os.fsync(file.fileno())
            half.rename(target)
        finally:
            half.unlink(missing_ok=True)

    def copy(self, target: Path, uid: int | None = None) -> None:
        """Copy the folder: links as links, times and modes kept, pipes and sockets left out; the
        copy belongs to `uid`. Raises: Unpackable; OSError, as of a full disk.
        """
        folders = [("", os.stat(self._prefix))]
        os.mkdir(target, 0o700)
        for path, found in self._walk():
            made = os.path.join(target, path)
            if stat.S_ISDIR(found.st_mode):
                os.mkdir(made, 0o700)
                folders.append((path, found))
            elif stat.S_ISLNK(found.st_mode):
                os.symlink(os.readlink(self._prefix + path), made)
                if uid is not None:
                    os.lchown(made, uid, uid)
            elif stat.S_ISREG(found.st_mode):
                self._copy_file(path, found, made)
                _finish(made, found, uid)
        for path, found in reversed(folders):
            _finish(os.path.join(target, path), found, uid)

    def _walk(self) -> Iterator[tuple[str, os.stat_result]]:
        """All below the folder, each folder before what is in it: paths from it on, as they were
        found."""
        todo = [""]
        while todo:
            path = todo.pop()
            if len(os.fsencode(path)) > MAX_PATH:
                raise Unpackable(f"the workspace holds paths of more than {MAX_PATH} bytes")
            with _reading():
                found = os.stat(self._prefix + path, follow_symlinks=not path)
            if path:
                self._count(entries=1)
                yield path, found
            if stat.S_ISDIR(found.st_mode):
                with _reading():
                    self._unlock(self._prefix + path, found, 0o700)
                    names = sorted(os.listdir(self._prefix + path), reverse=True)
                self._count(waiting=len(todo) + len(names))
                todo += [os.path.join(path, name) for name in names]

    def _unlock(self, path: str, found: os.stat_result, needed: int) -> None:
        mode = stat.S_IMODE(found.st_mode)
        if mode & needed != needed and os.geteuid() != 0:
            os.chmod(path, mode | needed)
            self.locked.append((path, mode))

    def _count(self, *, entries: int = 0, size: int = 0, waiting: int = 0) -> None:
        """Raises: Unpackable when a bound is exceeded."""
        self._entries += entries
        self._bytes += size
        if self._cancelled.is_set():
            raise Unpackable("cancelled")
        if self._entries + waiting > MAX_ENTRIES:
            raise Unpackable(f"the workspace holds more than {MAX_ENTRIES} files")
        if self._bytes > MAX_BYTES:
            raise Unpackable(f"the workspace holds more than {MAX_BYTES} bytes")
        if time.monotonic() > self._deadline:
            raise Unpackable(f"the workspace takes more than {MAX_S:g} s to read")

    @contextlib.contextmanager
    def _open(self, path: str, found: os.stat_result) -> Iterator[tuple[int, list[Extent]]]:
        """A regular file, and where its data is."""
        with _reading():
            self._unlock(self._prefix + path, found, 0o400)
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(self._prefix + path, flags)
        try:
            yield fd, [*_extents(fd, found)]
        finally:
            os.close(fd)

    def _read(self, fd: int, extents: list[Extent]) -> Iterator[tuple[int, bytes]]:
        """The data, with the offset of each chunk."""
        for offset, length in extents:
            for at in range(offset, offset + length, CHUNK):
                size = min(CHUNK, offset + length - at)
                self._count(size=size)
                yield at, os.pread(fd, size, at).ljust(size, b"\0")

    def _copy_file(self, path: str, found: os.stat_result, made: str) -> None:
        with self._open(path, found) as (fd, extents), open(made, "xb", buffering=0) as target:
            for at, data in self._read(fd, extents):
                target.seek(at)
                target.write(data)
            target.truncate(found.st_size)

    def _add(
        self,
        archive: tarfile.TarFile,
        path: str,
        found: os.stat_result,
        known: dict[tuple[int, int], str],
    ) -> None:
        """Add one entry to an archive. `known` names files that have several names."""
        info = tarfile.TarInfo(path)
        info.mode, info.mtime = stat.S_IMODE(found.st_mode), found.st_mtime
        kind = _TYPES.get(stat.S_IFMT(found.st_mode))
        if kind is None:
            return
        info.type = kind
        if stat.S_ISLNK(found.st_mode):
            info.linkname = os.readlink(self._prefix + path)
        elif kind != tarfile.DIRTYPE and found.st_nlink > 1:
            info.linkname = known.setdefault((found.st_dev, found.st_ino), path)
            if info.linkname != path:
                info.type = tarfile.LNKTYPE
            else:
                info.linkname = ""
        info.devmajor, info.devminor = os.major(found.st_rdev), os.minor(found.st_rdev)
        if info.type == tarfile.DIRTYPE and is_opaque(self._prefix + path):
            info.pax_headers = {OPAQUE_HEADER: "y"}
        if info.type != tarfile.REGTYPE:
            archive.addfile(info)
            return
        with self._open(path, found) as (fd, extents):
            head = _sparse(info, found.st_size, extents)
            data = _Stream(head, (data for _, data in self._read(fd, extents)))
            archive.addfile(info, data)  # type: ignore[arg-type]


_TYPES = {
    stat.S_IFREG: tarfile.REGTYPE,
    stat.S_IFDIR: tarfile.DIRTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE,
    stat.S_IFCHR: tarfile.CHRTYPE,
    stat.S_IFBLK: tarfile.BLKTYPE,
}


class _Stream:
    """Chunks as a file to read from."""

    def __init__(self, head: bytes, chunks: Iterator[bytes]) -> None:
        self._kept = bytearray(head)
        self._chunks = chunks

    def read(self, size: int) -> bytes:
        while len(self._kept) < size and (data := next(self._chunks, b"")):
            self._kept += data
        taken = bytes(self._kept[:size])
        del self._kept[:size]
        return taken


def _sparse(info: tarfile.TarInfo, size: int, extents: list[Extent]) -> bytes:
    """Set an entry's size; returns what stands before its data.

    A file with holes is stored in the PAX format 1.0 for sparse files of GNU tar, whose manual
    describes it ("Storing Sparse Files"): a map of the data, then the data.
    """
    stored = sum(length for _, length in extents)
    if stored == size:
        info.size = size
        return b""
    if not extents or sum(extents[-1]) < size:
        extents = [*extents, (size, 0)]
    numbers = [len(extents), *(number for extent in extents for number in extent)]
    head = "".join(f"{number}\n" for number in numbers).encode()
    head = head.ljust(-(-len(head) // _BLOCK) * _BLOCK, b"\0")
    info.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": info.name,
        "GNU.sparse.realsize": str(size),
    }
    folder, name = os.path.split(info.name)
    info.name = os.path.join(folder, "GNUSparseFile.0", name)
    info.size = len(head) + stored
    return head


def _extents(fd: int, found: os.stat_result) -> Iterator[Extent]:
    """Where a file has data; all of it where the file system does not say."""
    end = found.st_size
    if found.st_blocks * _BLOCK >= end:
        if end:
            yield 0, end
        return
    at = 0
    while at < end:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a hole up to the end
                return
            raise
        at = min(os.lseek(fd, start, os.SEEK_HOLE), end)
        yield start, at - start


def _finish(made: str, found: os.stat_result, uid: int | None) -> None:
    moments = (found.st_atime_ns, found.st_mtime_ns)
    finish_entry(made, stat.S_IMODE(found.st_mode), moments, uid)


def finish_entry(made: str, mode: int, moments: tuple[int, int], uid: int | None) -> None:
    """Give what was copied its owner, mode, and times of access and change in ns."""
    if uid is not None:
        os.chown(made, uid, uid)
    os.chmod(made, mode)
    os.utime(made, ns=moments)


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        raise Unpackable(f"the workspace cannot be read: {error.strerror}") from error


@contextlib.contextmanager
def reading(folder: Path, cancelled: threading.Event | None = None) -> Iterator[Packing]:
    """A walk through a folder; what an ordinary user's agent locked is locked again after it.

    Args:
        folder: the folder.
        cancelled: once set, from any thread, the walk ends soon, with Unpackable.
    """
    packing = Packing(folder, cancelled or threading.Event())
    try:
        yield packing
    finally:
        for path, mode in reversed(packing.locked):
            with contextlib.suppress(OSError):
                os.chmod(path, mode)


async def pack_in_thread(folder: Path, work: Callable[[Packing], T]) -> T:
    """Walk through a folder in a thread, which ends soon when the caller is cancelled."""
    cancelled = threading.Event()

    def walk() -> T:
        with reading(folder, cancelled) as packing:
            return work(packing)

    walking = asyncio.ensure_future(in_thread(walk))
    try:
        return await asyncio.shield(walking)
    except asyncio.CancelledError:
        cancelled.set()
        with contextlib.suppress(Exception):  # the cancellation goes first
            await walking
        raise


UNPACK = (
    "tar --extract --gzip --no-same-owner --file={archive} --directory=. "
    "$(tar --help | grep -o -m1 -e --delay-directory-restore)"
)
"""The command that puts it back, in a sandbox of its own. Locked folders are locked at the end."""
