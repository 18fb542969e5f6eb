"""Runs without Ray: finished, resumed, refused and stopped."""

import asyncio
import errno
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import kit
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batch_runner import JsonEvents, arun_batch
from hermes_rl.cli import faults_of, main, status_command
from hermes_rl.models.rate import Coordinator
from hermes_rl.store import load_run
from hermes_rl.testing import FakeConfig, FakeServer, FaultPlan

IN_PROCESS = ("--workers", "0")


async def test_resume_runs_only_new_units(tmp_path: Path, server: FakeServer) -> None:
    out = tmp_path / "run"
    arguments = kit.run_arguments(tmp_path, kit.make_rows(10), server, *IN_PROCESS)
    first = await kit.finish_run(*arguments)
    report = first.report()
    assert (report["done"], report["units"], report["open"]) == (22, 22, 0)
    assert report["solved"] == 20
    assert len(kit.final_rows(out)) == 22
    kit.check_usage(out, server.entries)
    served = server.requests

    again = await kit.finish_run(*arguments)
    assert server.requests == served, "a finished run called the model again"
    assert again.report()["done"] == 22

    rows = [*reversed(kit.make_rows(10)), kit.make_task(77)]
    more = await kit.finish_run(*kit.run_arguments(tmp_path, rows, server, *IN_PROCESS))
    assert more.report()["done"] == 23
    assert server.requests == served + 3
    kit.check_no_unit_ran_again(out, first.receipts())

    arguments = kit.run_arguments(tmp_path, kit.make_rows(6), server, *IN_PROCESS)
    report = (await kit.finish_run(*arguments)).report()
    assert (report["units"], report["done"], report["left"]) == (18, 18, 5)
    assert len(kit.final_rows(out)) == 23, "units that left the dataset are kept"


async def test_stats_report_and_manifest_of_a_run(tmp_path: Path, server: FakeServer) -> None:
    out, rows = tmp_path / "run", [kit.make_task(1), {"prompt": ""}]
    await kit.finish_run(*kit.run_arguments(tmp_path, rows, server, *IN_PROCESS), code=1)
    stats = json.loads((out / "stats.json").read_text())
    assert stats["units"] == {"done": 1, "given_up": 1, "open": 0}
    assert "1 of 2 units done, 1 given up" in (out / "report.html").read_text()
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["dataset"]["path"] == str(tmp_path / "tasks.jsonl")
    assert manifest["plan"]["bad_rows"] == 1
    assert "echo" in manifest["capabilities"]["models"]
    (failure,) = kit.read_table(out, "failures")
    assert (failure["cause"], failure["owner"], failure["reward"]) == ("task", "task", None)
    assert "tasks.jsonl:2" in failure["error"]
    assert list((out / "journal").iterdir()) == []
    assert list((out / "tmp").iterdir()) == []

    served = server.requests
    await kit.finish_run("--config", out / "run.yaml", code=1)
    assert server.requests == served
    elsewhere = ("--out", tmp_path / "other")
    other = await kit.finish_run("--config", out / "run.yaml", *elsewhere, code=1)
    assert other.report()["done"] == 1


async def test_dry_run_writes_nothing_and_makes_no_call(tmp_path: Path, server: FakeServer) -> None:
    out = tmp_path / "run"
    arguments = kit.run_arguments(
        tmp_path, [*kit.make_rows(4), {"no": "prompt"}], server, *IN_PROCESS
    )
    await kit.finish_run(*arguments, "--dry-run")
    assert not out.exists()
    await kit.finish_run(*arguments, "--limit", "2")
    before = server.requests
    files = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "batch_runner", *arguments, "--dry-run"),
        stdout=asyncio.subprocess.PIPE,
    )
    printed, _ = await process.communicate()
    assert "8 rows (1 bad), 17 units: 5 done, 0 given up, 12 to run" in printed.decode()
    assert server.requests == before
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == files


async def test_a_second_driver_is_refused(tmp_path: Path, server: FakeServer) -> None:
    arguments = kit.run_arguments(tmp_path, [kit.make_task(1, latency_s=60.0)], server, *IN_PROCESS)
    first = await kit.start_run(*arguments)
    await kit.wait_for_requests(server, 1, first)
    second = await kit.finish_run(*arguments, code=2)
    assert f"in use by process {first.pid}" in second.errors
    kit.kill(first.pid)
    await first.wait()


async def test_a_wrong_key_stops_the_run_and_the_right_one_resumes_it(tmp_path: Path) -> None:
    out = tmp_path / "run"
    async with FakeServer(FakeConfig(key="right")) as server:
        more = ("--api-key-env", "SOME_KEY", "--concurrency", "4", *IN_PROCESS)
        arguments = kit.run_arguments(tmp_path, kit.make_rows(20), server, *more)
        begun = time.monotonic()
        wrong = await kit.finish_run(*arguments, env={"SOME_KEY": "wrong-canary"}, code=3)
        assert time.monotonic() - begun < 60, "it waited for another answer"
        assert wrong.report()["stopped"] == "auth"
        assert wrong.report()["hint"] == "Set SOME_KEY"
        assert wrong.report()["detail"].startswith(f"401 from 127.0.0.1:{server.port}")
        assert server.requests <= 8, "dispatch continued after the breaker opened"
        failures = kit.read_table(out, "failures")
        assert {row["cause"] for row in failures} == {"auth"}
        await kit.finish_run(*arguments, env={"SOME_KEY": "right"})
        assert len(kit.final_rows(out)) == kit.count_units(20)
        kit.check_usage(out, server.entries)
    for path in out.rglob("*"):
        assert path.is_dir() or b"wrong-canary" not in path.read_bytes()


def not_parquet(path: Path) -> None:
    path.write_bytes(b"not parquet")


def damaged_page(path: Path) -> None:
    """A Parquet file whose footer is intact, so that only reading its rows fails."""
    table = pa.table({"prompt": [f"q{n}" for n in range(300)]})
    pq.write_table(table, path, compression="none", use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[4:64] = bytes(60)
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [not_parquet, damaged_page])
async def test_running_units_finish_when_the_dataset_is_damaged(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    kit.write_rows(folder / "a.jsonl", [{"prompt": f"p{n}"} for n in range(300)])
    damage(folder / "b.parquet")
    out = tmp_path / "run"
    free = ("--sandbox", "none", "--allow-unsandboxed", "--out", out, *IN_PROCESS)
    broken = await kit.finish_run(folder, "--model", "noop", *free, code=2)
    assert "Traceback" not in broken.errors
    report = broken.report()
    assert (report["stopped"], report["exit_code"]) == ("dataset", 2)
    assert "b.parquet" in report["detail"] or "a.jsonl:300: " in report["detail"]
    done = len(kit.final_rows(out))
    assert done >= 256, "rows before the damage were thrown away"
    assert json.loads((out / "stats.json").read_bytes())["units"]["done"] == done
    assert kit.read_table(out, "failures") == []
    (folder / "b.parquet").unlink()
    repaired = await kit.finish_run(folder, "--model", "noop", *free)
    assert repaired.report()["done"] == 300
    assert {row["attempt"] for row in kit.final_rows(out).values()} == {0}


async def test_another_dataset_is_refused(tmp_path: Path) -> None:
    """`a/train.jsonl` and `b/train.jsonl` have the same default run directory."""
    free = ("--sandbox", "none", "--allow-unsandboxed", "--out", tmp_path / "run", *IN_PROCESS)
    for name in "ab":
        (tmp_path / name).mkdir()
        kit.write_rows(
            tmp_path / name / "train.jsonl", [{"prompt": f"{name}{n}"} for n in range(3)]
        )

    async def run(name: str, *more: str, code: int = 0) -> kit.RunProcess:
        dataset = tmp_path / name / "train.jsonl"
        return await kit.finish_run(dataset, "--model", "noop", *free, *more, code=code)

    assert (await run("a")).report()["done"] == 3
    recorded = (tmp_path / "run" / "run.yaml").read_bytes()
    for more in ((), ("--dry-run",)):
        refused = await run("b", *more, code=2)
        assert refused.errors.count("\n") == 1
        assert f"no unit of {tmp_path}/b/train.jsonl is in {tmp_path}/run, " in refused.errors
        assert f"which was made from {tmp_path}/a/train.jsonl. Choose" in refused.errors
    assert len(kit.final_rows(tmp_path / "run")) == 3
    assert (tmp_path / "run" / "run.yaml").read_bytes() == recorded
    shared = [{"prompt": p} for p in ("new", "b0", "a2")]
    kit.write_rows(tmp_path / "b" / "train.jsonl", shared)
    assert (await run("b", "--limit", "1")).report()["done"] == 1, "it has units of the run"
    report = (await run("b")).report()
    assert (report["units"], report["done"], report["left"]) == (3, 3, 2)
    kit.write_rows(tmp_path / "b" / "train.jsonl", [{"prompt": "all new"}])
    assert "made from other rows of it. Choose another --out" in (await run("b", code=2)).errors


async def test_status_and_stats_of_a_killed_run_agree(tmp_path: Path, server: FakeServer) -> None:
    """Finished attempts that are not published yet count."""
    rows = [kit.make_task(n) for n in range(1, 5)] + [kit.make_task(9, latency_s=60.0)]
    out = tmp_path / "run"
    run = await kit.start_run(*kit.run_arguments(tmp_path, rows, server, *IN_PROCESS))
    await kit.wait_for_units(run, 4)
    kit.kill(run.pid)
    await run.wait()
    assert not list((out / "commits").iterdir()), "published too early for this test"
    status, stats = status_command.read_status(out), load_run(out).stats
    assert (status.done, status.solved, status.given_up, status.failed_attempts) == (4, 3, 0, 0)
    assert (stats["units"]["done"], stats["reward"]["solved"]) == (4, 3)
    assert status.output_tokens == stats["tokens"]["output_tokens"] > 0
    table = load_run(out).trajectories
    assert (len(table), int((table["reward"] >= 1).sum())) == (4, 3)


async def test_an_error_of_the_rate_coordinator_ends_the_run_at_once(
    tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its grants no call is ever made."""

    def fail(*_: object) -> None:
        raise RuntimeError("a bug of the coordinator")

    monkeypatch.setattr(Coordinator, "handle", fail)
    config = kit.make_config(tmp_path, [kit.make_task(1)], endpoint={"base_url": server.base_url})
    async with asyncio.timeout(60):
        with pytest.raises(RuntimeError, match="a bug of the coordinator"):
            await kit.run_config(config)


async def test_a_run_completes_despite_mixed_faults(tmp_path: Path) -> None:
    out = tmp_path / "run"
    plan = FaultPlan(seed=3, mixed=0.2, retry_after_s=0.05)
    async with FakeServer(FakeConfig(faults=plan)) as server:
        await kit.finish_run(*kit.run_arguments(tmp_path, kit.make_rows(30), server, *IN_PROCESS))
        kit.check_usage(out, server.entries)
    final = kit.final_rows(out)
    assert len(final) == kit.count_units(30)
    for row in final.values():
        assert row["reward"] is not None
        messages = [json.loads(m) for m in row["messages"]]
        texts = [m["content"] for m in messages if m["role"] == "assistant"]
        assert all(t == "" or t.startswith("wrote ") for t in texts), texts
    for row in kit.read_table(out, "failures"):
        assert row["cause"] is not None
        assert row["reward"] is None


async def test_a_unit_that_keeps_failing_is_given_up_and_reopened(tmp_path: Path) -> None:
    bad = {"id": "bad", "prompt": 'x\nSCRIPT: [{"fault": "filtered"}]'}
    out = tmp_path / "run"
    async with FakeServer() as server:
        arguments = kit.run_arguments(
            tmp_path, [bad, kit.make_task(1)], server, *IN_PROCESS, "--max-attempts", "2"
        )
        run = await kit.finish_run(*arguments, code=1)
        report = run.report()
        assert report["given_up"] == 1
        assert report["given_up_error"].startswith("ContentFiltered: ")
        failures = kit.read_table(out, "failures")
        assert sorted(row["attempt"] for row in failures) == [0, 1]
        requests = server.requests
        await kit.finish_run(*arguments, code=1)
        assert server.requests == requests
        await kit.finish_run(*arguments, "--retry-failed", code=1)
        assert server.requests > requests
        attempts = [row["attempt"] for row in kit.read_table(out, "failures")]
        assert sorted(attempts) == [0, 1, 2, 3]


async def test_a_finished_run_starts_no_worker(tmp_path: Path, server: FakeServer) -> None:
    arguments = kit.run_arguments(
        tmp_path,
        kit.make_rows(2),
        server,
    )
    await kit.finish_run(*arguments, "--workers", "0")
    before = server.requests
    again = await kit.finish_run(*arguments, "--workers", "1")
    assert "Ray" not in again.errors
    assert server.requests == before


def test_rows_passed_from_python_are_stored_only_in_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The temporary file of the program is removed; run.yaml still works."""
    program = """
import sys
from pathlib import Path
from batch_runner import run_batch
from hermes_rl import RunConfig

def rows():
    yield {"prompt": "one"}
    yield {"prompt": "two"}

config = RunConfig.model_validate({
    "dataset": {"path": rows()}, "model": {"name": "noop"}, "sandbox": {"backend": "none"},
    "run": {"workers": 0, "allow_unsandboxed": True},
})
for out in (None, None, "other"):
    run = config.run.model_copy(update={"out": out})
    report = run_batch(config.model_copy(update={"run": run}))
    assert (report.done, report.units) == (2, 2)
print(config.dataset.path, report.path)
"""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert not Path(ended.stdout.split()[0]).exists()
    assert list((tmp_path / "temporary").glob("*rows*")) == []
    assert not (tmp_path / "home").exists()
    (run,) = (tmp_path / "runs").iterdir()
    assert len(list(run.glob("rows-*.jsonl"))) == 1
    assert len(list((tmp_path / "other").glob("rows-*.jsonl"))) == 1
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--config", f"{run}/run.yaml"]) == 0
    assert main(["check", str(run)]) == 0


async def test_files_stay_small_where_folders_cannot_be_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run reports it once, and continues."""

    def refuse(one: Path, other: Path) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("hermes_rl.store.snapshots.exchange", refuse)
    run = {"concurrency": 1, "publish_every_s": 0.01}
    rows = [kit.make_task(n, turns=1) for n in range(55)]
    async with kit.OneByOne(tmp_path / "run") as server:
        endpoint = {"base_url": server.base_url}
        config, shown = kit.make_config(tmp_path, rows, run=run, endpoint=endpoint), io.StringIO()
        report = await arun_batch(config, progress=JsonEvents(shown))
    assert (report.done, report.stopped) == (55, None)
    (note,) = [line for line in shown.getvalue().splitlines() if "exchange two folders" in line]
    assert "small files are not merged: the file system of" in note
    assert len(list((tmp_path / "run").glob("trajectories/*.parquet"))) > 50
    assert list((tmp_path / "run" / "tmp").iterdir()) == []


async def test_a_run_of_many_small_batches_ends_in_few_files(tmp_path: Path) -> None:
    """Slow rollouts: every unit is published alone. Its files are merged before it ends."""
    out, rows = tmp_path / "run", [kit.make_task(n, turns=1) for n in range(65)]
    options = (*IN_PROCESS, "--concurrency", "1", "--set", "run.publish_every_s=0.01")
    async with kit.OneByOne(out, merges_after=60) as server:
        arguments = kit.run_arguments(tmp_path, rows, server, *options)
        reader = kit.ParquetReader(out, growing=True)
        reader.start()
        await kit.finish_run(*arguments)
        reader.check()
        assert len(list(out.glob("trajectories/*.parquet"))) <= 50
        assert len(kit.final_rows(out)) == 65
        assert list(faults_of(out)) == []
        served = server.requests
        assert (await kit.finish_run(*arguments)).report()["done"] == 65
        assert server.requests == served, "merged rows are still done"
