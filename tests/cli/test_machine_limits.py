"""Machines that lack something: each message names what is missing and how to get it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_runner import ORACLE, clean_environment, run_cli, run_process, write_rows

ROOT = Path(__file__).parents[2]
NO_NAMESPACES = (sys.executable, str(Path(__file__).with_name("no_namespaces.py")))
FORBIDDEN = "user namespaces are forbidden here (bwrap: "
FIX = "sudo sysctl user.max_user_namespaces=10000"


def ordinary_user() -> list[str]:
    """A command prefix that switches to an ordinary user who can read this checkout and Python.

    Root ignores the modes of folders; what is left to it here is reading, not writing.
    """
    if os.geteuid():
        return []
    reading = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    return ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", *reading]


def small_disk(folder: Path) -> list[str]:
    """A command prefix that mounts a disk of 50 MB on `folder`."""
    mount = f'mount -t tmpfs -o size=50m small {folder} && exec "$@"'
    user = ["--user", "--map-root-user"] if os.geteuid() else []
    return ["unshare", "--mount", *user, "sh", "-c", mount, "sh"]


@pytest.mark.parametrize("out", ["sealed/run", "sealed"])
def test_read_only_output_folder_is_refused(out: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "good.jsonl", {"prompt": "x"})
    (tmp_path / "sealed").mkdir(mode=0o555)
    plain = ("--sandbox", "none", "--allow-unsandboxed")
    result = run_process(
        "run",
        "good.jsonl",
        *ORACLE,
        *plain,
        "--out",
        out,
        cwd=tmp_path,
        under=ordinary_user(),
    )
    assert result.code == 2
    assert result.error == (
        f"error: {out} cannot be written: Permission denied. Choose another --out"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "good.jsonl", *ORACLE],
        ["run", "good.jsonl", "--model", "oracle", "--workers", "2"],
        ["check", "good.jsonl", "--run"],
        ["play", "good.jsonl", "0"],
    ],
    ids=" ".join,
)
def test_commands_explain_missing_user_namespaces(arguments: list[str], tmp_path: Path) -> None:
    write_rows(tmp_path / "good.jsonl", {"prompt": "x", "verify": "true", "oracle": "true"})
    result = run_process(*arguments, cwd=tmp_path, under=NO_NAMESPACES)
    assert result.code == 2
    assert result.error.startswith(f"error: {FORBIDDEN}")
    assert result.error.endswith(FIX)
    assert not (tmp_path / "runs").exists()


def test_doctor_explains_missing_user_namespaces(tmp_path: Path) -> None:
    result = run_process("doctor", "sandboxes", cwd=tmp_path, under=NO_NAMESPACES)
    assert result.code == 1
    assert "NO  bubblewrap" in result.out
    assert FORBIDDEN in result.out
    assert FIX in result.out


def test_doctor_reports_missing_bytecode(tmp_path: Path) -> None:
    """As in a container image that sets the variable and contains no bytecode."""
    nowhere = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": str(tmp_path / "none")}
    result = run_process("doctor", cwd=tmp_path, env=nowhere)
    assert "PYTHONDONTWRITEBYTECODE is set and the packages are not compiled" in result.out
    result = run_cli("doctor", cwd=tmp_path, env={"PYTHONDONTWRITEBYTECODE": ""})
    assert "bytecode" not in result.out


def test_too_little_disk_for_the_weights_is_reported(tmp_path: Path) -> None:
    write_rows(tmp_path / "good.jsonl", {"prompt": "x"})
    cache = tmp_path / "cache"
    cache.mkdir()
    result = run_process(
        "run", "good.jsonl", "--model", "local", "--workers", "0",
        "--sandbox", "none", "--allow-unsandboxed",
        cwd=tmp_path, env={"XDG_CACHE_HOME": str(cache)}, under=small_disk(cache),
    )  # fmt: skip
    assert result.code == 2
    assert re.match(r"error: not enough disk for the weights: needs 1\.\d GB in ", result.error)
    assert result.error.endswith("free some space or give --model-path FILE")


def fake_python(folder: Path, change: str) -> Path:
    """A wrapper of this interpreter that runs `change` first."""
    code = f"import sys; code = sys.argv[2]; {change}; exec(code)"
    made = folder / "fake-python"
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
def test_make_demo_refuses_unsuitable_pythons(change: str, line: str, tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "scripts", "locks"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    python = fake_python(tmp_path, change)
    done = subprocess.run(
        ["make", "demo", f"PYTHON={python}"],
        cwd=tmp_path, capture_output=True, text=True, env=clean_environment(), timeout=240,
    )  # fmt: skip
    assert done.returncode == 2
    assert f"error: {python} {line}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / ".venv").exists()
