"""At start: removes what owners that are gone left in a state folder, and only that.

An owner is gone when its lock can be taken (see `slots`): a live one of another run holds it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from hermes_rl.sandboxes import warden
from hermes_rl.sandboxes.slots import lock


def reap(state: Path, cgroups: str = "") -> list[str]:
    """Clean up after all owners that are gone. Blocks. Returns their names."""
    gone = []
    owners = state / "owners"
    known = set(os.listdir(owners))
    for name in sorted(known):
        try:
            held = lock(owners / name)
        except OSError:
            continue
        if held is None:
            continue
        warden.clean(str(state), name, cgroups)
        os.close(held)
        gone.append(name)
    # A folder is made after its owner's lock and removed before it: without one it is a stray.
    for box in os.listdir(state / "boxes"):
        owner = box.rpartition(".")[0]
        if owner not in known and not (owners / owner).exists():
            warden.clean(str(state), owner, cgroups)
            gone.append(owner)
    return gone


class Warden:
    """The process that cleans up when this one is gone."""

    def __init__(self, state: Path, owner: str, cgroups: str) -> None:
        ours, theirs = os.pipe()
        self._pipe = theirs
        command = [sys.executable, "-I", "-S", warden.__file__, str(state), owner, cgroups]
        self._process = subprocess.Popen(
            command,
            stdin=ours,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
            start_new_session=True,
        )
        os.close(ours)

    def close(self) -> None:
        """All is cleaned up: let it go. Blocks a moment."""
        if self._pipe >= 0:
            with contextlib.suppress(BrokenPipeError):  # it was killed
                os.write(self._pipe, b"closed")
            os.close(self._pipe)
            self._pipe = -1
            self._process.wait()
