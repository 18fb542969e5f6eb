"""Ray workers: the same rows whatever their number; they share cooldowns, and die alone."""

import json
from pathlib import Path

import kit
import pytest

from hermes_rl.testing import FakeConfig, FakeServer

pytestmark = pytest.mark.slow

ROWS = kit.rows(20)


async def test_one_and_four_workers_give_the_same_rows(
    tmp_path: Path, server: FakeServer, cluster: dict[str, str]
) -> None:
    dataset = kit.write(tmp_path / "tasks.jsonl", ROWS)
    contents = []
    for workers in ("1", "4"):
        out = tmp_path / workers
        more = ("--workers", workers, "--concurrency", "16")
        run = await kit.finish(*kit.played(dataset, out, server.base_url, *more), env=cluster)
        assert run.process.returncode == 0, run.errors
        assert run.report()["done"] == kit.units_of(20)
        contents.append(kit.content(out))
        assert len(list((out / "trajectories").glob("*.parquet"))) == int(workers)
        await kit.check_nothing_left([run.mark], out)
    assert contents[0] == contents[1]
    both = kit.table(tmp_path / "1", "trajectories") + kit.table(tmp_path / "4", "trajectories")
    assert {c["call_id"] for row in both for c in row["calls"]} == {
        e.call_id for e in server.entries
    }


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
    kit.check_usage(out, server.entries)


async def test_a_key_that_one_worker_saw_refused_rests_at_the_other(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    """Two Ray workers with a unit each; the second begins when the first was turned away with the
    first key, and has been answered with the second one for some seconds."""
    opened = tmp_path / "open"
    first = kit.task(0, turns=6, latency_s=0.7)
    second = kit.task(1) | {"setup": f"until [ -e {opened} ]; do sleep 0.1; done"}
    dataset = kit.write(tmp_path / "tasks.jsonl", [first, second])
    keys = {"KEY_REFUSED": "no", "KEY_GOOD": "yes"}
    async with FakeServer(FakeConfig(key="yes")) as server:
        arguments = kit.played(dataset, tmp_path / "run", server.base_url, "--workers", "2")
        run = await kit.launch(
            *arguments, "--concurrency", "2", "--api-key-env", ",".join(keys), env=cluster | keys
        )
        await kit.asked(server, 5, run)
        opened.touch()
        assert await run.wait() == 0, run.errors
        asked = [(entry.outcome, entry.fault) for entry in server.entries]
    writers = [event["writer"] for event in run.events if event["event"] == "attempt"]
    assert len(set(writers)) == 2, "both units ran at one worker"
    assert asked[0][0] == "refused"
    assert [outcome for outcome, _ in asked].count("refused") == 1, asked
