"""Ctrl-C during commands other than `run`."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cli_runner import COMMAND, write_rows


def test_ctrl_c_during_check_run_reports_no_result(tmp_path: Path) -> None:
    """The tasks take seconds and there are more than run at once, so the check is interrupted
    while it plays."""
    rows = [
        {"id": str(n), "prompt": f"x{n}", "verify": "cd $WORKSPACE", "oracle": "sleep 3"}
        for n in range(100)
    ]
    write_rows(tmp_path / "t.jsonl", *rows)
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch).chmod(0o755)  # each sandbox of root has its own user
        checking = subprocess.Popen(
            [COMMAND, "check", "t.jsonl", "--run"],
            cwd=tmp_path,
            env={**os.environ, "TMPDIR": scratch},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_enable_ctrl_c,
        )
        try:
            wait_for(Path(scratch), "hermes-rl-check-*/0/run/journal/*/done-*")
            checking.send_signal(signal.SIGINT)
            out, err = checking.communicate(timeout=240)
        finally:
            checking.kill()
    assert checking.returncode == 130
    assert out == "t.jsonl: 100 rows, 0 bad, 100 with a verifier, 100 with an oracle\n"
    assert "Traceback" not in err


def _enable_ctrl_c() -> None:
    """A shell may have started the tests with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def wait_for(folder: Path, pattern: str) -> None:
    until = time.monotonic() + 240
    while not list(folder.glob(pattern)):
        assert time.monotonic() < until, f"no {pattern}"
        time.sleep(0.05)


def test_ctrl_c_during_imports_prints_no_traceback() -> None:
    code = """
import sys
from hermes_rl.cli import main

class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, CtrlC())
sys.exit(main(["show", "runs/x"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (130, "")
