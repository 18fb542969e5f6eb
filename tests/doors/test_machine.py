"""Machines that lack something: the message says what, and what to do."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from doors_kit import PLAYED, clean_environment, process, write

ROOT = Path(__file__).parents[2]
NO_NAMESPACES = (sys.executable, str(Path(__file__).with_name("no_namespaces.py")))
FORBIDDEN = "user namespaces are forbidden here (bwrap: "
MEND = "sudo sysctl user.max_user_namespaces=10000"


def ordinary_user() -> list[str]:
    """Words that run a command as an ordinary user who can read this checkout and Python.

    Root ignores the modes of folders; what is left to it here is reading, not writing.
    """
    if os.geteuid():
        return []
    reading = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    return ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", *reading]


def small_disk(folder: Path) -> list[str]:
    """Words that run a command with a disk of 50 MB in `folder`."""
    mount = f'mount -t tmpfs -o size=50m small {folder} && exec "$@"'
    user = ["--user", "--map-root-user"] if os.geteuid() else []
    return ["unshare", "--mount", *user, "sh", "-c", mount, "sh"]


@pytest.mark.parametrize("out", ["sealed/run", "sealed"])
def test_a_read_only_folder(out: str, tmp_path: Path) -> None:
    write(tmp_path / "good.jsonl", {"prompt": "x"})
    (tmp_path / "sealed").mkdir(mode=0o555)
    plain = ("--sandbox", "none", "--allow-unsandboxed")
    said = process(
        "run", "good.jsonl", *PLAYED, *plain, "--out", out, cwd=tmp_path, under=ordinary_user()
    )
    assert said.code == 2
    assert said.error == (
        f"error: {out} cannot be written: Permission denied. Choose another --out"
    )


@pytest.mark.parametrize(
    "words",
    [
        ["run", "good.jsonl", *PLAYED],
        ["run", "good.jsonl", "--model", "oracle", "--workers", "2"],
        ["check", "good.jsonl", "--run"],
        ["play", "good.jsonl", "0"],
    ],
    ids=" ".join,
)
def test_no_user_namespaces(words: list[str], tmp_path: Path) -> None:
    write(tmp_path / "good.jsonl", {"prompt": "x", "verify": "true", "oracle": "true"})
    said = process(*words, cwd=tmp_path, under=NO_NAMESPACES)
    assert said.code == 2
    assert said.error.startswith(f"error: {FORBIDDEN}")
    assert said.error.endswith(MEND)
    assert not (tmp_path / "runs").exists()


def test_doctor_without_user_namespaces(tmp_path: Path) -> None:
    said = process("doctor", "sandboxes", cwd=tmp_path, under=NO_NAMESPACES)
    assert said.code == 1
    assert "NO  bubblewrap" in said.out
    assert FORBIDDEN in said.out
    assert MEND in said.out


def test_doctor_says_that_every_start_compiles_the_packages(tmp_path: Path) -> None:
    """As in an image that sets the variable and was built without bytecode."""
    nowhere = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": str(tmp_path / "none")}
    said = process("doctor", cwd=tmp_path, env=nowhere)
    assert "PYTHONDONTWRITEBYTECODE is set and the packages are not compiled" in said.out
    said = process("doctor", cwd=tmp_path, env={"PYTHONDONTWRITEBYTECODE": ""})
    assert "bytecode" not in said.out


def test_not_enough_disk_for_the_weights(tmp_path: Path) -> None:
    write(tmp_path / "good.jsonl", {"prompt": "x"})
    cache = tmp_path / "cache"
    cache.mkdir()
    said = process(
        "run", "good.jsonl", "--model", "local", "--workers", "0",
        "--sandbox", "none", "--allow-unsandboxed",
        cwd=tmp_path, env={"XDG_CACHE_HOME": str(cache)}, under=small_disk(cache),
    )  # fmt: skip
    assert said.code == 2
    assert re.match(r"error: not enough disk for the weights: needs 1\.\d GB in ", said.error)
    assert said.error.endswith("free some space or give --model-path FILE")


def pretend(folder: Path, change: str) -> Path:
    """An interpreter that is this one after `change`."""
    code = f"import sys; code = sys.argv[2]; {change}; exec(code)"
    made = folder / "pretended-python"
    made.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}' \"$@\"\n")
    made.chmod(0o755)
    return made


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("sys.version_info = (3, 10, 4)", "is Python 3.10, this needs 3.11 to 3.14. Use make PYTH"),
        ('sys.modules["venv"] = None', "has no venv module. On Debian or Ubuntu: apt-get install"),
        ("sys.exit(1)", "does not run. Use make PYTHON=/path/to/python3.11"),
    ],
    ids=["too old", "no venv", "broken"],
)
def test_a_python_that_will_not_do(change: str, line: str, tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "scripts", "locks"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    python = pretend(tmp_path, change)
    done = subprocess.run(
        ["make", "demo", f"PYTHON={python}"],
        cwd=tmp_path, capture_output=True, text=True, env=clean_environment(), timeout=30,
    )  # fmt: skip
    assert done.returncode == 2
    assert f"error: {python} {line}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / ".venv").exists()
