"""The supervisor alone, and the moments in which a command is ended."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hermes_rl.sandboxes import Sandbox, SandboxBackend, SandboxSpec, supervisor_text

SHELLS = 100


@contextmanager
def supervisor(folder: Path) -> Iterator[socket.socket]:
    """A bare supervisor that is ready; its pipe `o` has a reader."""
    ours, theirs = socket.socketpair()
    command = ["bash", "--norc", "--noprofile", str(folder / "supervisor"), str(folder)]
    process = subprocess.Popen([*command, str(folder), "x"], stdin=theirs, stdout=theirs)
    theirs.close()
    try:
        with ours:
            ours.settimeout(240)
            assert ours.recv(10) == b"R\n"
            yield ours
    finally:
        process.kill()
        process.wait()


def test_no_shell_hangs_when_its_command_is_killed(tmp_path: Path) -> None:
    """`wait -f` of bash 5.2 reads freed memory, and one shell of 256 hangs: none may use it."""
    lines = supervisor_text().splitlines()
    assert not [line for line in lines if "wait -f" in line.partition("#")[0]]
    (tmp_path / "supervisor").write_text(supervisor_text())
    (tmp_path / "env").write_text("_hx_names=\n")
    (tmp_path / "cmd").write_text("kill -9 $BASHPID\n")
    os.mkfifo(tmp_path / "o")
    reader = os.open(tmp_path / "o", os.O_RDONLY | os.O_NONBLOCK)
    try:
        for number in range(SHELLS):
            with supervisor(tmp_path) as channel:
                channel.send(b"r o /dev/null - b\n")
                try:
                    answer = channel.recv(20)
                except TimeoutError:
                    answer = b"nothing"
                assert answer == b"E 137 \n", f"shell {number} said {answer!r}"
    finally:
        os.close(reader)


async def test_timeouts_at_every_moment(each_sandbox: Sandbox) -> None:
    """Before the fork, in it, while children start: the session goes on, nothing is left."""
    sleep = f"sleep {980_000 + os.getpid()}"
    command = f"for i in 1 2; do (setsid {sleep} &); done; {sleep}"
    for number in range(60):
        result = await each_sandbox.run(command, timeout_s=number / 2000)
        assert result.timed_out
    found = await each_sandbox.run(f"pgrep -fc '^{sleep}' || true", timeout_s=20)
    assert found.output == "0\n"


async def test_closing_at_once_after_a_cancel(
    backend: SandboxBackend, loop_reports: list[dict[str, Any]]
) -> None:
    """What ends the cancelled command finds its sandbox closed, and says nothing."""
    for number in range(10):
        sandbox = await backend.lease(SandboxSpec(lease="cancel"))
        task = asyncio.create_task(sandbox.run("echo x; sleep 900", timeout_s=20))
        await asyncio.sleep(number / 1000)
        task.cancel()
        await asyncio.wait([task])
        await sandbox.aclose()
    gc.collect()  # an exception that nobody fetched is told when its task goes
    await asyncio.sleep(0)
    assert loop_reports == []
