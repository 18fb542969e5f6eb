"""The driver of a run directory: lock, epoch, recovery, ledger, dispatches and receipts."""

from __future__ import annotations

import asyncio
import itertools
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from hermes_rl.aio import in_thread, to_end
from hermes_rl.errors import StoreError
from hermes_rl.events import AttemptKey, Begun, Event
from hermes_rl.identity import canonical_json
from hermes_rl.ports import Receipt, WorkItem
from hermes_rl.store.commit import Prepared, commit_batch
from hermes_rl.store.files import add_digest, convert_os_errors
from hermes_rl.store.journal import Dispatched, DispatchJournal, JournalWriter, Publisher
from hermes_rl.store.ledger import Disposition, Ledger, open_ledger, write_checkpoint
from hermes_rl.store.processes import HeldLock
from hermes_rl.store.recovery import Recovery, RecoveryReport, duplicate_message, quarantined
from hermes_rl.store.rows import Derived, Finished
from hermes_rl.store.rundir import GRACE_S, SCHEMA_VERSION, TABLES, Epoch, RunDir, fence
from hermes_rl.store.snapshots import OLD_FILES_S, complete_switches
from hermes_rl.text import SECRETS
from hermes_rl.trajectory import fold, fold_subagents

SMALL_FILE = 16 * 1024 * 1024
"""Bytes. A run merges files below it as they come."""

MIDDLE_FILE = 128 * 1024 * 1024
"""Bytes. Files from `SMALL_FILE` on and below it are merged when there are many of these, too."""

MERGE_GROUPS = 8
"""Files of about 256 MB that one merge writes while workers run; the next one continues."""

CHECKPOINT_S = 60.0
"""How often a run looks whether a checkpoint is due."""

MOST_UNITS = 2_000_000
"""Attempts without a checkpoint, in the largest runs."""

_MAX_VALUE_CHARS = 40
"""Longer values are cut in error messages."""


def refuse_changes(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises: StoreError when the identities differ."""
    old, new = dict(_flatten(before)), dict(_flatten(now))
    codes = [{n: canonical_json(v) for n, v in values.items()} for values in (old, new)]
    names = [n for n in {**old, **new} if codes[0].get(n) != codes[1].get(n)]
    if not names:
        return
    changes = [
        f"{_short_name(n, names)} {_format_value(old.get(n))}, now {_format_value(new.get(n))}"
        for n in names
    ]
    keep = f"Keep {_format_value(old.get(names[0]))}" if len(names) == 1 else "Keep these"
    raise StoreError(
        f"{path} was made with {'; '.join(changes)}. {keep}, or choose --out {_unused_path(path)}"
    )


def _flatten(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _flatten(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def _short_name(name: str, names: list[str]) -> str:
    """The last part of a dotted name if it is unique among the changed names; the whole name within
    an environment, whose keys resemble those of the run."""
    if name.startswith("env."):
        return name
    leaf = name.rpartition(".")[2]
    alike = [n for n in names if n.rpartition(".")[2] == leaf]
    return leaf if len(alike) == 1 else name


def _format_value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        return repr(value)
    text = value if isinstance(value, str) else canonical_json(value)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."


def _unused_path(path: Path) -> Path:
    others = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(other for other in others if not other.exists())


@dataclass(frozen=True)
class OpenOptions:
    """How a run directory is opened."""

    max_attempts: int = 3
    """Counted failures after which a unit is given up."""
    retry_failed: bool = False
    """Reopen units that were given up."""
    grace_s: float = GRACE_S
    """Time for old writers to end before they are killed."""
    first_epoch: int = 1
    """The lowest epoch that may be used; other machines may have used those below."""
    many_units: int = 100_000
    """Attempts without a checkpoint after which a running driver writes one."""
    many_files: int = 50
    """Small files of a table after which a running driver merges them."""


class Driver:
    """One driver of one run: holds LOCK and the highest epoch. Made by `open_run`."""

    def __init__(
        self,
        run_dir: RunDir,
        lock: HeldLock,
        epoch: Epoch,
        ledger: Ledger,
        recovery: Recovery,
        options: OpenOptions,
    ) -> None:
        self.run_dir = run_dir
        self.epoch = epoch.epoch
        self.run_id = epoch.run_id
        self.ledger = ledger
        self._lock: HeldLock | None = lock
        self._recovery = recovery
        self._journal = DispatchJournal(run_dir, f"{epoch.epoch}-driver")
        self._in_flight: dict[AttemptKey, Dispatched] = {}
        self._options = options
        self._tables = asyncio.Lock()
        """Held by what changes the tables: one commit, recovery or switch at a time."""
        self._given_up: set[str] = set()
        """Writers that were recovered; what they prepare is ignored."""
        self.many_files = asyncio.Event()
        """Set when so many small files were committed that `merge_files` should run."""
        self._small_files: Counter[str] = Counter()
        """By table, since the last merge."""
        self._unsaved = len(ledger.changed)
        """Attempts that the checkpoint lacks."""

    @property
    def report(self) -> RecoveryReport:
        """The results of recovery, at the start and since."""
        return self._recovery.report

    @property
    def in_flight(self) -> int:
        """Attempts that were sent and have no receipt yet."""
        return len(self._in_flight)

    def dispatch(self, item: WorkItem, writer: str) -> None:
        """Step 1: record an attempt before it is sent to a writer. Raises: DiskFull."""
        line = self._journal.append(item, writer)
        self._in_flight[line.key] = line

    def receive(self, receipt: Receipt) -> Disposition:
        """Step 5: apply a receipt to the ledger. Returns the new state of the unit."""
        key = AttemptKey(unit_id=receipt.unit_id, epoch=receipt.epoch, attempt=receipt.attempt)
        if self._in_flight.pop(key, None) is not None:
            self._apply(receipt)
            self.run_dir.crash("attempt-5-receipt")
        return self.ledger.disposition(receipt.unit_id)

    async def recover_worker(self, writer: str, cause: str = "worker_lost") -> list[Receipt]:
        """Recover a dead worker: fence it, publish its finished attempts, and write a row with this
        cause for each attempt that it lost.

        Returns the missing receipts of its attempts; they are applied to the ledger.
        Raises: NotFenced when it still runs; StoreError when its journal is damaged; DiskFull.
        """
        return await to_end(self._take_over(writer, cause))

    async def _take_over(self, writer: str, cause: str) -> list[Receipt]:
        # Before the lock, so that only this recovery waits for a process that ends slowly.
        await asyncio.to_thread(fence, self.run_dir, writer, grace_s=self._options.grace_s)
        async with self._tables:
            await in_thread(self._refuse_lost_run)
            self._given_up.add(writer)
            sent = {k: d for k, d in self._in_flight.items() if d.writer == writer}
            receipts = await in_thread(self._recovery.recover_worker, writer, cause, sent)
        missing = [receipts[key] for key in sent if self._in_flight.pop(key, None) is not None]
        for receipt in missing:
            self._apply(receipt)
        return missing

    async def publish(self, derived: Derived) -> None:
        """Publish derived rows as a batch of their own.

        Raises: DiskFull.
        """
        await to_end(self._publish(derived))

    async def _publish(self, derived: Derived) -> None:
        async with self._tables:
            await in_thread(self._refuse_lost_run)
            await in_thread(self._recovery.publish_directly, [derived])

    async def commit(self, prepared: Prepared) -> None:
        """Commit a batch that a writer prepared, and unlink its `done` file.

        Raises: StoreError when its writer was given up, when this driver has ended or lost the run,
        or when a part differs from what was prepared; DiskFull.
        """
        await to_end(self._commit(prepared))

    async def _commit(self, prepared: Prepared) -> None:
        if self._lock is None:
            raise StoreError(f"{self.run_dir.path}: the driver of {prepared.writer} has ended")
        with self._lock.shared():
            async with self._tables:
                if prepared.writer in self._given_up:
                    raise StoreError(f"writer {prepared.writer} was given up")
                await in_thread(self._commit_batch, prepared)
        self._unsaved += len(prepared.commit.keys.unit_id)
        parts = prepared.commit.parts
        self._small_files.update(part.table for part in parts if part.size < SMALL_FILE)
        if max(self._small_files.values(), default=0) > self._options.many_files:
            self.many_files.set()

    def _commit_batch(self, prepared: Prepared) -> None:
        self._refuse_lost_run()
        commit_batch(self.run_dir, prepared)

    def _refuse_lost_run(self) -> None:
        """Raises: StoreError when another driver has begun, as after a lost LOCK."""
        newest = max(self.run_dir.epochs(), default=self.epoch)
        if newest > self.epoch:
            raise StoreError(f"{self.run_dir.path} was taken over: epoch {newest} has begun")

    def has_many_small_files(self) -> bool:
        """Whether a table has so many that they should be merged at the end. Blocking."""
        return self._has_many(0)

    def _has_many(self, least: int) -> bool:
        """Whether a table has many files from so many bytes on and below `MIDDLE_FILE`."""
        tables = ([p.stat().st_size for p in self.run_dir.parts(table)] for table in TABLES)
        most = max(sum(least <= size < MIDDLE_FILE for size in sizes) for sizes in tables)
        return most > self._options.many_files

    async def write_checkpoints(self) -> None:
        """Write each checkpoint that is due, until cancelled."""
        while True:
            await asyncio.sleep(CHECKPOINT_S)
            await self.write_checkpoint()

    async def write_checkpoint(self) -> None:
        """Write another checkpoint if many units were committed since the last one: at least half
        of those that it has, so that a run writes few, but two million are enough. Without it, a
        start reads more commits, so no failure matters."""
        half = len(self.ledger.base or ()) // 2
        due = max(self._options.many_units, min(half, MOST_UNITS))
        if self._lock is not None and self._unsaved >= due:
            with self._lock.shared():
                await to_end(in_thread(self._write_checkpoint))

    def _write_checkpoint(self) -> None:
        self._unsaved = 0  # commits from now on may be left for the next one
        with suppress(StoreError, OSError, ValueError):  # the last: it cannot be read back
            made = write_checkpoint(self.run_dir, self.epoch, self.ledger.base)
            if made is not None:
                self.ledger.rebase(made)

    async def merge_files(
        self,
        *,
        grace_s: float = OLD_FILES_S,
        ends: Callable[[], bool] = lambda: False,
        quiet: threading.Lock | None = None,
    ) -> None:
        """Remove old files, and merge small ones if there are many. Writers continue, and commits
        wait only for the switch.

        Args:
            grace_s: seconds for which replaced files are kept for readers that listed them.
            ends: whether the merge shall end soon, without a result; called in a thread.
            quiet: held while tables are switched. Commits do not wait for it.

        Raises: StoreError when a file is damaged, or the file system cannot exchange folders;
        DiskFull.
        """
        if self._lock is not None:
            with self._lock.shared():
                await to_end(self._merge_files(grace_s, ends, quiet or threading.Lock()))

    async def _merge_files(
        self, grace_s: float, ends: Callable[[], bool], quiet: threading.Lock
    ) -> None:
        from hermes_rl.store.compaction import Merge, switch_tables, write_merged  # long runs only

        def complete() -> None:
            self._refuse_lost_run()
            complete_switches(self.run_dir, grace_s=grace_s)

        def switch(merge: Merge) -> None:
            self._refuse_lost_run()
            switch_tables(self.run_dir, merge, grace_s=grace_s)

        if not await self._change(complete, quiet, ends) or not self.many_files.is_set():
            return
        many_new = max(self._small_files.values(), default=0) > self._options.many_files
        self.many_files.clear()
        self._small_files.clear()

        def write() -> Merge | None:
            small = SMALL_FILE if many_new and not self._has_many(SMALL_FILE) else MIDDLE_FILE
            return write_merged(self.run_dir, small=small, most=MERGE_GROUPS, ends=ends)

        merge = await in_thread(write)
        if merge is not None and not await self._change(partial(switch, merge), quiet, ends):
            merge.remove()

    async def _change(
        self, work: Callable[[], None], quiet: threading.Lock, ends: Callable[[], bool]
    ) -> bool:
        """Change tables in a thread. Returns False if the merge shall end while another thread
        holds `quiet`, perhaps for a long upload; commits do not wait for that."""
        while not quiet.acquire(blocking=False):
            if ends():
                return False
            await asyncio.sleep(0.05)
        try:
            async with self._tables:
                await in_thread(work)
        finally:
            quiet.release()
        return True

    def _apply(self, receipt: Receipt) -> None:
        self.ledger.apply(
            receipt.unit_id,
            receipt.attempt,
            done=receipt.status == "ok",
            cause=receipt.cause,
            fatal_command=receipt.fatal_command,
        )

    async def __aenter__(self) -> Driver:
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Raises: StoreError when files of the run were moved or removed while it was driven."""
        try:
            await self.aclose()
        except FileNotFoundError as missing:
            error = error or missing
        path = self.run_dir.path
        if isinstance(error, FileNotFoundError) and f"{path}/" in str(error):
            raise StoreError(
                f"files of {path} were moved or removed during the run ({error}). Put them back, "
                "then run the same command"
            ) from error

    async def aclose(self) -> None:
        """Close the run directory. Attempts without a receipt are recovered by the next start."""
        if self._lock is not None:
            try:
                await in_thread(self._journal.close, not self._in_flight)
                self.run_dir.close_gate()
            finally:
                self.release()

    def release(self) -> None:
        """Release LOCK."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


async def open_run(
    path: str | Path,
    identity: Mapping[str, Any],
    meta: Mapping[str, Any] | None = None,
    options: OpenOptions | None = None,
) -> Driver:
    """Open a run directory as its only driver: R1 to R5, then the ledger is ready.

    Args:
        path: the run directory; created if needed.
        identity: the identity sections of the configuration, plain JSON values.
        meta: for people; `config_hash` is used in rows of attempts that never started.
        options: see there.

    Raises: UserError for a path that cannot be used; StoreError when the run is in use, damaged,
    newer or of another configuration; DiskFull.
    """
    opened: list[Driver] = []

    def work() -> None:
        opened.append(_open(path, dict(identity), dict(meta or {}), options or OpenOptions()))

    try:
        await in_thread(work)
    except asyncio.CancelledError:
        for driver in opened:
            driver.release()
        raise
    return opened[0]


def _open(
    path: str | Path, identity: dict[str, Any], meta: dict[str, Any], options: OpenOptions
) -> Driver:
    run_dir = RunDir(path)
    SECRETS.learn_environment()
    run_dir.create()
    run_dir.try_file_system()
    lock = run_dir.lock()
    try:
        with convert_os_errors(run_dir.path):
            run_dir.crash("recover-1-locked")
            epoch = begin_epoch(
                run_dir, identity, meta, options.max_attempts, at_least=options.first_epoch
            )
            if damaged := quarantined(run_dir):
                raise StoreError(
                    f"{damaged[0]} waits for `hermes-rl check {run_dir.path} --repair`, "
                    "which saves its good lines"
                )
            recovery = Recovery(run_dir, epoch)
            ledger = open_ledger(run_dir, options.max_attempts)
            recovery.report.epochs_lost = epoch.epoch - len(run_dir.epochs())
            report = recovery.recover_writers(ledger, grace_s=options.grace_s)
            if report.duplicates:
                raise StoreError(duplicate_message(run_dir, report.duplicates[0]))
            if options.retry_failed:
                ledger.reopen_given_up()
            run_dir.crash("recover-6-ready")
    except BaseException:
        lock.release()
        raise
    return Driver(run_dir, lock, epoch, ledger, recovery, options)


def begin_epoch(
    run_dir: RunDir,
    identity: dict[str, Any] | None,
    meta: dict[str, Any],
    max_attempts: int | None = None,
    *,
    at_least: int = 1,
) -> Epoch:
    """R1: compare the configuration with that of the run and start the next epoch.

    Args:
        identity: None uses that of the run (repair).
        meta: for people.
        max_attempts: None uses that of the last start.
        at_least: the lowest epoch that may be used.

    Raises: StoreError for a run that is newer or of another configuration.
    """
    earlier = run_dir.epochs()
    first = run_dir.epoch(earlier[0]) if earlier else None
    last = run_dir.epoch(earlier[-1]) if earlier else None  # refuses a newer schema
    if first is not None and identity is not None:
        before, now = SECRETS.scrub_record((first.identity, identity))
        refuse_changes(run_dir.path, before, now)
    identity, meta = SECRETS.scrub_record((identity, meta))
    run_dir.crash("recover-1-compared")
    epoch = Epoch(
        epoch=max(run_dir.last_epoch() + 1, at_least),
        schema_version=last.schema_version if last else SCHEMA_VERSION,
        run_id=first.run_id if first else uuid.uuid4().hex,
        identity=(first.identity if first else identity) or {},
        max_attempts=max_attempts or (last.max_attempts if last else 3),
        meta=meta,
    )
    data = add_digest(msgspec.json.encode(epoch))
    if not run_dir.storage.put_new(f"epochs/{epoch.epoch}.json", data):
        raise StoreError(f"{run_dir.path}: another driver began epoch {epoch.epoch}")
    run_dir.open_gate(epoch.epoch)
    run_dir.crash("recover-1-epoch")
    return epoch


async def append_attempts(
    path: str | Path, identity: Mapping[str, Any], attempts: Iterable[Sequence[Event]]
) -> None:
    """Add finished attempts to a run directory, which is created if needed, and publish them.
    Attempts at a unit that the run already has are skipped.

    Args:
        identity: used as the identity of the configuration.
        attempts: the events of each, from `Begun` to `Ended`; epoch and run id are replaced.

    Raises: UserError, StoreError and DiskFull, as `open_run`.
    """
    async with (
        await open_run(path, identity) as driver,
        JournalWriter(driver.run_dir, driver.epoch, 0) as journal,
    ):
        for begun, *rest in attempts:
            if not isinstance(begun, Begun):
                raise ValueError("an attempt's first event must be 'begun'")
            unit = begun.key.unit_id
            if driver.ledger.next_attempt(unit):
                continue
            key = AttemptKey(unit_id=unit, epoch=driver.epoch, attempt=0)
            first = msgspec.structs.replace(begun, key=key, run_id=driver.run_id)
            row = fold([first, *rest])
            children = fold_subagents([first, *rest], row)
            await journal.finish(Finished(key=key, row=row, subagents=children))
        await Publisher(journal).drain()
