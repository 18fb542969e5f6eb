"""A run as people start it, without Ray: to the end, resumed, refused, stopped."""

import asyncio
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

from hermes_rl.cli import main, status_command
from hermes_rl.models.rate import Coordinator
from hermes_rl.store import load_run
from hermes_rl.testing import FakeConfig, FakeServer, FaultPlan

HERE = ("--workers", "0")


async def test_a_run_and_its_resume(tmp_path: Path, server: FakeServer) -> None:
    dataset = kit.write(tmp_path / "tasks.jsonl", kit.rows(10))
    out = tmp_path / "run"
    arguments = kit.played(dataset, out, server.base_url, *HERE)
    first = await kit.finish(*arguments)
    assert first.process.returncode == 0, first.errors
    report = first.report()
    assert (report["done"], report["units"], report["open"]) == (22, 22, 0)
    assert report["solved"] == 20
    assert len(kit.final_rows(out)) == 22
    kit.check_usage(out, server.entries)
    served = server.requests

    again = await kit.finish(*arguments)
    assert again.process.returncode == 0
    assert server.requests == served, "a finished run asked the model again"
    assert again.report()["done"] == 22

    kit.write(dataset, [*reversed(kit.rows(10)), kit.task(77)])
    more = await kit.finish(*arguments)
    assert more.report()["done"] == 23
    assert server.requests == served + 3
    kit.check_not_asked_again(out, first.receipts())

    kit.write(dataset, kit.rows(6))
    fewer = await kit.finish(*arguments)
    report = fewer.report()
    assert (report["units"], report["done"], report["left"]) == (18, 18, 5)
    assert len(kit.final_rows(out)) == 23, "units that left the dataset are kept"


async def test_what_the_driver_writes(tmp_path: Path, server: FakeServer) -> None:
    dataset = kit.write(tmp_path / "tasks.jsonl", [kit.task(1), {"prompt": ""}])
    out = tmp_path / "run"
    run = await kit.finish(*kit.played(dataset, out, server.base_url, *HERE))
    assert run.process.returncode == 1, "a bad row is a unit given up"
    stats = json.loads((out / "stats.json").read_text())
    assert stats["units"] == {"done": 1, "given_up": 1, "open": 0}
    assert "1 of 2 units done, 1 given up" in (out / "report.html").read_text()
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["dataset"]["path"] == str(dataset)
    assert manifest["plan"]["bad_rows"] == 1
    assert "echo" in manifest["capabilities"]["models"]
    (failure,) = kit.table(out, "failures")
    assert (failure["cause"], failure["owner"], failure["reward"]) == ("task", "task", None)
    assert "tasks.jsonl:2" in failure["error"]
    assert list((out / "journal").iterdir()) == []
    assert list((out / "tmp").iterdir()) == []

    served = server.requests
    again = await kit.finish("--config", out / "run.yaml")
    assert again.process.returncode == 1
    assert server.requests == served
    other = await kit.finish("--config", out / "run.yaml", "--out", tmp_path / "other")
    assert other.report()["done"] == 1


async def test_dry_run_touches_nothing(tmp_path: Path, server: FakeServer) -> None:
    dataset = kit.write(tmp_path / "tasks.jsonl", [*kit.rows(4), {"no": "prompt"}])
    out = tmp_path / "run"
    arguments = kit.played(dataset, out, server.base_url, *HERE)
    dry = await kit.finish(*arguments, "--dry-run")
    assert dry.process.returncode == 0, dry.errors
    assert not out.exists()
    await kit.finish(*arguments, "--limit", "2")
    before = server.requests
    files = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "batch_runner", *arguments, "--dry-run"),
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await process.communicate()
    assert "8 rows (1 bad), 17 units: 5 done, 0 given up, 12 to run" in said.decode()
    assert server.requests == before
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == files


async def test_a_second_driver_is_refused(tmp_path: Path, server: FakeServer) -> None:
    dataset = kit.write(tmp_path / "tasks.jsonl", [kit.task(1, latency_s=60.0)])
    arguments = kit.played(dataset, tmp_path / "run", server.base_url, *HERE)
    first = await kit.launch(*arguments)
    await kit.asked(server, 1, first)
    second = await kit.finish(*arguments)
    assert second.process.returncode == 2
    assert f"in use by process {first.pid}" in second.errors
    kit.kill(first.pid)
    await first.wait()


async def test_a_wrong_key_stops_and_the_right_one_resumes(tmp_path: Path) -> None:
    dataset = kit.write(tmp_path / "tasks.jsonl", kit.rows(20))
    out = tmp_path / "run"
    async with FakeServer(FakeConfig(key="right")) as server:
        more = ("--api-key-env", "SOME_KEY", "--concurrency", "4", *HERE)
        arguments = kit.played(dataset, out, server.base_url, *more)
        begun = time.monotonic()
        wrong = await kit.finish(*arguments, env={"SOME_KEY": "wrong-canary"})
        assert wrong.process.returncode == 3, wrong.errors
        assert time.monotonic() - begun < 15
        assert wrong.report()["stopped"] == "auth"
        assert wrong.report()["hint"] == "Set SOME_KEY"
        assert wrong.report()["detail"].startswith(f"401 from 127.0.0.1:{server.port}")
        assert server.requests <= 8, "dispatch went on after the breaker opened"
        failures = kit.table(out, "failures")
        assert {row["cause"] for row in failures} == {"auth"}
        right = await kit.finish(*arguments, env={"SOME_KEY": "right"})
        assert right.process.returncode == 0, right.errors
        assert len(kit.final_rows(out)) == kit.units_of(20)
        kit.check_usage(out, server.entries)
    for path in out.rglob("*"):
        assert path.is_dir() or b"wrong-canary" not in path.read_bytes()


def no_parquet(path: Path) -> None:
    path.write_bytes(b"no parquet")


def damaged_page(path: Path) -> None:
    """A Parquet file whose footer is sound: what is wrong shows when its rows are read."""
    table = pa.table({"prompt": [f"q{n}" for n in range(300)]})
    pq.write_table(table, path, compression="none", use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[4:64] = bytes(60)
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [no_parquet, damaged_page])
async def test_a_dataset_that_breaks_lets_what_runs_end(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    kit.write(folder / "a.jsonl", [{"prompt": f"p{n}"} for n in range(300)])
    damage(folder / "b.parquet")
    out = tmp_path / "run"
    free = ("--sandbox", "none", "--allow-unsandboxed", "--out", out, *HERE)
    broken = await kit.finish(folder, "--model", "noop", *free)
    assert broken.process.returncode == 2, broken.errors
    assert "Traceback" not in broken.errors
    report = broken.report()
    assert (report["stopped"], report["exit_code"]) == ("dataset", 2)
    assert "b.parquet" in report["detail"] or "a.jsonl:300: " in report["detail"]
    done = len(kit.final_rows(out))
    assert done >= 256, "rows before the damage were thrown away"
    assert json.loads((out / "stats.json").read_bytes())["units"]["done"] == done
    assert kit.table(out, "failures") == []
    (folder / "b.parquet").unlink()
    repaired = await kit.finish(folder, "--model", "noop", *free)
    assert repaired.report()["done"] == 300
    assert {row["attempt"] for row in kit.final_rows(out).values()} == {0}


async def test_another_dataset_needs_a_run_of_its_own(tmp_path: Path) -> None:
    """`a/train.jsonl` and `b/train.jsonl` have the same default folder."""
    free = ("--sandbox", "none", "--allow-unsandboxed", "--out", tmp_path / "run", *HERE)
    for name in "ab":
        (tmp_path / name).mkdir()
        kit.write(tmp_path / name / "train.jsonl", [{"prompt": f"{name}{n}"} for n in range(3)])

    async def run(name: str, *more: str) -> kit.Process:
        return await kit.finish(tmp_path / name / "train.jsonl", "--model", "noop", *free, *more)

    assert (await run("a")).report()["done"] == 3
    recorded = (tmp_path / "run" / "run.yaml").read_bytes()
    for more in ((), ("--dry-run",)):
        refused = await run("b", *more)
        assert refused.process.returncode == 2
        assert refused.errors.count("\n") == 1
        assert f"no unit of {tmp_path}/b/train.jsonl is in {tmp_path}/run, " in refused.errors
        assert f"which was made from {tmp_path}/a/train.jsonl. Choose" in refused.errors
    assert len(kit.final_rows(tmp_path / "run")) == 3
    assert (tmp_path / "run" / "run.yaml").read_bytes() == recorded
    shared = [{"prompt": p} for p in ("new", "b0", "a2")]
    kit.write(tmp_path / "b" / "train.jsonl", shared)
    assert (await run("b", "--limit", "1")).report()["done"] == 1, "it has units of the run"
    report = (await run("b")).report()
    assert (report["units"], report["done"], report["left"]) == (3, 3, 2)
    kit.write(tmp_path / "b" / "train.jsonl", [{"prompt": "all new"}])
    assert "made from other rows of it. Choose another --out" in (await run("b")).errors


async def test_a_killed_run_has_the_same_figures_everywhere(
    tmp_path: Path, server: FakeServer
) -> None:
    """What is finished and not yet published counts for `status` and for `check`."""
    rows = [kit.task(n) for n in range(1, 5)] + [kit.task(9, latency_s=60.0)]
    dataset, out = kit.write(tmp_path / "tasks.jsonl", rows), tmp_path / "run"
    run = await kit.launch(*kit.played(dataset, out, server.base_url, *HERE))
    await kit.until_done(run, 4)
    kit.kill(run.pid)
    await run.wait()
    assert not list((out / "commits").iterdir()), "it was published: this test shows nothing"
    status, stats = status_command.read_status(out), load_run(out).stats
    assert (status.done, status.solved, status.given_up, status.failed_attempts) == (4, 3, 0, 0)
    assert (stats["units"]["done"], stats["reward"]["solved"]) == (4, 3)
    assert status.output_tokens == stats["tokens"]["output_tokens"] > 0
    table = load_run(out).trajectories
    assert (len(table), int((table["reward"] >= 1).sum())) == (4, 3)


async def test_an_error_of_the_rate_coordinator_ends_the_run_at_once(
    tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its grants no call would ever be made."""

    def fail(*_: object) -> None:
        raise RuntimeError("a bug of the coordinator")

    monkeypatch.setattr(Coordinator, "handle", fail)
    config = kit.config(tmp_path, [kit.task(1)], endpoint={"base_url": server.base_url})
    async with asyncio.timeout(30):
        with pytest.raises(RuntimeError, match="a bug of the coordinator"):
            await kit.run(config)


async def test_mixed_faults_are_ridden_out(tmp_path: Path) -> None:
    dataset = kit.write(tmp_path / "tasks.jsonl", kit.rows(30))
    out = tmp_path / "run"
    plan = FaultPlan(seed=3, mixed=0.2, retry_after_s=0.05)
    async with FakeServer(FakeConfig(faults=plan)) as server:
        run = await kit.finish(*kit.played(dataset, out, server.base_url, *HERE))
        assert run.process.returncode == 0, run.errors
        kit.check_usage(out, server.entries)
    final = kit.final_rows(out)
    assert len(final) == kit.units_of(30)
    for row in final.values():
        assert row["reward"] is not None
        said = [json.loads(m) for m in row["messages"]]
        texts = [m["content"] for m in said if m["role"] == "assistant"]
        assert all(t == "" or t.startswith("wrote ") for t in texts), texts
    for row in kit.table(out, "failures"):
        assert row["cause"] is not None
        assert row["reward"] is None


async def test_a_unit_that_keeps_failing_is_given_up_and_reopened(tmp_path: Path) -> None:
    bad = {"id": "bad", "prompt": 'x\nSCRIPT: [{"fault": "filtered"}]'}
    dataset = kit.write(tmp_path / "tasks.jsonl", [bad, kit.task(1)])
    out = tmp_path / "run"
    async with FakeServer() as server:
        arguments = kit.played(dataset, out, server.base_url, *HERE, "--max-attempts", "2")
        run = await kit.finish(*arguments)
        assert run.process.returncode == 1, run.errors
        report = run.report()
        assert report["given_up"] == 1
        assert report["given_up_error"].startswith("ContentFiltered: ")
        failures = kit.table(out, "failures")
        assert sorted(row["attempt"] for row in failures) == [0, 1]
        requests = server.requests
        assert (await kit.finish(*arguments)).process.returncode == 1
        assert server.requests == requests
        await kit.finish(*arguments, "--retry-failed")
        assert server.requests > requests
        attempts = [row["attempt"] for row in kit.table(out, "failures")]
        assert sorted(attempts) == [0, 1, 2, 3]


async def test_a_finished_run_starts_no_worker(tmp_path: Path, server: FakeServer) -> None:
    dataset = kit.write(tmp_path / "tasks.jsonl", kit.rows(2))
    arguments = kit.played(dataset, tmp_path / "run", server.base_url)
    assert (await kit.finish(*arguments, "--workers", "0")).process.returncode == 0
    before = server.requests
    again = await kit.finish(*arguments, "--workers", "1")
    assert again.process.returncode == 0
    assert "Ray" not in again.errors
    assert server.requests == before


def test_rows_of_a_program_are_kept_in_the_run_directory_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program's own file goes with its process; the run's configuration works again."""
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
