"""The control channel: what the supervisor does not write ends the session at once."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from pathlib import Path

import pytest

from hermes_rl.sandboxes import (
    LINE_MAX,
    Background,
    HeadTail,
    Jobs,
    Shell,
    ShellLost,
    ShellPaths,
    Snapshot,
)


@pytest.mark.parametrize(
    "garbage",
    [
        b"x" * (LINE_MAX + 1),
        b"E\n",
        b"E zero s\n",
        b"E " + b"9" * 3000 + b" s\n",
        b"E 0 s\nE 0 s\n",
        b"P 1 1\n",
        b"X 7 0\n",
        b"\n",
        b"\xff\0 3 4\n",
    ],
)
async def test_garbage_ends_the_session(tmp_path: Path, garbage: bytes) -> None:
    """Also when it goes on for ever: nobody reads it."""
    ours, theirs = socket.socketpair()
    with theirs:
        paths = ShellPaths(tmp_path, "/hx", "/run/hx")
        shell = Shell(ours, paths, Jobs(lambda: 0, lambda: Snapshot([])))
        theirs.send(b"R\n")
        await shell.ready()
        Background(shell)
        command = asyncio.ensure_future(shell.execute("r", b"true", HeadTail(100)))
        await asyncio.sleep(0)  # the command is on its way
        theirs.setblocking(False)
        theirs.send(garbage)
        async with asyncio.timeout(60):
            await shell.lost.wait()
        with contextlib.suppress(ShellLost):  # an end that came before the garbage counts
            await command
        with pytest.raises(ShellLost, match="control channel"):
            await shell.execute("r", b"true", HeadTail(100))
        with contextlib.suppress(BlockingIOError):
            while True:
                theirs.send(b"x" * 65536)
        spent = time.process_time()
        await asyncio.sleep(1.0)
        assert time.process_time() - spent < 0.5  # a garbage collection may be in it
        shell.release()
