"""What a run settles before it begins."""

import shlex
from pathlib import Path

import pytest

from batch_runner.settings import as_config, settle


@pytest.mark.parametrize("name", ["plain", "two words", "it's $HOME"])
def test_the_command_that_goes_on_can_be_pasted(name: str, tmp_path: Path) -> None:
    out = tmp_path / name
    config = {
        "dataset": {"path": "smoke"},
        "model": {"name": "noop"},
        "sandbox": {"backend": "none"},
        "run": {"out": str(out), "allow_unsandboxed": True},
    }
    words = shlex.split(settle(as_config(config)).resume)
    assert words == ["hermes-rl", "run", "--config", f"{out}/run.yaml"]
