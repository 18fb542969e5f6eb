"""Every known way out of the sandbox is closed: as root, and as an ordinary user.

They fail, rather than skip, where sandboxes cannot run: that would be a gap.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NAMES = [
    line.strip().rstrip(",")
    for line in (HERE / "escapes.py").read_text().partition("CHECKS = (")[2].splitlines()
    if line.startswith("    ")
]
Run = Callable[[Path, str], None]


@pytest.mark.parametrize("name", NAMES)
def test_as_we_are(as_we_are: Run, name: str) -> None:
    as_we_are(HERE / "escapes.py", name)


@pytest.mark.parametrize("name", NAMES)
def test_as_an_ordinary_user(as_ordinary_user: Run, name: str) -> None:
    as_ordinary_user(HERE / "escapes.py", name)
