"""A folder for the environments that tests write."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "batch"))  # for forks
sys.path.insert(0, str(Path(__file__).parent))
from runs import Lab


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)
