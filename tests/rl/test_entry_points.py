"""Environments of installed packages are found by name, also beside broken ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import CLI

from hermes_rl.cli import main

SHOP = """
from hermes_rl.rl import EnvConfig, Environment, make_task

class Config(EnvConfig):
    sandboxed: bool = False

class Haggling(Environment[Config]):
    name = "haggling_shop"
    Config = Config

    def tasks(self, split, seed):
        yield make_task("say it", id="one", oracle='["yes"]')

    async def compute_reward(self, task, trajectory, ctx):
        return float(trajectory.final_response == "yes")
"""
PACKAGES = {
    "shop": (
        "corner_shop = corner_shop_env.haggling:Haggling",
        "corner_shop_env/haggling.py",
        SHOP,
    ),
    "torn": ("torn_one = torn_env:Torn", "torn_env.py", "import no_such_module_here\n"),
    "gone": ("gone_one = module_that_went:Gone", "something_else.py", ""),
    "other": ("no_class = no_class_env:Gone", "no_class_env.py", SHOP),
}

FLAGS = ("--model", "oracle", "--workers", "0", "--out", "run")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the installed packages."""
    folder = tmp_path_factory.mktemp("site")
    for name, (entry, module, text) in PACKAGES.items():
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        (info / "METADATA").write_text(metadata)
        (info / "entry_points.txt").write_text(f"[hermes_rl.environments]\n{entry}\n")
        path = folder / module
        if path.parent != folder:
            path.parent.mkdir()
            (path.parent / "__init__.py").touch()
        path.write_text(text)
    return folder


def test_an_installed_environment_runs_by_name_despite_broken_ones(
    site: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", CLI, "env", "process", "corner_shop", *FLAGS],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(site)},
    )
    assert done.returncode == 0, done.stderr
    assert "4/4 units done, 4 solved" in done.stdout
    assert "  name: corner_shop_env.haggling:Haggling\n" in (tmp_path / "run/run.yaml").read_text()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("torn_one", "torn_env: cannot be imported: ModuleNotFoundError: No module named 'no_such"),
        ("gone_one", "module_that_went: cannot be imported: ModuleNotFoundError"),
        ("no_class", "no_class_env: no Environment 'Gone' (found: Haggling)"),
        ("nobody", "unknown environment 'nobody' (known: corner_shop, "),
    ],
)
def test_a_broken_environment_is_reported_in_one_line(
    site: Path,
    tmp_path: Path,
    name: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(site)
    code, errors = main(["env", "process", name, *FLAGS]), capsys.readouterr().err
    assert (code, errors.count("\n")) == (2, 1), errors
    assert errors.startswith(f"error: {says}"), errors
    assert not list(tmp_path.iterdir())
