"""Every known way out of the sandbox is closed: as root, and as an ordinary user.

They fail, rather than skip, where sandboxes cannot run: that would be a gap.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("escapes.py")
OF_TOOLS = FILE.with_name("tool_escapes.py")
"""They need packages, which the Python of an ordinary user may lack."""


def names_in(file: Path) -> list[str]:
    return re.findall(r"^async def (\w+)\(backend: Bubblewrap\)", file.read_text(), re.MULTILINE)


NAMES = names_in(FILE)
each = pytest.mark.parametrize("name", NAMES)
Run = Callable[..., None]


@each
def test_as_we_are(as_we_are: Run, name: str) -> None:
    as_we_are(FILE, name)


@each
def test_of_the_reference(as_we_are: Run, name: str) -> None:
    as_we_are(FILE, name, "bubblewrap")


@each
def test_as_an_ordinary_user(as_ordinary_user: Run, name: str) -> None:
    as_ordinary_user(FILE, name)


@pytest.mark.parametrize("name", names_in(OF_TOOLS))
def test_of_tools(as_we_are: Run, name: str) -> None:
    as_we_are(OF_TOOLS, name)
