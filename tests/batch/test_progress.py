"""Progress for people: one live line on a terminal, plain lines elsewhere."""

import asyncio
import dataclasses
import fcntl
import json
import os
import pty
import re
import sys
import threading
from functools import partial
from pathlib import Path

import kit
import pytest
from forks import ForkServer

from batch_runner import JsonEvents, Rates, Report, Tally, View
from hermes_rl.store import RunDir, find_driver
from hermes_rl.testing import FakeServer

COUNTS = r"(\d+)/~?(\d+) units  (\d+) solved  (\d+) failed( \(\d+ attempts\))?  (\d+) running"
LINE = rf"{COUNTS} \| \d+/min(  [\d:]+ left)? \| \d+ tok/s  unpriced  429: \d+ %"
"""The progress line."""

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
def test_progress_line(view: View, line: str) -> None:
    assert view.line() == line


@pytest.mark.parametrize("columns", [120, 60])
async def test_live_line_on_a_terminal(tmp_path: Path, server: FakeServer, columns: int) -> None:
    """On a narrow terminal it takes two lines and is complete."""
    terminal, child_terminal = pty.openpty()
    arguments = kit.run_arguments(
        tmp_path, [kit.make_task(n, latency_s=0.3) for n in range(4)], server, "--workers", "0"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "batch_runner", *arguments, "--concurrency", "2",
        stdin=child_terminal, stdout=asyncio.subprocess.PIPE, stderr=child_terminal,
        env={**os.environ, "TERM": "xterm", "COLUMNS": str(columns), "LINES": "40"},
    )  # fmt: skip
    os.close(child_terminal)

    seen = b""
    os.set_blocking(terminal, False)

    def read() -> None:
        nonlocal seen
        try:
            seen += os.read(terminal, 1 << 16)
        except OSError:  # no data yet, or the other end is closed
            loop.remove_reader(terminal)

    loop = asyncio.get_running_loop()
    loop.add_reader(terminal, read)
    try:
        async with asyncio.timeout(kit.WAIT_S):
            printed, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
        read()
        loop.remove_reader(terminal)
        os.close(terminal)
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
    assert columns == 60 or text.count("\n") <= 2, "each line replaces the one before"
    assert b"4/4 units done, 4 solved" in printed


async def test_plain_progress_lines_without_a_terminal(tmp_path: Path, server: FakeServer) -> None:
    arguments = kit.run_arguments(tmp_path, [kit.make_task(1)], server, "--workers", "0")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "batch_runner", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, text = await process.communicate()
    assert process.returncode == 0, text
    lines = text.decode().splitlines()
    assert all(re.fullmatch(LINE, line) for line in lines), lines
    assert lines[-1].startswith("1/1 units  1 solved  0 failed  0 running")


async def test_a_run_does_not_wait_for_the_reader_of_its_events(
    tmp_path: Path, server: FakeServer
) -> None:
    """It finishes while its pipe is full; all events follow when they are read. A reader that goes
    away does not end it either."""
    tasks = [kit.make_task(n, turns=1) for n in range(15)]
    for goes_away in (False, True):
        folder, run_dir = tmp_path / f"{goes_away}", RunDir(tmp_path / f"{goes_away}" / "run")
        folder.mkdir()
        (readable, out), (errors, err) = small_pipe(), os.pipe()
        arguments = kit.run_arguments(folder, tasks, server, "--workers", "0", "--json")
        process = await ForkServer.of_this_process().start(
            ["run", *arguments], os.environ, [out, err]
        )
        run = kit.RunProcess(process, "")
        kit.STARTED_RUNS.append(run)
        with os.fdopen(readable) as events, os.fdopen(errors) as messages:
            if goes_away:
                await asyncio.to_thread(events.read, 1)
                events.close()
            else:
                await kit.wait_for(run, partial(has_ended, run_dir))
                found = [json.loads(line) for line in await asyncio.to_thread(events.readlines)]
                assert [e["event"] for e in found].count("attempt") == len(tasks)
                assert (found[-1]["event"], found[-1]["done"]) == ("report", len(tasks))
            assert await run.wait() == 0
            assert messages.read() == ""
        assert len(kit.final_rows(run_dir.path)) == len(tasks)


def small_pipe() -> tuple[int, int]:
    readable, writable = os.pipe()
    fcntl.fcntl(writable, fcntl.F_SETPIPE_SZ, 4096)
    return readable, writable


def has_ended(run_dir: RunDir) -> bool:
    return (run_dir.path / "stats.json").exists() and find_driver(run_dir) is None


def test_the_last_events_are_kept_for_a_late_reader() -> None:
    readable, writable = small_pipe()
    with os.fdopen(readable) as events, os.fdopen(writable, "w") as stream:
        shown = JsonEvents(stream)
        for number in range(11_000):
            shown.note(str(number))
        report = Report(**dict.fromkeys(f.name for f in dataclasses.fields(Report)))
        ending = threading.Thread(target=lambda: (shown.report(report), stream.close()))
        ending.start()
        found = [json.loads(line) for line in events]
        ending.join()
    (gap,) = [i for i, e in enumerate(found) if e["event"] == "left_out"]
    numbers = [int(e["text"]) for e in found if e["event"] == "note"]
    assert numbers[:gap] == [*range(gap)]
    assert numbers[gap:] == [*range(11_000 - (len(numbers) - gap), 11_000)]
    assert found[gap]["lines"] == 11_000 - len(numbers)
    assert found[-1]["event"] == "report"
