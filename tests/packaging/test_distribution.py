"""What we ship, and that it works where nothing of ours is but the wheel: no extras, no HOME."""

import email
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


class Place(NamedTuple):
    """Where a program runs."""

    folder: Path = ROOT
    variables: dict[str, str] | None = None


def execute(
    *words: str | Path, place: Place = Place(), timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in words],
        cwd=place.folder,
        env=place.variables,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def command(*words: str | Path, place: Place = Place(), timeout: float = 120) -> str:
    done = execute(*words, place=place, timeout=timeout)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def tracked(*folders: str) -> set[str]:
    listed = command("git", "ls-files", "-z", *folders)
    return {name for name in listed.split("\0") if name and (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and an sdist, built by the locked hatchling without a network."""
    out = tmp_path_factory.mktemp("built")
    command(sys.executable, "-m", "hatchling", "build", "-d", out)
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


def test_the_wheel_holds_the_packages_and_the_bundled_tasks(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = {name for name in names if ".dist-info/" not in name}
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    cards = {f"hermes_rl/data/{Path(name).name}" for name in tracked("datasets")}
    assert tracked(*packages) | cards <= shipped
    assert {"hermes_rl/data/smoke.jsonl", "hermes_rl/data/terminal_tasks.jsonl"} <= shipped
    assert "hermes_rl/py.typed" in shipped
    assert {name.split("/")[0] for name in shipped} <= {"hermes_rl", "batch_runner", "environments"}
    assert "environments/__init__.py" not in shipped
    assert not [name for name in shipped if name.endswith(".pyc")]
    licences = [name for name in names if "/licenses/" in name]
    assert any(name.endswith("/LICENSE") for name in licences)


def test_every_environment_package_is_listed() -> None:
    listed = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    present = {
        f"environments/{path.parent.name}" for path in ROOT.glob("environments/*/__init__.py")
    }
    assert present <= set(listed)
    assert present <= set(PROJECT["tool"]["mypy"]["files"])


def test_the_sdist_holds_no_junk_and_builds_the_same_wheel(
    built: Path, wheel: Path, tmp_path: Path
) -> None:
    archive = next(built.glob("*.tar.gz"))
    names = {name.split("/", 1)[1] for name in command("tar", "-tzf", archive).splitlines()}
    command("tar", "-xzf", archive, "-C", tmp_path)
    assert names - {"PKG-INFO"} <= tracked() | untracked()
    source = next(tmp_path.glob("hermes_rl-*"))
    command(
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "-t",
        "wheel",
        "-d",
        "again",
        place=Place(source),
    )
    again = next((source / "again").glob("*.whl"))
    assert set(zipfile.ZipFile(again).namelist()) == set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.slow
def test_a_virtual_environment_of_another_python_is_built_again(tmp_path: Path) -> None:
    """When PYTHON names one; else what is there is kept."""
    for name in ("scripts/venv.sh", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks/none.txt").touch()
    venv = tmp_path / "venv"
    unnamed = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    named = {**unnamed, "PYTHON": sys.executable}

    def make(variables: dict[str, str]) -> str:
        words = ["bash", "scripts/venv.sh", "venv", "locks/none.txt"]
        command(*words, place=Place(tmp_path, variables))
        return command(venv / "bin/python", "-c", "import sys; print(sys.prefix)").strip()

    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python").write_text("#!/bin/sh\necho another Python\n")
    (venv / "bin/python").chmod(0o755)
    assert make(unnamed) == "another Python"
    assert make(named) == str(venv)
    (venv / "kept").touch()
    assert make(named) == make(unnamed) == str(venv)
    assert (venv / "kept").exists()


def untracked() -> set[str]:
    """New files that are not committed yet; none in CI, where what is not tracked is not there."""
    listed = command("git", "ls-files", "-z", "--others", "--exclude-standard")
    return set(listed.split("\0"))


def needed(wheel: Path) -> dict[str, Distribution]:
    """What the wheel declares without extras, and what that needs in turn, as it is locked here."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    metadata = next(n for n in zipfile.ZipFile(wheel).namelist() if n.endswith("/METADATA"))
    head = email.message_from_bytes(zipfile.ZipFile(wheel).read(metadata))
    todo = [(Requirement(line), "") for line in head.get_all("Requires-Dist", ())]
    while todo:
        requirement, of_extra = todo.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": of_extra}):
            continue
        one = distribution(requirement.name)
        name = one.metadata["Name"]  # others may write it in another way
        found[name] = one
        for extra in {"", *requirement.extras}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                todo += [(Requirement(line), extra) for line in one.requires or ()]
    return found


def link(file: Path, to: Path) -> None:
    try:
        os.link(file, to)
    except OSError:  # another disk
        shutil.copy2(file, to)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean environment with the wheel and what it declares, no extras; pip finds it complete.

    What it declares is not fetched again: the files are the locked ones of this environment. What
    nobody declares is not there.
    """
    venv = tmp_path_factory.mktemp("installed") / "venv"
    command(sys.executable, "-m", "venv", "--without-pip", venv)
    site = next(venv.glob("lib/python3*/site-packages"))
    for one in needed(wheel).values():
        for file in one.files or ():
            if ".." not in file.parts:
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                link(Path(str(one.locate_file(file))), site / file)
    pip = [sys.executable, "-m", "pip", "--python", venv / "bin/python", "--no-input"]
    quiet = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    command(*pip, "install", *quiet, wheel)
    command(*pip, "check")
    return venv


def test_the_lock_is_complete() -> None:
    """The environment that these tests run in was installed from it without resolving."""
    command(sys.executable, "-m", "pip", "check")


def bare(tmp_path: Path) -> Place:
    """An empty folder, an empty HOME and next to nothing in the environment."""
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    kept = {k: v for k, v in os.environ.items() if k in {"PATH", "LANG", "TMPDIR"}}
    return Place(here, {**kept, "HOME": str(home), "HF_HUB_OFFLINE": "1"})


READ = """
import sys
import pyarrow.dataset
rows = pyarrow.dataset.dataset("runs/smoke-oracle/trajectories").to_table().to_pylist()
assert len(rows) == 10, len(rows)
assert [row["reward"] for row in rows] == [1.0] * 10, [row["reward"] for row in rows]
import datasets
assert datasets.__file__.startswith(sys.prefix), datasets.__file__
loaded = datasets.load_dataset("parquet", data_files="runs/smoke-oracle/trajectories/*.parquet")
assert loaded["train"].num_rows == 10
"""


@pytest.mark.slow
def test_the_wheel_runs_where_nothing_else_is(installed: Path, tmp_path: Path) -> None:
    """Also as root with an environment in a folder that is closed to others, as its HOME is."""
    place = bare(tmp_path)
    python = installed / "bin/python"
    where = command(python, "-c", "import hermes_rl; print(hermes_rl.__file__)", place=place)
    assert Path(where.strip()).is_relative_to(installed)
    run = ["run", "smoke", "--model", "oracle", "--workers", "0"]
    command(installed / "bin/hermes-rl", *run, timeout=300, place=place)
    command(python, "-c", READ, place=place)


@pytest.mark.slow
def test_a_missing_extra_is_one_line(installed: Path, tmp_path: Path) -> None:
    run = ["run", "smoke", "--model", "local", "--workers", "0"]
    done = execute(installed / "bin/hermes-rl", *run, place=bare(tmp_path))
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert "hermes-rl[local]" in lines[-1]
    assert lines[-1].startswith("error: "), done.stderr
    assert "Traceback" not in done.stderr
