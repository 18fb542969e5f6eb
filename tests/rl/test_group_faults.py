"""Groups while sandbox hosts die and the endpoint fails, on the real runner.

Every agent and every grader sleeps for a number of seconds that identifies its task and member. The
test ends the sleep of members that live, and kills the sandbox host of the others.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from runs import Lab, make_config, table

from batch_runner import Report, Silent, arun_batch
from hermes_rl.export import export_run
from hermes_rl.rl import EPSILON, gather, group_report, make_group
from hermes_rl.store import Run, load_run
from hermes_rl.testing import (
    ExactConfig,
    ExactEngine,
    FaultPlan,
    Truth,
    chat_of,
    write_tiny_tokenizer,
)
from hermes_rl.verify import BOXES

SIZE = 4
FAULTS = {"server_error": 0.03, "reset": 0.02}
TURNS = 6
AGENT, GRADER = 97_000, 98_000
"""First durations; each task adds ten, and each member one."""
STEPS = [{"run": "sleep $(cat nap); cp nap out.txt"}, *[{"run": "echo on"}] * (TURNS - 2), "Done."]

SLEEPERS = f"""
class Config(EnvConfig):
    toolsets: tuple[str, ...] | None = ("terminal",)
    group_size: int = {SIZE}
    graded_by_nap: bool = False
    careless: bool = False

def tasks(self, split, seed):
    for n in range(100):
        steps = {json.dumps(json.dumps(STEPS))}
        yield make_task(f"Sleep {{n}}.\\nSCRIPT: {{steps}}\\n", id=f"t{{n}}", n=n)

async def start(self, task, ctx):
    nap = {AGENT} + 10 * task.metadata["n"] + ctx.member
    await ctx.sandbox.write_file("nap", str(nap).encode())

async def compute_reward(self, task, trajectory, ctx):
    left = int(await ctx.grading.read_file("out.txt"))
    if self.config.graded_by_nap:
        try:
            await ctx.grading.run(f"sleep {{left - {AGENT} + {GRADER}}}", timeout_s=600)
        except CannotJudge:
            if not self.config.careless:
                raise
            return 0.0
    return (left % 10 + 1) / {SIZE}
"""
Place = tuple[int, int]
"""Task and member."""


@dataclass
class SandboxKiller:
    """Ends sleeps, and kills the sandbox hosts of doomed agents or graders."""

    doomed: frozenset[Place]
    base: int
    ended: set[tuple[int, Place]] = field(default_factory=set)
    """Process ids of killed hosts, with task and member."""

    def kill_sleepers(self) -> int:
        """End current sleeps and return their number."""
        found = 0
        for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if words[0] != b"sleep" or not words[1].isdigit():
                    continue
                base, rest = divmod(int(words[1]), 1_000)
                if 1_000 * base not in (AGENT, GRADER) or not (host := self._host(pid)):
                    continue
                dies = 1_000 * base == self.base and divmod(rest, 10) in self.doomed
                os.kill(host if dies else pid, signal.SIGKILL if dies else signal.SIGTERM)
                if dies:
                    self.ended.add((host, divmod(rest, 10)))
                found += 1
        return found

    def _host(self, pid: int) -> int | None:
        """Return the outermost process of the sandbox that a process is in: a child of this
        process, or of its zygote."""
        below = pid
        while pid > 1:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid():
                zygote = Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"hermes-rl-zygote")
                return below if zygote else pid
            below, pid = pid, parent
        return None


@asynccontextmanager
async def engine_in(folder: Path) -> AsyncIterator[ExactEngine]:
    tokenizer = write_tiny_tokenizer(folder / "tokenizer")
    async with ExactEngine(ExactConfig(tokenizer=tokenizer), chat=chat_of(tokenizer)) as engine:
        yield engine


async def run_with_kills(
    env: Path, out: Path, engine: ExactEngine, killer: SandboxKiller, groups: int, **config: Any
) -> Report:
    """Run while sandboxes die; the endpoint fails from the first sleep on."""

    async def kill_sandboxes() -> None:
        while True:
            if killer.kill_sleepers() and not engine.faults.rates:
                engine.faults = FaultPlan(seed=3, rates=FAULTS)
            await asyncio.sleep(0.1)

    place = {"base_url": engine.base_url, "tokens": "vllm"}
    run = make_config(
        env,
        out,
        None,
        dataset={"limit": groups},
        model={"name": "toy"},
        endpoint={**place, "tokenizer": str(engine.config.tokenizer)},
        sandbox={"backend": "bubblewrap"},
        env={"config": config},
        run={"concurrency": 16, "max_attempts": 1, "allow_unsandboxed": False},
    )
    reaping = asyncio.create_task(kill_sandboxes())
    try:
        return await arun_batch(run, progress=Silent())
    finally:
        reaping.cancel()


def expected_group(alive: Mapping[int, float]) -> dict[str, Any]:
    """Compute the row of a group from the rewards of its valid members."""
    values = [alive[m] for m in sorted(alive)]
    n = len(values)
    row: dict[str, Any] = {"n_valid": n, "sendable": n >= 2}
    row["mean"] = statistics.fmean(values) if n else None
    row["std"] = statistics.stdev(values) if n > 1 else None
    off = {m: r - row["mean"] for m, r in alive.items() if n > 1}
    row["dr_grpo"] = [off.get(m) for m in range(SIZE)]
    row["rloo"] = [off[m] * n / (n - 1) if m in off else None for m in range(SIZE)]
    row["grpo"] = [off[m] / (row["std"] + EPSILON) if m in off else None for m in range(SIZE)]
    return row | {"rewards": [alive.get(m) for m in range(SIZE)]}


def wrong_groups(rows: Iterable[Mapping[str, Any]], dead: frozenset[Place]) -> dict[str, list[str]]:
    """Return groups with wrong columns -> these columns."""
    found = {}
    for row in rows:
        n = int(row["task_id"][1:])
        must = expected_group({m: (m + 1) / SIZE for m in range(SIZE) if (n, m) not in dead})
        odd = [k for k, v in must.items() if _plain(row[k]) != pytest.approx(v, nan_ok=False)]
        if odd:
            found[row["task_id"]] = odd
    return found


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value


def newest(run: Run) -> list[dict[str, Any]]:
    rows = run.arrow("groups").sort_by("created_at").to_pylist()
    return list({row["group_id"]: row for row in rows}.values())


GROUPS = 12
DEAD = frozenset(
    [(0, m) for m in range(SIZE)]  # no valid member
    + [(1, 0), (1, 1), (1, 3)]  # one valid member
    + [(2, 1), (2, 3), (8, 0), (11, 2)]  # two, three and three; the other groups are complete
)


@pytest.mark.slow
async def test_failed_members_are_in_no_group_baseline(lab: Lab) -> None:
    env, out = lab.write(SLEEPERS).path, lab.out
    assert len(DEAD) >= 0.1 * GROUPS * SIZE
    async with engine_in(lab.path) as engine:
        killer = SandboxKiller(DEAD, AGENT)
        report = await run_with_kills(env, out, engine, killer, GROUPS)
        failed = sum(entry.fault in FAULTS for entry in engine.truth)
        truth = {e.call_id: e for e in engine.truth if e.outcome == "served"}
    assert {place for _, place in killer.ended} == DEAD
    assert report.given_up == len(DEAD)
    assert failed, "of some 250 requests one in 20 should have failed"
    lost = table(out, "failures")
    assert {(int(r["task_id"][1:]), r["member"]) for r in lost} == DEAD
    assert {(r["cause"], r["reward"]) for r in lost} == {("sandbox_died", None)}

    run = load_run(out)
    rows = newest(run)
    assert len(rows) == GROUPS
    assert wrong_groups(rows, DEAD) == {}
    counts = {row["task_id"]: row["n_valid"] for row in rows}
    assert [counts[f"t{n}"] for n in range(4)] == [0, 1, 2, 4]

    # The injected bug: failed members count with reward 0.
    kept = [
        make_group(replace(g, members=tuple(replace(m, **_with_zero_reward(m)) for m in g.members)))
        for g in gather(run)
    ]
    shown = wrong_groups([msgspec.structs.asdict(group) for group in kept], DEAD)
    assert set(shown) == {f"t{n}" for n, _ in DEAD}

    check_export(out, rows)
    check_report(run, rows, truth)


def _with_zero_reward(member: Any) -> dict[str, Any]:
    if member.why_invalid is None:
        return {}
    return {"trajectory_id": "dead", "reward": 0.0, "why_invalid": None}


def check_export(out: Path, rows: list[dict[str, Any]]) -> None:
    """Exports have no group with fewer than two valid members, and no failed member."""
    report = export_run(out, "atropos")
    assert report.left_out == {"small_group": 1}
    sent = [json.loads(line) for line in Path(report.out).read_text().splitlines()]
    sendable = [row for row in rows if row["n_valid"] >= 2]
    assert len(sent) == len(sendable) == GROUPS - 2
    wanted = sorted([r for r in row["rewards"] if r is not None] for row in sendable)
    assert sorted(sorted(group["scores"]) for group in sent) == wanted
    assert all(len(group["tokens"]) == len(group["scores"]) for group in sent)


def check_report(run: Run, rows: list[dict[str, Any]], truth: Mapping[str | None, Truth]) -> None:
    """Compare turns, endings and (with the engine's log) tokens of kept and dropped rollouts."""
    report = group_report(run)
    small = {row["group_id"] for row in rows if row["n_valid"] < 2}
    done = table(Path(run.path))
    dropped = [row for row in done if row["group_id"] in small]
    kept = [row for row in done if row["group_id"] not in small]
    sides = ((report.kept, kept), (report.dropped, dropped + table(Path(run.path), "failures")))
    for stats, side in sides:
        served = [[truth[c["call_id"]] for c in r["calls"] if c["call_id"] in truth] for r in side]
        used = [sum(len(e.prompt_ids) + len(e.sampled_ids) for e in calls) for calls in served]
        assert stats.count == len(side)
        assert stats.mean_tokens == pytest.approx(statistics.fmean(used))
    assert report.kept.endings == {"answered": GROUPS * SIZE - len(DEAD) - 1}
    assert report.dropped.endings == {"sandbox_died": len(DEAD), "answered": 1}
    # Failed members had one turn, so kept rollouts are longer on average.
    assert report.kept.mean_turns == TURNS
    mean = (len(DEAD) + TURNS) / (len(DEAD) + 1)
    assert report.dropped.mean_turns == pytest.approx(mean)
    (line,) = (line for line in report.lines() if line.startswith("dropped:"))
    assert f"{len(DEAD) + 1} rollouts, {mean:.1f} turns and" in line
    assert f"(sandbox_died {len(DEAD)}, answered 1)" in line


@pytest.mark.slow
async def test_a_grader_that_gives_failed_members_zero_is_detected(lab: Lab) -> None:
    """Grading sandboxes die: a careless grader returns 0.0 instead of raising CannotJudge."""
    env, dead = lab.write(SLEEPERS).path, frozenset([(0, 2), (2, 0), (2, 1), (2, 3)])
    async with engine_in(lab.path) as engine:
        for careless, shown in ((False, set()), (True, {"t0", "t2"})):
            out = lab.path / str(careless)
            killer = SandboxKiller(dead, GRADER)
            how = {"graded_by_nap": True, "careless": careless}
            report = await run_with_kills(env, out, engine, killer, 3, **how)
            assert {place for _, place in killer.ended} == dead
            assert len(killer.ended) >= BOXES * len(dead)
            assert report.given_up == (0 if careless else len(dead))
            rows = newest(load_run(out))
            assert len(rows) == 3
            assert set(wrong_groups(rows, dead)) == shown
            dropped = group_report(load_run(out))
            assert dropped.unjudged == report.given_up
