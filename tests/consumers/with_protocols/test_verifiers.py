"""A taskset of verifiers 0.4 is rolled out here: verifiers runs the episodes and rewards them."""

import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import absent  # noqa: F401
import pytest
from marble_v1 import MarbleTaskset
from marble_v1.taskset import MarbleConfig

HERE = Path(__file__).parents[1]


def roll_out(producer: str, *kinds: str, **config: Any) -> dict[str, Any]:
    """Roll out tasks of `vf_talk.py` with `verifiers_rollouts.py`."""
    args = {"agent": {"runtime": {"type": "subprocess"}}, "taskset": {"kinds": kinds}}
    data = {"id": "vf_talk", "python": sys.executable, "args": args, **config}
    script = str(HERE / "verifiers_rollouts.py")
    command = [producer, script, json.dumps(data), str(len(kinds))]
    env = {**os.environ, "PYTHONPATH": str(HERE)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    made: dict[str, Any] = json.loads(done.stdout)
    return made


def test_a_taskset_is_rolled_out_with_its_rewards_and_every_call(producer: str) -> None:
    made = roll_out(producer, "single", "turns", "tool", "parallel", "raises")
    single, turns, tool, parallel, broken = rows = made["rows"]
    assert sum(row["served"] for row in rows) == made["requests"] == 1 + 2 + 2 + 5 + 1
    for row in (single, turns, tool, parallel):
        assert (row["error"], row["reward"], row["end_reason"]) == (None, 0.5, "answered")
        assert row["rewards"] == [["right", 1.0, 0.5]]
        assert row["metrics"] == {"turns": float(row["turns"])}
        assert row["final_response"] == "It is 8"
        assert row["usage"] > 10
    assert [m["role"] for m in single["messages"]] == ["user", "assistant"]
    assert turns["turn_of"] == [0, 1, 1, 2]
    assert [m["role"] for m in tool["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert tool["messages"][2]["name"] == "double"
    assert tool["tools"][0]["function"]["name"] == "double"
    # Three calls with the same prompt, then a conversation: each answer is in the row once.
    answers = [m["content"] for m in parallel["messages"] if m["role"] == "assistant"]
    assert sorted(answers) == ["It is 8", *["Wait."] * 4]
    assert len(parallel["contexts"]) == 5
    assert (broken["reward"], broken["cause"]) == (None, "task")
    assert "a broken reward" in broken["error"]


def test_a_published_taskset_is_rolled_out_unmodified(producer: str) -> None:
    """marble-v1 computes where a marble falls; it knows a solution of each task."""
    tasks = list(islice(MarbleTaskset(MarbleConfig(id="marble-v1")).load(), 2))
    solved, wrong = [json.dumps(task.data.solution) for task in tasks]
    wrong = wrong.replace('"rot": ', '"rot": 99', 1)
    answers = {task.data.prompt: text for task, text in zip(tasks, (solved, wrong), strict=True)}
    args = {"agent": {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}}
    made = roll_out(producer, "", "", id="marble-v1", args=args, tasks=2, answers=answers)
    assert [row["error"] for row in made["rows"]] == [None, None]
    rows = {row["messages"][0]["content"]: row for row in made["rows"]}
    assert [rows[task.data.prompt]["reward"] for task in tasks] == [1.0, 0.0]
    for row in made["rows"]:
        assert (row["end_reason"], row["turns"]) == ("answered", 1)
        assert [name for name, *_ in row["rewards"]] == ["answered_legally", "closeness", "scored"]


@pytest.mark.parametrize(
    ("kind", "limits", "end_reason"),
    [("turns", {"max_turns": 1}, "max_turns"), ("tool", {"max_tokens": 5}, "token_limit")],
)
def test_an_episode_that_a_limit_of_the_run_ends_is_graded(
    producer: str, kind: str, limits: dict[str, int], end_reason: str
) -> None:
    made = roll_out(producer, kind, limits=limits)
    (row,) = made["rows"]
    assert (row["error"], row["cause"], row["end_reason"]) == (None, None, end_reason)
    assert row["reward"] == 0.0
    assert row["served"] == made["requests"] == row["turns"] == 1


def test_an_episode_that_hangs_ends_at_the_limit_of_active_seconds(producer: str) -> None:
    (row,) = roll_out(producer, "waits", limits={"max_seconds": 2})["rows"]
    assert (row["cause"], row["reward"]) == ("verifier", None)
    assert "verifiers gave no reward: time_limit" in row["error"]


def test_a_lost_process_fails_its_rollouts_and_a_cancelled_one_ends_its_episode(
    producer: str,
) -> None:
    (row,) = roll_out(producer, "dies")["rows"]
    assert (row["cause"], row["reward"]) == ("sandbox_died", None)
    assert roll_out(producer, "waits", cancel_after=0.5)["cancelled"]


def test_what_verifiers_refuses_is_reported(producer: str) -> None:
    with pytest.raises(AssertionError, match=r"UserError: .*agents"):
        roll_out(producer, "single", args={"agents": {}})
