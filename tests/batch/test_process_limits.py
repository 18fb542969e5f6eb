"""Runs on a full disk, and with few open files: they raise the limit or name the fix."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import kit
import pytest

from hermes_rl.testing import FakeServer

IN_PROCESS = ("--workers", "0")
ROLLOUTS = 60


async def run_in_shell(command: str, *arguments: str) -> tuple[int | None, str, str]:
    """Run a bash command: its exit code, output and errors."""
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", command, *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(kit.WAIT_S):
        out, errors = await process.communicate()
    return process.returncode, out.decode(), errors.decode()


async def run_on_small_disk(mount: Path, size: str, *arguments: str) -> tuple[int | None, str, str]:
    """Run with a small tmpfs at `mount`, in a mount namespace of its own. The content of the disk
    is copied from and to `mount`.kept."""
    namespaces = "-m" if os.geteuid() == 0 else "-Urm"
    script = (
        f'mount -t tmpfs -o size={size} tmpfs "$0" && cp -a "$0.kept/." "$0/" 2>/dev/null\n'
        f'{sys.executable} -m batch_runner "$@"\ncode=$?\n'
        'rm -rf "$0.kept"; cp -a "$0" "$0.kept"; exit $code'
    )
    command = f'exec unshare {namespaces} bash -c "$0" "$@"'
    return await run_in_shell(command, script, str(mount), *arguments)


async def test_a_full_disk_stops_the_run_which_resumes(tmp_path: Path, server: FakeServer) -> None:
    mount = tmp_path / "disk"
    mount.mkdir()
    (tmp_path / "disk.kept").mkdir()
    arguments = kit.run_arguments(
        tmp_path, kit.make_rows(60), server,
        *IN_PROCESS, "--concurrency", "8", "--out", str(mount / "run"),
    )  # fmt: skip
    code, printed, errors = await run_on_small_disk(mount, "400k", *arguments)
    assert code == 3, printed + errors
    (stop,) = [line for line in printed.splitlines() if line.startswith("stopped: ")]
    assert f"the disk of {mount / 'run'} is full. Free some space" in stop
    assert "Traceback" not in errors, errors
    kept = tmp_path / "disk.kept" / "run"
    before = {r["unit_id"] for r in kit.read_table(kept, "trajectories")}

    code, printed, errors = await run_on_small_disk(mount, "64m", *arguments)
    assert code == 0, printed + errors
    final = kit.final_rows(kept)
    assert len(final) == kit.count_units(60)
    assert before <= set(final)
    kit.check_usage(kept, server.entries)


async def run_with_file_limit(limit: str, arguments: list[str]) -> tuple[int | None, str]:
    """Exit code and errors of a run under `ulimit LIMIT`."""
    command = f'ulimit {limit} && exec "$0" -m batch_runner "$@"'
    code, _, errors = await run_in_shell(command, sys.executable, *arguments)
    return code, errors


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    return [kit.make_task(n, turns=1) for n in range(ROLLOUTS)]


async def test_a_low_soft_limit_of_open_files_is_raised(tmp_path: Path, server: FakeServer) -> None:
    """The commands of all rollouts run at once, each in a shell of its own."""
    arrived, gate = tmp_path / "arrived", tmp_path / "gate"
    arrived.mkdir()
    os.mkfifo(gate)
    steps = [
        json.dumps([{"run": f"touch {arrived}/{n}; cat {gate}"}, "ok"]) for n in range(ROLLOUTS)
    ]
    rows = [{"prompt": f"x\nSCRIPT: {step}"} for step in steps]
    concurrency = ("--concurrency", str(ROLLOUTS))
    arguments = kit.run_arguments(tmp_path, rows, server, *IN_PROCESS, *concurrency)
    run = asyncio.create_task(run_with_file_limit("-Sn 256", arguments))
    while len([*arrived.iterdir()]) < ROLLOUTS:
        assert not run.done(), run.result()
        await asyncio.sleep(0.05)
    gate.open("w").close()
    code, errors = await run
    assert code == 0, errors
    assert len(kit.final_rows(tmp_path / "run")) == ROLLOUTS
    assert kit.read_table(tmp_path / "run", "failures") == []


async def test_a_low_hard_limit_of_open_files_is_refused_before_any_call(
    tmp_path: Path, rows: list[dict[str, Any]], server: FakeServer
) -> None:
    arguments = kit.run_arguments(tmp_path, rows[:10], server, *IN_PROCESS, "--concurrency", "90")
    code, errors = await run_with_file_limit("-n 1200", arguments)
    assert code == 2
    assert "90 rollouts in one process need 1,336 open files, and the limit is 1,200" in errors
    assert "--concurrency 78" in errors
    assert server.requests == 0
    arguments[-1] = "78"
    code, errors = await run_with_file_limit("-n 1200", arguments)
    assert code == 0, errors
