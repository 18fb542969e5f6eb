"""Every backend passes the shipped suite; bubblewrap as root and as an ordinary user."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from engines import OF_THE_BACKEND

from hermes_rl.errors import SandboxDied
from hermes_rl.sandboxes import (
    CHECKS,
    Bubblewrap,
    BubblewrapSandbox,
    Check,
    Sandbox,
    Subprocess,
    conformance,
    processes,
    tells_a_host_fault,
)

every_check = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)


@every_check
async def test_bubblewrap(bubblewrap: Bubblewrap, check: Check) -> None:
    await check(bubblewrap)


@pytest.mark.parametrize("check", OF_THE_BACKEND, ids=lambda check: check.__name__)
@pytest.mark.usefixtures("reference")
async def test_the_reference(bubblewrap: Bubblewrap, check: Check) -> None:
    """bubblewrap starts the sandboxes itself."""
    await check(bubblewrap)


@every_check
async def test_none(plain: Subprocess, check: Check) -> None:
    await check(plain)


@every_check
def test_bubblewrap_of_an_ordinary_user(
    as_ordinary_user: Callable[[Path, str], None], check: Check
) -> None:
    as_ordinary_user(Path(conformance.__file__), check.__name__)


async def test_a_host_fault_is_not_the_agents_deed(bubblewrap: Bubblewrap) -> None:
    def strike(sandbox: Sandbox) -> None:
        assert isinstance(sandbox, BubblewrapSandbox)
        os.kill(sandbox.host_pid, signal.SIGKILL)

    await tells_a_host_fault(bubblewrap, strike)


async def test_a_sandbox_found_dead_blames_no_command(sandbox: BubblewrapSandbox) -> None:
    await sandbox.run("true", timeout_s=20)
    inside = processes.descendants(sandbox.host_pid)
    assert inside
    os.kill(sandbox.host_pid, signal.SIGKILL)
    # Nobody is left to hold the channel: the loop reads its end in the pauses between looks.
    await asyncio.to_thread(_all_gone, inside)
    await asyncio.sleep(0.01)
    with pytest.raises(SandboxDied) as caught:
        await sandbox.run("true", timeout_s=20)
    assert not caught.value.in_command


async def test_a_command_for_a_sandbox_not_yet_known_to_be_dead(
    sandbox: BubblewrapSandbox,
) -> None:
    """The host's fault too when the command meets the closed channel before the loop does."""
    await sandbox.run("true", timeout_s=20)
    inside = processes.descendants(sandbox.host_pid)
    assert inside
    os.kill(sandbox.host_pid, signal.SIGKILL)
    _all_gone(inside)  # the loop hears nothing meanwhile
    with pytest.raises(SandboxDied, match="signal 9 from outside") as caught:
        await sandbox.run("true", timeout_s=20)
    assert not caught.value.in_command, "it was never sent"


def _all_gone(those: Iterable[processes.Proc]) -> None:
    deadline = time.monotonic() + 60
    while any(p.alive() for p in those):
        assert time.monotonic() < deadline
        time.sleep(0.01)
