"""A disk that is full."""

import asyncio
import os
import sys
from pathlib import Path

import kit

from hermes_rl.testing import FakeServer

HERE = ("--workers", "0")


async def in_small_disk(mount: Path, size: str, *arguments: str) -> tuple[int, str, str]:
    """`hermes-rl run` with a small tmpfs at `mount`, in a mount namespace that later processes of
    this test do not see: what is to be looked at is copied to `mount`.kept at the end."""
    script = (
        f'mount -t tmpfs -o size={size} tmpfs "$0" && cp -a "$0.kept/." "$0/" 2>/dev/null\n'
        f'{sys.executable} -m batch_runner "$@"\ncode=$?\n'
        'rm -rf "$0.kept"; cp -a "$0" "$0.kept"; exit $code'
    )
    how = ["-m"] if os.geteuid() == 0 else ["-Urm"]
    process = await asyncio.create_subprocess_exec(
        "unshare", *how, "bash", "-c", script, str(mount), *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    said, errors = await process.communicate()
    return process.returncode or 0, said.decode(), errors.decode()


async def test_a_full_disk_stops_clearly_and_resumes(tmp_path: Path, server: FakeServer) -> None:
    dataset = kit.write(tmp_path / "tasks.jsonl", kit.rows(60))
    mount = tmp_path / "disk"
    mount.mkdir()
    (tmp_path / "disk.kept").mkdir()
    arguments = kit.played(dataset, mount / "run", server.base_url, *HERE, "--concurrency", "8")
    code, said, errors = await in_small_disk(mount, "400k", *arguments)
    assert code == 3, said + errors
    (stop,) = [line for line in said.splitlines() if line.startswith("stopped: ")]
    assert f"the disk of {mount / 'run'} is full. Free some space" in stop
    assert "Traceback" not in errors
    kept = tmp_path / "disk.kept" / "run"
    before = {r["unit_id"] for r in kit.table(kept, "trajectories")}

    code, said, errors = await in_small_disk(mount, "64m", *arguments)
    assert code == 0, said + errors
    final = kit.final_rows(kept)
    assert len(final) == kit.units_of(60)
    assert before <= set(final)
    kit.check_usage(kept, server.entries)
