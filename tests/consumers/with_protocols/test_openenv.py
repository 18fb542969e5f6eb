"""OpenEnv's own server is rolled out here, and its own client plays an environment of hermes_rl."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import absent  # noqa: F401
import pytest
from conftest import serving
from openenv.core.client_types import StepResult
from openenv.core.generic_client import GenericEnvClient

HERE = Path(__file__).parents[1]
ROOT = HERE.parents[1]


def test_an_environment_on_openenvs_server_is_rolled_out_with_its_rewards(producer: str) -> None:
    with serving(sys.executable, str(HERE / "guess_server.py")) as url:
        command = [producer, str(HERE / "openenv_rollouts.py"), url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert (first["error"], second["error"]) == (None, None)
    assert (first["reward"], second["reward"]) == (1.0, 0.5)
    assert "A number from 10 to 99." in first["messages"][-2]["content"]
    replies = [m["content"] for m in second["messages"] if m["role"] == "user"][1:]
    assert [json.loads(replies[0])["text"], json.loads(replies[2])["text"]] == ["Less.", "Less."]
    assert replies[1].startswith("The action failed: ")  # `many` is not a number


@pytest.mark.parametrize("right", [True, False])
def test_openenvs_client_plays_an_environment_of_hermes_rl(producer: str, right: bool) -> None:
    served = [producer, "-m", "hermes_rl.rl.openenv_server", "docs/examples/math_tool.py"]
    with serving(*served, "--port", "0") as url:
        result = asyncio.run(play(url, right))
    assert result.done
    assert result.reward == float(right)


async def play(url: str, right: bool) -> StepResult[dict[str, Any]]:
    """Call the tool once, then answer."""
    async with GenericEnvClient(base_url=url) as client:
        result: StepResult[dict[str, Any]] = await client.reset(index=3)
        assert [t["function"]["name"] for t in result.observation["tools"]] == ["calculate"]
        question = result.observation["messages"][-1]["content"]
        parts = question.strip("?").replace(",", "").split()
        a, b, c = (int(part) for part in parts if part.isdigit())
        call = {"name": "calculate", "arguments": {"operation": "multiply", "a": a, "b": b}}
        result = await client.step({"content": "", "tool_calls": [call]})
        (message,) = result.observation["messages"]
        assert (message["role"], message["content"]) == ("tool", str(a * b))
        assert not result.done
        result = await client.step({"content": f"ANSWER {a * b + c if right else 0}"})
        assert (await client.state())["step_count"] == 2
        return result
