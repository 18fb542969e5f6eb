"""Backends for the tests, and a way to run a check as an ordinary user."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
import pytest_asyncio

from hermes_rl.sandboxes import (
    Bubblewrap,
    BubblewrapSandbox,
    Sandbox,
    SandboxBackend,
    SandboxSpec,
    Subprocess,
    find_binary,
    leased_sandbox,
    reachable,
    watchdog,
    zygote,
)

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ORDINARY = 54321
"""A user id that nobody has."""
CANARY = "canary-7f3a"
"""Stands for an API key in the launcher's environment."""
CHECK_S = 300.0
"""How long one check may take."""


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """bubblewrap itself starts the sandboxes of this test."""
    monkeypatch.setenv(zygote.SWITCH, "bubblewrap")


@pytest.fixture
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A state folder that slot users can reach (pytest's own is closed to others)."""
    path = Path("/tmp") / f"hermes-test-{os.getpid()}-{os.urandom(4).hex()}"
    path.mkdir(mode=0o711)
    yield path
    memory = Path(watchdog.memory_folder(str(path)))
    left = [*path.glob("boxes/*"), *path.glob("owners/*"), *memory.glob("*")]
    shutil.rmtree(path, ignore_errors=True)
    assert left == [], "a closed backend leaves nothing"


KINDS: dict[str, type[Bubblewrap] | type[Subprocess]] = {
    "bubblewrap": Bubblewrap,
    "none": Subprocess,
}


@pytest_asyncio.fixture(params=KINDS)
async def backend(
    request: pytest.FixtureRequest, state: Path
) -> AsyncIterator[Bubblewrap | Subprocess]:
    """Each backend in turn."""
    made = KINDS[request.param](state_dir=state)
    yield made
    await made.aclose()


@pytest_asyncio.fixture
async def bubblewrap(state: Path) -> AsyncIterator[Bubblewrap]:
    backend = Bubblewrap(state_dir=state)
    yield backend
    await backend.aclose()


@pytest_asyncio.fixture
async def plain(state: Path) -> AsyncIterator[Subprocess]:
    backend = Subprocess(state_dir=state)
    yield backend
    await backend.aclose()


@pytest_asyncio.fixture
async def each_sandbox(backend: SandboxBackend) -> AsyncIterator[Sandbox]:
    """A sandbox of each backend."""
    async with leased_sandbox(backend) as sandbox:
        yield sandbox


@pytest_asyncio.fixture
async def sandbox(bubblewrap: Bubblewrap) -> AsyncIterator[BubblewrapSandbox]:
    async with await bubblewrap.lease(SandboxSpec(lease="test")) as leased:
        yield leased


@cache
def ordinary_python() -> str:
    """A Python that an ordinary user can start."""
    for python in ("/usr/bin/python3", sys.executable):
        command = ["setpriv", f"--reuid={ORDINARY}", f"--regid={ORDINARY}", "--clear-groups", "--"]
        done = subprocess.run(
            [*command, python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"],
            capture_output=True,
            check=False,
        )
        if done.returncode == 0:
            return python
    raise AssertionError("no Python 3.11 that an ordinary user can start: install python3")


@pytest.fixture(scope="session")
def code(_zygote_is_built: None) -> Iterator[Path]:
    """The package where everybody can read it: the checkout may lie where others cannot go."""
    shared = Path("/tmp") / f"hermes-code-{os.getpid()}-{os.urandom(4).hex()}"
    shared.mkdir(mode=0o755)
    package = shutil.copytree(ROOT / "hermes_rl", shared / "hermes_rl")
    shutil.copyfile(HERE / "launcher.py", shared / "launcher.py")
    for path in [package, *package.rglob("*")]:
        path.chmod(0o755)
    reachable(find_binary(), shared)
    yield shared
    shutil.rmtree(shared)


class Launcher:
    """A process that runs checks as some user; begun anew when a check took it along.

    Args:
        python: the command that starts an interpreter as that user.
        code: the folder with the package and launcher.py.
    """

    def __init__(self, python: list[str], code: Path) -> None:
        self._python = python
        self._code = code
        self._process: subprocess.Popen[bytes] | None = None
        self._said = -1

    def _begin(self) -> subprocess.Popen[bytes]:
        self._said, tell = os.pipe()
        process = subprocess.Popen(
            [*self._python, str(self._code / "launcher.py"), str(tell)],
            env={"PYTHONPATH": str(self._code), "PATH": os.environ["PATH"], "CANARY_KEY": CANARY},
            cwd="/",
            stdin=subprocess.PIPE,
            pass_fds=(tell,),
        )
        os.close(tell)
        return process

    def run(
        self,
        file: Path,
        name: str,
        state: Path,
        engine: Mapping[str, str] | None = None,
        launcher: str = "",
    ) -> None:
        """Run one function of a file on a backend.

        Args:
            engine: name, socket or program, and image, for containers; None for bubblewrap.
            launcher: what starts sandboxes (see `zygote.SWITCH`).

        Raises: AssertionError with its traceback.
        """
        checks = self._code / file.name
        if not checks.exists():
            shutil.copyfile(file, checks)
            checks.chmod(0o755)
        if self._process is None:
            self._process = self._begin()
        binary = reachable(find_binary(), self._code)
        order = {
            "file": str(checks),
            "check": name,
            "state": str(state),
            "binary": binary,
            "engine": engine,
            "launcher": launcher,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        said = b""
        while not said.endswith(b"\n"):
            ready, _, _ = select.select([self._said], [], [], CHECK_S)
            more = os.read(self._said, 1 << 16) if ready else b""
            if not more:
                self.close()
                raise AssertionError(f"{name}: no word within {CHECK_S} s, or the process died")
            said += more
        assert json.loads(said) == "", json.loads(said)

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            os.close(self._said)
            self._process = None


@pytest.fixture(scope="session")
def as_ordinary_user(code: Path) -> Iterator[Callable[..., None]]:
    """Run one function of a file on a backend as an ordinary user, in a process of his."""
    folder = Path("/tmp") / f"hermes-user-{os.getpid()}-{os.urandom(4).hex()}"
    folder.mkdir(mode=0o700)
    python = [sys.executable]
    if os.geteuid() == 0:
        os.chown(folder, ORDINARY, ORDINARY)
        become = ["setpriv", f"--reuid={ORDINARY}", f"--regid={ORDINARY}", "--clear-groups", "--"]
        python = [*become, ordinary_python()]
    launcher = Launcher(python, code)
    yield lambda file, name, engine=None: launcher.run(file, name, folder / "state", engine)
    launcher.close()
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def ourselves(code: Path) -> Iterator[Launcher]:
    launcher = Launcher([sys.executable], code)
    yield launcher
    launcher.close()


@pytest.fixture
def as_we_are(ourselves: Launcher, state: Path) -> Callable[..., None]:
    """Run one check in another process, as the user of the tests (root, in a container)."""
    return lambda file, name, launcher="": ourselves.run(file, name, state, launcher=launcher)
