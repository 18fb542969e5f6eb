"""Ray workers: shared cooldowns, isolated losses, their runtime environment."""

import json
from pathlib import Path

import kit
import pytest

from hermes_rl.testing import FakeConfig, FakeServer

pytestmark = pytest.mark.slow


async def test_a_unit_that_kills_its_worker_is_isolated_and_given_up(
    tmp_path: Path, server: FakeServer, cluster: dict[str, str]
) -> None:
    """Its command kills its worker; the other units get their rows."""
    step = {"run": "kill -9 $PPID", "latency_s": 0.2}
    deadly = {"id": "deadly", "prompt": f"x\nSCRIPT: {json.dumps([step, 'no'])}"}
    rows = [kit.make_task(n, latency_s=0.2) for n in range(8)]
    out = tmp_path / "run"
    more = ("--workers", "1", "--concurrency", "4", "--json")
    run = await kit.finish_run(
        *kit.run_arguments(tmp_path, [*rows[:2], deadly, *rows[2:]], server, *more),
        env=cluster,
        code=1,
    )
    assert run.report()["given_up"] == 1
    assert {r["task_id"] for r in kit.final_rows(out).values()} == {r["id"] for r in rows}
    lost = [r for r in kit.read_table(out, "failures") if r["cause"] == "worker_lost"]
    attempts = sorted(r["attempt"] for r in lost if r["task_id"] == "deadly")
    assert attempts == [0, 1, 2]
    third = next(r for r in lost if r["task_id"] == "deadly" and r["attempt"] == 2)
    others = [r for r in lost if r["task_id"] != "deadly"]
    assert all(r["finished_at"] <= third["started_at"] for r in others), "it did not run alone"
    kit.check_usage(out, server.entries)


async def test_workers_share_the_cooldown_of_a_refused_key(
    tmp_path: Path, cluster: dict[str, str]
) -> None:
    """Two Ray workers with a unit each. The second starts some seconds after the first was refused
    with the first key and answered with the second."""
    opened = tmp_path / "open"
    first = kit.make_task(0, turns=6, latency_s=0.7)
    second = kit.make_task(1) | {"setup": f"until [ -e {opened} ]; do sleep 0.1; done"}
    keys = {"KEY_REFUSED": "no", "KEY_GOOD": "yes"}
    async with FakeServer(FakeConfig(key="yes")) as server:
        arguments = kit.run_arguments(tmp_path, [first, second], server, "--workers", "2")
        run = await kit.start_run(
            *arguments, "--concurrency", "2", "--api-key-env", ",".join(keys), env=cluster | keys
        )
        await kit.wait_for_requests(server, 5, run)
        opened.touch()
        assert await run.wait() == 0, run.errors
        outcomes = [(entry.outcome, entry.fault) for entry in server.entries]
    writers = [event["writer"] for event in run.events if event["event"] == "attempt"]
    assert len(set(writers)) == 2, "both units ran at one worker"
    assert outcomes[0][0] == "refused"
    assert [outcome for outcome, _ in outcomes].count("refused") == 1, outcomes


async def test_workers_have_the_runtime_environment_of_the_run(
    tmp_path: Path, server: FakeServer, cluster: dict[str, str]
) -> None:
    """`--workers auto` takes Ray for it, although the run is small."""
    (tmp_path / "marks.py").write_text(
        "import os\n\ndef mark(answer, row):\n    return os.environ.get('WORKER_MARK') == 'here'\n"
    )
    rows = [{"prompt": 'x\nSCRIPT: ["done"]', "score": {"type": "python", "function": "mark"}}]
    more = (
        *("--set", f"scoring.functions.mark={tmp_path}/marks.py:mark"),
        *("--set", "run.runtime_env={env_vars: {WORKER_MARK: here}}"),
    )
    run = await kit.finish_run(*kit.run_arguments(tmp_path, rows, server, *more), env=cluster)
    assert run.report()["mean_reward"] == 1.0


@pytest.mark.parametrize(
    ("workers", "wanted", "error"),
    [
        ("0", "{env_vars: {A: b}}", "'run.runtime_env' is for Ray workers"),
        ("1", "{env_var: {A: b}}", "(did you mean 'env_vars'?)"),
        ("1", "{env_vars: {A: 1}}", "'run.runtime_env': runtime_env['env_vars'] must be of type"),
    ],
)
async def test_wrong_runtime_environments_are_refused_before_ray_starts(
    tmp_path: Path, server: FakeServer, workers: str, wanted: str, error: str
) -> None:
    more = ("--workers", workers, "--set", f"run.runtime_env={wanted}")
    run = await kit.finish_run(
        *kit.run_arguments(tmp_path, [kit.make_task(1)], server, *more), code=2
    )
    assert error in run.errors
    assert not server.entries
