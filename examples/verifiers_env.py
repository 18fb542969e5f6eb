"""An environment of hermes_rl as an environment of verifiers: for its EnvServer, eval and prime-rl.

    python -m hermes_rl.rl.openenv_server my_env --port 8000
    PYTHONPATH=examples eval verifiers_env --env.taskset.base-url http://127.0.0.1:8000 ...

The rollouts run in that server, with its tools, sandboxes and rewards; the harness here passes each
model request on to verifiers, which records the tokens. hermes_rl itself is not needed here.
"""

import json
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from aiohttp import ClientSession
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.runtimes import ProgramResult

__all__ = ["HermesHarness", "HermesTaskset"]


class HermesConfig(vf.TasksetConfig):
    base_url: str = "http://127.0.0.1:8000"
    """Of the server."""
    tasks: int = 100
    """How many of the environment's tasks, from the first one on."""


class HermesData(vf.TaskData):
    base_url: str
    position: int


class HermesTask(vf.Task[HermesData]):
    @vf.reward
    async def environment(self, trace: vf.Trace) -> float:
        """What the environment computed."""
        return float(trace.info["reward"])


class HermesTaskset(vf.Taskset[HermesTask, HermesConfig]):
    def load(self) -> Iterator[HermesTask]:
        for position in range(self.config.tasks):
            data = HermesData(prompt="", base_url=self.config.base_url, position=position)
            yield HermesTask(data, self.config.task)


class HermesHarnessConfig(HarnessConfig):
    id: str = "verifiers_env"


class HermesHarness(vf.Harness[HermesHarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: vf.Trace,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: HermesData,
    ) -> ProgramResult:
        async with ClientSession() as http, http.ws_connect(f"{data.base_url}/ws") as socket:

            async def exchange(kind: str, form: dict[str, Any]) -> dict[str, Any]:
                await socket.send_json({"type": kind, "data": form})
                answer = await socket.receive_json()
                if answer["type"] == "error":
                    raise RuntimeError(answer["data"]["message"])
                return answer["data"]

            messages: list[dict[str, Any]] = []
            result = await exchange("reset", {"index": data.position})
            while not result["done"]:
                messages += result["observation"]["messages"]
                body = {"model": ctx.model, "messages": messages}
                if tools := result["observation"]["tools"]:
                    body["tools"] = tools
                headers = {"Authorization": f"Bearer {secret}"}
                async with http.post(
                    f"{endpoint}/chat/completions", json=body, headers=headers
                ) as answer:
                    answer.raise_for_status()
                    message = (await answer.json())["choices"][0]["message"]
                messages.append(message)
                calls = [
                    {"id": call["id"], **call["function"]}
                    for call in message.get("tool_calls") or []
                ]
                step = {"content": message.get("content") or "", "tool_calls": calls}
                result = await exchange("step", step)
            trace.info["reward"] = result["reward"]
        return ProgramResult(0, json.dumps({"reward": result["reward"]}), "")
