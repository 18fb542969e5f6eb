"""A small base image, and an image store that sandboxes with other uids can read."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from image_kit import archive, root_file_system

from hermes_rl.sandboxes import ImageStore


@pytest.fixture(scope="session")
def shared() -> Iterator[Path]:
    """A folder that sandboxes with other uids can enter, unlike those of pytest."""
    path = Path("/tmp") / f"hermes-images-{os.getpid()}-{os.urandom(4).hex()}"
    path.mkdir()
    path.chmod(0o711)  # whatever the umask is
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def base(shared: Path) -> Path:
    """A tar archive of a root file system with a shell and some programs."""
    return archive(root_file_system(shared / "rootfs"), shared / "base.tar")


@pytest.fixture
def store(shared: Path, monkeypatch: pytest.MonkeyPatch) -> ImageStore:
    """An empty store, which the command uses too."""
    root = shared / os.urandom(4).hex()
    monkeypatch.setenv("HERMES_RL_IMAGES", str(root))
    return ImageStore()
