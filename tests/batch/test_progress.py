"""Progress as people see it: one live line on a terminal, plain lines elsewhere."""

import asyncio
import os
import pty
import re
import sys
from pathlib import Path

import kit
import pytest

from batch_runner import Rates, Tally, View
from hermes_rl.testing import FakeServer

COUNTS = r"(\d+)/~?(\d+) units  (\d+) solved  (\d+) failed( \(\d+ attempts\))?  (\d+) running"
LINE = rf"{COUNTS} \| \d+/min(  [\d:]+ left)? \| \d+ tok/s  unpriced  429: \d+ %"
"""The line of DESIGN 5.15."""

CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.mark.parametrize(
    ("view", "line"),
    [
        (
            View(20, True, 14, 11, 0, 4, Tally(unpriced_calls=9), Rates(0.4, 41.2)),
            "14/20 units  11 solved  0 failed  4 running | 24/min  0:15 left | 41 tok/s  unpriced  "
            "429: 0 %",
        ),
        (
            View(
                1_200, False, 60, 50, 3, 9,
                Tally(failed=5, cost_usd=1.25, requests=200, throttled=8), Rates(0.0, 0.0),
            ),
            "60/~1,200 units  50 solved  3 failed (5 attempts)  9 running | 0/min | 0 tok/s  "
            "$1.25  429: 4 %",
        ),
    ],
)  # fmt: skip
def test_the_line(view: View, line: str) -> None:
    assert view.line() == line


@pytest.mark.parametrize("columns", [120, 60])
async def test_one_live_line_on_a_terminal(
    tmp_path: Path, server: FakeServer, columns: int
) -> None:
    """On a narrow one it takes two, and loses nothing."""
    dataset = kit.write(tmp_path / "tasks.jsonl", [kit.task(n, latency_s=0.3) for n in range(4)])
    ours, theirs = pty.openpty()
    arguments = kit.played(dataset, tmp_path / "run", server.base_url, "--workers", "0")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "batch_runner", *arguments, "--concurrency", "2",
        stdin=theirs, stdout=asyncio.subprocess.PIPE, stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": str(columns), "LINES": "40"},
    )  # fmt: skip
    os.close(theirs)

    seen = b""
    os.set_blocking(ours, False)

    def read() -> None:
        nonlocal seen
        try:
            seen += os.read(ours, 1 << 16)
        except OSError:  # nothing yet, or nobody holds the other end any more
            loop.remove_reader(ours)

    loop = asyncio.get_running_loop()
    loop.add_reader(ours, read)
    try:
        async with asyncio.timeout(90):
            said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
        read()
        loop.remove_reader(ours)
        os.close(ours)
    text = seen.decode()
    assert process.returncode == 0, text
    lines = [line for line in re.split(r"[\r\n]+", CODES.sub("", text)) if line.strip()]
    assert len(lines) > 2
    if columns == 60:
        assert all(len(line) <= columns for line in lines), lines
        lines = [" | ".join(pair) for pair in zip(lines[::2], lines[1::2], strict=True)]
    matched = [re.fullmatch(LINE, line.strip()) for line in lines]
    assert all(matched), lines
    assert matched[-1] is not None
    assert matched[-1].group(1, 2, 3, 6) == ("4", "4", "4", "0")
    assert columns == 60 or text.count("\n") <= 2, "each line takes the place of the one before"
    assert b"4/4 units done, 4 solved" in said


async def test_plain_lines_elsewhere(tmp_path: Path, server: FakeServer) -> None:
    dataset = kit.write(tmp_path / "tasks.jsonl", [kit.task(1)])
    arguments = kit.played(dataset, tmp_path / "run", server.base_url, "--workers", "0")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "batch_runner", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, text = await process.communicate()
    assert process.returncode == 0, text
    lines = text.decode().splitlines()
    assert all(re.fullmatch(LINE, line) for line in lines), lines
    assert lines[-1].startswith("1/1 units  1 solved  0 failed  0 running")
