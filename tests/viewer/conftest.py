"""Fixtures: runs, `hermes-rl view` in a process of its own, and a browser."""

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path[:0] = [HERE, str(Path(__file__).parents[1] / "batch")]  # the latter for forks

from browser import Browser, open_browser  # noqa: E402
from made_runs import make_runs  # noqa: E402
from served import Served, serving  # noqa: E402


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs, read-only; see `made_runs`."""
    return make_runs(tmp_path_factory.mktemp("viewer"))


@pytest.fixture(scope="session")
def served(runs: Path) -> Iterator[Served]:
    with serving(runs) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Browser]:
    async with open_browser() as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def browser(served: Served, chromium: Browser) -> Browser:
    """A browser without data of earlier tests, which has opened the printed address."""
    await chromium.forget(f"http://127.0.0.1:{served.port}")
    await chromium.go(served.address)
    return chromium
