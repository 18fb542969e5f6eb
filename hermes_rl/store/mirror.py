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
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from hermes_rl.aio import in_thread
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
from hermes_rl.store.rundir import TABLES, RunDir, order_of, stem_of
from hermes_rl.store.snapshots import read_compactions, replaced_stems

SYNC_S = 5.0
"""How often the working copy is searched for new files."""

CLOSE_S = 120.0
"""How long the end of a run tries to complete the mirror."""

_FINAL = ("epochs", "commits", "compacted", *TABLES)
"""Folders whose files never change."""

_LATER = ("network", "workspaces")
"""Folders whose files are complete at the end."""

_NOT_MIRRORED = ("LOCK", "dataset.index")


class Replaced(StoreError):
    """Another driver took the run over."""


class Mirror:
    """A run at a URL that this process drives. Made by `open_mirror`.

    Args:
        remote: with its log read.
        lock: on the working copy; excludes other drivers on this machine.
        copy: the id of the working copy.
    """

    def __init__(self, remote: RemoteRun, lock: HeldLock, copy: str, lease_s: float) -> None:
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
        self._claim: Entry | None = None
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

    def claim(self, epoch: int) -> None:
        """Take the run over, and mirror what the working copy has. Blocking.

        Raises: StoreError when another driver was faster; UserError when the store fails.
        """
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        entry = Entry(
            id=secrets.token_hex(8),
            epoch=epoch,
            copy=self._copy,
            holder=holder,
            lease_s=self.lease_s,
        )
        self._claim = entry
        try:
            self.beat()
            if not self._remote.append(entry):
                raise StoreError(f"{self.url}: another driver has just started. Run again later")
            self.sync()
        except StoreError:
            raise
        except Exception as error:  # each store has its own errors
            raise UserError(f"{self.url} cannot be written: {describe(error)}") from error

    def beat(self) -> None:
        """Show that this driver lives."""
        if self._claim is not None:
            self._remote.put(f".log/beat-{self._claim.id}", b"%d" % time.time())

    def sync(self, *, final: bool = False) -> None:
        """Upload what is new, then name it in the log. May be repeated after any error. Blocking.

        Args:
            final: nothing is written any more.

        Raises: Replaced; errors of the store as they come.
        """
        with self.quiet:
            if self._lost is not None:
                raise self._lost
            if self._pending is None:
                self._pending = self._upload(final)
            if self._pending is not None:
                self._log(self._pending)
            while self._plain:
                name = min(self._plain)
                self._remote.put(name, self._remote.read(self._remote.files[name].object))
                self._plain.remove(name)
            self._remote.remove(self._retired)
            self._retired.clear()

    def _log(self, entry: Entry) -> None:
        if not self._remote.append(entry):
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
        files: dict[str, Stored] = {}
        known = self._remote.files
        for name in self._published(final):
            path = self.path / name
            if name.partition("/")[0] in _FINAL:
                if name not in known:
                    files[name] = Stored(name, path.stat().st_size, file_sha256(path))
                continue
            version = (path.stat().st_mtime_ns, path.stat().st_size)
            seen, digest = self._seen.get(name, (None, ""))
            if seen == version and name in known and known[name].sha256 == digest:
                continue
            data = path.read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            stored = Stored(f".state/{digest}", len(data), digest)
            if known.get(name) != stored:
                if stored.object not in self._uploaded:
                    self._remote.put(stored.object, data)
                    self._uploaded.add(stored.object)
                files[name] = stored
            self._seen[name] = version, digest
        new = [n for n, s in files.items() if s.object == n and n not in self._uploaded]
        self._remote.upload(self.path, new, self._uploaded.add)
        removed = tuple(self._merged_away())
        if not files and not removed:
            return None
        return Entry(id=secrets.token_hex(8), files=files, removed=removed)

    def _published(self, final: bool) -> Iterator[str]:
        """Names of the files that readers may see. A part is one only with its commit."""
        run_dir = RunDir(self.path)
        for folder in ("epochs", "commits", "compacted"):
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
        run_dir = RunDir(self.path)
        merged = replaced_stems(run_dir, [p for t in TABLES for p in run_dir.parts(t)])
        for name in self._remote.files:
            place = self.path / name
            if name.partition("/")[0] in TABLES and stem_of(place) in merged:
                yield name

    def remove_orphans(self) -> None:
        """Remove parts that a driver uploaded and could not name in the log before it was
        replaced: globs would read their rows beside those of the second attempt."""
        for table in TABLES:
            for name in self._remote.names(table):
                if f"{table}/{name}" not in self._remote.files and self._is_old(name):
                    self._remote.remove([f"{table}/{name}"])

    def _is_old(self, name: str) -> bool:
        found = re.fullmatch(r"part-(.*)\.parquet", name)
        return found is not None and 0 < order_of(found[1])[0] < self.first_epoch

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
                await in_thread(self.beat)
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
            except Exception as error:  # each store has its own errors
                if time.monotonic() + pause > deadline:
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
        if self._claim is not None:
            self._remote.remove([f".log/beat-{self._claim.id}"])
            self._claim = None

    def close(self) -> None:
        """Release the working copy. A run that was not finished is free after its lease, or at once
        on this machine."""
        self._lock.release()


def open_mirror(url: str, lease_s: float) -> Mirror:
    """Prepare the working copy of a run: the one of this machine if it drove the run last, else a
    new one. Blocking.

    Args:
        lease_s: seconds without a sign of life after which another machine may take over.

    Raises: StoreError when another driver lives, or the store is damaged; UserError when the store
    cannot be used; DiskFull.
    """
    remote = open_remote(url)
    root = cache_folder(url)
    root.mkdir(parents=True, exist_ok=True)
    lock = _lock(root, url)
    try:
        now = _try(remote)
        mine = root / "id"
        copy = mine.read_text() if mine.exists() else ""
        notes: list[str] = []
        last = remote.claim
        work = working_copy(url)
        if last is None or last.copy != copy or not (work / "epochs").is_dir():
            if last is not None:
                _refuse_living(remote, last, now)
            notes += _set_aside(root, work)
            copy = _fetch_all(remote, root, work)
        else:
            remote.fetch(work, [n for n, s in remote.files.items() if _is_lost(work, n, s)])
    except (StoreError, UserError, DiskFull):
        lock.release()
        raise
    except Exception as error:  # each store has its own errors
        lock.release()
        raise UserError(f"{url} cannot be used: {describe(error)}") from error
    mirror = Mirror(remote, lock, copy, lease_s)
    mirror.notes += notes
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


def _set_aside(root: Path, work: Path) -> list[str]:
    """Remove a working copy that another machine overtook; keep it if it has unpublished rows."""
    (root / "id").unlink(missing_ok=True)
    if any(path.stat().st_size for _, path in RunDir(work).journals("done")):
        aside = root / f"{work.name}-{secrets.token_hex(4)}"
        work.rename(aside)
        return [f"rows that were never uploaded from this machine are kept in {aside}"]
    shutil.rmtree(work, ignore_errors=True)
    return []


def _fetch_all(remote: RemoteRun, root: Path, work: Path) -> str:
    """Fetch the run into a new working copy. Returns: its id."""
    fetching, copy = root / "fetching", secrets.token_hex(8)
    shutil.rmtree(fetching, ignore_errors=True)
    fetching.mkdir()
    remote.fetch(fetching, remote.files)
    if remote.files:
        RunDir(fetching).create()
    work.parent.mkdir(exist_ok=True)
    fetching.rename(work)
    (root / "id").write_text(copy)
    return copy


def _is_lost(work: Path, name: str, stored: Stored) -> bool:
    """Whether a file that never changes is missing in the working copy."""
    return stored.object == name and not is_same(work / name, name, stored)
