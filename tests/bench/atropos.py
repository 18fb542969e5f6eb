"""`process` of 256 groups of 4 beside atroposlib 0.4.0's, on the same work and the same server.

    make bench-atropos          (its environment takes about 1 GB and three minutes)

Each rollout is a conversation of three answers at 200 ms each; ours has 64 in flight, atroposlib
one group at a time, as its `process` does. Wall time from the start of the command to its end, so
that imports and start-up count on both sides.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq

HERE = Path(__file__).parent
GROUPS, SIZE, LATENCY_S, IN_FLIGHT = 256, 4, 0.2, 64
BAR = 10.0
"""So many times as fast as the other one it must be."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--atropos", required=True, help="a Python that has atroposlib 0.4.0")
    parser.add_argument("--groups", type=int, default=GROUPS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(
            [sys.executable, "-m", "hermes_rl.testing.fake_server", "--latency", str(LATENCY_S)],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert server.stdout is not None
            base_url = json.loads(server.stdout.readline())["base_url"]
            ours = _ours(base_url, given.groups, Path(folder))
            theirs = _theirs(given.atropos, base_url, given.groups, folder)
        finally:
            server.terminate()
            server.wait()
    ideal = -(-given.groups * SIZE // IN_FLIGHT) * 3 * LATENCY_S
    print(f"ideal at {IN_FLIGHT} in flight  {ideal:7.1f} s")
    print(f"hermes-rl env process   {ours:7.1f} s")
    ratio = theirs / ours
    print(f"atroposlib 0.4.0        {theirs:7.1f} s")
    print(f"{ratio:.1f} x as fast; the bar is {BAR:g}: {'met' if ratio >= BAR else 'NOT met'}")
    return 0 if ratio >= BAR else 1


def _ours(base_url: str, groups: int, folder: Path) -> float:
    out = folder / "run"
    began = time.monotonic()
    subprocess.run(
        [
            *(str(Path(sys.executable).with_name("hermes-rl")), "env", "process"),
            str(HERE / "rounds_env.py"),
            *("--model", "fake", "--base-url", base_url, "--out", str(out), "--workers", "0"),
            *("--limit", str(groups), "--repeats", str(SIZE), "--concurrency", str(IN_FLIGHT)),
            "--json",
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    seconds = time.monotonic() - began
    rows = sum(pq.read_metadata(part).num_rows for part in (out / "trajectories").iterdir())
    assert rows == groups * SIZE, rows
    return seconds


def _theirs(python: str, base_url: str, groups: int, folder: str) -> float:
    began = time.monotonic()
    done = subprocess.run(
        [
            *(python, str(HERE / "atropos_side.py"), "--base-url", base_url, "--folder", folder),
            *("--groups", str(groups), "--size", str(SIZE)),
        ],
        check=True,
        capture_output=True,
        text=True,
        cwd=folder,
    )
    seconds = time.monotonic() - began
    said = json.loads(done.stdout.strip().splitlines()[-1])
    assert (said["groups"], said["solved"]) == (groups, groups * SIZE), said
    return seconds


if __name__ == "__main__":
    raise SystemExit(main())
