"""A sandbox that the host ends: while a command runs, or between two."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hermes_rl.errors import SandboxDied
from hermes_rl.sandboxes import processes
from hermes_rl.sandboxes.base import SandboxSpec
from hermes_rl.sandboxes.bubblewrap import Bubblewrap


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def has_run(inside: processes.Proc) -> bool:
    return Path(f"/proc/{inside.pid}/root/workspace/runs").exists()


async def test_a_death_knows_that_a_command_ran(bubblewrap: Bubblewrap) -> None:
    async with await bubblewrap.lease(SandboxSpec(lease="death-within")) as sandbox:
        task = asyncio.create_task(sandbox.run("echo 1 >runs; sleep 60", timeout_s=90))
        await until(lambda: any(map(has_run, processes.descendants(sandbox.host_pid))))
        os.kill(sandbox.host_pid, signal.SIGKILL)
        with pytest.raises(SandboxDied) as caught:
            await task
        assert caught.value.in_command
        with pytest.raises(SandboxDied) as caught:
            await sandbox.run("true", timeout_s=20)
        assert not caught.value.in_command, "this one never ran"


async def test_a_sandbox_found_dead_blames_no_command(bubblewrap: Bubblewrap) -> None:
    async with await bubblewrap.lease(SandboxSpec(lease="death-between")) as sandbox:
        await sandbox.run("true", timeout_s=20)
        inside = processes.descendants(sandbox.host_pid)
        assert inside
        os.kill(sandbox.host_pid, signal.SIGKILL)
        # Nobody is left to hold the channel: the loop reads its end in the pauses between looks.
        await until(lambda: not any(p.alive() for p in inside))
        await asyncio.sleep(0.01)
        with pytest.raises(SandboxDied) as caught:
            await sandbox.run("true", timeout_s=20)
        assert not caught.value.in_command
