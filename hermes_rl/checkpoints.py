"""Checkpoints: the state of a unit's rollout after a turn, from which a later attempt resumes.

`checkpoints/UNIT/TURN-EPOCH-ATTEMPT/` of a run directory holds `checkpoint.json` (messages and
events, budget, the agent's state) and `sandbox/`, a snapshot of files and shell. A folder
appears whole or not at all; the latest of a unit counts. They are deleted once the unit has a final
row.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hermes_rl.agent import Progress
from hermes_rl.errors import CAUSES, SandboxError
from hermes_rl.events import AttemptKey, Begun, Ended, Event, MessageAdded, Resumed, whole_rollout
from hermes_rl.identity import trajectory_id
from hermes_rl.messages import Message
from hermes_rl.sandboxes import Sandbox
from hermes_rl.text import SECRETS

_log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
"""The folder of a run directory."""
_FILE = "checkpoint.json"
_SANDBOX = "sandbox"


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a rollout after a turn."""

    key: AttemptKey
    """Of the attempt that wrote it."""
    progress: Progress
    events: list[Event]
    """All events except the starts of attempts."""
    spent: dict[str, int] = {}
    """Of the unit's budgets, by name."""

    @property
    def messages(self) -> list[Message]:
        """The whole conversation."""
        return [event.message for event in self.events if isinstance(event, MessageAdded)]

    def resumed(self) -> Resumed:
        """The event of an attempt that resumes from here."""
        key = self.key
        return Resumed(
            trajectory_id=trajectory_id(key.unit_id, key.epoch, key.attempt),
            turn=self.progress.turn,
            events=self.events,
        )


_decode = msgspec.json.Decoder(Checkpoint).decode


@dataclass(frozen=True)
class Found:
    """A checkpoint on the disk."""

    checkpoint: Checkpoint
    snapshot: Path | None
    """Of its sandbox, where it had one."""


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: where they are.
        every: turns from one to the next.
    """

    folder: Path
    every: int

    async def keep(
        self,
        key: AttemptKey,
        progress: Progress,
        events: Sequence[Event],
        spent: Mapping[str, int],
        sandbox: Sandbox | None,
    ) -> bool:
        """Write a checkpoint that replaces earlier ones of the unit. Returns False when processes
        run in the sandbox, or writing fails, which never fails a rollout."""
        happened = whole_rollout(events)
        kept: list[Event] = [e for e in happened if not isinstance(e, Begun | Ended)]
        checkpoint = Checkpoint(key=key, progress=progress, events=kept, spent=dict(spent))
        unit = self.folder / key.unit_id
        name = f"{progress.turn:06}-{key.epoch}-{key.attempt}"
        half = unit / f".{name}"
        try:
            text = msgspec.json.encode(SECRETS.scrub_record(checkpoint))
            await asyncio.to_thread(_clear, half)
            if sandbox is not None and not await sandbox.snapshot(half / _SANDBOX):
                return False
            await asyncio.to_thread(_finish, half, unit / name, text)
        except (OSError, SandboxError, TypeError, ValueError) as error:
            # Of a sandbox that is gone the next tool call tells more.
            _log.warning(
                "no checkpoint of unit %s after turn %d: %s", key.unit_id[:12], progress.turn, error
            )
            return False
        finally:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, half, ignore_errors=True))
        return True

    async def find(self, unit_id: str) -> Found | None:
        """The latest checkpoint of a unit that can be read."""
        return await asyncio.to_thread(self._find, unit_id)

    def _find(self, unit_id: str) -> Found | None:
        for path in sorted((self.folder / unit_id).glob("[0-9]*-*-*"), reverse=True):
            try:
                checkpoint = _decode((path / _FILE).read_bytes())
            except (OSError, msgspec.DecodeError) as error:
                _log.warning("%s cannot be read: %s", path, error)
                continue
            snapshot = path / _SANDBOX
            return Found(checkpoint, snapshot if snapshot.is_dir() else None)
        return None

    async def drop(self, unit_id: str) -> None:
        """Delete those of a unit."""
        await asyncio.to_thread(shutil.rmtree, self.folder / unit_id, ignore_errors=True)


def may_resume(cause: str | None) -> bool:
    """Whether a later attempt may resume from the checkpoint of one with this cause: the rollout
    did not cause the failure. None is the cause of an attempt that did not fail."""
    return cause is not None and cause != "stalled" and CAUSES[cause].retry


def _clear(half: Path) -> None:
    shutil.rmtree(half, ignore_errors=True)  # of an attempt that was killed
    half.mkdir(parents=True)


def _finish(half: Path, whole: Path, text: bytes) -> None:
    """Write the last file, make all of it durable and visible, and delete what came before."""
    (half / _FILE).write_bytes(text)
    for path in (*half.rglob("*"), half):
        _sync(path)
    half.rename(whole)
    _sync(whole.parent)
    for other in whole.parent.iterdir():
        if other != whole:
            shutil.rmtree(other, ignore_errors=True)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
