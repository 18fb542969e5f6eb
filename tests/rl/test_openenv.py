"""OpenEnv's wire, both ways: our client rolls out an environment that our server offers.

tests/consumers/with_protocols has the same with the package `openenv` on the other side.
"""

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, WSServerHandshakeError

from hermes_rl.errors import UserError
from hermes_rl.rl import arun_trial, open_openenv_server, parse_action

ROOT = Path(__file__).parents[2]
MATH = str(ROOT / "docs/examples/math_tool.py")
CLIENT = "hermes_rl.rl.openenv:OpenEnv"


def solution(first: dict[str, Any]) -> list[str]:
    """The actions that solve a task of math_tool, from its first observation."""
    parts = first["messages"][-1]["content"].replace(",", "").replace("?", "").split()
    a, b, c = (int(part) for part in parts if part.isdigit())
    calls = [("multiply", a, b), ("add", a * b, c)]
    steps = [
        {"content": "", "tool_calls": [{"name": "calculate", "arguments": arguments}]}
        for arguments in ({"operation": o, "a": x, "b": y} for o, x, y in calls)
    ]
    return [json.dumps(step) for step in steps] + [f"ANSWER {a * b + c}"]


async def first_of(url: str, index: int) -> dict[str, Any]:
    async with ClientSession() as session, session.ws_connect(f"{url}/ws") as socket:
        await socket.send_json({"type": "reset", "data": {"index": index}})
        answer = await socket.receive_json()
    observation: dict[str, Any] = answer["data"]["observation"]
    return observation


async def test_a_served_environment_is_rolled_out_by_the_client_and_graded() -> None:
    async with open_openenv_server(MATH) as url:
        played = [solution(await first_of(url, index)) for index in (0, 1)]
        played[1][-1] = "ANSWER 0"
        rows = await arun_trial(
            CLIENT,
            tasks=2,
            config={"base_url": url, "observe": False, "resets": [{"index": 0}, {"index": 1}]},
            solution=lambda task: json.dumps(["start", *played[task.metadata["reset"]["index"]]]),
        )
    assert [row.cause for row in rows] == [None, None], rows[0].error
    assert [row.reward for row in rows] == [1.0, 0.0]
    seen = json.loads(json.loads(rows[0].messages[3])["content"])
    assert seen["messages"][-1]["content"].startswith("What is ")
    assert seen["tools"][0]["function"]["name"] == "calculate"


async def test_mistakes_of_a_client_are_answered_and_end_nothing() -> None:
    async with (
        open_openenv_server(MATH) as url,
        ClientSession() as session,
        session.ws_connect(f"{url}/ws") as socket,
    ):

        async def ask(text: str) -> dict[str, Any]:
            await socket.send_str(text)
            answer: dict[str, Any] = await socket.receive_json()
            return answer

        for wrong, code in {
            "no JSON": "INVALID_JSON",
            '["reset"]': "INVALID_JSON",
            '{"type": "reset", "data": [1]}': "INVALID_JSON",
            "[" * 100_000: "INVALID_JSON",
            '{"type": "dance"}': "UNKNOWN_TYPE",
            '{"type": "step", "data": {"content": "x"}}': "VALIDATION_ERROR",
            '{"type": "reset", "data": {"index": -1}}': "VALIDATION_ERROR",
            '{"type": "reset", "data": {"index": "x"}}': "VALIDATION_ERROR",
        }.items():
            answer = await ask(wrong)
            assert (answer["type"], answer["data"]["code"]) == ("error", code)
        answer = await ask('{"type": "reset", "data": {"index": 0}}')
        assert answer["data"]["done"] is False
        answer = await ask('{"type": "step", "data": {"tool_calls": [1]}}')
        assert answer["data"]["code"] == "VALIDATION_ERROR"
        answer = await ask('{"type": "step", "data": {"content": "ANSWER 0"}}')
        assert (answer["data"]["done"], answer["data"]["reward"]) == (True, 0.0)
        assert (await ask('{"type": "state"}'))["data"] == {"step_count": 1}


SLOW = """
import time
from hermes_rl.rl import EnvConfig, Environment, make_task

class Config(EnvConfig):
    sandboxed: bool = False
    toolsets: tuple[str, ...] | None = ()

class Slow(Environment[Config]):
    name, Config = "slow", Config
    def tasks(self, split, seed):
        for n in range(3):
            time.sleep(0.2)
            yield make_task(f"Number {n}.", id=f"n{n}")
    async def compute_reward(self, task, trajectory, ctx):
        return 1.0
"""


async def test_clients_start_at_the_same_time_and_web_pages_cannot(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    async with open_openenv_server(f"{tmp_path / 'slow.py'}:Slow") as url:
        first = await asyncio.gather(*(first_of(url, index) for index in (2, 1, 2)))
        async with ClientSession() as session:
            with pytest.raises(WSServerHandshakeError, match="403"):
                await session.ws_connect(f"{url}/ws", headers={"Origin": "http://a.example"})
    assert [one["messages"][-1]["content"] for one in first] == [f"Number {n}." for n in (2, 1, 2)]


def test_a_mistake_on_the_command_line_is_one_line() -> None:
    command = [sys.executable, "-m", "hermes_rl.rl.openenv_server"]
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        for more, text in [(["no_such"], "unknown environment"), ([MATH, "--port", f"{port}"], "")]:
            done = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr.count("\n")) == (2, 1)
            assert (text or f"127.0.0.1:{port} cannot be used") in done.stderr


async def test_a_server_that_is_not_there_is_one_line() -> None:
    with pytest.raises(UserError, match="base_url must be that of a running OpenEnv server"):
        await arun_trial(CLIENT, "noop", tasks=1, config={"base_url": "http://127.0.0.1:9"})


@pytest.mark.parametrize(
    ("text", "required", "action"),
    [
        ('{"a": 1}', ["a", "b"], {"a": 1}),
        ('```json\n{"a": 1}\n```', [], {"a": 1}),
        ("plain", ["guess"], {"guess": "plain"}),
        ("7", ["guess"], {"guess": 7}),
        ("plain", [], None),
    ],
)
def test_actions_are_read(text: str, required: list[str], action: dict[str, Any] | None) -> None:
    if action is not None:
        assert parse_action(text, {"required": required}) == action
    else:
        with pytest.raises(ValueError, match="not a JSON object"):
            parse_action(text, {"required": required})
