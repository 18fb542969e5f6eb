"""`process` of 256 groups of 4, compared with atroposlib 0.4.0 on the same work and server.

    make bench-atropos          (its environment takes about 1 GB and three minutes)

Each rollout is a conversation of three answers at 200 ms each. hermes_rl has 64 in flight, and
atroposlib one group at a time, as its `process` does. The wall time of the commands includes
imports and start-up.
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
"""Least speedup over Atropos."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--atropos", required=True, help="a Python that has atroposlib 0.4.0")
    parser.add_argument("--groups", type=int, default=GROUPS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(
            [sys.executable, "-m", "hermes_rl.testing.fake_server", "--latency", str(LATENCY_S)],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert server.stdout is not None
            base_url = json.loads(server.stdout.readline())["base_url"]
            hermes_s = _measure_hermes_rl(base_url, arguments.groups, Path(folder))
            atropos_s = _measure_atropos(arguments.atropos, base_url, arguments.groups, folder)
        finally:
            server.terminate()
            server.wait()
    ideal = -(-arguments.groups * SIZE // IN_FLIGHT) * 3 * LATENCY_S
    print(f"ideal at {IN_FLIGHT} in flight  {ideal:7.1f} s")
    print(f"hermes-rl env process   {hermes_s:7.1f} s")
    ratio = atropos_s / hermes_s
    print(f"atroposlib 0.4.0        {atropos_s:7.1f} s")
    print(f"{ratio:.1f} x as fast; the bar is {BAR:g}: {'met' if ratio >= BAR else 'NOT met'}")
    return 0 if ratio >= BAR else 1


def _measure_hermes_rl(base_url: str, groups: int, folder: Path) -> float:
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


def _measure_atropos(python: str, base_url: str, groups: int, folder: str) -> float:
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
    result = json.loads(done.stdout.strip().splitlines()[-1])
    assert (result["groups"], result["solved"]) == (groups, groups * SIZE), result
    return seconds


if __name__ == "__main__":
    raise SystemExit(main())
