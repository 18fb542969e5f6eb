"""Who owns the folders of sandboxes: while others clean up, and against other users."""

import asyncio
import fcntl
import os
import subprocess
from pathlib import Path

import pytest

from hermes_rl.sandboxes import GradingSpec, Home, Sandbox, lock, watchdog

STRANGER = 54322
"""A user id that nobody has."""


def test_a_reaper_between_open_and_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the new owner's file for a moment, as it must to see whether that one lives."""
    flock, reapers = fcntl.flock, []

    def late(fd: int, how: int) -> None:
        if not reapers:
            reapers.append(os.open(f"/proc/self/fd/{fd}", os.O_RDWR))
            flock(reapers[0], how)
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    home = Home(tmp_path)
    os.close(reapers[0])
    assert lock(home.owners / home.owner) is None, "it lives, and is seen to live"
    home.close()


async def test_no_other_user_reaches_a_session_or_a_verdict(
    each_sandbox: Sandbox, state: Path
) -> None:
    """Another user of the machine tries all paths of a sandbox, and of its verifier, that exist."""
    process = await each_sandbox.start_process("sleep 60")
    assert_closed([state, Path(watchdog.memory_folder(str(state)))])
    await process.kill()
    grading = asyncio.create_task(each_sandbox.grade(GradingSpec("sleep 60", score=True)))
    while not any(state.glob("boxes/*/grade1/ctl/out")):
        assert not grading.done()
        await asyncio.sleep(0.01)
    assert_closed([state])
    grading.cancel()
    await asyncio.wait([grading])


def assert_closed(roots: list[Path]) -> None:
    """No pipe, and no file of a sandbox, can be opened by others."""
    paths = [path for root in roots for path in root.rglob("*")]
    folders = [path for path in paths if path.parent.name == "boxes"]
    folders = [path for path in folders if not path.name.endswith(".1")]  # what all share
    assert [path.stat().st_mode & 0o007 for path in folders] == [0]
    pipes = [path for path in paths if path.is_fifo()]
    assert pipes
    assert [path for path in pipes if path.stat().st_mode & 0o007] == []
    inside = [path for path in paths if any(sandbox in path.parents for sandbox in folders)] + pipes
    if os.geteuid() == 0:
        found = subprocess.run(
            ["setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups", "--"]
            + ["sh", "-c", 'for p; do test -e "$p" && echo "$p"; done', "sh"]
            + [str(path) for path in inside],
            capture_output=True,
            text=True,
            check=False,
        )
        assert found.stdout == ""
