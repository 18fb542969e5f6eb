"""Kinds of sandboxes that other packages bring."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from hermes_rl.cli import main
from hermes_rl.errors import UserError
from hermes_rl.sandboxes import CHECKS
from hermes_rl.store import load_run
from hermes_rl.wiring import make_backend

CODE = """
from hermes_rl.sandboxes import Subprocess

class Mine(Subprocess):
    name = "mine"

def no_backend(state_dir):
    return 3

def fails(state_dir):
    raise RuntimeError("no\\nlicence")
"""
NAMES = ("mine:Mine", "absent:Mine", "mine:absent", "mine:no_backend", "mine:fails")


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with five entry points, of which one works."""
    folder = tmp_path / "packages"
    about = folder / "mine_sandboxes-1.dist-info"
    about.mkdir(parents=True)
    (folder / "mine.py").write_text(CODE)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine-sandboxes\nVersion: 1\n")
    points = "".join(f"kind{number} = {value}\n" for number, value in enumerate(NAMES))
    (about / "entry_points.txt").write_text(f"[hermes_rl.sandboxes]\n{points}")
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()


async def test_the_shipped_suite_runs_on_it(state: Path) -> None:
    backend = make_backend("kind0", state)
    wanted = {"keeps_state", "ends_what_takes_too_long", "grades_what_was_left"}
    for check in CHECKS:
        if check.__name__ in wanted:
            await check(backend)
    await backend.aclose()


def test_a_package_brings_a_kind_of_sandbox(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = tmp_path / "rows.jsonl"
    row = {"prompt": "x", "verify": "test -e /workspace/a", "oracle": "touch a"}
    dataset.write_text(json.dumps(row))
    run = ["run", str(dataset), "--model", "oracle", "--workers", "0", "--out", str(tmp_path / "r")]
    assert main([*run, "--sandbox", "kind0"]) == 0
    (found,) = load_run(tmp_path / "r").trajectories.to_dict("records")
    assert found["reward"] == 1.0
    capsys.readouterr()
    assert main([*run, "--sandbox", "kind3"]) != 0
    shown = capsys.readouterr().err.strip()
    assert shown.splitlines()[-1:] == [shown], "one line"
    assert main(["doctor", "sandboxes"]) != 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("of the package mine-sandboxes" in line for line in lines) == 5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("kind1", "of the package mine-sandboxes cannot be loaded: ModuleNotFoundError"),
        ("kind2", "cannot be loaded: AttributeError"),
        ("kind3", "makes a int, which is not a SandboxBackend"),
        ("kind4", "cannot be loaded: RuntimeError: no licence"),
        ("kind5", "kind"),
    ],
)
def test_one_that_does_not_work_is_one_line(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        make_backend(name)
    assert "\n" not in str(caught.value)
