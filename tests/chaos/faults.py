"""Faults of disks, and what people do to a run between two starts: merges, damage and repair."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import kit

from hermes_rl.store import COMPACTION_POINTS, CRASH_VARIABLE

DISK_BYTES = 64 * 2**20
RESTORED = ("commits/*.json", "epochs/*.json", "compacted/*.json", "stats.json")
"""Files that a repair or a start makes again from others, so that nothing may be lost."""


async def command(*arguments: str, crash_at: str = "") -> tuple[int, str]:
    """Run `hermes-rl ARGUMENTS`. Returns its exit code and what it printed."""
    process = await asyncio.create_subprocess_exec(
        *(str(Path(sys.executable).with_name("hermes-rl")), *arguments),
        env={**os.environ, CRASH_VARIABLE: crash_at},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed, _ = await process.communicate()
    text = printed.decode(errors="replace")
    assert "Traceback" not in text, text
    return process.returncode or 0, text


async def merge(out: Path, chance: random.Random) -> str:
    """Merge a run, mostly interrupted. Returns what was done."""
    point = chance.choice([*COMPACTION_POINTS, ""])
    crash_at = f"{point}:{chance.randint(1, 2)}" if point else ""
    code, text = await command("compact", str(out), "--keep-old", "0", crash_at=crash_at)
    assert code == 0 or (crash_at and code == -9), text
    return f"merge {crash_at}".strip()


async def damage(out: Path, chance: random.Random) -> str:
    """Flip a bit of a file, or delete it, and repair the run. Returns what was done."""
    files = sorted(path for pattern in RESTORED for path in out.glob(pattern))
    if not files:
        return "no file to damage"
    path, how = chance.choice(files), chance.choice(["flip", "delete"])
    content = bytearray(path.read_bytes())
    path.unlink()
    if how == "flip" and content:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
    await command("check", str(out))
    code, text = await command("check", str(out), "--repair")
    assert code in (0, 2), text
    return f"{how} {path.relative_to(out)}"


async def suspend(pids: Iterable[int], seconds: float) -> None:
    """Suspend processes for longer than the lease, as Ctrl-Z or a preempted machine does."""
    with suppress(ProcessLookupError):
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def interrupt(run: kit.RunProcess) -> None:
    """Ctrl-C, unless the run has ended."""
    if run.process.returncode is None:
        run.process.send_signal(signal.SIGINT)


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system for a folder, which only root can mount; otherwise that of the machine."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = f"size={DISK_BYTES},mode=711".encode()
    mounted = libc.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, size) == 0
    try:
        yield
    finally:
        if mounted:
            libc.umount2(bytes(folder), 2)


def fill(folder: Path, chance: random.Random) -> Path | None:
    """Leave a few bytes on the disk of a folder. Returns the file to delete; None on a disk that is
    not small."""
    status = os.statvfs(folder)
    if status.f_blocks * status.f_frsize > DISK_BYTES:
        return None
    ballast = folder / "ballast"
    free = status.f_bavail * status.f_frsize
    with suppress(OSError):  # the run writes too
        ballast.write_bytes(b"x" * max(0, free - chance.choice([0, 4096, 60_000, 300_000])))
    return ballast
