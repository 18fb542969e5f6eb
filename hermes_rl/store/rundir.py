"""The folder of a run: its tables, names, lock and epochs."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from hermes_rl.errors import DiskFull, StoreError, UserError
from hermes_rl.locks import lock_within, try_lock
from hermes_rl.store.crash import CrashHook
from hermes_rl.store.files import Storage, check_digest, convert_os_errors, disk_errors
from hermes_rl.store.processes import HeldLock, read_holder, this_process

SCHEMA_VERSION = 1
"""Of the tables and the journal. A run directory of a higher version is refused."""

COMPACTED_VERSION = 2
"""Of a run with merged parts: versions that do not know them would miss rows and pay them again."""

TABLES = (
    *("segments", "subagents", "failures", "trajectories", "grades", "groups"),
    "deliveries",
)
"""All tables, in the order of publishing: derived rows after the rows that finish units."""


RETIRED = ".compact"
"""Parts before and after a switch to merged ones; afterwards named `.parquet.old`."""

CHECKPOINT = "ledger.checkpoint"
"""See `checkpoint`."""

FOLDERS = ("epochs", "journal", "commits", "tmp", *TABLES)
_STEM = re.compile(r"(\d+-[A-Za-z0-9_.]+-\d+)")


_STATUS_LOCK_S = 0.2
"""`status` holds LOCK for a moment; a driver that starts meanwhile waits."""


_URL = re.compile(r"([a-z][a-z0-9+.-]+):/{1,2}([^/].*|/.+)")
"""Also with one slash, which is what `pathlib.Path` makes of a URL."""


class Epoch(msgspec.Struct, frozen=True, kw_only=True):
    """One start of a driver: the content of epochs/E.json."""

    epoch: int
    schema_version: int
    run_id: str
    identity: dict[str, Any]
    """The identity sections of the configuration; a resume must have the same."""
    max_attempts: int = 3
    """Counted failures after which a unit is given up."""
    meta: dict[str, Any] = {}
    """For people: versions, host, command line."""


class _Version(msgspec.Struct):
    schema_version: int


_decode_version = msgspec.json.Decoder(_Version).decode
_decode_epoch = msgspec.json.Decoder(Epoch).decode
_T = TypeVar("_T")


class NewerRun(StoreError):
    """A run directory of a newer version of hermes_rl."""


class RunDir:
    """Paths and basic operations of one run directory. The constructor reads and creates nothing.

    Args:
        path: a local folder; URLs are refused (`local_run` has a copy of one).

    Raises: UserError for a URL.
    """

    def __init__(self, path: str | Path) -> None:
        if "://" in str(path) or (":/" in str(path) and url_of(path)):
            raise UserError(
                f"{url_of(path) or path} is not on this disk, which this command needs. Use `run`, "
                "`check`, `show`, `view` or `export` for a URL, or copy the run to a folder"
            )
        self.path = Path(path)
        self.crash = CrashHook.from_environment()
        self.storage = Storage(self.path, self.crash)
        self.merged: tuple[tuple[str, ...], dict[str, Any]] | None = None
        """For `snapshots.merged_by_stem`: the snapshots that were read, and their content."""
        self.compactions: dict[int, Any] = {}
        """The snapshots that were read, which never change; see `snapshots`."""

    def create(self) -> None:
        """Create the folders.

        Raises: UserError when the folder contains other files or cannot be written; DiskFull.
        """
        try:
            if self.path.is_dir() and not is_run(self.path):
                others = {p.name for p in self.path.iterdir()} - {*FOLDERS, "LOCK"}
                if others:
                    raise UserError(
                        f"{self.path} contains other files ({min(others)}) and is not a run "
                        "directory. Choose another --out"
                    )
            for folder in FOLDERS:
                (self.path / folder).mkdir(parents=True, exist_ok=True)
            self.storage.sync_path(self.path)
            above = self.path.absolute().parent
            if os.access(above, os.R_OK):
                self.storage.sync_path(above)
            if not os.access(self.path, os.W_OK):
                raise PermissionError(13, "Permission denied")
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFull(f"the disk of {self.path} is full. Free some space") from error
            raise UserError(
                f"{self.path} cannot be written: {error.strerror}. Choose another --out"
            ) from error

    def try_file_system(self) -> None:
        """Try what exactly-once execution needs, before anything is paid for.

        Raises: UserError that names what the file system lacks; DiskFull.
        """
        mark = secrets.token_hex(8)  # another driver may try at the same moment
        names = [self.path / "tmp" / f"probe-{mark}-{n}" for n in range(3)]
        fds: list[int] = []
        what = "new files"
        try:
            with disk_errors():
                fds += [os.open(names[0], os.O_RDWR | os.O_CREAT | os.O_CLOEXEC) for _ in range(2)]
                what = "locks (flock; Lustre has them with -o flock)"
                if not try_lock(fds[0]) or try_lock(fds[1]):
                    raise OSError(0, "two programs get the same lock")
                what = "hard links"
                os.link(names[0], names[1])
                with suppress(FileExistsError):
                    os.link(names[0], names[1])
                    raise OSError(0, "a link replaces a file")
                what = "renames"
                os.rename(names[1], names[2])
                for folder in FOLDERS:  # one may be a mount, or a link to another disk
                    what = f"renames from tmp/ to {folder}/"
                    # Of an absent file: the kernel compares the mounts first, and a living driver
                    # sees no file of ours in its tables.
                    with suppress(FileNotFoundError):
                        os.rename(names[1], self.path / folder / names[1].name)
        except OSError as error:
            if isinstance(error, DiskFull):
                raise
            raise UserError(
                f"the file system of {self.path} lacks {what}: {error.strerror}. A run directory "
                "needs them; choose another --out"
            ) from error
        finally:
            for fd in fds:
                os.close(fd)
            for name in names:
                name.unlink(missing_ok=True)

    def lock(self) -> HeldLock:
        """Take LOCK.

        Raises: StoreError, naming the process that holds it.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        with convert_os_errors(self.path):
            fd = os.open(self.path / "LOCK", flags, 0o644)
        if not lock_within(fd, _STATUS_LOCK_S):
            holder = read_holder(fd)
            os.close(fd)
            who = f"process {holder.pid} on {holder.host}" if holder else "another process"
            raise StoreError(
                f"{self.path} is in use by {who}; wait, or stop it with "
                f"`hermes-rl status {self.path} --stop`"
            )
        return HeldLock(fd)

    def open_gate(self, epoch: int) -> None:
        """Let this driver publish, and none of an earlier epoch: one that has lost LOCK and is
        suspended may be behind every check already, but has to pass its gate.

        Raises: StoreError when a later epoch has begun.
        """
        folder = self.path / "epochs"
        for name in os.listdir(folder):
            if name.isdigit() and int(name) < epoch:
                os.rename(folder / name, folder / f"{name}.closed")
        for closed in folder.glob("*.closed"):
            shutil.rmtree(closed, ignore_errors=True)
        self.storage.gate = folder / str(epoch)
        self.storage.gate.mkdir()
        if max(self.epochs()) > epoch:  # it may have looked for this gate before
            self.close_gate()
            raise StoreError(f"{self.path}: another driver has begun")

    def close_gate(self) -> None:
        """Publish nothing more."""
        if self.storage.gate is not None:
            shutil.rmtree(self.storage.gate, ignore_errors=True)

    def epochs(self) -> list[int]:
        """All epochs so far, ascending."""
        names = self.storage.names("epochs")
        return sorted(int(n[:-5]) for n in names if re.fullmatch(r"\d+\.json", n))

    def last_epoch(self) -> int:
        """The highest epoch in any name, 0 for none. An epoch is never reused, even if epochs/ was
        emptied, since batches of two drivers would have the same name."""
        stems = [*self.commit_stems(), *(stem_of(p) for t in TABLES for p in self.parts(t))]
        writers = [f"{name}-0" for name in (*self.writers(), *self.storage.names("quarantine"))]
        gates = [int(name) for name in self.storage.names("epochs") if name.isdigit()]
        return max([0, *self.epochs(), *gates, *(order_of(stem)[0] for stem in (*stems, *writers))])

    def epoch(self, number: int) -> Epoch:
        """The content of epochs/NUMBER.json.

        Raises: NewerRun; StoreError when it is damaged.
        """

        def decode(content: bytes) -> Epoch:
            version = _decode_version(check_digest(content)).schema_version
            if version > COMPACTED_VERSION:
                raise NewerRun(
                    f"{self.path} was written by a newer hermes_rl (schema {version}, this one "
                    f"knows {COMPACTED_VERSION}). Upgrade hermes_rl, or choose another --out"
                )
            return _decode_epoch(content)

        return self.read(f"epochs/{number}.json", decode)

    def read(self, name: str, decode: Callable[[bytes], _T]) -> _T:
        """A JSON file of the run. Raises: StoreError when it is damaged or cannot be read."""
        try:
            return decode(self.storage.read(name))
        except OSError as error:
            raise StoreError(f"{self.path}/{name} cannot be read: {error.strerror}") from error
        except (msgspec.DecodeError, ValueError) as error:
            raise StoreError(f"{self.path}/{name} is damaged: {error}") from error

    def writer_path(self, writer: str) -> Path:
        """The journal folder of a writer (EPOCH-WORKER)."""
        return self.path / "journal" / writer

    def writers(self) -> list[str]:
        """All writers that left a journal folder, oldest epoch first."""
        names = [n for n in self.storage.names("journal") if re.fullmatch(r"\d+-[\w.]+", n)]
        folders = [n for n in names if self.writer_path(n).is_dir()]
        return sorted(folders, key=lambda n: (epoch_of(n), n))

    def journals(self, kind: str, writer: str | None = None) -> list[tuple[str, Path]]:
        """The `done`, `live`, `asked` or `dispatch` files of one writer or of all, by number, each
        with the stem of its batch. Other files are ignored, such as `.nfs...`."""
        pattern = re.compile(kind if kind == "dispatch" else rf"{kind}-(\d+)")
        found = []
        for owner in self.writers() if writer is None else [writer]:
            folder = self.writer_path(owner)
            named = [(pattern.fullmatch(p.stem), p) for p in folder.glob(f"{kind}*.jsonl")]
            numbered = [(int(m[1]) if m.groups() else 0, p) for m, p in named if m]
            found += [(f"{owner}-{number}", path) for number, path in sorted(numbered)]
        return found

    def part_path(self, table: str, stem: str) -> Path:
        """The final name of a part."""
        return self.path / part_name(table, stem)

    def parts(self, table: str) -> list[Path]:
        """All parts of a table in the order of writing; see `order_of`."""
        names = self.storage.names(table)
        found = [self.path / table / n for n in names if re.fullmatch(r"part-.*\.parquet", n)]
        return sorted(found, key=lambda part: order_of(stem_of(part)))

    def present(self, part: Path) -> Path:
        """A part that was listed, although it was merged since: its file is kept for a while."""
        if part.exists():
            return part
        old = (self.path / RETIRED).glob(f"*/{part.parent.name}/{part.name}*")
        return next(old, part)

    def read_part(self, part: Path, read: Callable[[Path], _T]) -> _T:
        """Read a part that was listed, also if it is merged, and its file moved, at this moment.

        Args:
            read: takes the path; raises FileNotFoundError when the file is missing.
        """
        while True:
            place = self.present(part)
            try:
                return read(place)
            except FileNotFoundError:
                if self.present(part) == place:
                    raise

    def commit_stems(self) -> list[str]:
        """The stems of all committed batches."""
        names = self.storage.names("commits")
        return [n[:-5] for n in names if n.endswith(".json") and _STEM.fullmatch(n[:-5])]

    def committed(self, stem: str) -> bool:
        """Whether a batch is committed."""
        return (self.path / "commits" / f"{stem}.json").exists()


def url_of(path: str | Path) -> str | None:
    """The URL that a path is, without a slash at its end; None for a local path."""
    found = _URL.fullmatch(str(path))
    if found is None:
        return None
    scheme, rest = found.groups()
    return f"{scheme}://{'/' if scheme == 'file' else ''}{rest.strip('/')}"


def is_run(path: Path) -> bool:
    """Whether a folder is a run directory, even if some of its files are missing."""
    return sum((path / name).is_dir() for name in ("epochs", "commits", "journal")) > 1


def epoch_of(writer: str) -> int:
    """The epoch in a writer's name or a stem."""
    return int(writer.partition("-")[0])


def part_name(table: str, stem: str) -> str:
    """The name of a part within the run directory."""
    return f"{table}/part-{stem}.parquet"


def stem_of(part: Path) -> str:
    """The stem in `part-STEM.parquet`."""
    return part.stem.removeprefix("part-")


def order_of(stem: str) -> tuple[int, int, str, int]:
    """Sort key of stems: epoch, writer, sequence. Batches of the driver come before those of
    workers.

    Derived rows are sorted by this, since clocks may go back between two starts. A merged batch has
    the place of its last one.
    """
    found = re.fullmatch(r"(\d{1,9})-(\D*)(\d{0,9})(.*)-(\d{1,9})(?:\.\d+)?", stem)
    if found is None:
        return 0, -1, stem, 0
    epoch, kind, number, rest, sequence = found.groups()
    return int(epoch), int(number or -1), kind + rest, int(sequence)


GRACE_S = 10.0
"""Time for a writer to end after the end of its driver, and again after a kill."""

LEASE_S = 30.0
"""The lease of a writer whose `alive` does not contain it."""


class NotFenced(StoreError):
    """A writer still holds its journal after the grace period, a kill, or its lease."""


def fence(run_dir: RunDir, writer: str, *, grace_s: float = GRACE_S) -> None:
    """Return once the writer can no longer write. Blocking.

    After the grace period it kills a local process by pid and start time, but not this one. For a
    process on another machine it waits for the lease and the grace period.
    Raises: NotFenced when the writer still holds its journal after that.
    """
    path = run_dir.writer_path(writer) / "alive"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if lock_within(fd, grace_s):
            return
        holder = read_holder(fd)
        if holder is not None and holder == this_process(holder.lease_s):
            raise NotFenced(
                f"{run_dir.path}: writer {writer} of this process still waits for its disk. "
                "Its finished rows are published when the disk answers, or by the next start"
            )
        if holder is not None:
            holder.kill()
        lease_s = holder.lease_s if holder and holder.lease_s is not None else LEASE_S
        if not lock_within(fd, GRACE_S if holder and holder.local else lease_s + grace_s):
            who = f"process {holder.pid} on {holder.host}" if holder else "another process"
            raise NotFenced(f"{run_dir.path}: writer {writer} ({who}) still runs; stop it first")
    finally:
        os.close(fd)  # its holder is dead, and its name is never reused
