"""Tasks and datasets, runs as real processes, and checks of their run directories."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from forks import ForkedProcess, start

from batch_runner import JsonEvents, Report, arun_batch
from hermes_rl.config import RunConfig, parse_config
from hermes_rl.events import AttemptKey, Begun, Ended
from hermes_rl.testing import Connection, Entry, FakeServer, Incoming

IDENTICAL, REPEATS = 3, 4
"""Identical rows of `make_rows`, and the repeats of each."""
MARK = "HERMES_TEST_MARK"
WAIT_S = 300.0
"""After which a run hangs, on a machine that is far slower and busier than this one."""
END_S = 45.0
"""The same for the ends of its processes; Ray's would stay for a minute."""
VARYING_COLUMNS = (
    "timing", "started_at", "finished_at", "tool_stats", "calls", "attempt", "trajectory_id",
    "run_id", "root_trajectory_id", "row_index", "sandbox", "endpoint", "metrics",
)  # fmt: skip
"""Columns that may differ between two runs of the same tasks: ids, times and paths."""


def make_task(number: int, *, turns: int = 2, latency_s: float = 0.0) -> dict[str, Any]:
    """A task whose model writes a number to a file; every fifth is not solved."""
    answer = -1 if number % 5 == 4 else number
    steps: list[Any] = [{"run": f"echo {answer} > out.txt", "latency_s": latency_s}]
    steps += [{"run": f"echo step-{n}", "latency_s": latency_s} for n in range(1, turns)]
    steps.append(f"wrote {answer}")
    return {
        "id": f"task-{number}",
        "prompt": f"Write {number} to out.txt.\nSCRIPT: {json.dumps(steps)}",
        "verify": f'test "$(cat "$WORKSPACE/out.txt")" = {number}',
    }


def make_rows(distinct: int, *, latency_s: float = 0.0) -> list[dict[str, Any]]:
    """Distinct rows, and three identical ones with four repeats each among them."""
    rows = [make_task(n, latency_s=latency_s) for n in range(distinct)]
    same = {**make_task(1000, latency_s=latency_s), "repeats": REPEATS}
    for place in (0, distinct // 2, distinct):
        rows.insert(place, dict(same))
    return rows


def count_units(distinct: int) -> int:
    """The number of units of `make_rows`."""
    return distinct + IDENTICAL * REPEATS


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@dataclass
class RunProcess:
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

    async def wait(self, seconds: float = WAIT_S) -> int:
        """The exit code."""
        try:
            async with asyncio.timeout(seconds):
                code = await self.process.wait()
                await asyncio.gather(*self._readers)
        except TimeoutError:
            kill(self.pid)
            raise AssertionError(f"no end within {seconds} s: {self.errors[-3000:]}") from None
        return code

    async def wait_for_events(self, event: str, count: int = 1) -> None:
        """Wait for this many events of a kind."""
        await wait_for(self, lambda: [e["event"] for e in self.events].count(event) >= count)


async def wait_for(run: RunProcess, condition: Callable[[], Any]) -> None:
    """Wait until a condition holds; fail when the run ends before."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert run.process.returncode is None, run.errors[-3000:]
        assert time.monotonic() < deadline, run.errors[-3000:]
        await asyncio.sleep(0.01)


STARTED_RUNS: list[RunProcess] = []
"""Runs of the current test; those that still run at its end are killed (see conftest)."""


async def start_run(*arguments: str | Path, env: dict[str, str] | None = None) -> RunProcess:
    """Start `hermes-rl run ARGUMENTS --json`, in a process group of its own."""
    mark = uuid.uuid4().hex
    command = ["run", *map(str, arguments), "--json"]
    process = await start(command, {**os.environ, MARK: mark, **(env or {})})
    run = RunProcess(process, mark)
    STARTED_RUNS.append(run)
    streams = ((process.stdout, True), (process.stderr, False))
    run._readers = [asyncio.create_task(run.read(s, events=e)) for s, e in streams]
    return run


async def start_ray_run(out: Path, *arguments: str | Path) -> RunProcess:
    """Start `hermes-rl run ARGUMENTS --json` with a Ray of its own, and wait for its first worker.
    On a very busy machine Ray exceeds its own limits, so it has several attempts."""
    for _ in range(4):
        run = await start_run(*arguments)
        while run.process.returncode is None and not worker_pids(out):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        if run.process.returncode is None:
            return run
        await run.wait()
        assert "cannot start Ray" in run.errors, run.errors
    raise AssertionError("Ray did not start")


async def finish_run(
    *arguments: str | Path, env: dict[str, str] | None = None, code: int = 0
) -> RunProcess:
    """Run `hermes-rl run ARGUMENTS --json` to its end and check its exit code."""
    run = await start_run(*arguments, env=env)
    assert await run.wait() == code, run.errors
    return run


def run_arguments(
    folder: Path, rows: Iterable[dict[str, Any]], server: FakeServer, *more: str
) -> list[str]:
    """Arguments of a run of these rows against a fake server, without a sandbox, in `folder`/run.
    Writes the dataset `folder`/tasks.jsonl."""
    return [
        str(write_rows(folder / "tasks.jsonl", rows)), "--model", "fake",
        "--base-url", server.base_url, "--out", str(folder / "run"),
        "--sandbox", "none", "--allow-unsandboxed", "--toolsets", "terminal", *more,
    ]  # fmt: skip


def make_blind_python(folder: Path, mount: str = "") -> Path:
    """A Python for Ray workers that see an empty file system, or what a command mounts, instead of
    a folder. The file is beside that."""
    mount = mount or f"mount -t tmpfs tmpfs {folder}"
    python = folder.with_name("python")
    python.write_text(
        f'#!/bin/sh\nexec unshare -Urm sh -c \'{mount} && exec "$0" "$@"\' {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return python


def make_attempt(unit: str) -> tuple[Begun, Ended]:
    """The events of a finished attempt."""
    begun = Begun(
        key=AttemptKey(unit_id=unit, epoch=1, attempt=0), started_at=1.0, run_id="r", group_id="g",
        member=0, repeat=0, row_index=0, task_id=unit, task_hash="h", config_hash="c", seed=0,
        prompt="p", model="m", api_mode="chat_completions", endpoint="e",
    )  # fmt: skip
    return begun, Ended(finished_at=2.0, end_reason="answered", cause=None)


class OneByOne(FakeServer):
    """Lets a unit of a run begin once the one before it is published, so that each is a file. For
    tasks of one turn (two requests) and a concurrency of 1.

    Args:
        out: the run directory.
        merges_after: after so many units the next one waits for a merge of files.
    """

    def __init__(self, out: Path, merges_after: int = 10**9) -> None:
        super().__init__()
        self._out = out
        self._merges_after = merges_after
        self._waiting: set[asyncio.Task[None]] = set()

    def handle(self, connection: Connection, request: Incoming) -> None:
        if request.method == "GET":
            super().handle(connection, request)
            return
        task = asyncio.create_task(self._answer_later(connection, request))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def _answer_later(self, connection: Connection, request: Incoming) -> None:
        while not self._is_due(self.requests // 2):  # noqa: ASYNC110  the run is another process
            await asyncio.sleep(0.01)
        super().handle(connection, request)

    def _is_due(self, unit: int) -> bool:
        numbers = re.findall(r"part-\d+-\d-(\d+)", " ".join(map(str, self._out.glob("tr*/part-*"))))
        published = max(map(int, numbers), default=-1) + 1
        merged = unit <= self._merges_after or any(self._out.glob("compacted/*.json"))
        return published >= unit and merged

    async def aclose(self) -> None:
        for task in self._waiting:
            task.cancel()
        await super().aclose()


def make_config(
    folder: Path, rows: Iterable[dict[str, Any]], **sections: dict[str, Any]
) -> RunConfig:
    """A run of these rows in this process, without a sandbox, in `folder`/run.

    Args:
        sections: further keys, and replacements, by section.
    """
    data: dict[str, dict[str, Any]] = {
        "dataset": {"path": str(write_rows(folder / "tasks.jsonl", rows))},
        "model": {"name": "fake"},
        "agent": {"toolsets": ["terminal"]},
        "sandbox": {"backend": "none"},
        "run": {"out": str(folder / "run"), "workers": 0, "allow_unsandboxed": True},
    }
    return parse_config(data | {k: data.get(k, {}) | v for k, v in sections.items()})


async def run_config(config: RunConfig) -> Report:
    """Run a configuration in this process and discard its progress."""
    return await arun_batch(config, progress=JsonEvents(io.StringIO()))


def read_table(out: Path, name: str) -> list[dict[str, Any]]:
    """All published rows of a table."""
    parts = sorted((out / name).glob("*.parquet"))
    return [row for part in parts for row in pq.read_table(part).to_pylist()]


def final_rows(out: Path) -> dict[str, dict[str, Any]]:
    """Unit -> its one final row."""
    found = read_table(out, "trajectories")
    twice = [unit for unit, n in Counter(r["unit_id"] for r in found).items() if n > 1]
    assert twice == [], "a unit is finished twice"
    return {row["unit_id"]: row for row in found}


def comparable_rows(out: Path) -> dict[str, dict[str, Any]]:
    """Final rows without the columns that may differ between two runs."""
    return {
        unit: {k: v for k, v in row.items() if k not in VARYING_COLUMNS}
        for unit, row in final_rows(out).items()
    }


def check_usage(out: Path, served: Sequence[Entry], *, lost: bool = False) -> None:
    """Every request of the server is one recorded call, with its usage, or `unknown`.

    Args:
        lost: a worker without the run directory was lost, with its calls of the last second.
    """
    recorded = [
        c for n in ("trajectories", "failures") for r in read_table(out, n) for c in r["calls"]
    ]
    ids = Counter(call["call_id"] for call in recorded)
    assert [i for i, n in ids.items() if n > 1] == [], "a call is recorded twice"
    calls = {call["call_id"]: call for call in recorded}
    requests = {entry.call_id: entry for entry in served}
    assert lost or set(requests) <= set(calls), "the server served a call that no row records"
    known = {i for i, call in calls.items() if call["outcome"] != "unknown"}
    assert known <= set(requests), "a call with a known end never reached the server"
    for name in known:
        entry, call = requests[name], calls[name]
        if call["outcome"] == "ok":
            assert entry.outcome == "served"
            if entry.reported:
                usage = (call["input_tokens"], call["output_tokens"])
                assert usage == (entry.prompt_tokens, entry.completion_tokens)


def check_no_unit_ran_again(out: Path, receipts: dict[str, int]) -> None:
    """No unit that was reported done has a later attempt."""
    attempts: dict[str, int] = {}
    for name in ("trajectories", "failures"):
        for row in read_table(out, name):
            attempts[row["unit_id"]] = max(attempts.get(row["unit_id"], 0), row["attempt"])
    again = {unit for unit, attempt in receipts.items() if attempts[unit] != attempt}
    assert again == set()


def worker_pids(out: Path) -> list[int]:
    """The processes that hold a journal of this run."""
    return [
        int(json.loads(path.read_bytes())["pid"])
        for path in sorted((out / "journal").glob("*/alive"))
        if path.read_bytes()
    ]


async def wait_for_workers(out: Path, count: int, run: RunProcess) -> list[int]:
    """Wait until this many workers hold a journal; a busy machine starts one long after another.
    Returns their processes."""
    await wait_for(run, lambda: len(worker_pids(out)) == count)
    return worker_pids(out)


def sandbox_pids(out: Path) -> list[int]:
    """The outermost process of each sandbox of a run: its arguments contain the run id."""
    run_id = json.loads((out / "epochs" / "1.json").read_bytes())["run_id"].encode()
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes()
            name = (entry / "comm").read_text().strip()
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if name in ("bwrap", "bash") and run_id in line:
            parents[int(entry.name)] = parent
    return sorted(pid for pid, parent in parents.items() if parent not in parents)


def leftover_processes(marks: Iterable[str], out: Path) -> list[str]:
    """Command lines of processes that belong to a run by their environment or arguments."""
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


async def check_no_processes(marks: Iterable[str], out: Path, seconds: float = END_S) -> None:
    """All processes of the run end within some seconds."""
    deadline = time.monotonic() + seconds
    while left := leftover_processes(marks, out):
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.1)


async def check_processes_ended(pids: Iterable[int], seconds: float = END_S) -> None:
    """These processes end within some seconds."""
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.05)


class ParquetReader(threading.Thread):
    """Reads every Parquet file of a run as soon as it appears or changes, as a glob reader does.

    Args:
        growing: rows that were there never go.
    """

    def __init__(self, out: Path, *, growing: bool = False) -> None:
        super().__init__(daemon=True)
        self.out = out
        self._growing = growing
        self._read: dict[tuple[Path, int, int, int], list[str]] = {}
        self.fault: str | None = None
        self._stopped = threading.Event()

    def run(self) -> None:
        seen: set[str] = set()
        while not self._stopped.wait(0.05):
            units: Counter[str] = Counter()
            for part in [*self.out.glob("*/part-*.parquet")]:
                try:
                    units.update(self._units_of(part))
                except FileNotFoundError:  # merged since it was listed
                    break
                except (pa.ArrowInvalid, OSError) as error:
                    self.fault = f"{part}: {error}"
                    return
            else:  # every file that was listed was read
                if self._growing and not seen <= units.keys():
                    self.fault = "trajectories lack a unit that they contained"
                    return
                seen = {*units}
            if any(n > 1 for n in units.values()):
                self.fault = "trajectories contain a unit twice"
                return

    def _units_of(self, part: Path) -> list[str]:
        """Read a file, unless it is still the one that was read before. The trajectories in it."""
        stat = part.stat()
        version = (part, stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if version not in self._read:
            rows = pq.read_table(part)
            of_units = part.parent.name == "trajectories"
            self._read[version] = rows["unit_id"].to_pylist() if of_units else []
        return self._read[version]

    def check(self) -> None:
        """Stop, and fail when any file was not readable at any moment."""
        self._stopped.set()
        self.join()
        assert self.fault is None, self.fault


async def wait_for_requests(server: FakeServer, requests: int, run: RunProcess) -> None:
    """Wait until the server has received this many requests."""
    await wait_for(run, lambda: server.requests >= requests)


async def wait_for_units(run: RunProcess, units: int) -> None:
    """Wait until the run has reported this many units as done."""
    await wait_for(run, lambda: len(run.receipts()) >= units)


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
