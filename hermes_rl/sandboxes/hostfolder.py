"""A folder of the host as a sandbox's workspace: the agent works on your own files.

What the sandbox protects then is everything but that folder: the agent can change and delete all
that is in it, and what it leaves there may be run by you later (git hooks, build scripts).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hermes_rl.errors import UserError
from hermes_rl.sandboxes.privilege import has_slots

HOME = "/tmp"
"""Home of sessions in a host folder: what programs keep in HOME is no part of your files."""


@dataclass(frozen=True)
class HostFolder:
    """A folder that may be bound into a sandbox."""

    path: Path
    uid: int | None
    """Who the sandbox runs as: the folder's owner where we are root; None is ourselves."""


def host_folder(given: Path, state: Path) -> HostFolder:
    """Look at a folder before it is bound.

    Args:
        given: the folder.
        state: our own state folder, which no sandbox may reach.

    Raises: UserError when there is none, when it holds more than files of yours, or when the
        sandbox would have to run as root.
    """
    path = given.expanduser().resolve()
    if not path.is_dir():
        raise UserError(f"workspace {given}: no such folder. Make it, or name another")
    if state.resolve().is_relative_to(path):
        raise UserError(f"workspace {given}: it holds the folders of all sandboxes. Name a smaller")
    if not has_slots():
        if not os.access(path, os.W_OK | os.X_OK):
            raise UserError(f"workspace {given}: not writable for you. Name a folder of your own")
        return HostFolder(path, None)
    uid = path.stat().st_uid
    if uid == 0:
        raise UserError(
            f"workspace {given}: it belongs to root, and no sandbox runs as root. "
            f"Give it to a user (chown -R USER {given}), or start as an ordinary user"
        )
    return HostFolder(path, uid)
