"""Workspaces that rollouts left, kept in the run directory so that they can be graded again.

`workspaces/TRAJECTORY.tar.gz` holds the files, `workspaces/TRAJECTORY.json` what an environment
noted in `ctx.state`. Both stand before the rollout's row does. What belongs to no row (a kill in
between) is harmless and may be deleted.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hermes_rl.sandboxes.base import Sandbox
from hermes_rl.sandboxes.packing import FORMAT
from hermes_rl.store.disk import disk_errors


@dataclass(frozen=True)
class Kept:
    """What one rollout left."""

    archive: Path | None
    """None where there was no sandbox."""
    state: dict[str, Any]


@dataclass(frozen=True)
class Workspaces:
    """The folder of one run."""

    folder: Path

    async def keep(self, sandbox: Sandbox | None, trajectory_id: str, state: str) -> None:
        """Store what a graded sandbox holds, and the state; without a sandbox the state alone.

        Args:
            state: as `state_text` wrote it before it was graded.

        Raises: DiskFull, SandboxDied.
        """
        with disk_errors():
            self.folder.mkdir(exist_ok=True)
            await asyncio.to_thread((self.folder / f"{trajectory_id}.json").write_text, state)
            if sandbox is not None:
                await sandbox.pack_left(self.folder / f"{trajectory_id}.{FORMAT}")

    def find(self, trajectory_id: str, *, sandboxed: bool) -> Kept | None:
        """What a rollout left; None when nothing was kept, or its state could not be. Blocking.

        Args:
            sandboxed: it had a sandbox, whose archive must be there.
        """
        archive = self.folder / f"{trajectory_id}.{FORMAT}"
        state = self.folder / f"{trajectory_id}.json"
        if not state.exists() or (sandboxed and not archive.exists()):
            return None
        return Kept(archive if sandboxed else None, json.loads(state.read_text()))


def state_text(state: dict[str, Any]) -> str | None:
    """A state as it is kept; None for one that is no plain JSON: nothing is kept of such a rollout,
    for it cannot be graded again."""
    try:
        return json.dumps(state, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None
