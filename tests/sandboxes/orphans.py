"""Sandboxes that end leave no child to whoever is process 1 of the machine.

Run by test_orphans in a process of its own that takes that part: as a subreaper it gets each
process whose parent has ended, so that none is missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import time
from collections.abc import Iterator
from pathlib import Path

from hermes_rl.errors import SandboxKilled
from hermes_rl.sandboxes import KILL_SHELL, Bubblewrap, GradingSpec, Sandbox, SandboxSpec, processes

_PR_SET_CHILD_SUBREAPER = 36
COUNT = 4


@contextlib.contextmanager
def no_new_children() -> Iterator[None]:
    """Within, this process stands for the machine's process 1, and no child may be left to it."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = children()
    try:
        yield
        # Nobody here waits for what is left to us: it stays, dead or alive. What another thread
        # is just waiting for goes.
        deadline = time.monotonic() + 10
        while (left := children() - before) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"left to process 1: {[described(pid) for pid in left]}"
    finally:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def described(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text()[:80] + Path(f"/proc/{pid}/wchan").read_text()
    return str(pid)


def children() -> set[int]:
    """Ours, dead or alive."""
    return set(processes.children(os.getpid()))


async def lease(backend: Bubblewrap) -> Sandbox:
    return await backend.lease(SandboxSpec(lease="orphan"))


async def closed(backend: Bubblewrap) -> None:
    """With background processes that lost their parents."""
    async with await lease(backend):  # the backend's own processes are started with the first
        pass
    with no_new_children():
        for _ in range(COUNT):
            async with await lease(backend) as sandbox:
                await sandbox.run("sleep 500 & (setsid sleep 500 &)", timeout_s=20)


async def graded(backend: Bubblewrap) -> None:
    """Two verifiers each; one that times out and leaves processes behind."""
    async with await lease(backend):
        pass
    with no_new_children():
        for _ in range(COUNT):
            async with await lease(backend) as sandbox:
                for script, code in (("exit 3", 3), ("(setsid sleep 500 &); exit 0", 0)):
                    assert (await sandbox.grade(GradingSpec(script))).exit_code == code
        async with await lease(backend) as sandbox:
            slow = await sandbox.grade(GradingSpec("sleep 500 & sleep 500", timeout_s=0.2))
            assert slow.timed_out


async def killed_by_the_agent(backend: Bubblewrap) -> None:
    async with await lease(backend):
        pass
    with no_new_children():
        for _ in range(COUNT):
            async with await lease(backend) as sandbox:
                try:
                    await sandbox.run(f"sleep 500 & {KILL_SHELL}", timeout_s=20)
                except SandboxKilled:
                    continue
                raise AssertionError("not killed")


async def cancelled(backend: Bubblewrap) -> None:
    """In each stage of a start."""
    async with await lease(backend):
        pass
    with no_new_children():
        for number in range(12):
            start = asyncio.ensure_future(lease(backend))
            await asyncio.sleep(0.001 * number)
            start.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await start).aclose()
