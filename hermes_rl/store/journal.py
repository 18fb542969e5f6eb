"""Writes the journal: one folder per writer, created and locked by one process.

`dispatch` records which attempt the driver sent to which writer. `live` files record events as they
happen (no fsync). `done` files contain the complete rows of finished attempts (grouped fdatasync)
and become parts once sealed. Each is only appended to, by the process that created it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar
from weakref import WeakKeyDictionary

import msgspec

from hermes_rl.aio import in_thread, to_end
from hermes_rl.errors import StoreError
from hermes_rl.events import AttemptKey, Begun, Event, Redacted, TokensAdded, ToolsOffered
from hermes_rl.locks import try_lock
from hermes_rl.ports import Receipt, Recorder, WorkItem
from hermes_rl.store.commit import Prepared, commit_batch, prepare_batch
from hermes_rl.store.crash import CrashHook
from hermes_rl.store.files import LARGE_BYTES, AppendFile, pack
from hermes_rl.store.processes import HeldLock
from hermes_rl.store.rows import Derived, Finished, Place, RelayedLine, without_secrets
from hermes_rl.store.rundir import RunDir, epoch_of
from hermes_rl.text import SECRETS

T = TypeVar("T")


class Dispatched(msgspec.Struct, frozen=True, kw_only=True):
    """One line of dispatch.jsonl, which identifies an attempt that never started."""

    key: AttemptKey
    writer: str
    at: float
    """Unix time, seconds."""
    group_id: str
    repeat: int
    row_index: int
    task_id: str
    task_hash: str
    seed: int

    def begun(self, run_id: str, config_hash: str) -> Begun:
        """The first event of an attempt without other events."""
        return Begun(
            key=self.key,
            started_at=self.at,
            run_id=run_id,
            config_hash=config_hash,
            member=self.repeat,
            prompt="",
            model="",
            api_mode="",
            endpoint="",
            **{name: getattr(self, name) for name in _OF_ITEM},
        )


_OF_ITEM = ("group_id", "repeat", "row_index", "task_id", "task_hash", "seed")
"""Fields that a dispatch copies from its work item."""


class DispatchJournal:
    """Appends dispatches; the file is created with the first one."""

    def __init__(self, run_dir: RunDir, driver: str) -> None:
        self._crash = run_dir.crash
        self._path = run_dir.writer_path(driver) / "dispatch.jsonl"
        self._file: AppendFile | None = None

    def append(self, item: WorkItem, writer: str) -> Dispatched:
        """Step 1: record an attempt before it is sent. Raises: DiskFull."""
        if self._file is None:
            self._path.parent.mkdir(exist_ok=True)
            self._file = AppendFile(self._path, self._crash, "attempt-1-dispatch")
        line = Dispatched(
            key=AttemptKey(unit_id=item.unit_id, epoch=item.epoch, attempt=item.attempt),
            writer=writer,
            at=time.time(),
            **{name: getattr(item, name) for name in _OF_ITEM},
        )
        self._file.append(msgspec.json.encode(SECRETS.scrub_record(line)))
        return line

    def close(self, clean: bool) -> None:
        """Close the file; a clean end removes it."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if clean:
            self._path.unlink(missing_ok=True)
            with suppress(OSError):  # the folder is missing or not empty
                self._path.parent.rmdir()


_encoder = msgspec.json.Encoder()


def encode(value: msgspec.Struct) -> bytes:
    """Encode a record as JSON; lone surrogates, which JSON cannot contain, become `?`."""
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(value), ensure_ascii=False)
        return text.encode("utf-8", "replace")


def decode_lines(lines: Iterable[bytes], decode: Callable[[bytes], T]) -> Iterator[T]:
    """Decode the lines of an event file. Lines with values that are not valid JSON, such as NaN,
    are skipped."""
    for line in lines:
        try:
            record = decode(line)
        except msgspec.ValidationError:
            continue
        yield record


@dataclass(frozen=True)
class SealPolicy:
    """The size at which a batch is published."""

    rows: int = 1000
    """Finished attempts."""
    size: int = 128 * 1024 * 1024
    """Bytes of the `done` file."""


@dataclass
class Batch:
    """One `done` file: open while it takes rows, then sealed."""

    stem: str
    file: AppendFile
    attempts: list[AttemptKey] = field(default_factory=list)
    rows: int = 0
    """Lines: finished attempts and derived rows."""
    since: float | None = None
    """time.monotonic() of the first row."""

    def append(self, line: bytes, key: AttemptKey | None) -> Place:
        """Append encoded rows, of an attempt or derived ones. Raises: DiskFull."""
        place = Place(stem=self.stem, offset=self.file.size)
        self.file.append(line)
        self.rows += 1
        if key is not None:
            self.attempts.append(key)
        self.since = self.since or time.monotonic()
        return place


class SameTools(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="same_tools"):
    """The tools of an earlier attempt of the same file: most attempts have the same."""

    of: str
    """`tools_digest` of their event."""


def tools_digest(event: ToolsOffered) -> str:
    """Names the tools of an attempt within a file."""
    return hashlib.sha256(encode(event)).hexdigest()[:16]


class LiveLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a live file."""

    a: int
    """Number of the attempt in this writer; its `begun` event has the key."""
    e: Event | SameTools


class EventFiles:
    """Files with the events of work in progress, which are only needed after a kill.

    Args:
        folder: of the writer.
        kind: names the files.
        crash, point: the crash point of each line.
    """

    def __init__(self, folder: Path, kind: str, crash: CrashHook, point: str) -> None:
        self._folder = folder
        self._kind = kind
        self._crash, self._point = crash, point
        self._made = self._begun = 0
        self._open: dict[AppendFile, set[Hashable]] = {}
        """File -> its unfinished work."""
        self._current: AppendFile | None = None

    def begin(self, work: Hashable) -> tuple[AppendFile, int]:
        """Start some work. Returns the file for its events, and its number."""
        if self._current is None:
            path = self._folder / f"{self._kind}-{self._made}.jsonl"
            self._current = AppendFile(path, self._crash, self._point)
            self._open[self._current] = set()
            self._made += 1
        self._open[self._current].add(work)
        self._begun += 1
        return self._current, self._begun

    def rotate(self) -> None:
        """Use a new file for new work, so that the current one can end."""
        self._current = None

    def end(self, works: Iterable[Hashable]) -> list[Path]:
        """Record that work has ended. Returns the files to delete, whose work has all ended."""
        ended = set(works)
        for open_ in self._open.values():
            open_ -= ended
        over = [f for f, open_ in self._open.items() if not open_ and f is not self._current]
        for file in over:
            file.close()
            del self._open[file]
        return [file.path for file in over]

    def close(self, *, keep_open: bool = True) -> None:
        """Close all files, and delete those whose work has ended.

        Args:
            keep_open: False deletes all of them.
        """
        for file, open_ in self._open.items():
            file.close()
            if not (open_ and keep_open):
                file.path.unlink(missing_ok=True)
        self._open = {}


class LiveRecorder:
    """Records the events of one attempt.

    Args:
        append: takes each line, encoded.
        number: of the attempt in its writer.
        tools: digests of the tools that the file has.
    """

    def __init__(self, append: Callable[[bytes], None], number: int, tools: set[str]) -> None:
        self._write = append
        self._number = number
        self._tools = tools
        self._redacted = False

    def record(self, event: Event) -> None:
        """See `Recorder`."""
        if self._redacted and isinstance(event, TokensAdded):
            return
        clean = SECRETS.scrub_record(event)
        if isinstance(clean, ToolsOffered):
            self._append_tools(clean)
        else:
            self._append(clean)
        if clean is not event and not self._redacted:
            self._redacted = True
            self._append(Redacted())

    def _append_tools(self, event: ToolsOffered) -> None:
        digest = tools_digest(event)
        self._append(SameTools(of=digest) if digest in self._tools else event)
        self._tools.add(digest)

    def _append(self, event: Event | SameTools) -> None:
        self._write(encode(LiveLine(a=self._number, e=event)))


class GroupSync:
    """Groups fdatasync calls: one in a thread serves all that wait."""

    def __init__(self, run_dir: RunDir, pool: ThreadPoolExecutor) -> None:
        self._run_dir = run_dir
        self._pool = pool
        self._files: set[AppendFile] = set()
        self._next: asyncio.Task[None] | None = None
        self._busy = asyncio.Lock()
        self._failure: OSError | None = None

    async def durable(self, file: AppendFile) -> None:
        """Return once everything that was appended to the file is on disk.

        Raises: OSError (DiskFull), also after any earlier failure: the kernel forgets which pages
        it could not write, so that a later success proves nothing.
        """
        self._files.add(file)
        if self._next is None:
            self._next = asyncio.create_task(self._serve())
        await asyncio.shield(self._next)

    async def _serve(self) -> None:
        async with self._busy:
            files, self._files, self._next = self._files, set(), None
            if self._failure is None:
                try:
                    await asyncio.get_running_loop().run_in_executor(self._pool, self._sync, files)
                except OSError as failure:
                    self._failure = failure
        if self._failure is not None:
            raise self._failure

    def _sync(self, files: set[AppendFile]) -> None:
        for file in files:
            size = file.size
            self._run_dir.storage.sync(file.fileno())
            file.synced = size
        self._run_dir.crash("attempt-4-synced")


async def encode_rows(rows: Finished | Derived) -> bytes:
    """Encode rows as a compressed line, without secrets of this process."""
    payload = encode(without_secrets(rows))
    if len(payload) < LARGE_BYTES:
        return pack(payload)
    return await in_thread(partial(pack, payload, in_thread=True))


class JournalWriter:
    """The journal of one writer, EPOCH-WORKER. An async context manager.

    Args:
        lease_s: the writer stops when it does not hear its driver for so long; None for a writer
            that lives in its driver's process.

    Entering raises StoreError when the writer is too late: a newer driver took the run over.
    """

    def __init__(
        self,
        run_dir: RunDir,
        epoch: int,
        worker: int | str,
        *,
        policy: SealPolicy | None = None,
        lease_s: float | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.writer = f"{epoch}-{worker}"
        self.policy = policy or SealPolicy()
        self.full = asyncio.Event()
        """Set when the open batch has reached the policy's size."""
        self._path = run_dir.writer_path(self.writer)
        self._lease_s = lease_s
        self.alive: HeldLock | None = None
        """The lock of `alive` while the journal is open; a publisher holds it, too."""
        self._sequence = 0
        self._batch: Batch | None = None
        self._live = EventFiles(self._path, "live", run_dir.crash, "attempt-2-live")
        self._tools: WeakKeyDictionary[AppendFile, set[str]] = WeakKeyDictionary()
        """Live file -> digests of the tools that it has."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="journal-sync")
        self._sync = GroupSync(run_dir, self._pool)
        self._sealing = asyncio.Lock()
        self._relayed: dict[int, AppendFile] = {}
        """The `live` file of each attempt whose lines another process encodes."""

    async def __aenter__(self) -> JournalWriter:
        try:
            await in_thread(self._open)
        except BaseException:  # a cancellation is raised after the thread has opened it
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def _open(self) -> None:
        SECRETS.learn_environment()
        self._path.mkdir(exist_ok=True)
        alive = lock_alive_file(self._path / "alive", self._lease_s)
        try:
            epochs = self.run_dir.epochs()
            if epochs and epochs[-1] > epoch_of(self.writer):
                late = f"writer {self.writer} comes too late: epoch {epochs[-1]} has begun"
                raise StoreError(late)
            self.run_dir.storage.sync_path(self._path.parent)
            self._batch, self.alive = self._new_batch(), alive
        except BaseException:
            alive.release()
            raise

    def _new_batch(self) -> Batch:
        stem = f"{self.writer}-{self._sequence}"
        path = self._path / f"done-{self._sequence}.jsonl"
        batch = Batch(stem, AppendFile(path, self.run_dir.crash, "attempt-3-done"))
        self.run_dir.storage.sync_path(self._path)
        self._sequence += 1
        return batch

    @property
    def age_s(self) -> float:
        """Seconds since the first row of the open batch; 0 when it is empty."""
        since = self._batch.since if self._batch else None
        return 0.0 if since is None else time.monotonic() - since

    def recorder(self, key: AttemptKey) -> Recorder:
        """Return the recorder of one attempt. Its first event must be `Begun`."""
        file, number = self._live.begin(key)
        return LiveRecorder(file.append, number, self._tools.setdefault(file, set()))

    async def finish(self, rows: Finished | Derived) -> Place:
        """Write the rows of a finished attempt, or derived ones, without secrets of this process;
        they are durable on return. Returns their place.

        After a cancellation the rows may still be durable: recovery finds them.
        Raises: DiskFull (nothing was written, the attempt is not finished).
        """
        self._require_batch()
        line = await encode_rows(rows)
        batch = self._require_batch()  # the other may have been sealed
        key = rows.key if isinstance(rows, Finished) else None
        place = batch.append(line, key)
        self._note_size(batch)
        await self._sync.durable(batch.file)
        return place

    async def take(self, lines: Sequence[RelayedLine]) -> list[Receipt]:
        """Write lines that another process encoded, in a thread; rows are durable on return.

        Returns the receipts of these, with their places. Raises: DiskFull.
        """
        async with self._sealing:
            batch = self._require_batch()
            loop = asyncio.get_running_loop()
            write = loop.run_in_executor(self._pool, self._append_lines, batch, lines)
            receipts = await to_end(write)
            self._note_size(batch)
            if receipts:
                await self._sync.durable(batch.file)
            return receipts

    def _append_lines(self, batch: Batch, lines: Sequence[RelayedLine]) -> list[Receipt]:
        receipts = []
        for line in lines:
            if (done := line.receipt) is not None:
                key = AttemptKey(unit_id=done.unit_id, epoch=done.epoch, attempt=done.attempt)
                place = batch.append(line.content, key)
                receipts.append(msgspec.structs.replace(done, stem=place.stem, offset=place.offset))
                self._relayed.pop(line.attempt, None)
            elif line.attempt:
                if line.key is not None:
                    self._relayed[line.attempt], _ = self._live.begin(line.key)
                if (file := self._relayed.get(line.attempt)) is not None:
                    file.append(line.content)
            else:
                self.append_connection(line.content)
        return receipts

    def append_connection(self, line: bytes) -> None:
        """Append a connection of a sandbox through its egress proxy, as JSON, to
        network/WRITER.jsonl. Raises: OSError."""
        path = self.run_dir.path / "network" / f"{self.writer}.jsonl"
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as file:
            file.write(line + b"\n")

    def _require_batch(self) -> Batch:
        if self._batch is None:
            raise StoreError(f"writer {self.writer} is closed")
        return self._batch

    def _note_size(self, batch: Batch) -> None:
        if batch.rows >= self.policy.rows or batch.file.size >= self.policy.size:
            self.full.set()

    async def seal(self) -> Batch | None:
        """Seal the open batch and open the next. Returns None when it is empty."""
        async with self._sealing:
            if self._batch is None or not self._batch.rows:
                return None
            fresh = await in_thread(self._new_batch)
            self.run_dir.crash("publish-6-opened")
            sealed, self._batch = self._batch, fresh
            self.full.clear()
            self._live.rotate()
            await self._sync.durable(sealed.file)
            sealed.file.close()
            self.run_dir.crash("publish-6-sealed")
            return sealed

    async def committed(self, batch: Batch) -> None:
        """Step 9 for live files: unlink those whose attempts are all in committed batches."""
        async with self._sealing:  # a thread may be writing events
            ended = self._live.end(batch.attempts)
        await in_thread(self._unlink, ended)

    def _unlink(self, paths: list[Path]) -> None:
        for path in paths:
            path.unlink(missing_ok=True)
            self.run_dir.crash("publish-9-live")

    async def aclose(self) -> None:
        """Close all files, and remove the folder when it is no longer needed."""
        await to_end(self._aclose())

    async def _aclose(self) -> None:
        async with self._sealing:
            batch, self._batch = self._batch, None
            if batch is None:
                return
            try:
                await self._sync.durable(batch.file)
            finally:
                await in_thread(self._close, batch)
                self._pool.shutdown()

    def _close(self, batch: Batch) -> None:
        try:
            batch.file.close()
            if not batch.rows:
                batch.file.path.unlink()
            self._live.close()
            if ended := [p.name for p in self._path.iterdir()] == ["alive"]:
                (self._path / "alive").unlink()
        finally:
            if self.alive is not None:
                self.alive.release()
        if ended:
            # After its files are closed: NFS and FUSE keep a removed file that is open under
            # another name. The next start removes a folder that stays.
            with suppress(OSError):
                self._path.rmdir()


def lock_alive_file(path: Path, lease_s: float | None = None) -> HeldLock:
    """Create and lock the `alive` file of a writer.

    Raises: StoreError when a driver fenced this writer, or another process uses its name.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except (FileExistsError, FileNotFoundError) as error:
        raise StoreError(f"writer {path.parent.name} was fenced or exists already") from error
    if not try_lock(fd):
        os.close(fd)
        raise StoreError(f"writer {path.parent.name} was fenced")
    return HeldLock(fd, lease_s)


PUBLISH_EVERY_S = 300.0
"""Maximum time until a finished row is in Parquet."""


CommitBatch = Callable[[Prepared], Awaitable[None]]
"""Commits a batch, and unlinks its `done` file. Raises: DiskFull, StoreError or another OSError."""


class Publisher:
    """Publishes one writer's batches in order.

    Args:
        journal: the writer.
        every_s: a batch is published when its first row is this old.
        commit: `Driver.commit`, or passes the batch to it; None commits in this process, which
            holds LOCK and neither recovers nor merges meanwhile.
        turn: held while a batch is published; None for no limit.
    """

    def __init__(
        self,
        journal: JournalWriter,
        *,
        every_s: float = PUBLISH_EVERY_S,
        commit: CommitBatch | None = None,
        turn: asyncio.Semaphore | None = None,
    ) -> None:
        self._journal = journal
        self._turn = turn or nullcontext()
        self._every_s = every_s
        self._commit = commit or self._commit_here
        self._sealed: list[Batch] = []
        self._busy = asyncio.Lock()

    async def run(self) -> None:
        """Publish batches that are large or old enough, until cancelled. Raises: DiskFull."""
        while True:
            left = self._every_s - self._journal.age_s
            try:
                async with asyncio.timeout(max(0.0, min(left, 1.0))):
                    await self._journal.full.wait()
            except TimeoutError:
                pass
            if self._journal.full.is_set() or self._journal.age_s >= self._every_s:
                await self.drain()

    async def drain(self) -> None:
        """Publish all finished rows; a cancellation waits for that.

        Raises: DiskFull; the next call publishes the rest.
        """
        await to_end(self._drain())

    async def _drain(self) -> None:
        async with self._busy:
            batch = await self._journal.seal()
            if batch is not None:
                self._sealed.append(batch)
            while self._sealed:
                async with self._turn:
                    await self._publish(self._sealed[0])
                await self._journal.committed(self._sealed.pop(0))

    async def _publish(self, batch: Batch) -> None:
        """Publish while holding `alive`: on a stalled disk this may outlive its writer, and
        recovery must not touch the batch before it ends."""
        alive, run_dir = self._journal.alive, self._journal.run_dir
        if alive is None:
            raise StoreError(f"writer {self._journal.writer} is closed")
        with alive.shared():
            prepared = await in_thread(prepare_batch, run_dir, batch.file.path, batch.stem)
            if prepared is not None:
                await self._commit(prepared)

    async def _commit_here(self, prepared: Prepared) -> None:
        await in_thread(commit_batch, self._journal.run_dir, prepared)
