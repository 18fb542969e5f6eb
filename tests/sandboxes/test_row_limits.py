"""Limits of a row are those of its sandbox, as far as the run's own allow."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from batch_runner import Silent, run_batch
from hermes_rl.errors import StoreError
from hermes_rl.sandboxes import Bubblewrap, GradingSpec, SandboxLimits, SandboxSpec
from hermes_rl.store import load_run
from hermes_rl.tasks import parse_row

MIB = 1 << 20
SEEN = "ulimit -v >memory; head -c 20M /dev/zero >big 2>error; stat -c %s big >size; rm big"
VERIFY = 'cd "$WORKSPACE"; test "$(ulimit -v)" = "$(cat memory)"'


def run(out: Path, limits: dict[str, float], **sandbox: float) -> Any:
    """One row, whose agent looks at its limits. Returns the row of the run."""
    row = {"prompt": "look", "limits": limits, "oracle": SEEN, "verify": VERIFY}
    config = {
        "dataset": {"path": [row]},
        "model": {"name": "oracle"},
        "agent": {"toolsets": ["terminal"]},
        "sandbox": {"limits": sandbox},
        "run": {"out": str(out), "workers": 0, "keep_workspaces": True},
    }
    run_batch(config, progress=Silent())
    (row,) = load_run(out).trajectories.itertuples()
    return row


def in_force(row: Any) -> dict[str, Any]:
    limits: dict[str, Any] = row.sandbox["limits"]
    return limits


@pytest.mark.parametrize(
    ("limits", "sandbox", "memory", "storage"),
    [
        ({}, {}, 2 << 30, 2 << 30),
        ({"memory_bytes": 300 * MIB, "storage_bytes": 4 * MIB}, {}, 300 * MIB, 4 * MIB),
        ({}, {"memory_bytes": 400 * MIB, "storage_bytes": 5 * MIB}, 400 * MIB, 5 * MIB),
        (
            {"memory_bytes": 300 * MIB, "storage_bytes": 64 * MIB},
            {"memory_bytes": 400 * MIB, "storage_bytes": 5 * MIB},
            300 * MIB,
            5 * MIB,
        ),
        ({"memory_bytes": 4 << 30}, {"memory_bytes": 3 << 30}, 3 << 30, 2 << 30),
        ({"memory_bytes": 4 << 30}, {}, 4 << 30, 2 << 30),
    ],
)
def test_the_smaller_limit_wins(
    tmp_path: Path, limits: dict[str, float], sandbox: dict[str, float], memory: int, storage: int
) -> None:
    row = run(tmp_path / "out", limits, **sandbox)
    force = in_force(row)
    assert force["address_space_bytes_per_process"] == memory
    assert force["workspace_bytes"] == storage
    assert force.get("memory_bytes", memory) == memory
    assert "cpus" not in force
    if storage < 20 * MIB and force["workspace_held_by"] == "watching":
        assert row.end_reason == "sandbox_killed"
    else:
        assert row.reward == 1.0, "the verifier's sandbox has the same limits"


async def test_a_sandbox_sees_its_limits(bubblewrap: Bubblewrap) -> None:
    limits = SandboxLimits(memory_bytes=300 * MIB, workspace_bytes=4 * MIB)
    async with await bubblewrap.lease(SandboxSpec(lease="seen", limits=limits)) as sandbox:
        assert (await sandbox.run("ulimit -v", timeout_s=20)).output == f"{300 << 10}\n"
        if sandbox.info.limits["workspace_held_by"] == "kernel":
            full = await sandbox.run("head -c 20M /dev/zero >big", timeout_s=60)
            assert "No space left" in full.output


SPIN = "i=0; while [ $i -lt 100000 ]; do i=$((i + 1)); done"


async def test_cpu_time_is_bounded_where_the_machine_allows_it(bubblewrap: Bubblewrap) -> None:
    """A program that uses more than its share of a period has to wait for the next."""
    limits = SandboxLimits(cpus=0.1)
    async with await bubblewrap.lease(SandboxSpec(lease="cpus", limits=limits)) as sandbox:
        groups = (await sandbox.run("cat /proc/self/cgroup", timeout_s=20)).output
        name = next((w for w in groups.replace("/", "\n").split() if "hermes-rl-" in w), "")
        folders = (Path(at) for at, _, _ in os.walk("/sys/fs/cgroup"))  # others end meanwhile
        found = [p for p in folders if p.name == name and (p / "cpu.stat").exists()]
        if "cpus" not in sandbox.info.limits:
            assert not name or not any(map(_quota, found))
            return
        assert sandbox.info.limits["cpus"] == 0.1
        (group,) = found
        assert _quota(group) == 10_000
        await sandbox.run(SPIN, timeout_s=60)
        stat = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
        assert int(stat["nr_throttled"]) > 0
        graded = await sandbox.grade(GradingSpec("cat /proc/self/cgroup"))
        assert "cpu:" not in graded.output or f"cpu:/{name}." in graded.output
    await bubblewrap.aclose()  # else the next sandbox takes it over
    assert not group.exists()


def _quota(group: Path) -> int | None:
    for name in ("cpu.cfs_quota_us", "cpu.max"):
        if (group / name).exists():
            text = (group / name).read_text().split()[0]
            return None if text in ("-1", "max") else int(text)
    return None


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"cpus": 0}, "'limits.cpus' must be a number above 0"),
        ({"memory_bytes": 1000}, "'limits.memory_bytes' must be 33,554,432 or more"),
        ({"storage_bytes": 1000}, "'limits.storage_bytes' must be 1,048,576 or more"),
    ],
)
def test_limits_that_no_sandbox_can_have_are_refused(
    limits: dict[str, float], message: str
) -> None:
    row = parse_row({"prompt": "x", "limits": limits}, 0, "row 0")
    assert row.task is None
    assert message in (row.error or "")


def test_limits_of_a_run_are_identity_where_they_are_set(tmp_path: Path) -> None:
    run(tmp_path / "out", {})
    with pytest.raises(StoreError, match="memory_bytes none, now 1073741824"):
        run(tmp_path / "out", {}, memory_bytes=1 << 30)
