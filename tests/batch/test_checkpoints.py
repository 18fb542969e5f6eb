"""Checkpoints of long rollouts, and setup scripts that run once for all repeats."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import kit
import pytest

from hermes_rl.errors import UserError
from hermes_rl.messages import text_of
from hermes_rl.testing import FakeConfig, FakeServer, FaultPlan, ServedRequest

TURNS = 30
EVERY = 5
COUNT_COMMAND = "export N=$((N+1)); mkdir -p d$N; cd d$N; echo $N >>/tmp/kept; wc -l </tmp/kept"
BUBBLEWRAP = ("--workers", "0", "--sandbox", "bubblewrap", "--max-turns", "60")


def episode(turns: int = TURNS, *, latency_s: float = 0.02, **more: Any) -> dict[str, Any]:
    """A task in which each turn depends on the folder, variable and /tmp file of the one before."""
    steps: list[Any] = [{"run": COUNT_COMMAND, "latency_s": latency_s} for _ in range(turns - 1)]
    deepest = "/".join(f"d{n}" for n in range(1, turns))
    return {
        "id": "long",
        "prompt": f"Count.\nSCRIPT: {json.dumps([*steps, 'done'])}",
        "verify": f"test -d $WORKSPACE/{deepest} && test -f $WORKSPACE/ready",
        "setup": "date +%N >ready",
        **more,
    }


def arguments(
    folder: Path, server: FakeServer, rows: list[dict[str, Any]], *more: str
) -> list[str]:
    return kit.run_arguments(folder, rows, server, *BUBBLEWRAP, *more)


def outputs(row: dict[str, Any]) -> list[str]:
    """The outputs of the tool calls of a row."""
    messages = [json.loads(text) for text in row["messages"]]
    return [json.loads(m["content"])["output"] for m in messages if m["role"] == "tool"]


def resumed_turns(row: dict[str, Any]) -> float:
    """Turns that a rollout restored from a checkpoint."""
    return {m["name"]: m["value"] for m in row["metrics"]}.get("resumed_turns", 0.0)


def failed(folder: Path) -> list[dict[str, Any]]:
    return kit.read_table(folder / "run", "failures")


def checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "run" / "checkpoints").glob("*/[0-9]*"))


async def kill_at_request(server: FakeServer, requests: int, *command: str) -> None:
    run = await kit.start_run(*command)
    await kit.wait_for_requests(server, requests, run)
    kit.kill(run.pid)
    await run.wait()


@pytest.mark.slow
async def test_a_killed_episode_resumes_from_its_last_checkpoint(
    tmp_path: Path, server: FakeServer
) -> None:
    """Killed at turn 20 of 30, it repeats at most five turns. Files, variables and messages equal
    those of an undisturbed run, and every call is recorded once."""
    command = arguments(tmp_path, server, [episode()], "--checkpoint-turns", str(EVERY))
    await kill_at_request(server, 20, *command)
    before = server.requests
    assert len(checkpoints(tmp_path)) == 1, "a later checkpoint replaces the earlier ones"

    await kit.finish_run(*command)
    assert server.requests - before <= TURNS - before + EVERY
    kit.check_usage(tmp_path / "run", server.entries)
    (row,) = kit.final_rows(tmp_path / "run").values()
    assert (row["reward"], row["turns"], row["end_reason"]) == (1.0, TURNS, "answered")
    assert [text.split() for text in outputs(row)] == [[str(n)] for n in range(1, TURNS)]
    marked = resumed_turns(row)
    assert marked % EVERY == 0
    assert marked >= before - 1 - EVERY
    assert len(row["calls"]) == TURNS - marked, "only the calls of this attempt"
    (lost,) = failed(tmp_path)
    assert lost["cause"] == "driver_lost"
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
async def test_an_episode_survives_repeated_kills(tmp_path: Path, server: FakeServer) -> None:
    command = arguments(tmp_path, server, [episode()], "--checkpoint-turns", "3")
    for _ in range(3):
        await kill_at_request(server, server.requests + 8, *command)
    await kit.finish_run(*command)
    kit.check_usage(tmp_path / "run", server.entries)
    (row,) = kit.final_rows(tmp_path / "run").values()
    assert (row["reward"], row["turns"]) == (1.0, TURNS)
    assert [text.split() for text in outputs(row)] == [[str(n)] for n in range(1, TURNS)]
    assert server.requests <= TURNS + 3 * 4


@pytest.mark.slow
async def test_a_retry_resumes_from_the_checkpoint(tmp_path: Path, server: FakeServer) -> None:
    """The sandbox is killed, not the run."""
    command = arguments(tmp_path, server, [episode()], "--checkpoint-turns", "2")
    run = await kit.start_run(*command)
    await kit.wait_for_requests(server, 12, run)
    for pid in kit.sandbox_pids(tmp_path / "run"):
        kit.kill(pid)
    assert await run.wait() == 0, run.errors
    (row,) = kit.final_rows(tmp_path / "run").values()
    assert (row["attempt"], row["reward"], row["turns"]) == (1, 1.0, TURNS)
    assert resumed_turns(row) >= 8
    kit.check_usage(tmp_path / "run", server.entries)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["checkpoint.json", "sandbox/workspace.tar"])
async def test_a_damaged_checkpoint_starts_the_unit_again(
    damage: str, tmp_path: Path, server: FakeServer
) -> None:
    command = arguments(tmp_path, server, [episode()], "--checkpoint-turns", "5")
    await kill_at_request(server, 12, *command)
    (found,) = checkpoints(tmp_path)
    (found / damage).write_bytes(b"torn" * 200)
    await kit.finish_run(*command)
    (row,) = kit.final_rows(tmp_path / "run").values()
    assert (row["reward"], len(row["calls"])) == (1.0, TURNS)
    assert resumed_turns(row) == 0


@pytest.mark.slow
async def test_no_checkpoint_is_taken_while_a_process_runs(
    tmp_path: Path, server: FakeServer
) -> None:
    """A process cannot be restored; the next turn without one gets the checkpoint."""
    steps = ["sleep 60 & echo $! >pid", "echo 2", "echo 3", "kill $(cat pid)", "echo 5", "echo 6"]
    script = [{"run": step, "latency_s": 0.1} for step in steps]
    script.append({"run": "echo 7", "latency_s": 1.0})
    row = {"id": "busy", "prompt": f"Work.\nSCRIPT: {json.dumps([*script, 'done'])}"}
    command = arguments(tmp_path, server, [row], "--checkpoint-turns", "1")
    run = await kit.start_run(*command)
    await kit.wait_for_requests(server, 4, run)
    assert checkpoints(tmp_path) == []
    await kit.wait_for_requests(server, 7, run)
    assert [path.name[:6] for path in checkpoints(tmp_path)] == ["000006"]
    assert await run.wait() == 0


@pytest.mark.slow
async def test_unit_budget_includes_earlier_attempts(tmp_path: Path, server: FakeServer) -> None:
    """A unit with a budget of about 16 turns does not get it again in the next attempt."""
    free = arguments(tmp_path, server, [episode()])
    await kit.finish_run(*free)
    (row,) = kit.final_rows(tmp_path / "run").values()
    calls = [c["input_tokens"] + c["output_tokens"] for c in row["calls"]]
    (tmp_path / "bounded").mkdir()
    bound = ["--set", f"run.unit_budget_tokens={sum(calls[:16])}", "--max-tokens", "1"]
    command = arguments(
        tmp_path / "bounded", server, [episode()], "--checkpoint-turns", "2", *bound
    )
    await kill_at_request(server, server.requests + 10, *command)
    await kit.finish_run(*command, code=1)
    last = next(r for r in failed(tmp_path / "bounded") if r["cause"] == "unit_budget")
    assert 12 <= last["turns"] <= 16


async def run_setups(folder: Path, row: dict[str, Any], server: FakeServer, code: int) -> None:
    """Run all repeats of a row in this process and check the exit code."""
    config = kit.make_config(
        folder,
        [row],
        endpoint={"base_url": server.base_url},
        sandbox={"backend": "bubblewrap"},
    )
    assert (await kit.run_config(config)).exit_code == code


async def test_a_setup_runs_once_for_all_repeats(tmp_path: Path, server: FakeServer) -> None:
    """All repeats start from its result, and none sees the changes of another."""
    steps = [{"run": "cat ready; echo x >>log; cat log"}, "done"]
    prompt = f"Look.\nSCRIPT: {json.dumps(steps)}"
    row = episode(2, prompt=prompt, verify="test $(wc -l <$WORKSPACE/log) = 1", repeats=8)
    await run_setups(tmp_path, row, server, code=0)
    rows = list(kit.final_rows(tmp_path / "run").values())
    assert len(rows) == 8
    assert {row["reward"] for row in rows} == {1.0}
    assert len({tuple(outputs(row)) for row in rows}) == 1


async def test_a_setup_that_leaves_a_process_runs_each_time(
    tmp_path: Path, server: FakeServer
) -> None:
    """A snapshot cannot contain the process."""
    steps = [{"run": "kill -0 $(cat pid) && cat ready"}, "done"]
    row = episode(
        2,
        setup="date +%N >ready; setsid sleep 60 >/dev/null 2>&1 & echo $! >pid",
        prompt=f"Look.\nSCRIPT: {json.dumps(steps)}",
        verify="true",
        repeats=4,
    )
    await run_setups(tmp_path, row, server, code=0)
    rows = list(kit.final_rows(tmp_path / "run").values())
    stamps = {tuple(outputs(row)) for row in rows}
    assert len(stamps) == 4
    assert all(stamp[0].strip().isdigit() for stamp in stamps)


async def test_a_failing_setup_fails_every_repeat(tmp_path: Path, server: FakeServer) -> None:
    row = episode(2, setup="echo broken >&2; false", repeats=3)
    await run_setups(tmp_path, row, server, code=1)
    assert [row["cause"] for row in failed(tmp_path)] == ["task"] * 3
    assert all("broken" in row["error"] for row in failed(tmp_path))
    assert all(row["sandbox"] is not None for row in failed(tmp_path))


def test_checkpoints_are_refused_for_environments(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--checkpoint-turns works with datasets"):
        kit.make_config(tmp_path, [episode()], env={"name": "gsm8k"}, run={"checkpoint_turns": 5})


def judge(request: ServedRequest) -> str:
    (key,) = re.findall(r'"(verdict\w*)": V', text_of(request.messages[0]))
    return json.dumps({"reason": "It is.", key: "yes"})


@pytest.mark.parametrize(
    ("failing", "code", "verified"),
    [
        (FakeConfig(faults=FaultPlan(rates={"auth": 1.0})), 3, False),
        (FakeConfig(faults=FaultPlan(rates={"auth": 1.0})), 3, True),
        (FakeConfig(plays={"critic": lambda request: "No idea."}), 1, False),
    ],
    ids=["refused", "verified", "no verdict"],
)
async def test_an_answer_outlives_its_judge(
    failing: FakeConfig, code: int, verified: bool, tmp_path: Path
) -> None:
    """Once the judge answers, neither the policy nor the other judge is called again, unless the
    sandbox is graded, too; also if the judge fails again in between."""
    task = kit.make_task(1) | {"score": {"type": "judge", "rubric": "Is it written?"}}
    if not verified:
        del task["verify"]

    async with (
        FakeServer(FakeConfig(plays={"critic": judge, "other": judge})) as server,
        FakeServer(failing) as broken,
    ):
        runs = [(broken.base_url, code)] * (1 if verified else 2)
        for url, ended in (*runs, (server.base_url, 0)):
            where = f"scoring.judges=[other, {{name: critic, base_url: '{url}'}}]"
            more = ("--workers", "0", "--retry-failed", "--set", where)
            await kit.finish_run(*kit.run_arguments(tmp_path, [task], server, *more), code=ended)
        kit.check_usage(tmp_path / "run", [*server.entries, *broken.entries])
    served = Counter(entry.model for entry in server.entries)
    paid = 2 if verified else 1
    assert served == {"fake": 3 * paid, "other": paid, "critic": 1}
    (row,) = kit.final_rows(tmp_path / "run").values()
    assert resumed_turns(row) == (0 if verified else 3)
    assert (row["reward"], row["turns"], len(row["messages"])) == (1.0, 3, 7)
    assert len(row["calls"]) == (5 if verified else 1)
    assert {m["name"]: m["value"] for m in row["metrics"]}["judge_agreement"] == 1.0
    assert not (tmp_path / "run" / "checkpoints").exists()


def saved_replies(folder: Path) -> int:
    """Units of which a reply of a judge is saved."""
    names = [path.parent.name for path in checkpoints(folder) if path.name.endswith("-1-ended")]
    return len(set(names))


async def test_a_kill_while_judges_decide_repeats_only_their_calls_in_flight(
    tmp_path: Path,
) -> None:
    tasks = [kit.make_task(n) | {"score": {"type": "judge", "rubric": "Good?"}} for n in range(2)]
    for task in tasks:
        del task["verify"]

    async with (
        FakeServer(FakeConfig(plays={"critic": judge, "other": judge})) as server,
        FakeServer(FakeConfig(hold_at=1)) as silent,
    ):

        def command(url: str) -> list[str]:
            judges = f"scoring.judges=[other, {{name: critic, base_url: '{url}'}}]"
            return kit.run_arguments(tmp_path, tasks, server, "--workers", "0", "--set", judges)

        run = await kit.start_run(*command(silent.base_url))
        await kit.wait_for(run, lambda: silent.in_flight == 2 and saved_replies(tmp_path) == 2)
        kit.kill(run.pid)
        await run.wait()
        kept = shutil.copytree(tmp_path / "run/checkpoints", tmp_path / "kept")
        await kit.finish_run(*command(server.base_url))
        assert not (tmp_path / "run/checkpoints").exists()
        shutil.copytree(kept, tmp_path / "run/checkpoints")  # as of a kill just after the rows
        (foreign := tmp_path / "run/checkpoints/.nfs1").touch()
        await kit.finish_run(*command(server.base_url))
    assert Counter(entry.model for entry in server.entries) == {"fake": 6, "other": 2, "critic": 2}
    for row in kit.final_rows(tmp_path / "run").values():
        assert (row["reward"], resumed_turns(row), len(row["calls"])) == (1.0, 3, 1)
    assert [*foreign.parent.iterdir()] == [foreign]


class KillingCritic:
    """A judge whose first reply is malformed. Each request reaches it twice, because it kills the
    run at the first one."""

    def __init__(self) -> None:
        self.runs: list[kit.RunProcess] = []
        self.served = Counter[tuple[str, ...]]()

    def play(self, request: ServedRequest) -> str:
        texts = tuple(text_of(message) for message in request.messages)
        self.served[texts] += 1
        if self.runs and self.served[texts] == 1:
            kit.kill(self.runs[-1].pid)
        is_first = "Good?" in texts[1] and len(texts) == 2
        return "No idea." if is_first else judge(request)


async def test_no_reply_of_a_judge_is_paid_twice_in_a_run_that_is_killed(tmp_path: Path) -> None:
    """Killed at each request to a judge, it repeats only that request, and its row is that of a run
    that was not killed, apart from the columns that are about its calls."""
    rubrics = [{"type": "judge", "name": name, "rubric": f"{name}?"} for name in ("Good", "Short")]
    task = kit.make_task(1) | {"score": rubrics}
    del task["verify"]
    rows = []
    for killed in (False, True):
        (folder := tmp_path / f"killed-{killed}").mkdir()
        critic = KillingCritic()
        async with FakeServer(FakeConfig(plays={"critic": critic.play})) as server:
            more = ("--workers", "0", "--judge", "critic")
            command = kit.run_arguments(folder, [task], server, *more)
            codes = [-9, -9, -9, 0] if killed else [0]
            for code in codes:
                run = await kit.start_run(*command)
                critic.runs += [run] if killed else []
                assert await run.wait() == code, run.errors
            kit.check_usage(folder / "run", server.entries)
        assert [*critic.served.values()] == [2 if killed else 1] * 3
        assert Counter(entry.model for entry in server.entries)["fake"] == 3
        (row,) = kit.final_rows(folder / "run").values()
        metrics = {m["name"]: m["value"] for m in row["metrics"] if m["name"] != "resumed_turns"}
        (same,) = kit.comparable_rows(folder / "run").values()
        of_calls = {"usage", "served_models", "unpriced_calls"}
        rows.append({**{k: v for k, v in same.items() if k not in of_calls}, "metrics": metrics})
        lost = failed(folder)
        paid = [call for row in [row, *lost] for call in row["calls"] if call["outcome"] == "ok"]
        assert Counter(call["purpose"] for call in paid) == {"agent": 3, "judge": 3}
    assert rows[0] == rows[1]
