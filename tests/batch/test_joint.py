"""Runs at the same time: one limit of requests, even progress, one budget, one Ctrl-C."""

import asyncio
import os
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, STDOUT
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from kit import write_rows

from batch_runner import Progress, View, arun_jointly
from hermes_rl.config import RunConfig, parse_config
from hermes_rl.errors import UserError
from hermes_rl.store import load_run
from hermes_rl.testing import FakeConfig, FakeServer, RateLimits

AT_ONCE = 6


def two_models(
    tmp_path: Path, server: FakeServer, tasks: int, **endpoint: Any
) -> dict[str, RunConfig]:
    rows = [{"id": f"t{n}", "prompt": f'{n}?\nSCRIPT: ["It is {n}."]'} for n in range(tasks)]
    dataset = write_rows(tmp_path / "tasks.jsonl", rows)
    return {
        model: parse_config(
            {
                "dataset": {"path": str(dataset)},
                "model": {"name": model, "max_tokens": 40},
                "agent": {"toolsets": ["none"]},
                "endpoint": {"base_url": server.base_url, **endpoint},
                "run": {"out": str(tmp_path / model), "workers": 0, "concurrency": AT_ONCE},
            }
        )
        for model in ("a", "b")
    }


def lead_gained(server: FakeServer, tasks: int) -> int:
    """The most answers that one model gained on the other while both were being answered."""
    served = [entry.model for entry in server.entries if entry.outcome == "served"]
    first = max(served.index(model) for model in "ab")
    count, leads = Counter(served[:first]), [0]
    for model in served[first:]:
        count[model] += 1
        if tasks in count.values():
            break
        leads.append(count["a"] - count["b"])
    assert len(leads) > tasks // 2
    return max(leads[1:]) - min(leads[1:])


async def test_models_share_one_limit_and_progress_evenly(tmp_path: Path) -> None:
    async with FakeServer(FakeConfig(latency_s=0.2)) as server:
        reports = await arun_jointly(two_models(tmp_path, server, 40))
        assert {name: report.done for name, report in reports.items()} == {"a": 40, "b": 40}
        assert server.peak_in_flight == AT_ONCE
        assert lead_gained(server, 40) <= 2 * AT_ONCE, "one after the other would be 40"


async def test_a_rate_limit_slows_both_models_alike(tmp_path: Path) -> None:
    rate = RateLimits(requests=900, burst_s=0.2, headers=False, retry_after_s=0.3)
    async with FakeServer(FakeConfig(latency_s=0.1, rate=rate)) as server:
        reports = await arun_jointly(two_models(tmp_path, server, 40))
        assert {name: report.done for name, report in reports.items()} == {"a": 40, "b": 40}
        assert any(entry.outcome == "refused" for entry in server.entries)
        assert server.peak_in_flight <= AT_ONCE
        assert lead_gained(server, 40) <= 5 * AT_ONCE, "one after the other would be 40"


async def test_one_budget_covers_all_runs_and_their_starts(tmp_path: Path) -> None:
    price = {"input": 10, "output": 50, "cache_read": 10}
    async with FakeServer() as server:
        prices = {"a": price, "b": price}
        configs = two_models(tmp_path, server, 30, prices=prices)

        def cost() -> float:
            return sum(float(load_run(tmp_path / name).stats["cost_usd"]) for name in configs)

        for budget in (0.01, 0.02):
            reports = await arun_jointly(configs, progress=Progress(), budget_usd=budget)
            assert "cost_limit" in {report.stopped for report in reports.values()}
            assert 0 < cost() <= budget


class Shown(Progress):
    """Keeps what it shows; acts once a view has the lines of both runs."""

    every_s = 0.05

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.last: list[str] = []
        self.signals = 0

    def note(self, text: str) -> None:
        self.notes.append(text)

    def tick(self, view: View) -> None:
        self.last = view.lines()
        if not self.signals and len(self.last) == 2 and view.ended:
            self.signals += 1
            os.kill(os.getpid(), signal.SIGINT)


async def test_one_interrupt_ends_all_runs_and_nothing_runs_twice(tmp_path: Path) -> None:
    async with FakeServer(FakeConfig(latency_s=0.1)) as server:
        configs, shown = two_models(tmp_path, server, 40), Shown()
        stopped = await arun_jointly(configs, progress=shown)
        assert {report.stopped for report in stopped.values()} == {"interrupted"}
        assert [line[:3] for line in shown.last] == ["a: ", "b: "]
        assert sum(note.endswith("(Ctrl-C again stops at once)") for note in shown.notes) == 2
        done = await arun_jointly(configs, progress=Progress())
        assert {report.done for report in done.values()} == {40}
        assert len(server.entries) == 80


async def test_an_interrupt_shows_in_the_report_when_no_unit_stays_open(tmp_path: Path) -> None:
    """A caller with further rounds, such as `hermes-rl eval`, must not begin the next one."""

    def interrupt_once_all_run(request: int) -> None:
        if request == AT_ONCE:
            os.kill(os.getpid(), signal.SIGINT)

    async with FakeServer(FakeConfig(gather=AT_ONCE), interrupt_once_all_run) as server:
        reports = await arun_jointly(two_models(tmp_path, server, 3), progress=Progress())
        ended = {(one.done, one.stopped, one.exit_code) for one in reports.values()}
        assert ended == {(3, "interrupted", 130)}
        assert reports["a"].lines()[-1] == "interrupted. Resume with: the same command"


async def test_a_run_that_ends_by_a_fault_gives_its_slots_to_the_other(tmp_path: Path) -> None:
    async with FakeServer(FakeConfig(latency_s=0.3, models=("a",))) as server:
        reports = await arun_jointly(two_models(tmp_path, server, 12))
        assert (reports["a"].done, reports["b"].stopped) == (12, "model_not_found")
        assert server.peak_in_flight == AT_ONCE


@pytest.mark.slow
async def test_one_ray_serves_all_rounds_and_an_interrupted_round_resumes(tmp_path: Path) -> None:
    rows = [
        {
            "id": f"t{n}",
            "prompt": f'{n}?\nSCRIPT: ["{n}"]',
            "score": {"type": "number", "target": n},
        }
        for n in range(9)
    ]
    write_rows(tmp_path / "d.jsonl", rows)  # a pilot of 8 tasks, and a round of 9
    command = [
        *(sys.executable, "-c", "from hermes_rl.cli import main; exit(main())", "eval", "d.jsonl"),
        *("--model", "a", "--model", "b", "--toolsets", "none"),
        *("--concurrency", "4", "--base-url"),
    ]
    with tempfile.TemporaryDirectory(prefix="ray-") as rays:  # its sockets need a short path
        environment = {**os.environ, "RAY_TMPDIR": rays}

        def started() -> int:
            return len([*Path(rays).glob("ray/session_2*")])

        async def evaluate(
            server: FakeServer, workers: int, interrupt_at: int | None = None
        ) -> tuple[int, str]:
            before = started()
            child = await asyncio.create_subprocess_exec(
                *(*command, server.base_url, "--workers", str(workers)),
                cwd=tmp_path,
                env=environment,
                stdout=PIPE,
                stderr=STDOUT,
            )
            printed = asyncio.create_task(child.communicate())
            wanted = interrupt_at or len(server.entries) + 1
            while len(server.entries) < wanted:
                if printed.done():
                    break
                await asyncio.sleep(0.02)
            begun = started()  # a busy machine may have had to start it twice
            if interrupt_at is not None and not printed.done():
                child.send_signal(signal.SIGINT)
            text = (await printed)[0].decode()
            if "cannot start Ray" in text:  # on a very busy machine
                return await evaluate(server, workers, interrupt_at)
            assert "Traceback" not in text
            assert (begun > before) == bool(workers)
            assert started() == begun, "one Ray serves all rounds"
            return child.returncode or 0, text

        async with FakeServer(FakeConfig(latency_s=1.0)) as server:
            code, text = await evaluate(server, 0, interrupt_at=3)
            assert code == 130, text
            assert "Resume with: the same command" in text
            assert 3 <= len(server.entries) < 16
            server.config = FakeConfig()
            code, text = await evaluate(server, 1)
            assert code == 0, text
            assert "b less a: +0%" in text
            assert Counter(one.model for one in server.entries) == {"a": 9, "b": 9}


async def test_a_run_that_cannot_start_ends_the_others(tmp_path: Path) -> None:
    async with FakeServer(FakeConfig(latency_s=0.05)) as server:
        configs = two_models(tmp_path, server, 60)
        dataset = configs["b"].dataset.model_copy(update={"path": str(tmp_path / "none.jsonl")})
        configs["b"] = configs["b"].model_copy(update={"dataset": dataset})
        with pytest.raises(UserError, match=r"none.jsonl"):
            await arun_jointly(configs, progress=Progress())
        assert len(server.entries) < 60
