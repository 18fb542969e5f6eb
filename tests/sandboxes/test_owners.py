"""An owner of sandboxes that begins while another process cleans up after owners that are gone."""

import fcntl
import os
from pathlib import Path

import pytest

from hermes_rl.sandboxes.slots import Home, lock


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
