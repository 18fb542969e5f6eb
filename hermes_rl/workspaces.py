"""Workspaces of rollouts, stored in the run directory for regrading.

`workspaces/TRAJECTORY.tar.gz` holds the files, `workspaces/TRAJECTORY.image` what was changed over
an image, `workspaces/TRAJECTORY.json` what an environment noted in `ctx.state`. All are stored
before the row of the rollout. Files without a row (after a kill) are harmless and may be deleted.
The row of a rollout that could not be graded is in `failures` and says so;
`workspaces/TRAJECTORY.unjudged.json` says how its agent ended.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hermes_rl.sandboxes import FORMAT, Sandbox, changes_of
from hermes_rl.store import disk_errors
from hermes_rl.text import SECRETS

WORKSPACES = "workspaces"
"""The folder of a run directory."""


@dataclass(frozen=True)
class Kept:
    """The final state of one rollout."""

    archive: Path | None
    """None where there was no sandbox."""
    changes: Path | None
    """A snapshot of what was changed over an image, where the backend can write one."""
    state: dict[str, Any]


@dataclass(frozen=True)
class Workspaces:
    """The folder of one run."""

    folder: Path

    async def keep(
        self,
        sandbox: Sandbox | None,
        trajectory_id: str,
        state: str,
        unjudged: Mapping[str, Any] | None = None,
    ) -> None:
        """Store what a graded sandbox holds, and the state; without a sandbox the state alone.

        Secrets of this process are replaced in the state, not in the files.

        Args:
            state: as `state_text` wrote it before it was graded.
            unjudged: columns that the row of a rollout lacks which could not be judged.

        Raises: DiskFull, SandboxDied.
        """
        with disk_errors():
            self.folder.mkdir(exist_ok=True)
            noted = self.folder / f"{trajectory_id}.json"
            await asyncio.to_thread(noted.write_text, SECRETS.scrub(state))
            if unjudged is not None:
                ended = self.folder / f"{trajectory_id}.unjudged.json"
                await asyncio.to_thread(ended.write_text, SECRETS.scrub(json.dumps(unjudged)))
            if sandbox is not None:
                await sandbox.pack_left(self.folder / f"{trajectory_id}.{FORMAT}")

    def find(self, trajectory_id: str, *, sandboxed: bool) -> Kept | None:
        """The stored state of a rollout; None when nothing was stored, or not its state. Blocking.

        Args:
            sandboxed: it had a sandbox, whose archive must be there.
        """
        archive = self.folder / f"{trajectory_id}.{FORMAT}"
        state = self.folder / f"{trajectory_id}.json"
        if not state.exists() or (sandboxed and not archive.exists()):
            return None
        changes = changes_of(archive) if changes_of(archive).exists() else None
        return Kept(archive if sandboxed else None, changes, json.loads(state.read_text()))

    def as_rolled(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A row of `trajectories`, or one of `failures` with what could not be judged in its place:
        how the agent ended. Blocking."""
        ended = self.folder / f"{row['trajectory_id']}.unjudged.json"
        if row["cause"] is None or not ended.exists():
            return dict(row)
        return {**row, **json.loads(ended.read_text())}


def state_text(state: dict[str, Any]) -> str | None:
    """Encode a state to be kept; None for one that is not plain JSON: such a rollout cannot be
    graded again, and it is not kept."""
    try:
        return json.dumps(state, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return None
