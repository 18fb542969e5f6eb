"""Checkpoints: the state of a unit's rollout, from which a later attempt resumes: after a turn, or
at the agent's end, before judges are called, after each of their replies and when they fail.

`checkpoints/UNIT/TURN-EPOCH-ATTEMPT/` of a run directory holds `checkpoint.json` (messages and
events, budget, the agent's state) and `sandbox/`, a snapshot of files and shell. At the agent's end
its name ends with `-EVENTS-REPLIES-ended`, the numbers of events and of judges' replies, and it has
no snapshot. A folder appears whole or not at all; the latest of a unit counts. They are deleted
once the unit has a final row.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hermes_rl.agent import AgentResult, Progress
from hermes_rl.errors import CAUSES, SandboxError
from hermes_rl.events import AttemptKey, Begun, Ended, Event, MessageAdded, Resumed, whole_rollout
from hermes_rl.identity import trajectory_id
from hermes_rl.judging import Reply
from hermes_rl.messages import Message
from hermes_rl.sandboxes import Sandbox
from hermes_rl.text import SECRETS

_log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
"""The folder of a run directory."""
_FILE = "checkpoint.json"
_SANDBOX = "sandbox"
_ENDED = "-ended"


class AgentEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How the agent of a rollout ended that has no reward yet: `AgentResult` without messages."""

    end_reason: str
    final_response: str | None
    turns: int
    seconds: float
    active_seconds: float
    metrics: dict[str, float]
    replies: dict[str, list[Reply]] = {}
    """Those of judges (`Replies.received`)."""

    @classmethod
    def of(cls, result: AgentResult, replies: Mapping[str, list[Reply]]) -> AgentEnd:
        """The end of an agent, and the replies of judges about its answer so far."""
        made = msgspec.convert(result, cls, from_attributes=True)
        return msgspec.structs.replace(made, replies=dict(replies))


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a rollout."""

    key: AttemptKey
    """Of the attempt that wrote it."""
    progress: Progress | None = None
    """After a turn."""
    ended: AgentEnd | None = None
    """At the agent's end; exactly one of both is there."""
    events: list[Event]
    """All events except the starts of attempts."""
    spent: dict[str, int] = {}
    """Of the unit's budgets, by name."""

    @property
    def messages(self) -> list[Message]:
        """The whole conversation."""
        return [event.message for event in self.events if isinstance(event, MessageAdded)]

    @property
    def turn(self) -> int:
        """The last turn that it holds."""
        if self.ended is not None:
            return self.ended.turns
        assert self.progress is not None
        return self.progress.turn

    def result(self) -> AgentResult | None:
        """How the agent ended; None for a checkpoint after a turn."""
        if self.ended is None:
            return None
        ended = msgspec.structs.asdict(self.ended)
        del ended["replies"]
        return AgentResult(messages=self.messages, **ended)

    def resumed(self) -> Resumed:
        """The event of an attempt that resumes from here."""
        key = self.key
        return Resumed(
            trajectory_id=trajectory_id(key.unit_id, key.epoch, key.attempt),
            turn=self.turn,
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
        every: turns from one to the next; None writes them at the agent's end only.
    """

    folder: Path
    every: int | None

    async def keep(
        self,
        key: AttemptKey,
        state: Progress | AgentEnd,
        events: Sequence[Event],
        spent: Mapping[str, int],
        sandbox: Sandbox | None,
    ) -> bool:
        """Write a checkpoint that replaces earlier ones of the unit.

        Args:
            state: of the agent, after a turn or at its end.
            sandbox: its files are kept; None for a rollout that needs none from here on.

        Returns: False when processes run in the sandbox, or writing fails, which never fails a
            rollout.
        """
        happened = whole_rollout(events)
        kept: list[Event] = [e for e in happened if not isinstance(e, Begun | Ended)]
        checkpoint = Checkpoint(
            key=key,
            progress=state if isinstance(state, Progress) else None,
            ended=state if isinstance(state, AgentEnd) else None,
            events=kept,
            spent=dict(spent),
        )
        unit = self.folder / key.unit_id
        name = f"{checkpoint.turn:06}-{key.epoch}-{key.attempt}"
        if checkpoint.ended is not None:
            replies = sum(map(len, checkpoint.ended.replies.values()))
            name += f"-{len(kept)}-{replies}{_ENDED}"
        half = unit / f".{name}"
        try:
            if await asyncio.to_thread((unit / name).exists):
                return True  # nothing has happened since
            text = msgspec.json.encode(SECRETS.scrub_record(checkpoint))
            await asyncio.to_thread(_clear, half)
            if sandbox is not None and not await sandbox.snapshot(half / _SANDBOX):
                return False
            await asyncio.to_thread(_finish, half, unit / name, text)
        except (OSError, SandboxError, TypeError, ValueError) as error:
            # Of a sandbox that is gone the next tool call tells more.
            _log.warning(
                "no checkpoint of unit %s after turn %d: %s",
                *(key.unit_id[:12], checkpoint.turn, error),
            )
            return False
        finally:
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, half, ignore_errors=True))
        return True

    async def find(self, unit_id: str) -> Found | None:
        """The latest checkpoint of a unit that can be read."""
        return await asyncio.to_thread(self._find, unit_id)

    def _find(self, unit_id: str) -> Found | None:
        paths = (self.folder / unit_id).glob("[0-9]*-*-*")
        for path in sorted(paths, key=_numbers, reverse=True):
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

    async def settle(self, unit_id: str, cause: str | None) -> None:
        """Delete those of a unit from which no attempt may resume after one with this cause.

        Args:
            cause: None is the cause of an attempt that did not fail.
        """
        if cause in _OF_GRADING:
            await asyncio.to_thread(_keep_ended, self.folder / unit_id)
        elif cause is None or not CAUSES[cause].retry:
            await self.drop(unit_id)


_OF_GRADING = ("stalled", "verifier")
"""Causes that a rollout may have itself, but not once its agent has ended."""


def clear(folder: Path, is_done: Callable[[str], bool]) -> None:
    """Delete what a run that is over left in its folder, except rollouts that only need a grade.

    Args:
        is_done: whether a unit has its final row; a kill just after that row leaves a checkpoint.
    """
    for unit in folder.glob("*"):
        with suppress(ValueError):  # the name of no unit, such as `.nfs...`
            if is_done(unit.name):
                shutil.rmtree(unit, ignore_errors=True)
        _keep_ended(unit)
    with suppress(OSError):
        folder.rmdir()


def _keep_ended(unit: Path) -> None:
    for path in unit.glob("*"):
        if not path.name.endswith(_ENDED) or path.name.startswith("."):
            shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        unit.rmdir()


def _numbers(path: Path) -> list[int]:
    return [int(part) for part in path.name.split("-") if part.isdecimal()]


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
