"""A run directory on an object store: its log, and copies on this disk.

    URL/TABLE/part-STEM.parquet commits/ ...    the files of the run; names never reused
    URL/.log/N.json       what was added, in order, made by put-if-absent: the truth
    URL/.log/N.copy       the same, written after it, for the case that it is lost or damaged
    URL/.log/beat-ID      a sign of life of the driver that made claim ID
    URL/.state/SHA256     content of files that change, such as stats.json; URL/NAME is a plain copy

An entry of the log is a claim, by which a driver takes the run over, or names files with size and
sha256. Both take the next number. A driver that was replaced finds its number taken, so it can add
nothing after the claim of its successor.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from hermes_rl.errors import DiskFull, StoreError, UserError
from hermes_rl.locks import lock_within, try_lock
from hermes_rl.store.files import add_digest, check_digest, disk_errors, file_sha256
from hermes_rl.store.rundir import url_of

_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "'hermes-rl[s3]'"),
    **dict.fromkeys(("gs", "gcs"), "gcsfs"),
    **dict.fromkeys(("az", "abfs", "adl"), "adlfs"),
}
"""Protocol -> what to install."""

FORMAT = 1
"""Of log entries. A log of a higher format is refused."""

_PARALLEL = 8
"""Transfers at the same time."""


_FETCH_S = 600.0
"""How long a reader waits for another one that fetches the same run."""


class Stored(msgspec.Struct, frozen=True):
    """A file of the run in the store."""

    object: str
    """Its key below the URL; the name itself unless its content may change."""
    size: int
    sha256: str


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One object of the log."""

    id: str
    format: int = FORMAT
    epoch: int = 0
    """Of a claim; 0 for other entries."""
    copy: str = ""
    """The working copy that made the claim."""
    holder: str = ""
    """Process and host of the claim, for people."""
    lease_s: float = 0.0
    files: dict[str, Stored] = {}
    removed: tuple[str, ...] = ()


_decode_entry = msgspec.json.Decoder(Entry).decode


def cache_folder(url: str) -> Path:
    """Where copies of a run are kept on this disk: below `$XDG_CACHE_HOME`, or ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home, "hermes-rl", "runs", hashlib.sha256(url.encode()).hexdigest()[:16])


class RemoteRun:
    """The log and the objects of a run at a URL. All methods block; errors of the store are raised
    as they come, except where stated.

    Args:
        url: as `url_of` returns it.

    Raises: UserError when the package for the protocol is missing or refuses the URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        scheme = url.partition(":")[0]
        try:
            import fsspec

            more = {"auto_mkdir": True} if scheme == "file" else {"use_listings_cache": False}
            self._fs, self._root = fsspec.core.url_to_fs(url, skip_instance_cache=True, **more)
        except ImportError as error:
            package = _PACKAGES.get(scheme, f"the fsspec package for {scheme}")
            raise UserError(f"{url}: {scheme}:// needs a package. pip install {package}") from error
        except ValueError as error:
            raise UserError(f"{url}: {error}. Use s3://BUCKET/PATH, gs:// or az://") from error
        self._whole = {"max_concurrency": 1} if scheme in ("s3", "s3a") else {}
        """Read in one request; s3fs would ask for the size first."""
        self._entries: list[Entry] = []
        self.files: dict[str, Stored] = {}
        """Name -> the file as of the entries that were read."""
        self.log_faults: list[str] = []
        """One line for each entry that was read from its copy."""
        self._incomplete: dict[str, bytes] = {}
        """Objects of the log that are missing or damaged -> their content."""

    @property
    def entries(self) -> list[Entry]:
        """The entries that were read."""
        return self._entries

    @property
    def claim(self) -> Entry | None:
        """The newest claim that was read."""
        return next((e for e in reversed(self._entries) if e.epoch), None)

    def refuse_absent(self) -> None:
        """Raises: UserError when there is no run."""
        if not any(name.startswith("epochs/") for name in self.files):
            raise UserError(f"{self.url} is not a run (no log of one). Give the URL of a run")

    def read_log(self) -> None:
        """Read the entries that were added since the last call.

        Raises: StoreError for a newer log, and where an entry and its copy are lost or damaged.
        """
        known = len(self._entries)
        names = {n for n in self.names(".log") if re.fullmatch(r"\d{10}\.(json|copy)", n)}
        numbers = sorted({int(n[:10]) for n in names})
        if numbers != list(range(1, len(numbers) + 1)) or len(numbers) < known:
            raise StoreError(f"{self.url}/.log lacks entries. Restore them from a backup")
        for number, entry in self._parallel(self._read_entry, numbers[known:]):
            self.apply(entry)
            if (copy := _copy_name(number)).rpartition("/")[2] not in names:
                self._incomplete[copy] = _content(entry)
        self.log_faults.sort()  # threads read the entries

    def _read_entry(self, number: int) -> tuple[int, Entry]:
        name, copy = _entry_name(number), _copy_name(number)
        try:
            entry = self._decode(name)
        except StoreError as error:
            try:
                entry = self._decode(copy)
            except StoreError:
                raise StoreError(f"{error}. Restore it from a backup") from error
            self.log_faults.append(f"{error}; its copy is intact")
            self._incomplete[name] = _content(entry)
        if entry.format > FORMAT:
            raise StoreError(f"{self.url} was written by a newer hermes_rl. Upgrade it")
        return number, entry

    def _decode(self, name: str) -> Entry:
        try:
            return _decode_entry(check_digest(self.read(name)))
        except FileNotFoundError:
            raise StoreError(f"{self.url}/{name} is missing") from None
        except (msgspec.DecodeError, ValueError) as error:
            raise StoreError(f"{self.url}/{name} is damaged: {error}") from error

    def complete_log(self) -> None:
        """Write the objects of the log that are missing or damaged again."""
        self._parallel(lambda name: self.put(name, self._incomplete[name]), self._incomplete)
        self._incomplete.clear()

    def apply(self, entry: Entry) -> None:
        """Add an entry that is in the store to what is known."""
        self._entries.append(entry)
        self.files.update(entry.files)
        for name in entry.removed:
            self.files.pop(name, None)

    def append(self, entry: Entry) -> bool:
        """Put an entry under the next number, and apply it. May be repeated with the same entry
        when the answer of the store was lost.

        Returns: False when the number is taken by another entry.

        Raises: StoreError when the store has lost the entry before.
        """
        number, data = len(self._entries) + 1, _content(entry)
        if self._entries:  # readers of a log with a gap find nothing
            self._read_entry(number - 1)
        if not self.put_new(_entry_name(number), data):
            return False
        self._incomplete[_copy_name(number)] = data
        self.complete_log()
        self.apply(entry)
        return True

    def put_new(self, name: str, data: bytes) -> bool:
        """Put an object that does not exist. Returns False when other content has its name."""
        try:
            self._fs.pipe_file(self._key(name), data, mode="create")
        except Exception:  # each store has its own errors; what is there decides
            try:
                return self.read(name) == data
            except FileNotFoundError:
                pass
            raise
        return True

    def put(self, name: str, data: bytes) -> None:
        """Put or replace an object."""
        self._fs.pipe_file(self._key(name), data)

    def read(self, name: str) -> bytes:
        """The content of an object. Raises: FileNotFoundError."""
        content: bytes = self._fs.cat_file(self._key(name), **self._whole)
        return content

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; absent ones do not matter."""
        for name in names:
            try:
                self._fs.rm_file(self._key(name))
            except FileNotFoundError:
                continue

    def modified(self, name: str) -> float:
        """When an object was written, in seconds by the clock of the store. Raises:
        FileNotFoundError."""
        when: float = self._fs.modified(self._key(name)).timestamp()
        return when

    def try_store(self) -> None:
        """Try whether the store refuses to replace an object that a put must not replace.

        Raises: UserError when it does not.
        """
        name = f".log/probe-{secrets.token_hex(8)}"
        try:
            if not self.put_new(name, b"1") or self.put_new(name, b"2") or self.read(name) != b"1":
                raise UserError(
                    f"{self.url}: this store ignores put-if-absent (If-None-Match), so two "
                    "drivers could overwrite each other. Use a store that has it, or a local --out"
                )
        finally:
            self.remove([name])

    def fetch(self, folder: Path, names: Iterable[str], *, verify: bool = True) -> dict[str, str]:
        """Copy files of the log to a folder. A file is there completely or not at all.

        Args:
            verify: False also takes files that differ from the log, or are absent.

        Returns: one line for each file that was lost or changed in the store, by its name.

        Raises: StoreError for such a file, when `verify`.
        """
        names = list(names)
        found = zip(names, self._parallel(lambda n: self._fetch(folder, n), names), strict=True)
        faults = {name: fault for name, fault in found if fault}
        if verify:
            self.refuse_faults(faults)
        return faults

    def refuse_faults(self, faults: dict[str, str]) -> None:
        """Raises: StoreError for the first of some faults that `fetch` found."""
        for fault in faults.values():
            raise StoreError(f"{fault}. Restore it, or see hermes-rl check {self.url}")

    def _fetch(self, folder: Path, name: str) -> str:
        stored, place = self.files[name], folder / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise StoreError(f"{self.url}/.log names the file {name!r}, which is outside of a run")
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
        with disk_errors():
            try:
                self._fs.get_file(self._key(stored.object), str(temporary))
                same = file_sha256(temporary) == stored.sha256
                if not same:
                    os.utime(temporary, (0, 0))  # so that `is_same` does not accept it
                os.replace(temporary, place)
            except FileNotFoundError:
                return f"{self.url}/{stored.object}: is missing"
            finally:
                temporary.unlink(missing_ok=True)
        return "" if same else f"{self.url}/{stored.object}: does not match its sha256"

    def _parallel(self, work: Any, items: Iterable[Any]) -> list[Any]:
        with ThreadPoolExecutor(_PARALLEL) as pool:
            return list(pool.map(work, items))

    def upload(self, folder: Path, names: Iterable[str], done: Callable[[str], None]) -> None:
        """Put files of a folder under their names.

        Args:
            done: takes the name of each file that is in the store, also when others fail.
        """

        def work(name: str) -> None:
            self._fs.put_file(str(folder / name), self._key(name))
            done(name)

        self._parallel(work, names)

    def names(self, folder: str) -> list[str]:
        """The names of the objects in a folder."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._key(folder), detail=False)
        except FileNotFoundError:
            return []
        return [str(name).rstrip("/").rpartition("/")[2] for name in found]

    def _key(self, name: str) -> str:
        return f"{self._root}/{name}"


def _entry_name(number: int) -> str:
    return f".log/{number:010d}.json"


def _copy_name(number: int) -> str:
    return f".log/{number:010d}.copy"


def _content(entry: Entry) -> bytes:
    return add_digest(msgspec.json.encode(entry))


def describe(error: BaseException) -> str:
    """One line for an error of a store."""
    code = getattr(error, "errno", None)
    text = str(error) or (errno.errorcode.get(code, "") if code else "") or type(error).__name__
    return " ".join(text.split())[:200]


def open_remote(url: str) -> RemoteRun:
    """Open a run and read its log. Raises: UserError when the store cannot be reached; as
    `RemoteRun` and `read_log`."""
    remote = RemoteRun(url)
    try:
        remote.read_log()
    except (StoreError, UserError):
        raise
    except Exception as error:  # each store has its own errors
        raise UserError(
            f"{url} cannot be read: {describe(error)}. Check the address and its credentials"
        ) from error
    return remote


def fetch_run(url: str, *, whole: bool = False, new: bool = False) -> tuple[Path, list[str]]:
    """Bring the copy for readers up to date: a folder on this disk with the published files.

    Args:
        whole: fetch everything again, and keep what is damaged, for checks.
        new: there may be no run yet; the folder is empty then.

    Returns: the folder, and one line for each file that was lost or changed in the store.

    Raises: UserError when there is no run, or the store cannot be reached; StoreError for damage.
    """
    remote = open_remote(url)
    if not new:
        remote.refuse_absent()
    folder = cache_folder(url) / "copy" / _name(url)
    for name in ("epochs", "commits", "journal", "tmp"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    fd = os.open(folder.parent / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not lock_within(fd, _FETCH_S):
            raise StoreError(f"{url} is being fetched by another process for a long time. Stop it")
        faults = [*remote.log_faults, *_fetch_into(remote, folder, whole)]
    except (StoreError, UserError, DiskFull):
        raise
    except Exception as error:  # each store has its own errors
        raise UserError(f"{url} cannot be read: {describe(error)}. Run the same again") from error
    finally:
        os.close(fd)
    return folder, faults


def _fetch_into(remote: RemoteRun, folder: Path, whole: bool) -> list[str]:
    fetched: dict[str, Stored] = {}
    faults: dict[str, str] = {}
    while True:
        absent = [
            name
            for name, stored in remote.files.items()
            if stored != fetched.get(name) and (whole or not is_same(folder / name, name, stored))
        ]
        fetched |= {name: remote.files[name] for name in absent}
        faults |= remote.fetch(folder, absent, verify=False)
        if faults:
            remote.read_log()
        lost = {n: f for n, f in faults.items() if fetched[n] == remote.files.get(n)}
        if len(lost) == len(faults):
            break
        faults = lost  # others were merged meanwhile
    if not whole:
        for name in faults:
            (folder / name).unlink(missing_ok=True)
        remote.refuse_faults(faults)
    for path in (p for p in folder.rglob("*") if p.is_file()):
        if path.relative_to(folder).as_posix() not in remote.files:
            path.unlink(missing_ok=True)
    return [*faults.values()]


def is_same(place: Path, name: str, stored: Stored) -> bool:
    """Whether a file has the size of the log, and the content, if that may change. Never for one
    that differed when it was fetched."""
    try:
        found = place.stat()
    except OSError:
        return False
    same = found.st_size == stored.size and found.st_mtime_ns != 0
    return same and (stored.object == name or file_sha256(place) == stored.sha256)


def working_copy(url: str) -> Path:
    """Where a driver on this machine keeps the run, whether or not it is there."""
    return cache_folder(url) / "work" / _name(url)


def _name(url: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", url.rpartition("/")[2]).lstrip(".")[:80] or "run"


def local_run(path: str | Path) -> Path:
    """The folder of a run: the path itself; for a URL the working copy while a driver of this
    machine uses it, else an up-to-date copy. Raises: as `fetch_run`."""
    url = url_of(path)
    if url is None:
        return Path(path)
    work = working_copy(url)
    try:
        fd = os.open(work / "LOCK", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return fetch_run(url)[0]
    try:
        driven = not try_lock(fd, shared=True)
    finally:
        os.close(fd)
    return work if driven else fetch_run(url)[0]
