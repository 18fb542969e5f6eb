"""Every known way out of the sandbox is closed: as root, and as an ordinary user.

They fail, rather than skip, where sandboxes cannot run: that would be a gap.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CHECKS = [
    (file, line.strip().rstrip(","))
    for file in ("escapes.py", "escapes_calls.py")
    for line in (HERE / file).read_text().partition("CHECKS = (")[2].splitlines()
    if line.startswith("    ")
]
each = pytest.mark.parametrize(("file", "name"), CHECKS, ids=[name for _, name in CHECKS])
Run = Callable[[Path, str], None]


@each
def test_as_we_are(as_we_are: Run, file: str, name: str) -> None:
    as_we_are(HERE / file, name)


@each
def test_as_an_ordinary_user(as_ordinary_user: Run, file: str, name: str) -> None:
    as_ordinary_user(HERE / file, name)
