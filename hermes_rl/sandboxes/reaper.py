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
    """The process that cleans up when this one is gone.

    It is no child of this one: Ray kills an actor's children together with the actor.
    """

    def __init__(self, state: Path, owner: str, cgroups: str) -> None:
        ours, self._pipe = os.pipe()
        self._ended, theirs = os.pipe()
        command = [sys.executable, "-I", "-S", warden.__file__, str(state), owner, cgroups]
        subprocess.run(
            ["/bin/sh", "-c", 'exec 3<&0; "$@" <&3 3<&- &', "sh", *command],
            stdin=ours,
            stdout=theirs,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
            start_new_session=True,
            check=True,
        )
        os.close(ours)
        os.close(theirs)

    def close(self) -> None:
        """All is cleaned up: let it go. Blocks a moment."""
        if self._pipe >= 0:
            with contextlib.suppress(BrokenPipeError):  # it was killed
                os.write(self._pipe, b"closed")
            os.close(self._pipe)
            self._pipe = -1
            os.read(self._ended, 1)  # end of file: it has ended
            os.close(self._ended)
