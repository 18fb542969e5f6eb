"""A dataset with repeats, runs as real processes, and what must hold of their run directories."""

from __future__ import annotations

import asyncio
import atexit
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batch_runner import JsonEvents, Report, arun_batch
from hermes_rl.config import RunConfig, parse_config
from hermes_rl.testing import Entry, FakeServer

IDENTICAL, REPEATS = 3, 4
MARK = "HERMES_TEST_MARK"
TIMES = (
    "timing", "started_at", "finished_at", "tool_stats", "calls", "attempt", "trajectory_id",
    "run_id", "root_trajectory_id", "row_index", "sandbox", "endpoint", "metrics",
)  # fmt: skip
"""Columns that may differ between two runs of one thing: ids, times and places."""


def task(number: int, *, turns: int = 2, latency_s: float = 0.0) -> dict[str, Any]:
    """A task whose model writes a number to a file; every fifth is not solved."""
    said = -1 if number % 5 == 4 else number
    steps: list[Any] = [{"run": f"echo {said} > out.txt", "latency_s": latency_s}]
    steps += [{"run": f"echo step-{n}", "latency_s": latency_s} for n in range(1, turns)]
    steps.append(f"wrote {said}")
    return {
        "id": f"task-{number}",
        "prompt": f"Write {number} to out.txt.\nSCRIPT: {json.dumps(steps)}",
        "verify": f'test "$(cat "$WORKSPACE/out.txt")" = {number}',
    }


def rows(distinct: int, *, latency_s: float = 0.0) -> list[dict[str, Any]]:
    """Distinct rows, and three identical ones with four repeats each in their midst."""
    made = [task(n, latency_s=latency_s) for n in range(distinct)]
    same = {**task(1000, latency_s=latency_s), "repeats": REPEATS}
    for place in (0, distinct // 2, distinct):
        made.insert(place, dict(same))
    return made


def units_of(distinct: int) -> int:
    return distinct + IDENTICAL * REPEATS


def write(path: Path, made: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


class ForkedProcess:
    """A process that the fork server started, with the methods of asyncio's subprocesses."""

    def __init__(self, pid: int, exit_code: asyncio.Task[bytes]) -> None:
        self.pid = pid
        self._exit_code = exit_code

    @property
    def returncode(self) -> int | None:
        return int(self._exit_code.result()) if self._exit_code.done() else None

    async def wait(self) -> int:
        return int(await asyncio.shield(self._exit_code))

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)


class ForkServer:
    """Started at the first run of a test process (see forked_runs.py); it ends with that."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._address = f"{self._folder.name}/orders"
        program = Path(__file__).with_name("forked_runs.py")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._server = subprocess.Popen(
            [sys.executable, str(program), self._address], start_new_session=True, **pipes
        )
        assert self._server.stdout
        assert self._server.stdout.readline() == b"listening\n"
        atexit.register(self.close)

    def close(self) -> None:
        self._server.communicate()
        self._folder.cleanup()

    async def start(
        self, arguments: Sequence[str], env: dict[str, str], outputs: Sequence[int]
    ) -> ForkedProcess:
        """Start `hermes-rl run ARGUMENTS`; takes over the descriptors for its output."""
        order = json.dumps({"arguments": arguments, "env": env}).encode() + b"\n"
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._address)
        sent = socket.send_fds(connection, [order], outputs)
        connection.sendall(order[sent:])
        for descriptor in outputs:
            os.close(descriptor)
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        pid = int(await reader.readline())

        async def ended() -> bytes:
            try:
                return await reader.readline()
            finally:
                writer.close()

        return ForkedProcess(pid, asyncio.create_task(ended()))

    @classmethod
    @cache
    def of_this_process(cls) -> ForkServer:
        return cls()


async def output_pipe() -> tuple[asyncio.StreamReader, int]:
    """A stream and the descriptor that writes to it."""
    readable, writable = os.pipe()
    stream = asyncio.StreamReader(2**22)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(readable, "rb")
    )
    return stream, writable


@dataclass
class Process:
    """One `hermes-rl run` as a real process, with its JSON events."""

    process: ForkedProcess
    mark: str
    events: list[dict[str, Any]] = field(default_factory=list)
    errors: str = ""
    _readers: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.process.pid

    def receipts(self) -> dict[str, int]:
        """Unit -> attempt, of the units that were reported done."""
        done = [e for e in self.events if e["event"] == "attempt" and e["status"] == "ok"]
        return {e["unit_id"]: e["attempt"] for e in done}

    def report(self) -> dict[str, Any]:
        return next(e for e in reversed(self.events) if e["event"] == "report")

    async def read(self, stream: asyncio.StreamReader, *, events: bool) -> None:
        while line := await stream.readline():
            try:
                self.events.append(json.loads(line if events else b""))
            except ValueError:
                self.errors += line.decode(errors="replace")

    async def wait(self, seconds: float = 120.0) -> int:
        """The exit code."""
        try:
            async with asyncio.timeout(seconds):
                code = await self.process.wait()
                await asyncio.gather(*self._readers)
        except TimeoutError:
            kill(self.pid)
            raise AssertionError(f"no end within {seconds} s: {self.errors[-3000:]}") from None
        return code

    async def until(self, event: str, count: int = 1) -> None:
        """Wait for so many events of a kind."""
        await wait_for(self, lambda: [e["event"] for e in self.events].count(event) >= count)


async def wait_for(run: Process, found: Callable[[], Any]) -> None:
    """Wait until something holds during a run."""
    deadline = time.monotonic() + 90
    while not found():
        assert run.process.returncode is None, run.errors[-3000:]
        assert time.monotonic() < deadline, run.errors[-3000:]
        await asyncio.sleep(0.01)


STARTED: list[Process] = []
"""Runs of the present test; what still runs at its end is killed (see conftest)."""


async def launch(*arguments: str | Path, env: dict[str, str] | None = None) -> Process:
    """Start `hermes-rl run ARGUMENTS --json`, in a process group of its own."""
    mark = uuid.uuid4().hex
    (said, out), (errors, err) = await output_pipe(), await output_pipe()
    process = await ForkServer.of_this_process().start(
        [*map(str, arguments), "--json"], {**os.environ, MARK: mark, **(env or {})}, [out, err]
    )
    made = Process(process, mark)
    STARTED.append(made)
    streams = ((said, True), (errors, False))
    made._readers = [asyncio.create_task(made.read(s, events=e)) for s, e in streams]
    return made


async def finish(*arguments: str | Path, env: dict[str, str] | None = None) -> Process:
    """Run to the end."""
    process = await launch(*arguments, env=env)
    await process.wait()
    return process


def played(dataset: Path, out: Path, base_url: str, *more: str) -> list[str]:
    """Arguments of a run against a fake server, without a sandbox."""
    return [
        str(dataset), "--model", "fake", "--base-url", base_url, "--out", str(out),
        "--sandbox", "none", "--allow-unsandboxed", "--toolsets", "terminal", *more,
    ]  # fmt: skip


def config(folder: Path, made: Iterable[dict[str, Any]], **sections: dict[str, Any]) -> RunConfig:
    """A run of these rows in this process, without a sandbox, in `folder`/run.

    Args:
        sections: what they say besides, or instead.
    """
    data: dict[str, dict[str, Any]] = {
        "dataset": {"path": str(write(folder / "tasks.jsonl", made))},
        "model": {"name": "fake"},
        "agent": {"toolsets": ["terminal"]},
        "sandbox": {"backend": "none"},
        "run": {"out": str(folder / "run"), "workers": 0, "allow_unsandboxed": True},
    }
    return parse_config(data | {k: data.get(k, {}) | v for k, v in sections.items()})


async def run(config: RunConfig) -> Report:
    """Run a configuration in this process; its progress goes nowhere."""
    return await arun_batch(config, progress=JsonEvents(io.StringIO()))


def table(out: Path, name: str) -> list[dict[str, Any]]:
    """All published rows of a table."""
    parts = sorted((out / name).glob("*.parquet"))
    return [row for part in parts for row in pq.read_table(part).to_pylist()]


def final_rows(out: Path) -> dict[str, dict[str, Any]]:
    """Unit -> its one final row."""
    found = table(out, "trajectories")
    twice = [unit for unit, n in Counter(r["unit_id"] for r in found).items() if n > 1]
    assert twice == [], "a unit is finished twice"
    return {row["unit_id"]: row for row in found}


def content(out: Path) -> dict[str, dict[str, Any]]:
    """Final rows without what may differ between two runs."""
    return {
        unit: {k: v for k, v in row.items() if k not in TIMES}
        for unit, row in final_rows(out).items()
    }


def check_usage(out: Path, served: Sequence[Entry]) -> None:
    """The server's requests are our calls, one by one; what we could not learn is `unknown`."""
    recorded = [
        c for name in ("trajectories", "failures") for r in table(out, name) for c in r["calls"]
    ]
    ids = Counter(call["call_id"] for call in recorded)
    assert [i for i, n in ids.items() if n > 1] == [], "a call is recorded twice"
    calls = {call["call_id"]: call for call in recorded}
    asked = {entry.call_id: entry for entry in served}
    assert set(asked) <= set(calls), "the server served a call that no row knows"
    known = {i for i, call in calls.items() if call["outcome"] != "unknown"}
    assert known <= set(asked), "a call with a known end never reached the server"
    for name in known:
        entry, call = asked[name], calls[name]
        if call["outcome"] == "ok":
            assert entry.outcome == "served"
            if entry.reported:
                usage = (call["input_tokens"], call["output_tokens"])
                assert usage == (entry.prompt_tokens, entry.completion_tokens)


def check_not_asked_again(out: Path, receipts: dict[str, int]) -> None:
    """No unit that was reported done has a later attempt."""
    attempts: dict[str, int] = {}
    for name in ("trajectories", "failures"):
        for row in table(out, name):
            attempts[row["unit_id"]] = max(attempts.get(row["unit_id"], 0), row["attempt"])
    again = {unit for unit, attempt in receipts.items() if attempts[unit] != attempt}
    assert again == set()


def alive_pids(out: Path) -> list[int]:
    """The processes that hold a journal of this run."""
    return [
        int(json.loads(path.read_bytes())["pid"])
        for path in sorted((out / "journal").glob("*/alive"))
        if path.read_bytes()
    ]


def bwrap_pids(out: Path) -> list[int]:
    """The outermost process of each sandbox of a run: its lease stands in its arguments."""
    run_id = json.loads((out / "epochs" / "1.json").read_bytes())["run_id"].encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes()
            name = (entry / "comm").read_text().strip()
        except OSError:
            continue
        if name == "bwrap" and run_id in line:
            found.append(int(entry.name))
    return sorted(found)


def left_behind(marks: Iterable[str], out: Path) -> list[str]:
    """Command lines of processes that belong to a run: by environment, or by the lease in argv."""
    epochs = sorted((out / "epochs").glob("*.json"))
    signs = [f"{MARK}={mark}".encode() for mark in marks]
    leases = [json.loads(epoch.read_bytes())["run_id"].encode() for epoch in epochs[:1]]
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes()
            line = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if any(s in environment for s in signs) or any(s in line for s in leases):
            found.append(f"{entry.name} {line.replace(bytes(1), b' ').decode(errors='replace')}")
    return found


async def check_nothing_left(marks: Iterable[str], out: Path, seconds: float = 5.0) -> None:
    """No process of the run is there after some seconds."""
    deadline = time.monotonic() + seconds
    while left := left_behind(marks, out):
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.1)


async def check_gone(pids: Iterable[int], seconds: float = 5.0) -> None:
    """These processes have ended after some seconds."""
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.05)


class Watcher(threading.Thread):
    """Reads every Parquet file of a run again and again, as a careless reader would."""

    def __init__(self, out: Path) -> None:
        super().__init__(daemon=True)
        self.out = out
        self.reads = 0
        self.fault: str | None = None
        self._stop_now = threading.Event()

    def run(self) -> None:
        while not self._stop_now.wait(0.05):
            units: Counter[str] = Counter()
            for part in self.out.glob("*/part-*.parquet"):
                try:
                    read = pq.read_table(part)
                except (pa.ArrowInvalid, OSError) as error:
                    self.fault = f"{part}: {error}"
                    return
                self.reads += 1
                if part.parent.name == "trajectories":
                    units.update(read["unit_id"].to_pylist())
            if any(n > 1 for n in units.values()):
                self.fault = "a unit stands in trajectories twice"
                return

    def check(self) -> None:
        """Stop, and fail when anything was wrong at any moment."""
        self._stop_now.set()
        self.join()
        assert self.fault is None, self.fault


async def asked(server: FakeServer, requests: int, run: Process) -> None:
    """Wait until the server was asked so often by a run."""
    await wait_for(run, lambda: server.requests >= requests)


async def until_done(run: Process, units: int) -> None:
    """Wait until so many units were reported done."""
    await wait_for(run, lambda: len(run.receipts()) >= units)


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
