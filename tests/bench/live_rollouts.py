"""Measure `rollouts()`: from the last member to the trainer, cost and memory per group.

    python tests/bench/live_rollouts.py --groups 50000 --kills 50

Without a model server: the played model `noop` answers at once, so that the harness is what costs.
`--kills N` kills trainers after a few acknowledgements, and checks that each group was acknowledged
exactly once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from hermes_rl.rl import Policy, rollouts
from hermes_rl.store import load_run

ENV = """
from hermes_rl.rl import EnvConfig, Environment, make_task

class Config(EnvConfig):
    sandboxed: bool = False
    toolsets: tuple[str, ...] | None = ()

class Numbers(Environment[Config]):
    name, endless, Config = "numbers", True, Config

    def tasks(self, split, seed):
        n = 0
        while True:
            yield make_task(f"Number {n}.", id=f"n{n}")
            n += 1

    async def compute_reward(self, task, trajectory, ctx):
        return float(ctx.member % 2)
"""
CONFIG = {"sandbox": {"backend": "none"}, "run": {"allow_unsandboxed": True}}


def resident_mb() -> float:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


async def measure(folder: Path, groups: int, size: int) -> dict[str, object]:
    """Take groups, and measure each tenth of them."""
    stream = rollouts(
        str(folder / "numbers.py"), Policy(model="noop"), out=folder / "run", group_size=size,
        concurrency=32, limit=groups, config=CONFIG,
    )  # fmt: skip
    waits: list[float] = []
    tenths = []
    async with stream:
        for _ in range(10):
            began, cpu, reading = time.monotonic(), time.process_time(), 0.0
            for _ in range(groups // 10):
                group = await anext(stream)
                now = time.time()
                rows = [m.trajectory for m in group.members if m.trajectory is not None]
                last = max(row["finished_at"] for row in rows)
                waits.append(now - (last / 1e6 if isinstance(last, int) else last.timestamp()))
                before = time.monotonic()
                await group.ack(step=1)
                reading += time.monotonic() - before
            spent = time.monotonic() - began
            used = time.process_time() - cpu
            tenths.append(
                {
                    "ms_per_group": round(1e3 * spent / (groups // 10), 2),
                    "cpu_ms_per_group": round(1e3 * used / (groups // 10), 2),
                    "ack_ms": round(1e3 * reading / (groups // 10), 2),
                    "resident_mb": round(resident_mb(), 1),
                }
            )
            print(json.dumps(tenths[-1]), flush=True)
    later = [float(t["resident_mb"]) for t in tenths[2:]]
    slope = (later[-1] - later[0]) / (groups * 0.7) * 10_000
    return {
        "groups": groups,
        "last_member_to_trainer_ms": round(1e3 * statistics.median(waits), 1),
        "p99_ms": round(1e3 * statistics.quantiles(waits, n=100)[-1], 1),
        "memory_mb_per_10000_groups": round(slope, 2),
    }


async def train(folder: Path, limit: int) -> None:
    """The trainer that is killed."""
    stream = rollouts(
        str(folder / "numbers.py"), Policy(model="noop"), out=folder / "killed", group_size=2,
        concurrency=8, limit=limit, config=CONFIG,
    )  # fmt: skip
    async with stream:
        async for group in stream:
            await group.ack(step=1)
            print(group.group_id, flush=True)
    print("end", flush=True)


async def kill(folder: Path, kills: int) -> dict[str, object]:
    """Kill trainers at random moments, then let one finish."""
    limit, seen, draw, killed = kills * 6, list[str](), random.Random(0), 0
    ended = False
    while not ended:
        process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--train", str(folder), "--groups", str(limit),
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout
        wanted = draw.randrange(1, 6)
        async for line in process.stdout:
            name = line.decode().strip()
            ended = name == "end"
            if not ended:
                seen.append(name)
                wanted -= 1
                if wanted == 0 and killed < kills:
                    await asyncio.sleep(draw.uniform(0, 0.02))
                    process.send_signal(signal.SIGKILL)
                    killed += 1
        await process.wait()
    events = load_run(folder / "killed").frame("deliveries")
    acknowledged = Counter(events[events["event"] == "acknowledged"]["group_id"])
    return {
        "kills": killed,
        "groups": limit,
        "acknowledged": len(acknowledged),
        "twice": sum(count > 1 for count in acknowledged.values()),
        "reported_twice": len(seen) - len(set(seen)),
        "reported_and_lost": len(set(seen) - set(acknowledged)),
    }


def main() -> None:
    """Measure, and print one JSON line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int, default=5_000)
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--train", type=Path)
    options = parser.parse_args()
    if options.train is not None:
        asyncio.run(train(options.train, options.groups))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "numbers.py").write_text(ENV)
        found = asyncio.run(measure(folder, options.groups, options.size)) if options.groups else {}
        if options.kills:
            found |= {"kill": asyncio.run(kill(folder, options.kills))}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
