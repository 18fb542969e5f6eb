"""Starts processes from one thread that lives as long as they may.

Die-with-parent follows the *thread* that spawned, so a short-lived one would take its sandboxes
along. No preexec_fn and no user=: both cost vfork, several milliseconds in a large process. To drop
to a slot's uid the command runs through `setpriv`, which is part of every Linux's util-linux.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Launch:
    """What to start."""

    argv: Sequence[str]
    pass_fds: Sequence[int] = ()
    uid: int | None = None
    """User and group id to drop to; None keeps ours."""


def trampoline(uid: int) -> list[str]:
    """The command prefix that drops to a uid and gid of this number, without any group."""
    binary = shutil.which("setpriv", path="/usr/bin:/bin:/usr/sbin:/sbin")
    if binary is None:
        raise FileNotFoundError("setpriv is missing: install util-linux")
    return [binary, f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--"]


class Spawner:
    """One thread that starts processes; `close` it after all of them have ended."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sandbox-spawn")

    async def call(self, work: Callable[[], T]) -> T:
        """Run something short in the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False)


def start(launch: Launch, stdio: socket.socket) -> subprocess.Popen[bytes]:
    """Start a process with an empty environment, its own session, and all three standard
    descriptors on `stdio`. Call it in a Spawner's thread.
    """
    prefix = [] if launch.uid is None else trampoline(launch.uid)
    return subprocess.Popen(
        [*prefix, *launch.argv],
        stdin=stdio.fileno(),
        stdout=stdio.fileno(),
        stderr=stdio.fileno(),
        env={},
        cwd="/",
        pass_fds=launch.pass_fds,
        start_new_session=True,
    )


async def exited(process: subprocess.Popen[bytes]) -> int:
    """Wait for a child of ours by pidfd. Returns its code, negative after a signal."""
    code = process.poll()
    if code is not None:
        return code
    handle = os.pidfd_open(process.pid)
    try:
        await gone(handle)
    finally:
        os.close(handle)
    return process.wait()


async def gone(pidfd: int) -> None:
    """Wait until the process behind a pidfd has ended."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    loop.add_reader(pidfd, done.set)
    try:
        await done.wait()
    finally:
        loop.remove_reader(pidfd)
