"""Sandboxes alone, one after the other, in a worker as large as a busy one.

    python sandbox_verbs.py BACKEND (start | fork | builtin | external) COUNT [MB]

`start` leases and closes, `fork` does so from a snapshot of 20 MB; the others run a command in one
session. What it costs is measured by
`rows`, from outside.
"""

from __future__ import annotations

import asyncio
import mmap
import sys
import tempfile
from pathlib import Path

from hermes_rl.sandboxes import SandboxBackend, SandboxSnapshot, SandboxSpec
from hermes_rl.wiring import make_backend

COMMANDS = {"builtin": "echo step-1", "external": "/bin/true"}


def ballast(size_mb: int) -> mmap.mmap:
    """Resident memory: forking a large worker costs more."""
    held = mmap.mmap(-1, max(1, size_mb) << 20)
    for place in range(0, len(held), mmap.PAGESIZE):
        held[place] = 1
    return held


async def fork(backend: SandboxBackend, count: int, folder: Path) -> None:
    """Lease from one snapshot, and close."""
    async with await backend.lease(SandboxSpec(lease="bench-first")) as first:
        made = "for n in {1..200}; do head -c 100000 /dev/urandom >$n; done"
        assert (await first.run(made, timeout_s=30.0)).exit_code == 0
        assert await first.snapshot(folder)
    spec = SandboxSpec(lease="bench-fork", snapshot=SandboxSnapshot(folder, shared=True))
    for _ in range(count):
        async with await backend.lease(spec):
            pass


async def run(name: str, verb: str, count: int, folder: Path) -> None:
    """All of it."""
    folder.chmod(0o711)
    backend = make_backend(name, folder / "state")
    try:
        if verb == "start":
            for number in range(count):
                sandbox = await backend.lease(SandboxSpec(lease=f"bench-{number}"))
                await sandbox.aclose()
            return
        if verb == "fork":
            await fork(backend, count, folder / "snapshot")
            return
        sandbox = await backend.lease(SandboxSpec(lease="bench"))
        for _ in range(count):
            result = await sandbox.run(COMMANDS[verb], timeout_s=30.0)
            assert result.exit_code == 0, result.output
        await sandbox.aclose()
    finally:
        await backend.aclose()


def main() -> None:
    """See the module."""
    name, verb, count, *size = sys.argv[1:]
    held = ballast(int(size[0]) if size else 400)
    with tempfile.TemporaryDirectory(prefix="hermes-rl-bench-") as folder:
        asyncio.run(run(name, verb, int(count), Path(folder)))
    held.close()


if __name__ == "__main__":
    main()
