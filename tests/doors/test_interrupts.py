"""Ctrl-C at a command that is no run: it ends and claims nothing."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from doors_kit import COMMAND, write


def test_ctrl_c_ends_a_check_that_plays_and_calls_nothing_right(tmp_path: Path) -> None:
    """The tasks take seconds and there are more than run at once, so the check is interrupted
    while it plays."""
    rows = [
        {"id": str(n), "prompt": f"x{n}", "verify": "cd $WORKSPACE", "oracle": "sleep 3"}
        for n in range(20)
    ]
    write(tmp_path / "t.jsonl", *rows)
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch).chmod(0o755)  # sandboxes of root's have users of their own
        checking = subprocess.Popen(
            [COMMAND, "check", "t.jsonl", "--run"],
            cwd=tmp_path,
            env={**os.environ, "TMPDIR": scratch},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_hear_ctrl_c,
        )
        try:
            wait_for(Path(scratch), "hermes-rl-check-*/0/run/journal/*/done-*")
            checking.send_signal(signal.SIGINT)
            out, err = checking.communicate(timeout=60)
        finally:
            checking.kill()
    assert checking.returncode == 130
    assert out == "t.jsonl: 20 rows, 0 bad, 20 with a verifier, 20 with an oracle\n"
    assert "Traceback" not in err


def _hear_ctrl_c() -> None:
    """A shell may have started the tests with the signal ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def wait_for(folder: Path, pattern: str) -> None:
    until = time.monotonic() + 60
    while not list(folder.glob(pattern)):
        assert time.monotonic() < until, f"no {pattern}"
        time.sleep(0.05)


def test_ctrl_c_while_a_command_is_loaded_is_no_traceback() -> None:
    code = """
import sys
from hermes_rl.cli import main

class Pressed:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Pressed())
sys.exit(main(["show", "runs/x"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "")
