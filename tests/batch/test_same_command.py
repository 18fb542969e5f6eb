"""Whose deed a sandbox's death was: the machine's, or that of a command that was running twice."""

import asyncio
import time
from pathlib import Path
from typing import Any

import hosts
import kit
import pytest

from hermes_rl.testing import FakeServer

HERE = ("--workers", "0", "--sandbox", "bubblewrap")
A, B = hosts.sleeper(1), hosts.sleeper(2)


def failures(out: Path) -> dict[int, str]:
    """Attempt -> cause."""
    return {row["attempt"]: row["cause"] for row in kit.table(out, "failures")}


def final(out: Path) -> dict[str, Any]:
    (row,) = kit.final_rows(out).values()
    return row


async def test_the_same_command_twice_is_the_policys(tmp_path: Path, server: FakeServer) -> None:
    dataset = kit.write(tmp_path / "tasks.jsonl", [hosts.task({"run": A})])
    out = tmp_path / "run"
    run = await kit.launch(*kit.played(dataset, out, server.base_url, *HERE))
    await hosts.dies_under(A, run, out)
    await hosts.dies_under(A, run, out)
    assert await run.wait() == 0, run.errors
    assert failures(out) == {0: "sandbox_died"}
    row = final(out)
    assert (row["end_reason"], row["owner"], row["attempt"]) == ("sandbox_killed", "policy", 1)
    assert (row["reward"], row["truncated"], row["error"]) == (1.0, False, None)
    assert server.requests == 4, "no third attempt"
    kit.check_usage(out, server.entries)
    await kit.check_nothing_left([run.mark], out)


async def test_two_different_commands_are_the_machines(tmp_path: Path, server: FakeServer) -> None:
    steps = [{"run": A}, {"run": B}, "done"]  # one for each attempt
    dataset = kit.write(tmp_path / "tasks.jsonl", [hosts.task(steps)])
    out = tmp_path / "run"
    run = await kit.launch(*kit.played(dataset, out, server.base_url, *HERE))
    await hosts.dies_under(A, run, out)
    await hosts.dies_under(B, run, out)
    assert await run.wait() == 0, run.errors
    assert failures(out) == {0: "sandbox_died", 1: "sandbox_died"}
    row = final(out)
    assert (row["end_reason"], row["attempt"], row["reward"]) == ("answered", 2, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("published", [False, True])
async def test_a_killed_driver_forgets_no_command(
    published: bool, tmp_path: Path, server: FakeServer
) -> None:
    """The first attempt is known from the journal, or from its commit."""
    dataset = kit.write(tmp_path / "tasks.jsonl", [hosts.task({"run": A})])
    out = tmp_path / "run"
    arguments = kit.played(dataset, out, server.base_url, *HERE)
    often = ("--set", f"run.publish_every_s={0.1 if published else 300}")
    first = await kit.launch(*arguments, *often)
    await hosts.dies_under(A, first, out)
    await first.until("attempt")
    cut = await hosts.running(A, first)
    deadline = time.monotonic() + 60
    while published and not any((out / "commits").iterdir()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    assert any((out / "commits").iterdir()) == published
    kit.kill(first.pid)
    await first.wait()
    await kit.check_gone([cut], 30.0)

    second = await kit.launch(*arguments)
    await hosts.dies_under(A, second, out)
    assert await second.wait() == 0, second.errors
    assert failures(out) == {0: "sandbox_died", 1: "driver_lost"}
    row = final(out)
    assert (row["end_reason"], row["owner"], row["attempt"]) == ("sandbox_killed", "policy", 2)
    assert row["reward"] == 1.0
