"""The first Ctrl-C lets running rollouts finish, the second cancels them; both can be resumed."""

import os
import re
import signal
import subprocess
import tempfile
from pathlib import Path

import kit
import pytest

from batch_runner import catch_signals
from hermes_rl.evals import summary
from hermes_rl.store import CRASH_VARIABLE, load_run
from hermes_rl.testing import FakeServer

ROWS = [kit.make_task(n, latency_s=0.25) for n in range(12)]
IN_PROCESS = ("--workers", "0", "--concurrency", "4")


def check_orderly_end(run: kit.RunProcess) -> int:
    """Check that no unit started after the first Ctrl-C. Returns the number of finished units,
    which depends on the machine: workers do not start at the same time."""
    (at, note), *_ = (
        (n, e) for n, e in enumerate(run.events) if e["event"] == "note" and "stopping" in e["text"]
    )
    before = sum(e["event"] == "attempt" for e in run.events[:at])
    running = int(re.findall(r"stopping: (\d+) running", note["text"])[0])
    assert running > 0, "nothing ran at the signal"
    assert sum(e["event"] == "attempt" for e in run.events) == before + running
    return before + running


async def test_first_ctrl_c_finishes_running_rollouts(tmp_path: Path, server: FakeServer) -> None:
    out = tmp_path / "run"
    arguments = kit.run_arguments(tmp_path, ROWS, server, *IN_PROCESS)
    run = await kit.start_run(*arguments)
    await kit.wait_for_requests(server, 6, run)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does: to the whole group
    assert await run.wait() == 130, run.errors
    report = run.report()
    assert report["stopped"] == "interrupted"
    assert report["done"] == check_orderly_end(run)
    assert f"{out}/run.yaml" in report["resume"]
    assert len(kit.final_rows(out)) == report["done"] < 12
    assert str(summary(load_run(out))).endswith(f"; {12 - report['done']} units still open")
    assert kit.read_table(out, "failures") == []
    assert list((out / "journal").iterdir()) == []
    await kit.check_no_processes([run.mark], out)

    await kit.finish_run("--config", out / "run.yaml")
    assert len(kit.final_rows(out)) == 12
    assert load_run(out).unfinished is None
    kit.check_usage(out, server.entries)
    kit.check_no_unit_ran_again(out, run.receipts())


async def test_second_ctrl_c_cancels_running_rollouts(tmp_path: Path, server: FakeServer) -> None:
    out = tmp_path / "run"
    arguments = kit.run_arguments(tmp_path, ROWS, server, *IN_PROCESS)
    run = await kit.start_run(*arguments)
    await kit.wait_for_units(run, 3)
    run.process.send_signal(signal.SIGINT)
    await run.wait_for_events("note")  # stopping
    run.process.send_signal(signal.SIGINT)
    assert await run.wait() == 130, run.errors
    cut = kit.read_table(out, "failures")
    assert {(row["status"], row["cause"], row["owner"]) for row in cut} == {
        ("cancelled", "interrupted", "operator")
    }
    assert all(row["reward"] is None for row in cut)
    assert len(kit.final_rows(out)) == len(run.receipts()) >= 3
    await kit.check_no_processes([run.mark], out)

    await kit.finish_run(*arguments)
    assert len(kit.final_rows(out)) == 12
    kit.check_usage(out, server.entries)
    kit.check_no_unit_ran_again(out, run.receipts())


@pytest.mark.slow
async def test_ctrl_c_to_a_ray_run_reaches_no_worker(tmp_path: Path, server: FakeServer) -> None:
    """A terminal sends Ctrl-C to Ray's processes, the workers and the sandboxes, too."""
    out = tmp_path / "run"
    ray = ("--workers", "2", "--concurrency", "4")
    run = await kit.start_ray_run(out, *kit.run_arguments(tmp_path, ROWS, server, *ray))
    await kit.wait_for_requests(server, 6, run)
    os.killpg(run.pid, signal.SIGINT)
    assert await run.wait() == 130, run.errors
    failed = len(kit.read_table(out, "failures"))
    assert len(kit.final_rows(out)) == run.report()["done"] == check_orderly_end(run) - failed
    # A signal that reached workers or sandboxes would leave other causes. A sandbox may fail to
    # start on an overloaded machine.
    causes = {(row["cause"], row["error"]) for row in kit.read_table(out, "failures")}
    assert {cause for cause, _ in causes} <= {"sandbox_start"}, causes
    await kit.check_no_processes([run.mark], out)


async def test_sigterm_acts_like_the_first_ctrl_c(tmp_path: Path, server: FakeServer) -> None:
    out = tmp_path / "run"
    run = await kit.start_run(*kit.run_arguments(tmp_path, ROWS[:6], server, *IN_PROCESS))
    await kit.wait_for_requests(server, 2, run)
    run.process.send_signal(signal.SIGTERM)
    assert await run.wait() == 130, run.errors
    assert len(kit.final_rows(out)) == check_orderly_end(run)


async def test_ctrl_c_at_the_end_ends_only_the_merge(tmp_path: Path, server: FakeServer) -> None:
    """All units are done: the run reports that. Its small files are merged later."""
    out = tmp_path / "run"
    rows = [kit.make_task(n, turns=1) for n in range(51)]
    more = ("--workers", "0", "--concurrency", "1", "--set", "run.publish_every_s=0.01")
    async with kit.OneByOne(out) as first:
        arguments = kit.run_arguments(tmp_path, rows, first, *more, "--limit", "50")
        await kit.finish_run(*arguments)
    stalls = {CRASH_VARIABLE: "compact-1-written:1:2"}
    run = await kit.start_run(*kit.run_arguments(tmp_path, rows, server, *more), env=stalls)
    await kit.wait_for(run, lambda: [*out.glob("tmp/trajectories.part-*.2000000.parquet.*")])
    run.process.send_signal(signal.SIGINT)
    assert await run.wait() == 0, run.errors
    assert (run.report()["done"], run.report()["stopped"]) == (51, None)


async def test_a_forked_child_does_not_count_the_signal(tmp_path: Path) -> None:
    """Ray forks its processes, and Ctrl-C may reach one before it is another program."""
    stopping = tmp_path / "stopping"
    with (
        catch_signals(stopping.touch, stopping.touch) as interrupts,
        interrupts.raising_in_blocking_code(),
        pytest.raises(subprocess.SubprocessError),
    ):
        subprocess.run(["true"], preexec_fn=lambda: signal.raise_signal(signal.SIGINT))  # noqa: ASYNC221
    assert not interrupts.fired
    assert not stopping.exists()


@pytest.mark.slow
async def test_ctrl_c_while_ray_starts(tmp_path: Path, server: FakeServer) -> None:
    """No rollout runs yet: the run acknowledges the signal, ends and leaves no process."""
    out = tmp_path / "run"
    ray = ("--workers", "2", "--concurrency", "4")
    with tempfile.TemporaryDirectory(prefix="ray-") as rays:  # its sockets need a short path
        arguments = kit.run_arguments(tmp_path, ROWS, server, *ray)
        run = await kit.start_run(*arguments, env={"RAY_TMPDIR": rays})
        await kit.wait_for(run, lambda: [*Path(rays).glob("ray/session_2*")])
        os.killpg(run.pid, signal.SIGINT)
        assert await run.wait() == 130, run.errors
    assert [e["text"] for e in run.events if e["event"] == "note"][1:] == ["stopping"]
    assert "Traceback" not in run.errors
    assert server.requests == 0
    await kit.check_no_processes([run.mark], out)
