"""Environments that tests write."""

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from rl_kit import Written


@pytest.fixture
def write_env(tmp_path: Path) -> Callable[..., Written]:
    """Writes an environment's file: `write_env(body, head="")`, the body within its class."""

    def write(body: str, head: str = "", name: str = "made_up") -> Written:
        text = "from hermes_rl.rl import *\n" + textwrap.dedent(head)
        text += f'\n\nclass Made(Environment[EnvConfig]):\n    name = "{name}"\n\n'
        text += textwrap.indent(textwrap.dedent(body).strip("\n"), "    ") + "\n"
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        return Written(path)

    return write
