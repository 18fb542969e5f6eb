"""Toy weights in real wheels, a package index on loopback, and the tiny model's server."""

import asyncio
import contextlib
import hashlib
import os
import random
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from aiohttp import web

from hermes_rl.models.local import LocalServer, Part, Weights, local_server

PART_BYTES = 200_000


@dataclass
class Toy:
    """Toy weights and the folder that holds their wheels."""

    weights: Weights
    content: bytes
    wheels: Path
    marker: Path
    """A file that a wheel would make if it were installed."""
    env: dict[str, str]

    def wheel(self, number: int) -> Path:
        return self.wheels / f"toy_part{number}-1.0-py3-none-any.whl"

    def changed(self, **fields: object) -> Weights:
        return replace(self.weights, **fields)


def write_wheel(folder: Path, number: int, piece: bytes, marker: Path) -> Part:
    """A real wheel with one piece, and a .pth file that tells if anybody installs it."""
    path = folder / f"toy_part{number}-1.0-py3-none-any.whl"
    info = f"toy_part{number}-1.0.dist-info"
    member = f"toy_part{number}/data.bin"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, piece)
        wheel.writestr(
            f"toy_part{number}.pth", f"import pathlib; pathlib.Path({str(marker)!r}).touch()"
        )
        metadata = f"Metadata-Version: 2.1\nName: toy-part{number}\nVersion: 1.0\n"
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return Part(
        package=f"toy-part{number}",
        version="1.0",
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        wheel_bytes=path.stat().st_size,
        member=member,
        bytes=len(piece),
    )


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    wheels, marker = tmp_path / "registry", tmp_path / "installed"
    wheels.mkdir()
    content = b"GGUF" + random.Random(7).randbytes(3 * PART_BYTES + 1000)
    pieces = [content[at : at + PART_BYTES] for at in range(0, len(content), PART_BYTES)]
    parts = [write_wheel(wheels, number, piece, marker) for number, piece in enumerate(pieces, 1)]
    weights = Weights(
        name="toy",
        title="Toy",
        description="a toy",
        file="toy.gguf",
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        licence="LICENSE-SmolLM2",
        parts=tuple(parts),
    )
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "HF_HUB_OFFLINE": "1",
    }
    return Toy(weights, content, wheels, marker, env)


@dataclass
class Index:
    """A package index on loopback that counts what it serves and can hold a wheel back."""

    env: dict[str, str]
    served: list[str] = field(default_factory=list)
    held_back: set[str] = field(default_factory=set)


async def serve(app: web.Application) -> tuple[web.AppRunner, str]:
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


@pytest.fixture
async def index(toy: Toy) -> AsyncIterator[Index]:
    async def page(request: web.Request) -> web.Response:
        stem = request.match_info["name"].replace("-", "_")
        found = toy.wheels.glob(f"{stem}-*.whl")
        links = "".join(f'<a href="/wheels/{path.name}">{path.name}</a>' for path in found)
        html = f"<!DOCTYPE html><html><body>{links}</body></html>"
        return web.Response(text=html, content_type="text/html")

    async def wheel(request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name in here.held_back:
            await asyncio.sleep(60)
        here.served.append(name)
        return web.FileResponse(toy.wheels / name)

    app = web.Application()
    app.router.add_get("/simple/{name}/", page)
    app.router.add_get("/wheels/{name}", wheel)
    runner, address = await serve(app)
    env = {k: v for k, v in toy.env.items() if k not in ("PIP_NO_INDEX", "PIP_FIND_LINKS")}
    here = Index(env={**env, "PIP_INDEX_URL": f"{address}/simple"})
    yield here
    await runner.cleanup()


@pytest.fixture
def serving() -> Callable[[web.Application], object]:
    """Starts an application on a free port of loopback; gives its runner and address."""
    return serve


FETCH = """
import asyncio, os, pickle, sys
from pathlib import Path
from hermes_rl.models.local.weights import fetch_weights
weights = pickle.loads(bytes.fromhex(sys.argv[1]))
print(asyncio.run(fetch_weights(weights, Path(sys.argv[2]), env=dict(os.environ))), flush=True)
"""


@pytest.fixture
def fetch_command() -> Callable[[Weights, Path], list[str]]:
    """The command of a process of its own that fetches weights."""
    import pickle

    def command(weights: Weights, folder: Path) -> list[str]:
        return [sys.executable, "-c", FETCH, pickle.dumps(weights).hex(), str(folder)]

    return command


HOLD = """
import asyncio, sys
from hermes_rl.models.local import local_server

async def main():
    async with local_server("local-tiny") as server:
        print((await server.endpoint()).base_url, flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


@contextlib.contextmanager
def holder(env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process of its own that holds a server of the tiny model; it prints the address."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of one server for the tests of a module."""
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path_factory.mktemp("held"))}
    with holder(env) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield env


@pytest.fixture
def start_holder() -> Callable[[dict[str, str]], contextlib.AbstractContextManager]:
    """Starts a process that holds a server."""
    return holder


@pytest.fixture
async def server(held: dict[str, str]) -> AsyncIterator[LocalServer]:
    async with local_server("local-tiny", env=held) as server:
        yield server
