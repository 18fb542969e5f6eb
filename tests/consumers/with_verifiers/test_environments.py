"""Environments with `load_environment` are rolled out here: those of two published packages,
unmodified, and those of `vf_games.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("name", "metric", "system"),
    [
        ("stardata.envs.constraint_gym", "prosody_reward", []),
        ("stardata.envs.constraint_gym:load_lipogram_env", "lipogram_reward", []),
        ("sophistry-bench-sprint", "aggregate_reward", ["system"]),
    ],
)
def test_a_published_environment_is_rolled_out_unmodified(
    request: pytest.FixtureRequest, name: str, metric: str, system: list[str]
) -> None:
    rows = roll_out(request, name, 2)
    assert len({row["messages"][0]["content"] for row in rows}) == 2
    for row in rows:
        assert (row["error"], row["end_reason"], row["turns"]) == (None, "answered", 1)
        assert row["served"] == 1
        assert 0 < row["reward"] == row["metrics"][metric] <= 1
        assert [message["role"] for message in row["messages"]] == [*system, "user", "assistant"]


@pytest.mark.parametrize("kind", ["game", "tool"])
def test_turns_and_tools_of_an_environment_are_in_the_row(
    request: pytest.FixtureRequest, kind: str
) -> None:
    (row,) = roll_out(request, f"vf_games:load_{kind}", 1)
    assert (row["error"], row["reward"], row["turns"], row["served"]) == (None, 1.0, 2, 2)
    assert row["turn_of"] == [0, 1, 1, 2]
    replied = row["messages"][2]
    if kind == "game":
        assert (replied["role"], replied["content"]) == ("user", "Less.")
    else:
        assert (replied["role"], replied["content"], replied["name"]) == ("tool", "8", "double")
        assert row["tools"][0]["function"]["name"] == "double"


def roll_out(request: pytest.FixtureRequest, name: str, tasks: int) -> list[dict[str, Any]]:
    producer = request.config.getoption("--producer")
    config = json.dumps({"id": name, "python": sys.executable})
    command = [producer, str(HERE / "verifiers_rollouts.py"), config, str(tasks)]
    env = {**os.environ, "PYTHONPATH": str(HERE)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return rows
