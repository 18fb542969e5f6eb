"""Ray workers: the same rows whatever their number, and a run from a loop that is running."""

import asyncio
import json
import os
import sys
from pathlib import Path

import hosts
import kit
import pytest
import yaml

from hermes_rl.testing.fake_server import FakeServer

pytestmark = pytest.mark.slow

ROWS = kit.rows(20)


async def test_one_and_eight_workers_give_the_same_rows(
    tmp_path: Path, server: FakeServer, cluster: dict[str, str]
) -> None:
    dataset = kit.write(tmp_path / "tasks.jsonl", ROWS)
    contents = []
    for workers in ("1", "8"):
        out = tmp_path / workers
        more = ("--workers", workers, "--concurrency", "16")
        run = await kit.finish(*kit.played(dataset, out, server.base_url, *more), env=cluster)
        assert run.process.returncode == 0, run.errors
        assert run.report()["done"] == kit.units_of(20)
        contents.append(kit.content(out))
        assert len(list((out / "trajectories").glob("*.parquet"))) == int(workers)
        await kit.check_nothing_left([run.mark], out)
    assert contents[0] == contents[1]
    both = kit.table(tmp_path / "1", "trajectories") + kit.table(tmp_path / "8", "trajectories")
    assert {c["call_id"] for row in both for c in row["calls"]} == {
        e.call_id for e in server.entries
    }


async def test_a_run_goes_on_with_another_number_of_workers(
    tmp_path: Path, server: FakeServer, cluster: dict[str, str]
) -> None:
    """Begun with a Ray worker; few units are left, so the default then is this process."""
    dataset = kit.write(tmp_path / "tasks.jsonl", kit.rows(6))
    out = tmp_path / "run"
    played = kit.played(dataset, out, server.base_url)
    first = await kit.finish(*played, "--limit", "2", "--workers", "1", env=cluster)
    assert [e["text"] for e in first.events if e["event"] == "note"] == ["starting 1 Ray workers"]
    again = await kit.finish(*played)
    (chosen,) = [e["text"] for e in again.events if e["event"] == "note"]
    assert chosen.startswith("running in this process: fewer than 200 units")
    assert again.process.returncode == 0, again.errors
    assert len(kit.final_rows(out)) == kit.units_of(6)
    kit.check_books(out, server.entries)


async def test_a_unit_that_kills_its_worker_is_given_up_alone(
    tmp_path: Path, server: FakeServer, cluster: dict[str, str]
) -> None:
    """Its command kills the process that runs it; its neighbours get their rows all the same."""
    deed = {"run": "kill -9 $PPID", "latency_s": 0.2}
    deadly = {"id": "deadly", "prompt": f"x\nSCRIPT: {json.dumps([deed, 'no'])}"}
    rows = [kit.task(n, latency_s=0.2) for n in range(8)]
    dataset = kit.write(tmp_path / "tasks.jsonl", [*rows[:2], deadly, *rows[2:]])
    out = tmp_path / "run"
    more = ("--workers", "1", "--concurrency", "4", "--json")
    run = await kit.finish(*kit.played(dataset, out, server.base_url, *more), env=cluster)
    assert run.process.returncode == 1, run.errors
    assert run.report()["given_up"] == 1
    assert {r["task_id"] for r in kit.final_rows(out).values()} == {r["id"] for r in rows}
    lost = [r for r in kit.table(out, "failures") if r["cause"] == "worker_lost"]
    mine = sorted(r["attempt"] for r in lost if r["task_id"] == "deadly")
    assert mine == [0, 1, 2]
    third = next(r for r in lost if r["task_id"] == "deadly" and r["attempt"] == 2)
    others = [r for r in lost if r["task_id"] != "deadly"]
    assert all(r["finished_at"] <= third["started_at"] for r in others), "it did not run alone"
    kit.check_books(out, server.entries)


async def test_the_same_command_twice_is_the_policys(
    tmp_path: Path, server: FakeServer, cluster: dict[str, str]
) -> None:
    """Two workers, of which each may have either attempt."""
    command = hosts.sleeper(3)
    dataset = kit.write(tmp_path / "tasks.jsonl", [hosts.task({"run": command})])
    out = tmp_path / "run"
    more = ("--workers", "2", "--sandbox", "bubblewrap")
    run = await kit.launch(*kit.played(dataset, out, server.base_url, *more), env=cluster)
    for _ in range(2):
        await hosts.dies_under(command, run, out)
    assert await run.wait() == 0, run.errors
    assert [row["cause"] for row in kit.table(out, "failures")] == ["sandbox_died"]
    (final,) = kit.final_rows(out).values()
    assert (final["end_reason"], final["owner"]) == ("sandbox_killed", "policy")
    assert (final["attempt"], final["reward"]) == (1, 1.0)


_NOTEBOOK = """
import asyncio, json, sys
from batch_runner import arun_batch, run_batch
from batch_runner.progress import Silent
from hermes_rl.config import load_config, parse_config
from pathlib import Path

async def cell():
    config = parse_config(load_config(Path(sys.argv[1])))
    first = run_batch(config, progress=Silent())
    again = await arun_batch(config, progress=Silent())
    print(json.dumps([first.as_dict(), again.as_dict()]))

asyncio.run(cell())
"""


@pytest.mark.parametrize("workers", [0, 1])
async def test_run_batch_where_a_loop_runs(
    workers: int, tmp_path: Path, server: FakeServer, cluster: dict[str, str]
) -> None:
    """As in a notebook, where the cell itself runs on a loop."""
    dataset = kit.write(tmp_path / "tasks.jsonl", [kit.task(1), kit.task(2)])
    config = {
        "dataset": {"path": str(dataset)},
        "model": {"name": "fake"},
        "sandbox": {"backend": "none"},
        "endpoint": {"base_url": server.base_url},
        "run": {"out": str(tmp_path / "run"), "workers": workers, "allow_unsandboxed": True},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _NOTEBOOK, str(tmp_path / "config.yaml"),
        stdout=asyncio.subprocess.PIPE, env={**os.environ, **cluster},
    )  # fmt: skip
    said, _ = await process.communicate()
    assert process.returncode == 0
    first, again = json.loads(said)
    assert (first["done"], again["done"], again["exit_code"]) == (2, 2, 0)
    assert server.requests == 6


_CLOSE = """
import asyncio, json, os, signal, sys, time
from pathlib import Path
from batch_runner.pool import open_pool
from batch_runner.budgets import make_coordinator
from batch_runner.dispatcher import WorkerLost
from batch_runner.settings import settle
from batch_runner.worker import WorkerSpec
from hermes_rl.config import load_config, parse_config
from hermes_rl.store.driver import OpenOptions, open_run

async def main():
    settings = settle(parse_config(load_config(Path(sys.argv[1]))))
    soon = OpenOptions(grace_s=0.5)
    async with await open_run(settings.out, settings.identity, None, soon) as driver:
        spec = WorkerSpec(
            run_path=str(settings.out), run_id=driver.run_id, epoch=1, worker=0, capacity=1,
            lease_s=2.0, publish_every_s=1.0, config=settings.config.model_dump_json().encode(),
            config_hash=settings.config_hash,
        )
        coordinator = make_coordinator(settings.config, driver.run_dir, 1)
        with open_pool(settings, spec, coordinator) as start:
            worker = await start(1, 1)
            pid = json.loads((settings.out / "journal/1-1/alive").read_bytes())["pid"]
            os.kill(pid, signal.SIGSTOP)
            begun = time.monotonic()
            try:
                await worker.close()
            except WorkerLost as error:
                await worker.kill()
                await driver.recover_worker(worker.writer)
                print(json.dumps([str(error), time.monotonic() - begun, pid]))

asyncio.run(main())
"""


async def test_a_worker_that_is_stopped_while_it_closes_holds_nobody_up(
    tmp_path: Path, server: FakeServer, cluster: dict[str, str]
) -> None:
    out = tmp_path / "run"
    run = {"out": str(out), "workers": 1, "allow_unsandboxed": True}
    config = {
        "dataset": {"path": "smoke"},
        "model": {"name": "fake"},
        "sandbox": {"backend": "none"},
        "endpoint": {"base_url": server.base_url},
        "run": run,
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CLOSE, str(tmp_path / "config.yaml"),
        stdout=asyncio.subprocess.PIPE, env={**os.environ, **cluster},
    )  # fmt: skip
    async with asyncio.timeout(90):
        said, _ = await process.communicate()
    why, seconds, pid = json.loads(said.splitlines()[-1])  # Ray prints there too
    assert why == "not heard for 2 s"
    assert seconds < 20
    await kit.check_gone([pid])
    assert list((out / "journal").iterdir()) == []
