"""256 groups of four, killed in the midst and run again: what a training step takes."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from rl_kit import Written, events, flags, report_of, start, table

from hermes_rl.testing.fake_server import FakeConfig, FakeServer

GROUPS, SIZE, ROUNDS, IN_FLIGHT, KILLED_AT = 256, 4, 2, 64, 400
TALK = f"""
class Config(EnvConfig):
    sandboxed: bool = False
    toolsets: tuple[str, ...] | None = ()
    group_size: int = {SIZE}

endless = True

def tasks(self, split, seed):
    n = 0
    while True:
        yield make_task(f"Number {{n}}.", id=f"n{{n}}", n=n)
        n += 1

async def reply(self, task, trajectory, ctx):
    return "Go on." if len(trajectory.answers) < {ROUNDS} else None

async def compute_reward(self, task, trajectory, ctx):
    return float(ctx.member < task.metadata["n"] % {SIZE + 1})
"""


@pytest.mark.slow
async def test_a_thousand_rollouts_killed_in_the_midst(
    tmp_path: Path, write_env: Callable[..., Written]
) -> None:
    env, out = write_env(TALK).path, tmp_path / "run"
    more = ("--limit", str(GROUPS), "--concurrency", str(IN_FLIGHT))
    plays = {"policy": lambda request: "Well."}
    async with FakeServer(FakeConfig(latency_s=0.02, plays=plays)) as server:
        first = await start("process", env, *flags(out, server, *more))
        seen = await events(first, until=KILLED_AT)
        first.send_signal(signal.SIGKILL)
        await first.wait()
        told = {e["unit_id"] for e in seen if e["event"] == "attempt" and e["status"] == "ok"}
        assert KILLED_AT <= len(told) < GROUPS * SIZE
        again = await start("process", env, *flags(out, server, *more))
        later, _ = await asyncio.gather(events(again), again.wait())
        assert again.returncode == 0
        report = report_of(later)
        served = [entry.call_id for entry in server.entries]
    assert report["done"] == GROUPS * SIZE
    assert not told & {e["unit_id"] for e in later if e["event"] == "attempt"}

    rows = table(out)
    assert len(rows) == len({row["unit_id"] for row in rows}) == GROUPS * SIZE
    assert Counter(row["group_id"] for row in rows) == dict.fromkeys(
        {row["group_id"] for row in rows}, SIZE
    )
    assert {(row["row_index"], row["member"]) for row in rows} == {
        (n, m) for n in range(GROUPS) for m in range(SIZE)
    }
    assert [row["reward"] for row in rows] == [
        float(m < n % (SIZE + 1)) for n in range(GROUPS) for m in range(SIZE)
    ]

    # Nothing is paid twice but what was in flight.
    lost = table(out, "failures")
    assert {row["cause"] for row in lost} <= {"driver_lost"}
    units = {c["call_id"]: r["unit_id"] for r in rows + lost for c in r["calls"]}
    assert len(served) == len(set(served))
    assert set(served) <= set(units)
    asked = Counter(units[call] for call in served)
    twice = {unit for unit, count in asked.items() if count > ROUNDS}
    assert len(twice) <= IN_FLIGHT
    assert twice <= {row["unit_id"] for row in lost}
    assert not twice & told
    assert len(served) <= ROUNDS * (GROUPS * SIZE + IN_FLIGHT)

    groups = table(out, "groups")
    assert len(groups) == GROUPS
    for group in groups:
        n = int(group["task_id"][1:])
        solved = n % (SIZE + 1)
        assert (group["n_valid"], group["size"], group["sendable"]) == (SIZE, SIZE, True)
        assert group["members"] == list(range(SIZE))
        assert group["mean"] == solved / SIZE
        assert group["equal_scores"] == (solved in (0, SIZE))
