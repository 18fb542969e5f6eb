"""What all tests share: Hypothesis's settings, and which tests run in one process.

`make test` spreads the tests over two processes (pytest-xdist, --dist loadgroup). What stands in
one group runs in one of them, in order: a file, since its tests share fixtures, or the tests that
use something of which the machine has one, whose group is named.
"""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# No deadlines, since machines differ; in CI the same examples each time.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

HERE = Path(__file__).parent
RAY = "ray"
"""One Ray at a time: two that start at once are too slow for Ray's own limits. Begun first, since
it takes longest."""
BY_FIXTURE = {"cluster": RAY, "as_ordinary_user": "ordinary user"}
"""Fixture -> group of all tests with it. Sandboxes of one user share the limits of that user."""
BY_FILE = {"bench/test_bench.py": RAY}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test its group; an explicit `xdist_group` stands."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            named = [BY_FIXTURE[name] for name in fixtures_of(item) if name in BY_FIXTURE]
            file = file_of(item)
            item.add_marker(pytest.mark.xdist_group((named or [BY_FILE.get(file, file)])[0]))
    items.sort(key=lambda item: group_of(item) != RAY)


def fixtures_of(item: pytest.Item) -> list[str]:
    return list(getattr(item, "fixturenames", ()))


def file_of(item: pytest.Item) -> str:
    return str(item.path.relative_to(HERE)) if item.path.is_relative_to(HERE) else str(item.path)


def group_of(item: pytest.Item) -> str:
    marker = item.get_closest_marker("xdist_group")
    return str(marker.args[0]) if marker is not None else ""
