"""Setups of tasks that run once for several rollouts of one process.

A snapshot is taken of the sandbox in which the setup ran; the other rollouts start from that.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hermes_rl.errors import SandboxError
from hermes_rl.sandboxes import Sandbox

KEPT = 16
"""Tasks of which snapshots are kept in one process: rollouts of a task come one after the other."""


@dataclass
class Setups:
    """Snapshots of tasks' setups, of one process."""

    at_end: Callable[..., Any]
    """Takes a function and its arguments, to be called after all rollouts."""
    _folder: Path | None = None
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _known: OrderedDict[str, asyncio.Future[Path | None]] = field(default_factory=OrderedDict)
    """Task -> its snapshot; None for one whose setup has to run each time."""

    async def find(self, name: str) -> Path | None:
        """A task's snapshot; waits for it while its setup runs for another rollout.

        None says that the caller has to run the setup; it calls `saved`, or `failed`, after it.

        Args:
            name: what the task is known by: equal for equal tasks, images and limits.
        """
        found = self._known.get(name)
        if found is not None:
            self._known.move_to_end(name)
            return await asyncio.shield(found)
        self._known[name] = asyncio.get_running_loop().create_future()
        while len(self._known) > KEPT and next(iter(self._known.values())).done():
            _, oldest = self._known.popitem(last=False)
            if (folder := oldest.result()) is not None:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return None

    async def saved(self, name: str, sandbox: Sandbox) -> None:
        """Take a snapshot after the first setup of a task."""
        known = self._known.get(name)
        if known is None or known.done():
            return
        try:
            folder = await self._snapshot(sandbox)
        except BaseException:
            self.failed(name)
            raise
        if not known.done():
            known.set_result(folder)

    def failed(self, name: str) -> None:
        """The setup of a task failed, or could not run: others run it themselves."""
        known = self._known.get(name)
        if known is not None and not known.done():
            self._known.pop(name)
            known.set_result(None)

    async def _snapshot(self, sandbox: Sandbox) -> Path | None:
        """None where there can be none, as of a setup that leaves processes."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="hermes-rl-setups-"))
            self.at_end(shutil.rmtree, self._folder, ignore_errors=True)
        folder = self._folder / str(next(self._numbers))
        try:
            return folder if await sandbox.snapshot(folder) else None
        except (OSError, SandboxError):
            return None
