"""Sandboxes on another machine over ssh, and in the fake of modal, beside ssh's own commands.

    python remote_verbs.py (ssh | modal) STARTS COMMANDS

Prints seconds of wall time: the work is that of other processes. The machine is this one.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "sandboxes"))
from sshd import Sshd, sshd

from hermes_rl.sandboxes import (
    GradingSpec,
    Modal,
    SandboxBackend,
    SandboxSpec,
    SshHosts,
    find_binary,
    reachable,
)
from hermes_rl.testing import FakeModal


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    """Seconds that it takes."""
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


async def measure(backend: SandboxBackend, starts: int, commands: int) -> dict[str, list[float]]:
    """Start, a builtin in one session, a grading."""
    found: dict[str, list[float]] = {"start": [], "builtin": [], "grade": []}
    try:
        async with await backend.lease(SandboxSpec("warm")):  # connects, once
            pass
        for _ in range(starts):
            began = time.perf_counter()
            async with await backend.lease(SandboxSpec("bench")) as sandbox:
                found["start"].append(time.perf_counter() - began)
                found["grade"].append(await timed(lambda: sandbox.grade(GradingSpec("true"))))
        async with await backend.lease(SandboxSpec("bench")) as sandbox:
            for _ in range(commands):
                found["builtin"].append(
                    await timed(lambda: sandbox.run("echo step-1", timeout_s=30))
                )
    finally:
        await backend.aclose()
    return found


async def measure_ssh(machine: Sshd, starts: int, commands: int) -> dict[str, list[float]]:
    """`ssh HOST true`, and `run("true")` on one connection of asyncssh."""
    import asyncssh

    host = machine.host
    options = ["-F", "none", "-o", f"UserKnownHostsFile={host.known_hosts}", "-i", str(host.key)]
    line = ["ssh", *options, "-p", str(host.port), "127.0.0.1", "true"]

    async def once() -> None:
        await asyncio.to_thread(subprocess.run, line, check=True)

    found = {"ssh": [await timed(once) for _ in range(starts)]}
    async with asyncssh.connect(
        "127.0.0.1", host.port, client_keys=[host.key], known_hosts=host.known_hosts, config=None
    ) as held:
        found["exec"] = [await timed(lambda: held.run("true")) for _ in range(commands)]
    return found


def main() -> None:
    """See the module."""
    name, starts, commands = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

    async def all_of(folder: Path) -> dict[str, list[float]]:
        if name == "modal":
            async with FakeModal(reachable(find_binary(), folder)) as server:
                os.environ.update(server.variables)
                return await measure(Modal(), starts, commands)
        with sshd(folder) as machine:
            found = await measure(SshHosts([machine.host]), starts, commands)
            return {**found, **await measure_ssh(machine, starts, commands)}

    with tempfile.TemporaryDirectory(prefix="hermes-rl-bench-", dir="/tmp") as made:
        folder = Path(made)
        folder.chmod(0o711)
        print(json.dumps(asyncio.run(all_of(folder))))


if __name__ == "__main__":
    main()
