"""Machines that let a process open few files: the run makes room, or says what to do."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import kit
import pytest

from hermes_rl.testing import FakeConfig, FakeServer

AT_ONCE = 60


async def run(limit: str, arguments: list[str]) -> tuple[int | None, str]:
    """Exit code and errors of a run in a shell with a limit of open files."""
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", f'ulimit {limit} && exec "$0" "$@"',
        sys.executable, "-m", "batch_runner", *arguments,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(120):
        _, errors = await process.communicate()
    return process.returncode, errors.decode()


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    return [kit.task(n, turns=1) for n in range(AT_ONCE)]


async def test_a_low_limit_is_raised(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    """All rollouts are in their first call together, with a connection and a shell each."""
    dataset, out = kit.write(tmp_path / "t.jsonl", rows), tmp_path / "run"
    async with FakeServer(FakeConfig(latency_s=0.5)) as server:
        arguments = kit.played(
            dataset, out, server.base_url, "--workers", "0", "--concurrency", str(AT_ONCE)
        )
        code, errors = await run("-Sn 256", arguments)
        assert server.peak_in_flight > AT_ONCE // 2
    assert code == 0, errors
    assert len(kit.final_rows(out)) == AT_ONCE
    assert kit.table(out, "failures") == []


async def test_a_limit_that_cannot_be_raised_is_said_before_anything_is_asked(
    tmp_path: Path, rows: list[dict[str, Any]], server: FakeServer
) -> None:
    dataset, out = kit.write(tmp_path / "t.jsonl", rows[:10]), tmp_path / "run"
    place = kit.played(dataset, out, server.base_url, "--workers", "0", "--concurrency", "90")
    code, errors = await run("-n 1200", place)
    assert code == 2
    assert "90 rollouts in one process need 1,336 open files, and the limit is 1,200" in errors
    assert "--concurrency 78" in errors
    assert server.requests == 0
    place[-1] = "78"
    code, errors = await run("-n 1200", place)
    assert code == 0, errors
