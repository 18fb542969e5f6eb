"""Backends for the tests, and a way to run a check as an ordinary user."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import pytest_asyncio

from hermes_rl.sandboxes import warden
from hermes_rl.sandboxes.binary import find_binary, reachable
from hermes_rl.sandboxes.bubblewrap import Bubblewrap
from hermes_rl.sandboxes.none import Subprocess

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ORDINARY = 54321
"""A user id that nobody has."""
CANARY = "canary-7f3a"
"""Stands for an API key in the launcher's environment."""


@pytest.fixture
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A state folder that slot users can reach (pytest's own is closed to others)."""
    path = Path("/tmp") / f"hermes-test-{os.getpid()}-{os.urandom(4).hex()}"
    path.mkdir(mode=0o711)
    yield path
    memory = Path(warden.memory_folder(str(path)))
    left = [*path.glob("boxes/*"), *path.glob("owners/*"), *memory.glob("*")]
    shutil.rmtree(path, ignore_errors=True)
    assert left == [], "a closed backend leaves nothing"


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
def code() -> Iterator[Path]:
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


@pytest.fixture
def as_ordinary_user(code: Path) -> Iterator[Callable[[Path, str], None]]:
    """Run one check of a file's CHECKS as an ordinary user, in a process of its own."""
    if os.geteuid() != 0:
        yield lambda file, name: _launch([sys.executable], code, file, name, Path("/tmp"))
        return
    folder = Path("/tmp") / f"hermes-user-{os.getpid()}-{os.urandom(4).hex()}"
    folder.mkdir(mode=0o700)
    os.chown(folder, ORDINARY, ORDINARY)
    user = ["setpriv", f"--reuid={ORDINARY}", f"--regid={ORDINARY}", "--clear-groups", "--"]
    python = ordinary_python()
    yield lambda file, name: _launch([*user, python], code, file, name, folder)
    shutil.rmtree(folder)


@pytest.fixture
def as_we_are(code: Path, state: Path) -> Callable[[Path, str], None]:
    """Run one check in a process of its own, as the user of the tests (root, in a container)."""
    return lambda file, name: _launch([sys.executable], code, file, name, state)


def _launch(python: list[str], code: Path, file: Path, name: str, folder: Path) -> None:
    checks = code / file.name
    if not checks.exists():
        shutil.copyfile(file, checks)
        checks.chmod(0o755)
    binary = reachable(find_binary(), code)
    done = subprocess.run(
        [*python, str(code / "launcher.py"), str(checks), name, str(folder / "state"), binary],
        env={"PYTHONPATH": str(code), "PATH": os.environ["PATH"], "CANARY_KEY": CANARY},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
