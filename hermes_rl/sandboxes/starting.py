"""Starting a process with an identity and an environment of its own.

No preexec_fn and no user=: both cost vfork, several milliseconds in a large process. To drop to
another user id the starting thread takes that identity for the moment of the start: to the kernel
an identity belongs to a thread.
"""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from hermes_rl.errors import SandboxStartError
from hermes_rl.sandboxes.files import libc


@dataclass(frozen=True)
class Launch:
    """What to start."""

    argv: Sequence[str]
    executable: str
    """What runs; argv[0] is only its name, which the sandbox can see."""
    pass_fds: Sequence[int] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """All of its environment."""
    uid: int | None = None
    """User and group id to drop to; None keeps ours."""


@dataclass(frozen=True)
class _Calls:
    """System call numbers of one architecture: libc's functions would change every thread."""

    setgroups: int
    setresgid: int
    setresuid: int


_CALLS = {"x86_64": _Calls(116, 119, 117), "aarch64": _Calls(159, 149, 147)}
_PR_SET_DUMPABLE = 4


@contextmanager
def identity(uid: int | None) -> Iterator[None]:
    """This thread as user and group `uid`, without any other group; root before and after. None
    changes nothing. Raises: SandboxStartError where the system calls' numbers are not known.

    The saved ids stay 0, which is the way back; a program that is started loses them at its exec.
    """
    if uid is None:
        yield
        return
    calls = _CALLS.get(platform.machine())
    if calls is None:
        machine = platform.machine()
        raise SandboxStartError(f"root cannot start sandboxes on {machine}: use an ordinary user")
    library = libc()
    groups = os.getgroups()

    def call(number: int, *values: object) -> None:
        if library.syscall(number, *values) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot take the identity {uid}: {os.strerror(code)}")

    call(calls.setgroups, 0, None)
    try:
        call(calls.setresgid, uid, uid, 0)
        call(calls.setresuid, uid, uid, 0)
        yield
    finally:
        call(calls.setresuid, 0, 0, 0)
        call(calls.setresgid, 0, 0, 0)
        call(calls.setgroups, len(groups), (ctypes.c_uint32 * len(groups))(*groups))
        library.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # a change of identity clears it


def start(launch: Launch, stdio: socket.socket) -> subprocess.Popen[bytes]:
    """Start a process with its own session, and all three standard descriptors on `stdio`.
    Call it in a Spawner's thread."""
    with identity(launch.uid):
        return subprocess.Popen(
            launch.argv,
            executable=launch.executable,
            stdin=stdio.fileno(),
            stdout=stdio.fileno(),
            stderr=stdio.fileno(),
            env=dict(launch.env),
            cwd="/",
            pass_fds=launch.pass_fds,
            start_new_session=True,
        )
