"""The grading box: a verifier in a fresh sandbox over the workspace that the agent left.

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
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from hermes_rl.errors import SandboxDied, SandboxStartError, TaskFault
from hermes_rl.sandboxes.base import MAX_OUTPUT_BYTES, GradingResult, GradingSpec
from hermes_rl.sandboxes.output import HeadTail
from hermes_rl.sandboxes.pipes import DRAIN_PAUSE_S, LINE_MAX, Pipe

HOME = "/grading"
VERIFY = "/verify"
REPORT_BYTES = 4096
START_S = 30.0
LOOK_S = 2.0
"""Between two looks at what a verifier, and the programs that it runs, have written."""

KILLED = 137
"""Exit code of a verifier that was ended because its box exceeded a limit."""


@dataclass(frozen=True)
class Paths:
    """Where things are, as the verifier sees them."""

    control: str
    home: str
    verify: str
    workspace: str


def environment(paths: Paths, path: str) -> dict[str, str]:
    """The verifier's variables: nothing of the agent's."""
    return {
        "PATH": path,
        "HOME": paths.home,
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "TERM": "dumb",
        "WORKSPACE": paths.workspace,
        "VERIFY": paths.verify,
        "PYTHONNOUSERSITE": "1",
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_NOSYSTEM": "1",
    }


def starter(paths: Paths, variables: dict[str, str], score: bool) -> str:
    """The script that sets the stage, reports on the channel that it is ready, waits for the
    host's answer, and becomes the verifier."""
    control = shlex.quote(paths.control)
    return "\n".join(
        [
            "ulimit -c 0 || exit 125",
            "trap - HUP INT QUIT TERM USR1 USR2",
            "{ printf 1000 >/proc/self/oom_score_adj; } 2>/dev/null",
            "unset BASH_ENV ENV OLDPWD",
            *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
            f"cd -- {shlex.quote(paths.home)} || exit 125",
            "umask 022",
            *([f"exec 3>{control}/report"] if score else []),
            "echo R",
            "IFS= read -r go || exit 125",
            "unset go",
            f"exec </dev/null >{control}/out 2>&1 bash --norc --noprofile {control}/script",
            "",
        ]
    )


def write_stage(control: Path, verify: Path, spec: GradingSpec, start: str) -> None:
    """Put starter, script and the verifier's files where the box shows them read-only."""
    (control / "start").write_text(start)
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
        os.chmod(folder, 0o755)
        for name in names:
            os.chmod(os.path.join(folder, name), 0o755)
    for name in ("start", "script"):
        os.chmod(control / name, 0o644)


def refused(reason: object) -> GradingResult:
    """The result for a workspace that no verifier can be shown, by the agent's doing."""
    return GradingResult(exit_code=KILLED, timed_out=False, output=f"[ended: {reason}]")


@dataclass(frozen=True)
class Running:
    """A started verifier."""

    ended: Callable[[], Awaitable[int]]
    """Waits for its end and for the end of all that it started; its code, negative after a signal
    from outside."""
    end: Callable[[], Awaitable[int]]
    """Ends it with all that it started; its code."""
    standing: Callable[[], Awaitable[object]]
    """Called once when the verifier is about to start."""
    excess: Callable[[], Awaitable[str | None]]
    """Which limit its box exceeds, in words; asked every few seconds."""
    close: Callable[[], object]


async def judge(
    spec: GradingSpec, control: Path, start: Callable[[socket.socket], Awaitable[Running]]
) -> GradingResult:
    """Run a verifier whose stage stands in `control`.

    Raises: SandboxStartError when the box does not come up; SandboxDied when the host lost it.
    """
    out = Pipe(control, "out")
    report = Pipe(control, "report")
    try:
        return await _judge(spec, out, report, start)
    finally:
        out.close()
        report.close()


async def _judge(
    spec: GradingSpec, out: Pipe, report: Pipe, start: Callable[[socket.socket], Awaitable[Running]]
) -> GradingResult:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    kept, told = HeadTail(MAX_OUTPUT_BYTES), HeadTail(REPORT_BYTES * 5 // 2)
    began = time.monotonic()
    timed_out, excess = False, None
    with ours:
        running = await start(theirs)
        end: asyncio.Future[int] | None = None
        try:
            await _started(ours)
            await running.standing()
            report.shut()
            await asyncio.get_running_loop().sock_sendall(ours, b"G\n")
            end = asyncio.ensure_future(running.ended())
            began = time.monotonic()
            async with asyncio.timeout(spec.timeout_s):
                excess = await _until(end, running, (out, kept), (report, told))
        except TimeoutError:
            timed_out = True
        finally:
            code = await asyncio.shield(asyncio.ensure_future(_end(end, running)))
            running.close()
    out.read_into(kept, 4 << 20)
    report.read_into(told, 1 << 16)
    if code < 0 and not timed_out and excess is None:
        raise SandboxDied(f"the grading box was ended by signal {-code} from outside")
    return GradingResult(
        exit_code=124 if timed_out else code if excess is None else KILLED,
        timed_out=timed_out,
        output=kept.text() + (f"\n[ended: {excess}]" if excess else ""),
        report=told.parts()[0][:REPORT_BYTES] if spec.score else b"",
        seconds=time.monotonic() - began,
    )


async def _end(end: asyncio.Future[int] | None, running: Running) -> int:
    """The code of a verifier that has ended, or is ended now."""
    if end is not None and not end.done():
        end.cancel()
        await asyncio.wait([end])
    return await running.end() if end is None or end.cancelled() else end.result()


async def _until(
    end: asyncio.Future[int],
    running: Running,
    output: tuple[Pipe, HeadTail],
    report: tuple[Pipe, HeadTail],
) -> str | None:
    """Read what comes until a verifier's end. Returns which limit its box exceeded, if it did."""
    loop = asyncio.get_running_loop()
    look = loop.time() + LOOK_S
    while not end.done():
        before = output[1].total
        output[0].read_into(output[1], 1 << 20)
        report[0].read_into(report[1], 1 << 16)
        if loop.time() >= look:
            if (excess := await running.excess()) is not None:
                return excess
            look = loop.time() + LOOK_S
        pause = DRAIN_PAUSE_S if output[1].total == before else 0.001
        await asyncio.wait([end], timeout=pause)
    return None


async def _started(ours: socket.socket) -> None:
    """Wait for the starter's word. Raises: SandboxStartError with what came instead."""
    loop = asyncio.get_running_loop()
    said = b""
    try:
        async with asyncio.timeout(START_S):
            while not said.endswith(b"R\n") and len(said) < LINE_MAX:
                data = await loop.sock_recv(ours, 4096)
                if not data:
                    break
                said += data
    except TimeoutError:
        said += b"it did not start in time"
    if not said.endswith(b"R\n"):
        raise SandboxStartError(f"the grading box did not start: {said.decode('utf-8', 'replace')}")
