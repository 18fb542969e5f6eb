"""Ended sandboxes leave nothing to the machine's process 1, also where that waits for nobody."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("orphans.py")
Run = Callable[[Path, str], None]


@pytest.mark.parametrize("check", ["closed", "graded", "killed_by_the_agent", "cancelled"])
def test_nothing_is_left_to_process_1(as_we_are: Run, check: str) -> None:
    as_we_are(FILE, check)


def test_nothing_of_an_ordinary_users_is_left_to_process_1(as_ordinary_user: Run) -> None:
    as_ordinary_user(FILE, "graded")
