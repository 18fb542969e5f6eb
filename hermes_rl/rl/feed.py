"""Rows of `rollouts()` in a queue, for trainers that take rows rather than groups.

with RowFeed(rollouts("my_env", policy, out="runs/live"), policy) as feed:
    for row in feed.take(64):
        ...                        # row.prompt_ids, row.completion_ids, row.member.advantage
    feed.acknowledge(step=1)
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from hermes_rl.errors import UserError
from hermes_rl.record import Segment
from hermes_rl.rl.live import GroupData, LiveMember, Policy, RolloutStream, SyncGroup, SyncRollouts

_POLL_SECONDS = 0.2
"""How often a full or an empty queue is looked at for the end of the stream."""


@dataclass(frozen=True)
class Row:
    """One sequence to train on. Lists have one entry per token."""

    group: GroupData
    member: LiveMember
    """Its `advantage` is the one of every trained token in all of its rows."""
    segment: Segment
    version: int | None
    """The least policy version of its sampled tokens. Where the engine names none, the policy's
    when the rollout began, which is at most that; None if that is unknown too."""

    @property
    def prompt_ids(self) -> list[int]:
        """Ids before the first sampled one."""
        return self.segment.input_ids[: self.segment.prompt_len]

    @property
    def completion_ids(self) -> list[int]:
        """All ids from the first sampled one on, those of tools and users among them."""
        return self.segment.input_ids[self.segment.prompt_len :]

    @property
    def completion_mask(self) -> list[int]:
        """1 where a completion id is trained, else 0."""
        return [int(trained) for trained in self.segment.loss_mask[self.segment.prompt_len :]]

    @cached_property
    def logprobs(self) -> list[float]:
        """Of sampling, for all `segment.input_ids`; 0 where not sampled."""
        return [0.0 if value is None else value for value in self.segment.logprobs]


def make_rows(
    group: GroupData, member: LiveMember, live_version: Callable[[float], int | None]
) -> list[Row]:
    """Return what to train on of a member: its trainable segments; none if it is not valid.

    Args:
        live_version: returns the policy's version at a time, in seconds since 1970.
    """
    rows: list[Row] = []
    for segment in member.segments:
        if member.advantage is None or not segment.trainable or not any(segment.loss_mask):
            continue
        assert member.trajectory is not None
        pairs = zip(segment.version_ids, segment.sampled_mask, strict=True)
        least = min(version for version, sampled in pairs if sampled)
        unknown = least < 0
        began = member.trajectory["started_at"] / 1e6
        rows.append(Row(group, member, segment, live_version(began) if unknown else least))
    return rows


@dataclass
class _QueuedGroup:
    """A group whose rows are in the queue, or were."""

    group: SyncGroup
    rows: int
    taken: int = 0
    stale: int = 0


class _NoMoreTasks(RuntimeError):
    """The stream has ended with its tasks."""


class _RowQueue(queue.Queue[Any]):
    """Tells which row was taken. Holds pairs of a row and what is returned for it."""

    def __init__(self, size: int, taken: Callable[[Row], None]) -> None:
        super().__init__(size)
        self._taken = taken

    def _get(self) -> Any:  # queue.Queue calls it under its lock
        row, made = super()._get()
        self._taken(row)
        return made


class RowFeed:
    """Takes groups from a stream on a thread of its own and queues their rows, groups in order.

    A group without a row to train is rejected. Use it as a context manager, or call `start` and
    `stop`.

    Args:
        stream: of `rollouts()`, not yet open.
        policy: that of the stream.
        size: rows in the queue, at most; the next group waits until there is space.
        max_staleness: a trainer that drops rows more than so many policy versions old says so
            here: a group that it dropped whole is rejected, not acknowledged.
        make: what is queued for a row, in place of the row.
    """

    def __init__(
        self,
        stream: RolloutStream,
        policy: Policy,
        *,
        size: int = 1,
        max_staleness: int | None = None,
        make: Callable[[Row], Any] = lambda row: row,
    ) -> None:
        for name, value, least in (("size", size, 1), ("max_staleness", max_staleness or 0, 0)):
            if value < least:
                raise UserError(f"RowFeed: {name} must be at least {least}, not {value}")
        self.queue: queue.Queue[Any] = _RowQueue(size, self._note_taken)
        self._stream, self._policy, self._make = stream, policy, make
        self._max_staleness = max_staleness
        self._stack, self._stopping = ExitStack(), threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._groups: dict[str, _QueuedGroup] = {}
        self._last_group = 0.0
        self._versions: list[tuple[float, int | None]] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Open the stream. Raises: as the stream; UserError if its model gives no token ids."""
        if self._thread is not None:
            raise UserError("the feed is open already. Use `with RowFeed(...)`, or call start once")
        with ExitStack() as opening:
            groups = opening.enter_context(self._stream.sync())
            self._stream.require_ids()
            self._stack = opening.pop_all()
        self._versions = [(0.0, self._policy.version)]
        self._policy.listeners.append(self._note_version)
        self._last_group = time.monotonic()
        self._thread = threading.Thread(target=self._produce, args=(groups,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the stream; running rollouts are cancelled, and the next start runs them again."""
        self._stopping.set()
        self._stack.close()
        if self._thread is not None:
            self._policy.listeners.remove(self._note_version)
            self._thread.join()
            self._thread = None

    def check(self, stale_after_s: float | None = None) -> None:
        """Raise what ended the stream, once all rows were taken, or RuntimeError after so long
        without a group, in s."""
        if self._error is not None and self.queue.empty():
            raise self._error
        silent = time.monotonic() - self._last_group
        if stale_after_s is not None and self.queue.empty() and silent > stale_after_s:
            raise RuntimeError(f"no group for {silent:.0f} s")

    def take(self, count: int) -> list[Any]:
        """Return the next rows; waits for them. Fewer at the end of the tasks, none after it.

        Raises: what ended the stream before that.
        """
        if self._thread is None:
            raise UserError("the feed is not open. Use `with RowFeed(...) as feed`")
        rows: list[Any] = []
        while len(rows) < count:
            error = self._error  # set after the last row
            try:
                rows.append(self.queue.get(timeout=_POLL_SECONDS))
            except queue.Empty:
                if error is None:
                    continue
                if rows or isinstance(error, _NoMoreTasks):
                    break
                raise error from None
        return rows

    def acknowledge(self, step: int) -> int:
        """Acknowledge, with this step, each group whose rows have all been taken.

        Returns: the number of groups.
        """
        count = 0
        for name, queued in list(self._groups.items()):
            if queued.taken < queued.rows:
                break
            if queued.stale == queued.rows:
                queued.group.reject(f"stale: more than {self._max_staleness} versions old")
            else:
                queued.group.ack(step)
                count += 1
            del self._groups[name]
        return count

    def _produce(self, groups: SyncRollouts) -> None:
        try:
            for group in groups:
                self._give(group)
                if self._stopping.is_set():
                    return
            self._error = _NoMoreTasks("the environment has no more tasks")
        except BaseException as error:  # raised by `check` on the trainer's thread
            self._error = error

    def _give(self, group: SyncGroup) -> None:
        rows = [row for member in group.members for row in make_rows(group, member, self._live)]
        if not rows:
            group.reject("no token to train")
            return
        self._groups[group.group_id] = _QueuedGroup(group, len(rows))
        for row in rows:
            made = self._make(row)
            while not self._stopping.is_set():
                try:
                    self.queue.put((row, made), timeout=_POLL_SECONDS)
                    break
                except queue.Full:  # the trainer is behind
                    continue
        self._last_group = time.monotonic()

    def _note_taken(self, row: Row) -> None:
        queued, now, most = (
            self._groups[row.group.group_id],
            self._policy.version,
            self._max_staleness,
        )
        queued.taken += 1
        if now is not None and row.version is not None and most is not None:
            queued.stale += now - row.version > most

    def _live(self, at: float) -> int | None:
        return [version for since, version in self._versions if since <= at][-1]

    def _note_version(self) -> None:
        if self._policy.version != self._versions[-1][1]:
            self._versions.append((time.time(), self._policy.version))
