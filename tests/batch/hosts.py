"""A machine that ends the sandbox in which a certain command runs, as its memory killer would."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import kit


def sleeper(number: int) -> str:
    """A command that takes longer than any test, and that no other process of this machine runs."""
    return f"sleep 1{number:02}.{os.getpid()}"


def task(*steps: Any) -> dict[str, Any]:
    """A task that is solved once its first command has run."""
    script = [{"run": "echo 7 > out.txt"}, *steps, "done"]
    verify = 'test "$(cat "$WORKSPACE/out.txt")" = 7'
    return {"id": "t", "prompt": f"Write 7.\nSCRIPT: {json.dumps(script)}", "verify": verify}


async def running(command: str, run: kit.Process, seconds: float = 90.0) -> int:
    """Wait until the command runs in a sandbox; its process id."""
    wanted = b"".join(word.encode() + b"\0" for word in command.split())
    deadline = time.monotonic() + seconds
    while True:
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if entry.read_bytes() == wanted:
                    return int(entry.parent.name)
            except OSError:
                continue
        assert run.process.returncode is None, run.errors[-3000:]
        assert time.monotonic() < deadline, run.errors[-3000:]
        await asyncio.sleep(0.02)


async def dies_under(command: str, run: kit.Process, out: Path) -> None:
    """Wait until the command runs, and end its sandbox from outside."""
    pid = await running(command, run)
    boxes = kit.bwrap_pids(out)
    (outermost,) = [box for box in boxes if _parent(box) not in boxes]
    kit.kill(outermost)
    await kit.check_gone([pid], 30.0)


def _parent(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])
