"""A key in the driver's environment reaches no sandbox and no file of the run directory."""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

CANARY = "sk-canary-51b0c7d9e2f4"
HERMES = [sys.executable, "-c", "import sys; from hermes_rl.cli import main; sys.exit(main())"]
SPY = "env; set; cat /proc/[0-9]*/environ; cat /proc/[0-9]*/cmdline; ls -laR /workspace /tmp /hx"


@pytest.fixture
def server() -> Iterator[str]:
    """A server that knows only the canary's key."""
    words = ["-m", "hermes_rl.testing.fake_server", "--port", "0", "--key", CANARY, "--until-eof"]
    process = subprocess.Popen(
        [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["base_url"]
    finally:
        process.terminate()
        process.wait(10)


def found_in(folder: Path, secret: str) -> list[str]:
    """Files that hold the secret, raw, in base64 at any offset, or inside Parquet's pages."""
    import pyarrow.parquet as pq

    coded = [base64.b64encode(b"x" * n + secret.encode())[4:-4] for n in range(3)]
    needles = [secret.encode(), *coded]
    hits = []
    for path in folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            if path.suffix == ".parquet":
                data += json.dumps(pq.read_table(path).to_pylist(), default=str).encode()
            hits += [str(path)] if any(needle in data for needle in needles) else []
    return hits


@pytest.mark.parametrize("good_key", [True, False])
def test_no_file_holds_the_key(server: str, tmp_path: Path, good_key: bool) -> None:
    dataset = tmp_path / "spy.jsonl"
    script = json.dumps([{"run": SPY}, "ok"])
    dataset.write_text(json.dumps({"prompt": f"Look.\nSCRIPT: {script}", "verify": SPY}) + "\n")
    key = CANARY if good_key else CANARY + "-wrong"
    out = tmp_path / "run"
    words = ["run", str(dataset), "--model", "m", "--base-url", server, "--api-key-env", "SPY_KEY"]
    done = subprocess.run(
        [*HERMES, *words, "--workers", "0", "--out", str(out)],
        capture_output=True,
        text=True,
        env={**os.environ, "SPY_KEY": key},
        timeout=120,
    )
    assert done.returncode == (0 if good_key else 3), done.stderr
    assert list((out / ("trajectories" if good_key else "failures")).glob("*.parquet"))
    assert found_in(out, key) == []
    assert key not in done.stdout + done.stderr
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "x").write_bytes(base64.b64encode(b"ab" + key.encode() + b"cd"))
    assert found_in(tmp_path / "planted", key)  # the search itself works
