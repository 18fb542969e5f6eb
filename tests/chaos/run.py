"""Kill a run at random moments, run it again until it is whole, check its books; many times.

    python tests/chaos/run.py --n 200 --seed 1 [--ray 0.25] [--keep FOLDER]

Each round draws from its own seed how a run is disturbed, one to three times: kill -9 of the
driver, of a worker or of both, a named crash point of the commit protocol, Ctrl-C once or twice,
its sandboxes killed, driver or workers stopped for longer than the lease (SIGSTOP), or a disk that
does not answer for a while, then Ctrl-C twice. Prints a line per round and a report; exits 1 when a
round broke a promise, and keeps its folder.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "batch"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import kit
from conftest import ray_cluster

from hermes_rl.sandboxes import default_state_dir, memory_folder
from hermes_rl.store import CRASH_POINTS, CRASH_VARIABLE
from hermes_rl.testing import FakeConfig, FakeServer, FaultPlan

DISTINCT = 10
LATENCY_S = 0.02
REQUESTS = 3 * kit.units_of(DISTINCT)
COSTS = ("usage", "cost_usd", "unpriced_calls")
"""Columns that retried calls change."""
DEEDS = (
    *("driver", "driver", "driver", "crash", "crash", "interrupt", "twice", "sandboxes"),
    *("stop", "stall", "stall"),
)
RAY_DEEDS = (*DEEDS, "worker", "worker", "both", "both", "stop", "stop worker", "stop worker")
LEASE_S = 6.0
STOP_S = LEASE_S + 3.0
STALLS_S = (2, 14, 30)
"""Within the patience of a second Ctrl-C, beyond that of rollouts, and beyond that of recovery."""
STALL_POINTS = [p for p in CRASH_POINTS if p.startswith("publish-")]


@dataclass
class Round:
    """One run, disturbed."""

    number: int
    seed: int
    workers: int
    sandbox: str
    faults: float
    deeds: list[str] = field(default_factory=list)
    starts: int = 0
    seconds: float = 0.0
    fault: str | None = None

    def line(self) -> str:
        how = f"{self.workers} workers, {self.sandbox}, {self.faults:.0%} faults"
        said = f"FAILED: {self.fault}" if self.fault else "ok"
        deeds = ", ".join(self.deeds)
        return (
            f"{self.number:4} seed {self.seed:<10} {how}: {deeds} -> {said} ({self.seconds:.0f} s)"
        )


class Chaos:
    """Plays one round after another."""

    def __init__(self, folder: Path, cluster: dict[str, str]) -> None:
        self.folder = folder
        self.cluster = cluster
        self.unbroken: dict[str, dict[str, Any]] = {}
        """Sandbox -> the rows of a run that nobody disturbed."""

    async def play(self, this: Round) -> None:
        """One round to its end; a broken promise is noted in it."""
        chance = random.Random(this.seed)
        folder = self.folder / f"round-{this.number}"
        folder.mkdir()
        begun = time.monotonic()
        try:
            async with asyncio.timeout(300):
                await self._play(this, chance, folder)
        except (AssertionError, TimeoutError, KeyError, OSError) as error:
            this.fault = f"{type(error).__name__}: {str(error)[:2000]}"
        else:
            shutil.rmtree(folder)
        this.seconds = time.monotonic() - begun

    async def _play(self, this: Round, chance: random.Random, folder: Path) -> None:
        made = kit.rows(DISTINCT, latency_s=LATENCY_S)
        dataset, out = folder / "tasks.jsonl", folder / "run"
        watcher = kit.Watcher(out)
        watcher.start()
        receipts: dict[str, int] = {}
        marks = []
        unbroken = await self._undisturbed(this.sandbox)
        plan = FaultPlan(seed=this.seed, mixed=this.faults, retry_after_s=0.05)
        async with FakeServer(FakeConfig(faults=plan)) as server:
            arguments = self._arguments(this, dataset, out, server)
            for last in (*[False] * chance.randint(1, 3), True):
                chance.shuffle(made)
                kit.write(dataset, made)
                run = await self._start(this, chance, arguments, None if last else out, server)
                this.starts += 1
                marks.append(run.mark)
                receipts.update(run.receipts())
            assert run.process.returncode in (0, 1), run.errors[-2000:]
            watcher.check()
            self._check(out, server, receipts, this.faults)
        check_equal(kit.content(out), unbroken, this.faults)
        await kit.check_nothing_left(marks, out)
        await check_machine()

    async def _undisturbed(self, sandbox: str) -> dict[str, Any]:
        if sandbox not in self.unbroken:
            folder = self.folder / f"undisturbed-{sandbox}"
            folder.mkdir()
            dataset = kit.write(folder / "tasks.jsonl", kit.rows(DISTINCT, latency_s=LATENCY_S))
            more = ("--workers", "0", "--sandbox", sandbox)
            async with FakeServer() as server:
                run = await kit.finish(*kit.played(dataset, folder / "run", server.base_url, *more))
            assert run.process.returncode == 0, run.errors[-2000:]
            self.unbroken[sandbox] = kit.content(folder / "run")
        return self.unbroken[sandbox]

    def _arguments(
        self, this: Round, dataset: Path, out: Path, server: FakeServer
    ) -> list[str | Path]:
        more = ("--workers", str(this.workers), "--concurrency", "6", "--max-attempts", "6")
        fast = ("--set", "run.publish_every_s=0.3", "--sandbox", this.sandbox)
        fast += ("--set", f"run.lease_s={LEASE_S}")
        return [*kit.played(dataset, out, server.base_url, *more, *fast)]

    async def _start(
        self,
        this: Round,
        chance: random.Random,
        arguments: list[str | Path],
        disturb: Path | None,
        server: FakeServer,
    ) -> kit.Process:
        deeds = RAY_DEEDS if this.workers else DEEDS
        deed = chance.choice(deeds) if disturb is not None else "none"
        env = dict(self.cluster) if this.workers else {}
        if deed == "crash":
            point = f"{chance.choice(CRASH_POINTS)}:{chance.randint(1, 4)}"
            env[CRASH_VARIABLE] = point
            this.deeds.append(f"crash {point}")
        elif deed == "stall":
            env[CRASH_VARIABLE] = f"{chance.choice(STALL_POINTS)}:1:{chance.choice(STALLS_S)}"
            this.deeds.append(f"stall {env[CRASH_VARIABLE]}")
        elif disturb is not None:
            this.deeds.append(deed)
        run = await kit.launch(*arguments, env=env)
        if disturb is not None and deed != "crash":
            at = server.requests + chance.randint(1, REQUESTS * 2 // 3)
            if await _reached(server, run, at):
                await _do(deed, run, disturb)
        await run.wait(150)
        return run

    def _check(
        self, out: Path, server: FakeServer, receipts: dict[str, int], faults: float
    ) -> None:
        final = kit.final_rows(out)
        given_up = {r["unit_id"] for r in kit.table(out, "failures")} - set(final)
        assert len(final) + (len(given_up) if faults else 0) == kit.units_of(DISTINCT)
        kit.check_usage(out, server.entries)
        kit.check_not_asked_again(out, receipts)
        assert list((out / "journal").iterdir()) == []
        assert list((out / "tmp").iterdir()) == []
        for row in kit.table(out, "failures"):
            assert row["reward"] is None


def check_equal(found: dict[str, Any], unbroken: dict[str, Any], faults: float) -> None:
    """Final rows are those of a run that nobody disturbed; what faults cost apart."""

    def plain(rows: dict[str, Any]) -> dict[str, Any]:
        if not faults:
            return rows
        return {u: {k: v for k, v in r.items() if k not in COSTS} for u, r in rows.items()}

    assert set(found) <= set(unbroken), "other units than in an undisturbed run"
    wanted = {unit: row for unit, row in plain(unbroken).items() if unit in found}
    odd = [
        f"{unit} {column}: {str(value)[:400]} instead of {str(wanted[unit].get(column))[:400]}"
        for unit, row in plain(found).items()
        for column, value in row.items()
        if value != wanted[unit].get(column)
    ]
    assert not odd, "the rows differ from those of an undisturbed run:\n" + "\n".join(odd)


async def check_machine(seconds: float = 20.0) -> None:
    """No sandbox's folder, owner or mount is left of runs that have ended."""
    state = default_state_dir()
    deadline = time.monotonic() + seconds
    while left := left_on_the_machine(state):
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.1)


def left_on_the_machine(state: Path) -> list[str]:
    """What sandboxes left, by path."""
    folders = (state / "boxes", state / "owners", Path(memory_folder(str(state))))
    found = [str(path) for folder in folders if folder.is_dir() for path in folder.iterdir()]
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return found + [line for line in mounts if str(state) in line]


async def _reached(server: FakeServer, run: kit.Process, requests: int) -> bool:
    """Wait for a request; False when the run ends before."""
    while server.requests < requests and run.process.returncode is None:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    return run.process.returncode is None


async def _do(deed: str, run: kit.Process, out: Path) -> None:
    workers = [pid for pid in kit.alive_pids(out) if pid != run.pid]
    if deed in ("stop", "stop worker"):
        await _stop([run.pid] if deed == "stop" else workers[:1])
    if deed in ("worker", "both"):
        for pid in workers[: 1 if deed == "worker" else None]:
            kit.kill(pid)
    if deed in ("driver", "both"):
        kit.kill(run.pid)
    if deed in ("interrupt", "twice", "stall"):
        run.process.send_signal(signal.SIGINT)
    if deed in ("twice", "stall"):
        await asyncio.sleep(0.05)
        if run.process.returncode is None:
            run.process.send_signal(signal.SIGINT)
    if deed == "sandboxes":
        for pid in kit.bwrap_pids(out):
            kit.kill(pid)


async def _stop(pids: list[int]) -> None:
    """Stop processes for longer than the lease, as Ctrl-Z or a preempted machine does."""
    with suppress(ProcessLookupError):
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(STOP_S)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def draw(number: int, seed: int, ray: float) -> Round:
    """The round of this number."""
    chance = random.Random(f"{seed}-{number}")
    return Round(
        number=number,
        seed=chance.randrange(2**31),
        workers=2 if chance.random() < ray else 0,
        sandbox="bubblewrap" if chance.random() < 0.25 else "none",
        faults=0.2 if chance.random() < 0.3 else 0.0,
    )


async def play_all(chaos: Chaos, rounds: list[Round]) -> None:
    for this in rounds:
        await chaos.play(this)
        print(this.line(), flush=True)


def report(rounds: list[Round]) -> dict[str, Any]:
    """What the rounds add up to."""
    deeds = Counter(
        deed.partition(":")[0].partition(" publish-")[0] for r in rounds for deed in r.deeds
    )
    return {
        "rounds": len(rounds),
        "failed": [r.number for r in rounds if r.fault],
        "starts": sum(r.starts for r in rounds),
        "deeds": dict(sorted(deeds.items())),
        "seconds": round(sum(r.seconds for r in rounds)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--n", type=int, default=20, help="rounds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--ray", type=float, default=0.25, help="share of rounds with Ray workers")
    parser.add_argument("--keep", type=Path, help="folder for what failed")
    given = parser.parse_args()
    folder = given.keep or Path(tempfile.mkdtemp(prefix="hermes-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    # A place of its own for sandboxes, so that what they leave can be seen. Ray's stays short.
    scratch = folder / "scratch"
    scratch.mkdir()
    for path in (folder, scratch):  # sandboxes have users of their own
        path.chmod(0o711)
    os.environ.setdefault("RAY_TMPDIR", tempfile.gettempdir())
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
    rounds = [draw(given.first + n, given.seed, given.ray) for n in range(given.n)]
    with ray_cluster() if any(r.workers for r in rounds) else nullcontext({}) as address:
        asyncio.run(play_all(Chaos(folder, address), rounds))
    said = report(rounds)
    print(json.dumps(said, indent=2))
    if said["failed"]:
        print(f"kept: {folder}")
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
