"""The driver of a run at a URL: a working copy on this disk, and its mirror in the store.

The working copy is a run directory as any other. What it has published is uploaded, then named in
the log; see `remote`. The store may be away for as long as it likes: rows wait on this disk.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from hermes_rl.aio import in_thread, run_sync
from hermes_rl.errors import DiskFull, StoreError, UserError
from hermes_rl.locks import try_lock
from hermes_rl.store.files import file_sha256
from hermes_rl.store.processes import HeldLock
from hermes_rl.store.remote import (
    Entry,
    RemoteRun,
    Stored,
    cache_folder,
    describe,
    is_same,
    open_remote,
    working_copy,
)
from hermes_rl.store.rundir import CHECKPOINT, LEASE_S, TABLES, RunDir, order_of, stem_of, url_of
from hermes_rl.store.snapshots import epoch_of_merge, read_compactions, replaced_stems

SYNC_S = 5.0
"""How often the working copy is searched for new files."""

CLOSE_S = 120.0
"""How long the end of a run tries to complete the mirror."""

_FINAL = ("commits", "compacted", *TABLES)
"""Folders whose files change by a repair only."""

_LATER = ("network", "workspaces")
"""Folders whose files are complete at the end."""

_NOT_MIRRORED = ("LOCK", "dataset.index", CHECKPOINT)


class Replaced(StoreError):
    """Another driver took the run over."""


class Mirror:
    """A run at a URL that this process drives. Made by `open_mirror`.

    Args:
        remote: with its log read.
        lock: on the working copy; excludes other drivers on this machine.
        copy: the id of the working copy.
        damaged: for a repair, names of files that were lost or changed in the store.
    """

    def __init__(
        self,
        remote: RemoteRun,
        lock: HeldLock,
        copy: str,
        lease_s: float,
        damaged: set[str] | None = None,
    ) -> None:
        self.url = remote.url
        self.path = working_copy(remote.url)
        self.first_epoch = 1 + max((e.epoch for e in remote.entries), default=0)
        """The lowest epoch that no driver can have used."""
        self.notes: list[str] = []
        self.lease_s = lease_s
        self.quiet = threading.Lock()
        """Held while files are replaced that must be seen together."""
        self._remote = remote
        self._lock = lock
        self._copy = copy
        self._damaged = damaged
        self._claim: Entry | None = None
        self._ended = threading.Event()
        self._stopped = threading.Event()
        self._beating = threading.Lock()
        self._pending: Entry | None = None
        """What was put into the log without an answer."""
        self._lost: Replaced | None = None
        self._uploaded: set[str] = set()
        """Objects that are in the store, although the log may not name them yet."""
        self._plain: set[str] = set()
        """Files whose plain copies are older than the log."""
        self._retired: set[str] = set()
        """Parts that the log does not have any more, to be removed."""
        self._seen: dict[str, tuple[tuple[int, int], str]] = {}
        """Name of a file that may change -> time of change and size, sha256."""
        self._run_dir = RunDir(self.path)

    def note_lost_files(self) -> None:
        """Add a line for each file that the store has lost and the repair did not make again. The
        repair itself reports parts."""
        lost = (n for n in sorted(self._damaged or ()) if n.partition("/")[0] not in TABLES)
        self.notes += [f"lost: {self.url}/{n}" for n in lost if not (self.path / n).exists()]

    def claim(self, epoch: int) -> None:
        """Take the run over, and mirror what the working copy has. Blocking.

        Raises: StoreError when another driver was faster; UserError when the store fails.
        """
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        epochs = [f"epochs/{number}.json" for number in self._run_dir.epochs()]
        try:
            self._claim = Entry(
                id=secrets.token_hex(8),
                epoch=epoch,
                copy=self._copy,
                holder=holder,
                lease_s=self.lease_s,
                files=self._put_changed(epochs),  # here: a claim may be all that a driver leaves
            )
            self._beat()
            threading.Thread(target=self._keep_beating, daemon=True).start()
            if not self._remote.append(self._claim):
                raise StoreError(f"{self.url}: another driver has just started. Run again later")
            self._plain |= {*self._claim.files}
            self.sync()
            self.remove_orphans()
        except StoreError:
            raise
        except Exception as error:  # each store has its own errors
            raise UserError(f"{self.url} cannot be written: {describe(error)}") from error

    def _beat(self) -> None:
        """Show that this driver lives."""
        if self._claim is not None:
            self._remote.put(f".log/beat-{self._claim.id}", b"%d" % time.time())

    def _keep_beating(self) -> None:
        """In a thread, since an upload or a merge may take longer than the lease."""
        while not self._ended.wait(min(SYNC_S, self.lease_s / 4)):
            with suppress(Exception), self._beating:  # each store has its own errors; see `_keep`
                if not self._ended.is_set():
                    self._beat()

    def sync(self, *, final: bool = False) -> None:
        """Upload what is new, then name it in the log. May be repeated after any error. Blocking.

        Args:
            final: nothing is written any more.

        Raises: Replaced; errors of the store as they come.
        """
        with self.quiet:
            if self._lost is not None:
                raise self._lost
            self._log_pending()
            self._pending = self._upload(final)
            self._log_pending()
            while self._plain:
                name = min(self._plain)
                self._remote.put(name, self._remote.read(self._remote.files[name].object))
                self._plain.remove(name)
            self._remote.remove(self._retired)
            self._retired.clear()

    def _log_pending(self) -> None:
        entry = self._pending
        if entry is None:
            return
        if not self._remote.append(entry):
            self._ended.set()
            self._lost = self._replaced()
            raise self._lost
        self._plain |= {name for name, stored in entry.files.items() if stored.object != name}
        self._retired |= {*entry.removed}
        self._pending = None

    def _replaced(self) -> Replaced:
        by = "another driver"
        with suppress(Exception):  # only for the message
            claim = open_remote(self.url).claim
            by = claim.holder if claim else by
        return Replaced(
            f"{self.url} was taken over by {by}, since this driver was silent. "
            f"Rows that it does not have stay in {self.path}"
        )

    def _upload(self, final: bool) -> Entry | None:
        known, names = self._remote.files, [*self._published(final)]
        new = [n for n in names if _never_changes(n) and n not in known]
        files = {
            n: Stored(n, (self.path / n).stat().st_size, file_sha256(self.path / n)) for n in new
        }
        repair = self._damaged is not None
        files |= self._put_changed(
            n for n in names if n not in files and (repair or not _never_changes(n))
        )
        self._remote.upload(
            self.path, [n for n in new if n not in self._uploaded], self._note_uploaded
        )
        removed = {*self._merged_away()}
        if self._damaged is not None:
            lost = (n for n in known if _never_changes(n) or n in self._damaged)
            removed |= {n for n in lost if not (self.path / n).exists()}
        if not files and not removed:
            return None
        return Entry(id=secrets.token_hex(8), files=files, removed=tuple(sorted(removed)))

    def _note_uploaded(self, name: str) -> None:
        self._uploaded.add(name)
        if self._stopped.is_set():
            raise InterruptedError("interrupted")

    def _put_changed(self, names: Iterable[str]) -> dict[str, Stored]:
        """Put the content of those files that the log does not have, under names of their own."""
        files: dict[str, Stored] = {}
        known, damaged = self._remote.files, self._damaged or ()
        for name in names:
            path = self.path / name
            version = (path.stat().st_mtime_ns, path.stat().st_size)
            seen, digest = self._seen.get(name, (None, ""))
            if seen == version and name in known and known[name].sha256 == digest:
                continue
            data = path.read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            stored = Stored(f".state/{digest}", len(data), digest)
            if name not in known or known[name].sha256 != digest:
                if stored.object not in self._uploaded:
                    self._remote.put(stored.object, data)
                    self._uploaded.add(stored.object)
                files[name] = stored
            elif name in damaged:
                self._remote.put(known[name].object, data)
            self._seen[name] = version, digest
        return files

    def _published(self, final: bool) -> Iterator[str]:
        """Names of the files that readers may see. A part is one only with its commit."""
        run_dir = self._run_dir
        yield from (f"epochs/{number}.json" for number in run_dir.epochs())
        for folder in ("commits", "compacted"):
            yield from (f"{folder}/{name}" for name in run_dir.storage.names(folder))
        stems = {*run_dir.commit_stems()}
        stems |= {one.stem for c in read_compactions(run_dir) for one in c.merged}
        for table in TABLES:
            parts = (p for p in run_dir.parts(table) if stem_of(p) in stems)
            yield from (f"{table}/{part.name}" for part in parts)
        others = [p for p in self.path.iterdir() if p.is_file() and p.name not in _NOT_MIRRORED]
        if final:
            others += [p for f in _LATER for p in (self.path / f).rglob("*") if p.is_file()]
        yield from (p.relative_to(self.path).as_posix() for p in others if p.name[0] != ".")

    def _merged_away(self) -> Iterator[str]:
        """Parts in the store that merged ones replace."""
        merged = self._merged_stems()
        for name in self._remote.files:
            if name.partition("/")[0] in TABLES and stem_of(self.path / name) in merged:
                yield name

    def _merged_stems(self) -> set[str]:
        run_dir = self._run_dir
        return replaced_stems(run_dir, [p for t in TABLES for p in run_dir.parts(t)])

    def remove_orphans(self) -> None:
        """Remove parts that a driver uploaded and could not name in the log before it was killed or
        replaced: globs would read their rows beside those of the second attempt; and those that
        this driver merged before it could. Parts that a later driver uploaded or merged stay, since
        this one may have been replaced."""
        merged = self._merged_stems()
        for table in {*TABLES} & {*self._remote.names("")}:
            for name in self._remote.names(table):
                left = stem_of(self.path / name) in merged or self._is_old(name)
                if left and f"{table}/{name}" not in self._remote.files:
                    self._remote.remove([f"{table}/{name}"])

    def _is_old(self, name: str) -> bool:
        found = re.fullmatch(r"part-(.*?)(?:\.(\d+))?\.parquet", name)
        if found is None:
            return False
        epoch = max(order_of(found[1])[0], epoch_of_merge(int(found[2] or 0)))
        return 0 < epoch < self.first_epoch

    @asynccontextmanager
    async def running(
        self, note: Callable[[str], None], lost: Callable[[str], None]
    ) -> AsyncIterator[None]:
        """Keep the mirror up to date during this context.

        Args:
            note: takes a line when the store fails, and when it answers again.
            lost: takes a line when another driver took the run over.
        """
        for line in self.notes:
            note(line)
        work = asyncio.create_task(self._keep(note, lost))
        try:
            yield
        finally:
            work.cancel()
            await asyncio.wait((work,))

    async def _keep(self, note: Callable[[str], None], lost: Callable[[str], None]) -> None:
        failing, pause = False, min(SYNC_S, self.lease_s / 4)
        while True:
            await asyncio.sleep(pause)
            try:
                await in_thread(self.sync)
            except Replaced as error:
                lost(str(error))
                return
            except Exception as error:  # each store has its own errors; the disk here has the rows
                if not failing:
                    note(f"{self.url} fails ({describe(error)}); the run continues on this disk")
                failing = True
                continue
            if failing:
                note(f"{self.url} is up to date again")
            failing = False

    def stop(self) -> None:
        """Let `finish` end after the transfers that run, or the next failure."""
        self._stopped.set()

    async def finish(self, within_s: float = CLOSE_S) -> str:
        """Complete the mirror and give the run up.

        Args:
            within_s: how long a store that fails is tried, in seconds.

        Returns: why it is incomplete; empty when it is complete.
        """
        deadline, pause = time.monotonic() + within_s, 0.5
        while True:
            try:
                await in_thread(self._finish)
            except Replaced as error:
                return str(error)
            except StoreError as error:
                return f"{error}. The rows of this run are in {self.path}"
            except Exception as error:  # each store has its own errors
                if self._stopped.is_set() or time.monotonic() + pause > deadline:
                    return (
                        f"{self.url} lacks what was finished last: {describe(error)}. It is in "
                        f"{self.path}, and the next start on this machine uploads it"
                    )
                await asyncio.sleep(pause)
                pause = min(2 * pause, 5.0)
            else:
                return ""

    def _finish(self) -> None:
        self.sync(final=True)
        self.remove_orphans()
        self._ended.set()
        with self._beating:
            pass
        if self._claim is not None:
            self._remote.remove([f".log/beat-{self._claim.id}"])
            self._claim = None

    def close(self) -> None:
        """Release the working copy. A run that was not finished is free after its lease, or at once
        on this machine."""
        self._ended.set()
        self._lock.release()


@dataclass(frozen=True)
class OpenedRun:
    """A run for a command that changes it."""

    path: Path
    first_epoch: int = 1
    """The lowest epoch that the command may use."""
    notes: list[str] = field(default_factory=list)


@contextmanager
def changed_run(path: str | Path, *, repair: bool = False) -> Iterator[OpenedRun]:
    """The folder of a run for a command that changes it. Of a URL it is the working copy, which
    takes the run over and is uploaded when the context ends without an error. Blocking.

    Args:
        repair: also take files that were lost or changed in the store, and upload everything to
            one that was emptied.

    Raises: StoreError when another driver lives, or takes the run meanwhile; UserError for a URL
    without a run, or when the store fails; DiskFull.
    """
    url = url_of(path)
    if url is None:
        yield OpenedRun(Path(path))
        return
    remote = open_remote(url)
    if not (repair and _is_emptied(remote)):
        remote.refuse_absent()
    mirror = open_mirror(url, LEASE_S, repair=repair)
    try:
        yield OpenedRun(mirror.path, mirror.first_epoch, mirror.notes)
        mirror.note_lost_files()
        mirror.claim(RunDir(mirror.path).last_epoch())
        if why := run_sync(mirror.finish()):
            raise StoreError(why)
    finally:
        mirror.close()


def open_mirror(url: str, lease_s: float, *, repair: bool = False) -> Mirror:
    """Prepare the working copy of a run: the one of this machine if it drove the run last, else a
    new one. Blocking.

    Args:
        lease_s: seconds without a sign of life after which another machine may take over.
        repair: see `changed_run`.

    Raises: StoreError when another driver lives, or the store is damaged; UserError when the store
    cannot be used; DiskFull.
    """
    remote = open_remote(url)
    root = cache_folder(url)
    root.mkdir(parents=True, exist_ok=True)
    lock = _lock(root, url)
    try:
        return _open(remote, root, lock, lease_s, repair)
    except (StoreError, UserError, DiskFull):
        lock.release()
        raise
    except Exception as error:  # each store has its own errors
        lock.release()
        raise UserError(f"{url} cannot be used: {describe(error)}") from error


def _open(remote: RemoteRun, root: Path, lock: HeldLock, lease_s: float, repair: bool) -> Mirror:
    now = _try(remote)
    copy = (root / "id").read_text() if (root / "id").exists() else ""
    last, work = remote.claim, working_copy(remote.url)
    mine = last is not None and last.copy == copy  # made under this lock, so its driver ended
    if last is not None and not mine:
        _refuse_living(remote, last, now)
    emptied = _is_emptied(remote)
    if emptied and not repair:
        raise UserError(
            f"{remote.url} is empty, but this machine has the rows of a run there, in {work}. Put "
            f"them back with `hermes-rl check {remote.url} --repair`, or remove the folder to "
            "start from scratch"
        )
    kept = (mine or emptied) and (work / "epochs").is_dir()
    notes = [] if kept else _set_aside(remote, root, work)
    damaged: set[str] | None = None
    if repair or not kept:
        fetched = _fetch_all(remote, root, verify=not repair)
        damaged = _find_damaged(remote, fetched) if repair else None
    if kept:
        _fetch_lost(remote, work, verify=not repair)
        shutil.rmtree(root / "fetching", ignore_errors=True)
    else:
        for name in (n for n in damaged or () if not _never_changes(n)):
            (fetched / name).unlink(missing_ok=True)  # a repair cannot use it
        copy = _begin_copy(root, work, fetched)
    mirror = Mirror(remote, lock, copy, lease_s, damaged)
    mirror.notes += [*notes, *remote.log_faults]
    return mirror


def _lock(root: Path, url: str) -> HeldLock:
    fd = os.open(root / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not try_lock(fd):
        os.close(fd)
        raise StoreError(f"{url} is in use by another process on this machine. Stop it, or wait")
    return HeldLock(fd)


def _try(remote: RemoteRun) -> float:
    """Try the store. Returns: its time."""
    remote.try_store()
    name = f".log/now-{secrets.token_hex(8)}"
    remote.put(name, b"")
    try:
        return remote.modified(name)
    finally:
        remote.remove([name])


def _refuse_living(remote: RemoteRun, claim: Entry, now: float) -> None:
    try:
        silent = now - remote.modified(f".log/beat-{claim.id}")
    except FileNotFoundError:
        return  # it ended
    if silent <= claim.lease_s:
        raise StoreError(
            f"{remote.url} is in use by {claim.holder} (last sign of life {max(0, silent):.0f} s "
            f"ago). Stop it, or wait until it is silent for {claim.lease_s:g} s"
        )


def _is_emptied(remote: RemoteRun) -> bool:
    """Whether the store has lost all of a run that this machine drove: a log that was never begun
    has no rows."""
    return not remote.entries and _has_rows_for(remote, working_copy(remote.url))


def _has_rows_for(remote: RemoteRun, work: Path) -> bool:
    """Whether a working copy has rows that the store lacks."""
    run_dir = RunDir(work)
    journals = any(path.stat().st_size for _, path in run_dir.journals("done"))
    return journals or any(f"commits/{s}.json" not in remote.files for s in run_dir.commit_stems())


def _set_aside(remote: RemoteRun, root: Path, work: Path) -> list[str]:
    """Remove a working copy that another machine overtook; keep it if it has rows of its own."""
    if _has_rows_for(remote, work):
        aside = root / f"{work.name}-{secrets.token_hex(4)}"
        work.rename(aside)
        return [f"rows that were never uploaded from this machine are kept in {aside}"]
    shutil.rmtree(work, ignore_errors=True)
    return []


def _fetch_all(remote: RemoteRun, root: Path, *, verify: bool) -> Path:
    """Fetch the run. Returns: the folder."""
    fetching = root / "fetching"
    shutil.rmtree(fetching, ignore_errors=True)
    fetching.mkdir()
    if remote.files:
        RunDir(fetching).create()  # first: without commits, other files look like no run
    remote.fetch(fetching, remote.files, verify=verify)
    return fetching


def _fetch_lost(remote: RemoteRun, work: Path, *, verify: bool) -> None:
    """Fetch what recovery reads and a working copy lacks, except for parts that it has merged: a
    driver may have been killed before it uploaded the merged ones."""
    lost = [n for n, s in remote.files.items() if _is_lost(work, n, s)]
    parts = {n for n in lost if n.partition("/")[0] in TABLES}
    remote.fetch(work, [n for n in lost if n not in parts], verify=verify)
    run_dir = RunDir(work)
    merged = replaced_stems(run_dir, [p for t in TABLES for p in run_dir.parts(t)])
    remote.fetch(work, [n for n in parts if stem_of(work / n) not in merged], verify=verify)


def _find_damaged(remote: RemoteRun, fetched: Path) -> set[str]:
    """The names of files that were lost or changed in the store."""
    return {
        name
        for name, stored in remote.files.items()
        if not (fetched / name).is_file() or file_sha256(fetched / name) != stored.sha256
    }


def _begin_copy(root: Path, work: Path, fetched: Path) -> str:
    """Make a fetched run the working copy. Returns: its id."""
    copy = secrets.token_hex(8)
    work.parent.mkdir(exist_ok=True)
    fetched.rename(work)
    (root / "id").write_text(copy)
    return copy


def _never_changes(name: str) -> bool:
    return name.partition("/")[0] in _FINAL


def _is_lost(work: Path, name: str, stored: Stored) -> bool:
    """Whether a file that recovery reads is missing in the working copy."""
    if name.startswith("epochs/"):
        return not (work / name).exists()
    return _never_changes(name) and not is_same(work / name, name, stored)
