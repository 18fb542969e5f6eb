"""The death of a sandbox is a policy failure when the same command ran in two of them, and an
infrastructure failure otherwise."""

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import kit
import pytest

from hermes_rl.testing import FakeServer

BUBBLEWRAP = ("--workers", "0", "--sandbox", "bubblewrap")
# Commands that take longer than any test, and that no other process of this machine runs.
COMMAND, OTHER_COMMAND = (f"sleep 1{number:02}.{os.getpid()}" for number in (1, 2))


def make_task(*steps: Any) -> dict[str, Any]:
    """A task that is solved once its first command has run."""
    script = [{"run": "echo 7 > out.txt"}, *steps, "done"]
    verify = 'test "$(cat "$WORKSPACE/out.txt")" = 7'
    return {"id": "t", "prompt": f"Write 7.\nSCRIPT: {json.dumps(script)}", "verify": verify}


async def wait_for_command(command: str, run: kit.RunProcess) -> int:
    """Wait until the command runs in a sandbox; its process id."""
    wanted = b"".join(part.encode() + b"\0" for part in command.split())
    found: list[int] = []

    def find() -> bool:
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if entry.read_bytes() == wanted:
                    found.append(int(entry.parent.name))
            except OSError:
                continue
        return bool(found)

    await kit.wait_for(run, find)
    return found[0]


async def kill_sandbox_of(command: str, run: kit.RunProcess, out: Path) -> None:
    """Wait until the command runs, and kill its sandbox as an out-of-memory killer would."""
    pid = await wait_for_command(command, run)
    (outermost,) = kit.sandbox_pids(out)
    kit.kill(outermost)
    await kit.check_processes_ended([pid], 60.0)


def causes(out: Path) -> dict[int, str]:
    """Attempt -> cause."""
    return {row["attempt"]: row["cause"] for row in kit.read_table(out, "failures")}


async def test_a_command_that_ends_two_sandboxes_is_a_policy_failure(
    tmp_path: Path, server: FakeServer
) -> None:
    out, rows = tmp_path / "run", [make_task({"run": COMMAND})]
    run = await kit.start_run(*kit.run_arguments(tmp_path, rows, server, *BUBBLEWRAP))
    await kill_sandbox_of(COMMAND, run, out)
    await kill_sandbox_of(COMMAND, run, out)
    assert await run.wait() == 0, run.errors
    assert causes(out) == {0: "sandbox_died"}
    (row,) = kit.final_rows(out).values()
    assert (row["end_reason"], row["owner"], row["attempt"]) == ("sandbox_killed", "policy", 1)
    assert (row["reward"], row["truncated"], row["error"]) == (1.0, False, None)
    assert server.requests == 4, "no third attempt"
    kit.check_usage(out, server.entries)
    await kit.check_no_processes([run.mark], out)


async def test_two_commands_that_end_one_sandbox_each_are_infrastructure_failures(
    tmp_path: Path, server: FakeServer
) -> None:
    steps = [{"run": COMMAND}, {"run": OTHER_COMMAND}, "done"]  # one for each attempt
    out, rows = tmp_path / "run", [make_task(steps)]
    run = await kit.start_run(*kit.run_arguments(tmp_path, rows, server, *BUBBLEWRAP))
    await kill_sandbox_of(COMMAND, run, out)
    await kill_sandbox_of(OTHER_COMMAND, run, out)
    assert await run.wait() == 0, run.errors
    assert causes(out) == {0: "sandbox_died", 1: "sandbox_died"}
    (row,) = kit.final_rows(out).values()
    assert (row["end_reason"], row["attempt"], row["reward"]) == ("answered", 2, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("published", [False, True])
async def test_fatal_commands_survive_a_killed_driver(
    published: bool, tmp_path: Path, server: FakeServer
) -> None:
    """The first attempt is read from the journal, or from its commit."""
    out = tmp_path / "run"
    arguments = kit.run_arguments(tmp_path, [make_task({"run": COMMAND})], server, *BUBBLEWRAP)
    publish_every = ("--set", f"run.publish_every_s={0.1 if published else 300}")
    first = await kit.start_run(*arguments, *publish_every)
    await kill_sandbox_of(COMMAND, first, out)
    await first.wait_for_events("attempt")
    command_pid = await wait_for_command(COMMAND, first)
    deadline = time.monotonic() + 60
    while published and not any((out / "commits").iterdir()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    assert any((out / "commits").iterdir()) == published
    kit.kill(first.pid)
    await first.wait()
    await kit.check_processes_ended([command_pid], 60.0)

    second = await kit.start_run(*arguments)
    await kill_sandbox_of(COMMAND, second, out)
    assert await second.wait() == 0, second.errors
    assert causes(out) == {0: "sandbox_died", 1: "driver_lost"}
    (row,) = kit.final_rows(out).values()
    assert (row["end_reason"], row["owner"], row["attempt"]) == ("sandbox_killed", "policy", 2)
    assert row["reward"] == 1.0
