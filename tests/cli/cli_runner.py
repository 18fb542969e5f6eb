"""Run `hermes-rl` as a user types it, in this process or in one of its own, in a new folder."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from hermes_rl.cli import main

COMMAND = str(Path(sys.executable).parent / "hermes-rl")
ORACLE = ("--model", "oracle", "--workers", "0")


@dataclass(frozen=True)
class CommandResult:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The only error line."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        return lines[0]

    def json(self) -> Any:
        return json.loads(self.out)


def run_cli(
    *arguments: str | Path, cwd: Path, typed: str = "", env: dict[str, str] | None = None
) -> CommandResult:
    """Run `hermes-rl ARGUMENTS` in this process, which is a second faster than `run_process`."""
    out, err = io.StringIO(), io.StringIO()
    with (
        chdir(cwd),
        mock.patch.dict(os.environ, {**clean_environment(), **(env or {})}, clear=True),
        mock.patch("sys.stdin", io.StringIO(typed)),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        code = main(list(map(str, arguments)))
    assert "Traceback" not in out.getvalue() + err.getvalue(), err.getvalue()[-3000:]
    return CommandResult(code, out.getvalue(), err.getvalue())


def run_process(
    *arguments: str | Path,
    cwd: Path,
    env: dict[str, str] | None = None,
    under: Sequence[str] = (),
    seconds: float = 240.0,
) -> CommandResult:
    """Run `hermes-rl ARGUMENTS` in a process of its own; it must not print a traceback.

    Args:
        under: a command, such as setpriv, that starts it.
    """
    done = subprocess.run(
        [*under, COMMAND, *map(str, arguments)],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**clean_environment(), **(env or {})},
    )
    assert "Traceback" not in done.stdout + done.stderr, done.stderr[-3000:]
    return CommandResult(done.returncode, done.stdout, done.stderr)


def clean_environment() -> dict[str, str]:
    """This environment without API keys, a running Ray and access to the hub."""
    dropped = ("_API_KEY", "RAY_ADDRESS", "COLUMNS")
    kept = {k: v for k, v in os.environ.items() if not k.endswith(dropped)}
    return {**kept, "HF_HUB_OFFLINE": "1"}


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def scripted_task(name: str, *steps: Any, verify: str | None = None) -> dict[str, Any]:
    """A task whose prompt carries the answers of the fake model."""
    row = {"id": name, "prompt": f"Do {name}.\nSCRIPT: {json.dumps(list(steps))}"}
    return row if verify is None else {**row, "verify": verify}
