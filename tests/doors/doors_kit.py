"""The command as a user types it: in this process, or in one of its own, in a fresh folder."""

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
PLAYED = ("--model", "oracle", "--workers", "0")


@dataclass(frozen=True)
class Said:
    """What a command left on the terminal."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that says what is wrong."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        return lines[0]

    def json(self) -> Any:
        return json.loads(self.out)


def hermes(
    *words: str | Path, cwd: Path, typed: str = "", env: dict[str, str] | None = None
) -> Said:
    """Run `hermes-rl WORDS` in this process, which saves a second; `process` is the real thing."""
    out, err = io.StringIO(), io.StringIO()
    with (
        chdir(cwd),
        mock.patch.dict(os.environ, {**clean_environment(), **(env or {})}, clear=True),
        mock.patch("sys.stdin", io.StringIO(typed)),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        code = main([str(word) for word in words])
    assert "Traceback" not in out.getvalue() + err.getvalue(), err.getvalue()[-3000:]
    return Said(code, out.getvalue(), err.getvalue())


def process(
    *words: str | Path,
    cwd: Path,
    env: dict[str, str] | None = None,
    under: Sequence[str] = (),
    seconds: float = 60.0,
) -> Said:
    """Run `hermes-rl WORDS`; whatever happens, nobody sees a traceback.

    Args:
        under: words before the command, as of setpriv.
    """
    done = subprocess.run(
        [*under, COMMAND, *map(str, words)],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        env={**clean_environment(), **(env or {})},
    )
    assert "Traceback" not in done.stdout + done.stderr, done.stderr[-3000:]
    return Said(done.returncode, done.stdout, done.stderr)


def clean_environment() -> dict[str, str]:
    """Nobody's keys, no Ray that happens to run, no hub to wait for."""
    dropped = ("_API_KEY", "RAY_ADDRESS", "COLUMNS")
    kept = {k: v for k, v in os.environ.items() if not k.endswith(dropped)}
    return {**kept, "HF_HUB_OFFLINE": "1"}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def scripted(name: str, *steps: Any, verify: str | None = None) -> dict[str, Any]:
    """A task that carries what the fake model does."""
    row = {"id": name, "prompt": f"Do {name}.\nSCRIPT: {json.dumps(list(steps))}"}
    return row if verify is None else {**row, "verify": verify}
