"""Kill runs at random moments, resume them until they are complete, and check their usage records.

    python tests/chaos/run.py --n 200 --seed 1 [--ray 0.25] [--remote 0.2] [--keep FOLDER]

Each round draws one to three faults from its own seed: kill -9 of the driver, of a worker or of
both, a crash point of the commit protocol, Ctrl-C once or twice, killed sandboxes, driver or
workers suspended for longer than the lease (SIGSTOP; `--stop 60` for up to so many seconds), a disk
that stalls for a while, followed by Ctrl-C twice, a disk that is full for a while (as root), or a
clock that jumps by up to a day. Between two starts, runs are merged, also interrupted, and files
are damaged or deleted and repaired. A share of the rounds (`--remote`) runs at an s3:// URL; see
`object_store`. Prints one line per round and a report. Exits with 1 when a round broke a promise,
and keeps its folder.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shutil
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

import faults
import kit
import object_store
import s3
from conftest import ray_cluster

from hermes_rl.sandboxes import default_state_dir, memory_folder
from hermes_rl.store import CRASH_POINTS, CRASH_VARIABLE
from hermes_rl.testing import FakeConfig, FakeServer, FaultPlan

DISTINCT = 10
LATENCY_S = 0.02
REQUESTS = 3 * kit.count_units(DISTINCT)
COSTS = ("usage", "cost_usd", "unpriced_calls")
"""Columns that change with retried calls."""
FAULTS = (
    *("driver", "driver", "driver", "crash", "crash", "interrupt", "twice", "sandboxes"),
    *("stop", "stall", "stall", "full", "full", "clock", "merge", "merge", "merge"),
    *("damage", "damage", "damage"),
)
RAY_FAULTS = (*FAULTS, "worker", "worker", "both", "both", "stop", "stop worker", "stop worker")
LEASE_S = 6.0
STOP_S = LEASE_S + 3.0
STALLS_S = (2, 14, 30)
"""Shorter than the wait after a second Ctrl-C, longer than that for rollouts, and longer than that
of recovery."""
STALL_POINTS = [p for p in CRASH_POINTS if p.startswith("publish-")]


@dataclass
class Round:
    """One run and its faults."""

    number: int
    seed: int
    workers: int
    sandbox: str
    error_rate: float
    faults: list[str] = field(default_factory=list)
    starts: int = 0
    seconds: float = 0.0
    fault: str | None = None
    remote: bool = False
    """Whether the run is at a URL."""
    killed: Counter[str] = field(default_factory=Counter)
    """Start of a unit id -> how many of its sandboxes were killed."""

    def line(self) -> str:
        how = f"{self.workers} workers, {self.sandbox}, {self.error_rate:.0%} faults"
        how = "s3" if self.remote else how
        outcome = f"FAILED: {self.fault}" if self.fault else "ok"
        faults = ", ".join(self.faults)
        return (
            f"{self.number:4} seed {self.seed:<10} {how}: {faults} -> {outcome} "
            f"({self.seconds:.0f} s)"
        )


class Chaos:
    """Runs one round after another."""

    def __init__(
        self, folder: Path, cluster: dict[str, str], stop_s: float = STOP_S, s3: str | None = None
    ) -> None:
        self.folder = folder
        self.s3 = s3
        """The address of an S3 server, for rounds at URLs."""
        self.stop_s = stop_s
        self.cluster = cluster
        self.undisturbed: dict[str, dict[str, Any]] = {}
        """Sandbox -> the rows of a run without faults."""

    async def run_round(self, this: Round) -> None:
        """Run one round to its end, and record a broken promise in it."""
        chance = random.Random(this.seed)
        folder = self.folder / f"round-{this.number}"
        folder.mkdir()
        begun = time.monotonic()
        try:
            if this.remote:
                async with asyncio.timeout(900):
                    await self._run_remote(this, chance, folder)
                return
            with faults.small_disk(folder) if chance.random() < 0.5 else nullcontext():
                async with asyncio.timeout(300 + 5 * self.stop_s):
                    await self._run(this, chance, folder)
        except (AssertionError, TimeoutError, KeyError, OSError) as error:
            this.fault = f"{type(error).__name__}: {str(error)[:2000]}"
        finally:
            if this.fault is None:
                shutil.rmtree(folder)
            this.seconds = time.monotonic() - begun

    async def _run(self, this: Round, chance: random.Random, folder: Path) -> None:
        rows, out = kit.make_rows(DISTINCT, latency_s=LATENCY_S), folder / "run"
        reader = kit.ParquetReader(out)
        reader.start()
        receipts: dict[str, int] = {}
        marks = []
        undisturbed = await self._undisturbed(this.sandbox)
        plan = FaultPlan(seed=this.seed, mixed=this.error_rate, retry_after_s=0.05)
        async with FakeServer(FakeConfig(faults=plan)) as server:
            for last in (*[False] * chance.randint(1, 3), True):
                chance.shuffle(rows)
                arguments = self._arguments(this, folder, rows, server)
                run = await self._start(this, chance, arguments, None if last else out, server)
                this.starts += 1
                assert "Traceback" not in run.errors, run.errors[-2000:]
                marks.append(run.mark)
                receipts.update(run.receipts())
            assert run.process.returncode in (0, 1), run.errors[-2000:]
            reader.check()
            self._check(out, server, receipts, this.error_rate)
        rows_found = without_killed(this, kit.comparable_rows(out))
        check_equal(rows_found, undisturbed, this.error_rate)
        await kit.check_no_processes(marks, out)
        await check_machine()

    async def _run_remote(self, this: Round, chance: random.Random, folder: Path) -> None:
        rows, undisturbed = (
            kit.make_rows(DISTINCT, latency_s=LATENCY_S),
            await self._undisturbed("none"),
        )
        marks, receipts = [], dict[str, int]()
        assert self.s3
        with s3.s3_proxy(self.s3) as proxy:
            url = f"s3://{await proxy.make_bucket()}/runs/one"
            store = object_store.Store(proxy, url, folder, chance)
            async with FakeServer() as server:
                arguments = [*self._arguments(this, folder, rows, server), "--out", url]
                with store.reachable():
                    for _ in range(chance.randint(1, 3)):
                        run, what = await store.start(arguments, server, REQUESTS // 2, STOP_S)
                        this.faults.append(what)
                        assert "Traceback" not in run.errors, run.errors[-2000:]
                        marks.append(run.mark)
                        receipts.update(run.receipts())
                    for run in await store.complete(arguments):
                        marks.append(run.mark)
                        receipts.update(run.receipts())
                    this.starts = len(marks)
                    out = await store.read()
                    if not store.moved:
                        kit.check_usage(out, server.entries)
                        kit.check_no_unit_ran_again(out, receipts)
        final = kit.final_rows(out)
        assert len(final) == kit.count_units(DISTINCT), f"{len(final)} units"
        check_equal(kit.comparable_rows(out), undisturbed, this.error_rate)
        await kit.check_no_processes(marks, out)
        await check_machine()

    async def _undisturbed(self, sandbox: str) -> dict[str, Any]:
        if sandbox not in self.undisturbed:
            folder = self.folder / f"undisturbed-{sandbox}"
            folder.mkdir()
            rows = kit.make_rows(DISTINCT, latency_s=LATENCY_S)
            more = ("--workers", "0", "--sandbox", sandbox)
            async with FakeServer() as server:
                await kit.finish_run(*kit.run_arguments(folder, rows, server, *more))
            self.undisturbed[sandbox] = kit.comparable_rows(folder / "run")
        return self.undisturbed[sandbox]

    def _arguments(
        self, this: Round, folder: Path, rows: list[dict[str, Any]], server: FakeServer
    ) -> list[str]:
        more = ("--workers", str(this.workers), "--concurrency", "6", "--max-attempts", "6")
        fast = ("--set", "run.publish_every_s=0.3", "--sandbox", this.sandbox)
        fast += ("--set", f"run.lease_s={LEASE_S}")
        return kit.run_arguments(folder, rows, server, *more, *fast)

    async def _start(
        self,
        this: Round,
        chance: random.Random,
        arguments: list[str],
        target: Path | None,
        server: FakeServer,
    ) -> kit.RunProcess:
        choices = RAY_FAULTS if this.workers else FAULTS
        fault_kind = chance.choice(choices) if target is not None else "none"
        env = dict(self.cluster) if this.workers else {}
        if fault_kind == "crash":
            env[CRASH_VARIABLE] = f"{chance.choice(CRASH_POINTS)}:{chance.randint(1, 4)}"
        elif fault_kind == "stall":
            env[CRASH_VARIABLE] = f"{chance.choice(STALL_POINTS)}:1:{chance.choice(STALLS_S)}"
        elif fault_kind == "clock":
            env["HERMES_TEST_CLOCK"] = str(chance.randint(-86_400, 86_400))
        detail = env.get(CRASH_VARIABLE) or env.get("HERMES_TEST_CLOCK", "")
        if target is not None:
            this.faults.append(f"{fault_kind} {detail}".strip())
        run = await kit.start_run(*arguments, env=env)
        if target is not None and fault_kind != "crash":
            at = server.requests + chance.randint(1, REQUESTS * 2 // 3)
            if await _reached(server, run, at):
                await self._inject(this, fault_kind, run, target, chance)
        await run.wait(150 + self.stop_s)
        if target is not None and fault_kind in ("merge", "damage"):
            this.faults[-1] = await getattr(faults, fault_kind)(target, chance)
        return run

    async def _inject(
        self,
        this: Round,
        fault_kind: str,
        run: kit.RunProcess,
        target: Path,
        chance: random.Random,
    ) -> None:
        if fault_kind == "full":
            await _fill(run, target.parent, chance)
        elif fault_kind == "sandboxes":
            this.killed.update(_kill_sandboxes(target))
        elif fault_kind in ("merge", "damage"):
            await _inject("driver", run, target)
        else:
            await _inject(fault_kind, run, target, chance.uniform(LEASE_S + 3, self.stop_s))

    def _check(
        self, out: Path, server: FakeServer, receipts: dict[str, int], error_rate: float
    ) -> None:
        final = kit.final_rows(out)
        given_up = {r["unit_id"] for r in kit.read_table(out, "failures")} - set(final)
        assert len(final) + (len(given_up) if error_rate else 0) == kit.count_units(DISTINCT)
        kit.check_usage(out, server.entries)
        kit.check_no_unit_ran_again(out, receipts)
        assert list((out / "journal").iterdir()) == []
        assert list((out / "tmp").iterdir()) == []
        for row in kit.read_table(out, "failures"):
            assert row["reward"] is None


def without_killed(this: Round, found: dict[str, Any]) -> dict[str, Any]:
    """The rows, without those that may end as `sandbox_killed` after the faults of this round.

    A sandbox of `none` is a shell that its agent may kill, too: nothing shows who did it. Others
    are lost by the machine, unless the same command loses two of them.
    """
    enough = 1 if this.sandbox == "none" else 2
    return {
        unit: row
        for unit, row in found.items()
        if row["end_reason"] != "sandbox_killed" or this.killed[unit[:16]] < enough
    }


def check_equal(found: dict[str, Any], undisturbed: dict[str, Any], error_rate: float) -> None:
    """Final rows equal those of an undisturbed run, except for the cost of retries."""

    def plain(rows: dict[str, Any]) -> dict[str, Any]:
        if not error_rate:
            return rows
        return {u: {k: v for k, v in r.items() if k not in COSTS} for u, r in rows.items()}

    assert set(found) <= set(undisturbed), "other units than in an undisturbed run"
    wanted = {unit: row for unit, row in plain(undisturbed).items() if unit in found}
    odd = [
        f"{unit} {column}: {str(value)[:400]} instead of {str(wanted[unit].get(column))[:400]}"
        for unit, row in plain(found).items()
        for column, value in row.items()
        if value != wanted[unit].get(column)
    ]
    assert not odd, "the rows differ from those of an undisturbed run:\n" + "\n".join(odd)


async def check_machine(seconds: float = 20.0) -> None:
    """No folder, owner or mount of a sandbox is left after the run."""
    state = default_state_dir()
    deadline = time.monotonic() + seconds
    while left := left_on_the_machine(state):
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.1)


def left_on_the_machine(state: Path) -> list[str]:
    """Paths and mounts that sandboxes left."""
    folders = (state / "boxes", state / "owners", Path(memory_folder(str(state))))
    found = [str(path) for folder in folders if folder.is_dir() for path in folder.iterdir()]
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return found + [line for line in mounts if str(state) in line]


async def _reached(server: FakeServer, run: kit.RunProcess, requests: int) -> bool:
    """Wait for a request. Returns False when the run ends before."""
    while server.requests < requests and run.process.returncode is None:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    return run.process.returncode is None


async def _fill(run: kit.RunProcess, folder: Path, chance: random.Random) -> None:
    """Fill the disk until the run ends, at most for some seconds."""
    ballast = faults.fill(folder, chance)
    if ballast is None:
        kit.kill(run.pid)
        return
    with suppress(TimeoutError):
        async with asyncio.timeout(chance.choice([1, 5, 15])):
            await run.process.wait()
    ballast.unlink(missing_ok=True)


async def _inject(fault_kind: str, run: kit.RunProcess, out: Path, stop_s: float = STOP_S) -> None:
    workers = [pid for pid in kit.worker_pids(out) if pid != run.pid]
    if fault_kind in ("stop", "stop worker"):
        await faults.suspend([run.pid] if fault_kind == "stop" else workers[:1], stop_s)
    if fault_kind in ("worker", "both"):
        for pid in workers[: 1 if fault_kind == "worker" else None]:
            kit.kill(pid)
    if fault_kind in ("driver", "both"):
        kit.kill(run.pid)
    if fault_kind in ("interrupt", "twice", "stall"):
        faults.interrupt(run)
    if fault_kind in ("twice", "stall"):
        await asyncio.sleep(0.05)
        faults.interrupt(run)


def _kill_sandboxes(out: Path) -> list[str]:
    """Kill all sandboxes of a run. Returns the starts of their units' ids."""
    units = []
    for pid in kit.sandbox_pids(out):
        with suppress(FileNotFoundError):
            lease = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
            units += re.findall(r"[0-9a-f]{32}-([0-9a-f]{16})-\d+-\d+", lease)
        kit.kill(pid)
    return units


def draw(number: int, seed: int, ray: float, remote: float = 0.0) -> Round:
    """The round of this number."""
    chance = random.Random(f"{seed}-{number}")
    if random.Random(f"remote-{seed}-{number}").random() < remote:
        return Round(number, chance.randrange(2**31), 0, "none", 0.0, remote=True)
    return Round(
        number=number,
        seed=chance.randrange(2**31),
        workers=2 if chance.random() < ray else 0,
        sandbox="bubblewrap" if chance.random() < 0.25 else "none",
        error_rate=0.2 if chance.random() < 0.3 else 0.0,
    )


async def run_all(chaos: Chaos, rounds: list[Round]) -> None:
    for this in rounds:
        await chaos.run_round(this)
        print(this.line(), flush=True)


def report(rounds: list[Round]) -> dict[str, Any]:
    """Totals over all rounds."""
    faults = Counter(fault_kind.partition(" ")[0] for r in rounds for fault_kind in r.faults)
    return {
        "rounds": len(rounds),
        "failed": [r.number for r in rounds if r.fault],
        "starts": sum(r.starts for r in rounds),
        "faults": dict(sorted(faults.items())),
        "seconds": round(sum(r.seconds for r in rounds)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--n", type=int, default=20, help="rounds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--ray", type=float, default=0.25, help="share of rounds with Ray workers")
    parser.add_argument("--remote", type=float, default=0.2, help="share of rounds at s3:// URLs")
    parser.add_argument("--stop", type=float, default=STOP_S, help="longest SIGSTOP, seconds")
    parser.add_argument("--keep", type=Path, help="folder for what failed")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="hermes-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    # Sandboxes get a folder of their own, which shows what they leave. Ray needs a short path.
    scratch = folder / "scratch"
    scratch.mkdir()
    for path in (folder, scratch):  # each sandbox has its own user
        path.chmod(0o711)
    os.environ.setdefault("RAY_TMPDIR", tempfile.gettempdir())
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
    shares = (options.seed, options.ray, options.remote)
    rounds = [draw(options.first + n, *shares) for n in range(options.n)]
    with (
        ray_cluster() if any(r.workers for r in rounds) else nullcontext({}) as address,
        s3.s3_server() if any(r.remote for r in rounds) else nullcontext() as server,
    ):
        asyncio.run(run_all(Chaos(folder, address, options.stop, server), rounds))
    totals = report(rounds)
    print(json.dumps(totals, indent=2))
    if totals["failed"]:
        print(f"kept: {folder}")
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
