"""A process is killed and restarted: reported results are durable, and each paid call is recorded
once."""

import asyncio
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from runs import Lab, events, report_of, run_flags, start, start_server, tokens, tokens_spent

from batch_runner import regrade_run
from hermes_rl.testing import FakeConfig, FakeServer

GROUPS, SIZE, ROUNDS, IN_FLIGHT, KILLED_AT = 64, 4, 2, 32, 100
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
    return "More." if len(trajectory.answers) < {ROUNDS} else None

async def compute_reward(self, task, trajectory, ctx):
    return float(ctx.member < task.metadata["n"] % {SIZE + 1})
"""


async def test_reported_rollouts_are_not_repeated_after_a_kill(lab: Lab) -> None:
    env, out = lab.write(TALK).path, lab.out
    more = ("--limit", str(GROUPS), "--concurrency", str(IN_FLIGHT))
    plays = {"policy": lambda request: "Well."}
    async with FakeServer(FakeConfig(latency_s=0.02, plays=plays)) as server:
        first = await start("process", env, *run_flags(out, server, *more))
        seen = await events(first, until=KILLED_AT)
        first.send_signal(signal.SIGKILL)
        await first.wait()
        reported = {e["unit_id"] for e in seen if e["event"] == "attempt" and e["status"] == "ok"}
        assert KILLED_AT <= len(reported) < GROUPS * SIZE
        again = await start("process", env, *run_flags(out, server, *more))
        later, _ = await asyncio.gather(events(again), again.wait())
        assert again.returncode == 0
        served = [entry.call_id for entry in server.entries]
    assert report_of(later)["done"] == GROUPS * SIZE
    assert not reported & {e["unit_id"] for e in later if e["event"] == "attempt"}

    rows = lab.rows()
    assert len({row["unit_id"] for row in rows}) == len(rows)
    assert [(row["row_index"], row["member"], row["reward"]) for row in rows] == [
        (n, m, float(m < n % (SIZE + 1))) for n in range(GROUPS) for m in range(SIZE)
    ]

    # Only rollouts in flight are paid twice.
    lost = lab.rows("failures")
    assert {row["cause"] for row in lost} <= {"driver_lost"}
    units = {c["call_id"]: r["unit_id"] for r in rows + lost for c in r["calls"]}
    assert len(served) == len(set(served))
    assert set(served) <= set(units)
    requests = Counter(units[call] for call in served)
    twice = {unit for unit, count in requests.items() if count > ROUNDS}
    assert len(twice) <= IN_FLIGHT
    assert twice <= {row["unit_id"] for row in lost} - reported

    groups = lab.rows("groups")
    assert len(groups) == len(lab.groups()) == GROUPS
    for group in groups:
        solved = int(group["task_id"][1:]) % (SIZE + 1)
        assert (group["n_valid"], group["members"]) == (SIZE, list(range(SIZE)))
        assert (group["mean"], group["equal_scores"]) == (solved / SIZE, solved in (0, SIZE))


ENV = """
class Config(EnvConfig):
    sandboxed: bool = False
    ask: bool = False

uses = ("judge",)

def tasks(self, split, seed):
    for n in range(4):
        yield make_task(f"task {n}", id=f"t{n}", toolsets=["none"])

async def ask(self, task, ctx, others):
    await ctx.judge.verdict("Is it good?")
    if task.id == "t3" and ctx.member == 0 and not AGAIN.exists():
        while sum(map(lines, (OUT / "journal").glob("*derived*/done-*"))) < others:
            await asyncio.sleep(0.01)
        AGAIN.touch()
        await ctx.judge.verdict("LAST question: is it really good?")

async def compute_reward(self, task, trajectory, ctx):
    if self.config.ask:
        await self.ask(task, ctx, 7)
        return float(ctx.member)
    return 0.5
"""
SCORED = """
async def score_group(self, task, members, ctx):
    await self.ask(task, ctx, 3)
    return [float(m.member) for m in members]
"""
HEAD = """
import asyncio
from pathlib import Path
AGAIN, OUT = Path({here!r}) / "again", Path({here!r}) / "run"

def lines(path):
    return len(path.read_bytes().splitlines())
"""
RUN = """
import sys
from pathlib import Path
from types import SimpleNamespace
sys.path.insert(0, sys.argv[1])
from runs import make_config
from batch_runner import run_batch
judge = {"judge": {"name": "critic", "max_tokens": 50}}
server = SimpleNamespace(base_url=sys.argv[4])
dataset = {"repeats": 2, "limit": None}
run_batch(make_config(sys.argv[2], Path(sys.argv[3]), server, env=judge, dataset=dataset))
"""
REGRADE = """
import asyncio, sys
from pathlib import Path
from batch_runner.regrade import regrade_run
asyncio.run(regrade_run(Path(sys.argv[3]), [("env.config.ask", True)]))
"""


class Killer:
    """A judge that kills the process that asks the last question."""

    def __init__(self) -> None:
        self.questions = 0
        self.child: asyncio.subprocess.Process | None = None

    def __call__(self, request: Any) -> Any:
        self.questions += 1
        if "LAST" in str(request.messages):
            assert self.child is not None
            os.kill(self.child.pid, signal.SIGKILL)
        return '{"verdict": "yes"}'

    async def run(self, script: str, *arguments: str) -> None:
        here = str(Path(__file__).parent)
        self.child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, here, *arguments, stderr=asyncio.subprocess.DEVNULL
        )
        async with asyncio.timeout(120):
            assert await self.child.wait() == -signal.SIGKILL


@pytest.mark.parametrize(("table", "others"), [("groups", 3), ("grades", 7)])
async def test_scores_and_grades_survive_a_kill_and_interrupted_calls_are_recorded_once(
    lab: Lab, table: str, others: int
) -> None:
    killer, groups = Killer(), table == "groups"
    env = lab.write(ENV + (SCORED if groups else ""), HEAD.format(here=str(lab.path))).path
    judge = {"judge": {"name": "critic", "max_tokens": 50}}
    kept = {"keep_workspaces": True}
    async with start_server(critic=killer, policy=lambda request: "something") as server:

        async def complete() -> None:
            dataset = {"repeats": 2, "limit": None}
            await lab.run(env, server, env=judge, dataset=dataset, run=kept)

        if groups:
            await killer.run(RUN, str(env), str(lab.out), server.base_url)
            await complete()
        else:
            await complete()
            await killer.run(REGRADE, str(env), str(lab.out))
            again = await regrade_run(lab.out, [("env.config.ask", True)])
            assert (again.graded, again.known, again.groups) == (1, others, 4)
        await complete()  # another start records nothing twice
    rows = lab.rows(table)
    assert len(rows) == others + 2
    (cut,) = [row for row in rows if row["error"] is not None]
    assert cut["error"] == "driver_lost: killed"
    assert [call["outcome"] for call in cut["calls"]] == ["ok", "unknown"]
    assert cut["usage"]["unknown_calls"] == 1
    assert killer.questions == sum(len(row["calls"]) for row in rows) == others + 3
    assert [group["rewards"] for group in lab.groups().values()] == [[0.0, 1.0]] * 4
    bound = sum(m["value"] for m in cut["metrics"])
    assert bound > 50
    assert tokens_spent(lab.out) == tokens(lab.rows()) + tokens(rows) + bound
    assert list((lab.out / "journal").iterdir()) == []
