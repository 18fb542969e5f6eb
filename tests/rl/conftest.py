"""Environments that tests write."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from rl_kit import Lab, Written


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@pytest.fixture
def write_env(lab: Lab) -> Callable[..., Written]:
    """Writes an environment's file: `write_env(body, head="")`, the body within its class."""
    return lab.write
