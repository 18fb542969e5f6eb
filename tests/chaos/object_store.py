"""Rounds at an s3:// URL: kills, takeovers by another machine, merges and repairs, while the store
answers 503 or nothing, cuts answers, and gets requests twice or after their clients gave up."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import faults
import kit
from s3 import KEYS, Proxy

from hermes_rl.store import COMPACTION_POINTS, CRASH_POINTS, CRASH_VARIABLE, load_run
from hermes_rl.testing import FakeServer

FAULTS = (
    *("driver", "driver", "early", "early", "late", "crash", "crash", "interrupt", "twice"),
    *("stop", "merge", "merge", "repair"),
)
"""`early` and `late` kill the driver some seconds after its start, and after its first request."""
ANY = ("503", "503", "lost", "down", "cut")
ON_PUT = (*ANY, "late", "late", "twice", "twice")
READ_TIMEOUT_S = 3
"""Of clients: less than a request that is `late` takes."""
LAST_S = 240.0
"""How long starts are repeated until one completes the run."""


class Store:
    """A run at a URL behind a failing store, and the machines that drive it."""

    def __init__(self, proxy: Proxy, url: str, folder: Path, chance: random.Random) -> None:
        self.proxy, self.url, self.folder, self.chance = proxy, url, folder, chance
        self.dice = random.Random(chance.random())
        self.rate = 0.0
        self.down_until = 0.0
        self.moved = False
        """Whether another machine took over: what was not uploaded is lost by design."""
        proxy.failure = self.fail

    def fail(self, method: str, path: str) -> str | None:
        """See `s3.Failure`."""
        if time.monotonic() < self.down_until:
            return "down"
        if self.dice.random() >= self.rate:
            return None
        return self.dice.choice(ON_PUT if method == "PUT" else ANY)

    def use_machine(self, name: str) -> None:
        """Use the cache of a machine from now on."""
        os.environ["XDG_CACHE_HOME"] = str(self.folder / name)

    @contextmanager
    def reachable(self) -> Iterator[None]:
        """The environment of programs that use the store."""
        os.environ.update(KEYS, AWS_ENDPOINT_URL=self.proxy.address)
        timeouts = f'"read_timeout": {READ_TIMEOUT_S}, "connect_timeout": {READ_TIMEOUT_S}'
        os.environ["FSSPEC_S3"] = '{"config_kwargs": {' + timeouts + "}}"
        self.use_machine("machine-a")
        try:
            yield
        finally:
            self.proxy.failure = lambda method, path: None
            for name in (*KEYS, "AWS_ENDPOINT_URL", "FSSPEC_S3", "XDG_CACHE_HOME"):
                del os.environ[name]

    async def change(self, kind: str) -> str:
        """Merge or repair the run, as people do between two starts."""
        crash_at, command = "", ["check", self.url, "--repair"]
        if kind == "merge":
            point = self.chance.choice([*COMPACTION_POINTS, ""])
            crash_at = f"{point}:{self.chance.randint(1, 2)}" if point else ""
            command = ["compact", self.url]
        code, text = await faults.command(*command, crash_at=crash_at)
        assert code in (0, 2) or (crash_at and code == -9), f"{kind}: exit {code}: {text}"
        return f"{kind} {crash_at} exit {code}"

    async def start(
        self, arguments: list[str], server: FakeServer, requests: int, stop_s: float
    ) -> tuple[kit.RunProcess, str]:
        """One start with a fault. Returns what was done, too."""
        kind = self.chance.choice(FAULTS)
        self.rate = self.chance.choice([0.0, 0.05, 0.2])
        what, env = f"{kind} {self.rate:.0%}", {}
        if kind == "crash":
            env[CRASH_VARIABLE] = f"{self.chance.choice(CRASH_POINTS)}:{self.chance.randint(1, 4)}"
            what += f" {env[CRASH_VARIABLE]}"
        if self.chance.random() < 0.3:
            self.use_machine("machine-b")
            self.moved, what = True, f"{what} on machine-b"
        run = await kit.start_run(*arguments, env=env)
        at = server.requests + self.chance.randint(1, 1 if kind == "late" else requests)
        if kind == "early":
            await asyncio.sleep(self.chance.uniform(0, 4))
            kit.kill(run.pid)
        while server.requests < at and run.process.returncode is None:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        if self.chance.random() < 0.3:
            self.down_until = time.monotonic() + self.chance.uniform(1, 8)
            what += " outage"
        if run.process.returncode is None:
            await self._inject(kind, run, stop_s)
        await run.wait(240)
        self.use_machine("machine-a")
        if kind in ("merge", "repair"):
            what += f", {await self.change(kind)}"
        return run, what

    async def _inject(self, kind: str, run: kit.RunProcess, stop_s: float) -> None:
        if kind == "late":
            await asyncio.sleep(self.chance.uniform(0, 8))
        if kind in ("driver", "late", "merge", "repair"):
            kit.kill(run.pid)
        elif kind == "stop":
            await faults.suspend([run.pid], stop_s)
        elif kind in ("interrupt", "twice"):
            for _ in range(1 if kind == "interrupt" else 2):
                faults.interrupt(run)
                await asyncio.sleep(0.05)

    async def complete(self, arguments: list[str]) -> list[kit.RunProcess]:
        """Start until the run is complete; refused and incomplete starts say so in one line."""
        deadline, runs = time.monotonic() + LAST_S, list[kit.RunProcess]()
        while True:
            runs.append(await kit.start_run(*arguments))
            code = await runs[-1].wait(240)
            assert "Traceback" not in runs[-1].errors, runs[-1].errors[-2000:]
            if code in (0, 1):
                return runs
            assert code in (2, 3), (code, runs[-1].errors[-2000:])
            assert time.monotonic() < deadline, runs[-1].errors[-2000:]
            self.rate = 0.0
            await asyncio.sleep(0.5)

    async def read(self) -> Path:
        """Check the finished run as another machine sees it. Returns its copy."""
        self.rate = self.down_until = 0.0
        await asyncio.sleep(self.proxy.late_s)  # what is late has arrived
        self.use_machine("reader")
        code, text = await faults.command("check", self.url)
        assert code == 0, text
        path = (await asyncio.to_thread(load_run, self.url)).path
        named = {p.relative_to(path).as_posix() for p in path.glob("trajectories/*.parquet")}
        found = {k for k in await self.proxy.objects(self.url) if k.startswith("trajectories/")}
        assert found == named, f"globs see other parts: {found ^ named}"
        return path
