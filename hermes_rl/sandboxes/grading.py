"""The grading sandbox: a verifier in a fresh sandbox over the workspace that the agent left.

Nothing of the agent's runs any more, and nothing that it left is found by accident: HOME and the
working directory are empty and outside the workspace, Python and git read no configuration from
them, the verifier's files are read-only. The workspace is shown through a layer that is thrown
away (or as a copy, where the machine has no overlays), so the same state can be graded again.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import shlex
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from hermes_rl.errors import SandboxDied, SandboxStartError, TaskFault
from hermes_rl.sandboxes.base import MAX_OUTPUT_BYTES, GradingResult, GradingSpec
from hermes_rl.sandboxes.processes import Tree
from hermes_rl.sandboxes.recipe import PATH
from hermes_rl.sandboxes.shell import DRAIN_PAUSE_S, LINE_MAX, HeadTail, Pipe

T = TypeVar("T", bound=Tree)

HOME = "/grading"
VERIFY = "/verify"
REPORT_BYTES = 4096
START_S = 30.0
_CREDENTIALS = struct.Struct("3i")
"""The kernel's `struct ucred`: process, user and group id of who wrote."""
KILLED = 137
"""Exit code of a verifier that was ended because its box exceeded a limit."""


@dataclass(frozen=True)
class Paths:
    """Where things are, as the verifier sees them."""

    control: str
    home: str
    verify: str
    workspace: str


_VARIABLES = {
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "TERM": "dumb",
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
    return f"""ulimit -c 0 || exit 125
trap - HUP INT QUIT TERM USR1 USR2
{{ printf 1000 >/proc/self/oom_score_adj; }} 2>/dev/null
unset BASH_ENV ENV OLDPWD
export {" ".join(f"{name}={shlex.quote(value)}" for name, value in exported.items())}
cd -- {shlex.quote(paths.home)} || exit 125
umask 022
echo R
IFS= read -r go || exit 125
unset go
exec </dev/null {"3>&1 " if score else ""}>{control}/out 2>&1 bash --norc --noprofile \
    {control}/script
"""


def write_stage(
    control: Path,
    verify: Path,
    spec: GradingSpec,
    paths: Paths,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Put starter, script and the verifier's files where the box shows them read-only.

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
    launch: Callable[[socket.socket], Awaitable[T]],
    standing: Callable[[T], Awaitable[None]] | None = None,
    stop: asyncio.Future[str] | None = None,
) -> GradingResult:
    """Run a verifier whose stage stands in `control`.

    Args:
        launch: starts the stage's starter, with the socket as its standard input and output.
        standing: called once when the verifier is about to start.
        stop: done when the verifier must end: the reason, such as a limit that its box exceeds.
            Cancelled at the verifier's end.

    Raises: SandboxStartError when the box does not come up; SandboxDied when the host lost it.
    """
    stop = stop or asyncio.get_running_loop().create_future()
    out = Pipe(control, "out")
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
            code = await asyncio.shield(asyncio.ensure_future(_end(end, tree)))
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
