"""A taskset and a harness of verifiers 0.4: one task for each way to call a model."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.runtimes import ProgramResult

__all__ = ["TalkHarness", "TalkTaskset"]

TOOL = {
    "type": "function",
    "function": {"name": "double", "description": "Double it.", "parameters": {"type": "object"}},
}
CALL = {"calls": [{"name": "double", "arguments": {"n": 4}}]}


class TalkData(vf.TaskData):
    kind: str


class TalkTask(vf.Task[TalkData]):
    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        if self.data.kind == "raises":
            raise RuntimeError("a broken reward")
        return float((trace.last_reply or "").endswith("8"))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class TalkConfig(vf.TasksetConfig):
    kinds: tuple[str, ...] = ()
    """Any of single, turns, tool, parallel, raises, waits, dies."""


class TalkTaskset(vf.Taskset[TalkTask, TalkConfig]):
    def load(self) -> Iterator[TalkTask]:
        for kind in self.config.kinds:
            steps = [CALL if kind == "tool" else {"text": "Wait."}, {"text": "It is 8"}]
            script = json.dumps(steps[1:] if kind in ("single", "raises") else steps)
            yield TalkTask(TalkData(prompt=f"{kind}\nSCRIPT: {script}\n", kind=kind))


class TalkHarnessConfig(HarnessConfig):
    id: str = "vf_talk"


class TalkHarness(vf.Harness[TalkHarnessConfig]):
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
        data: TalkData,
    ) -> ProgramResult:
        messages: list[dict[str, Any]] = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(timeout=60) as http:

            async def call(messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
                answer = await http.post(
                    f"{endpoint}/chat/completions",
                    json={"model": ctx.model, "messages": messages, **fields},
                    headers={"Authorization": f"Bearer {secret}"},
                )
                answer.raise_for_status()
                message: dict[str, Any] = answer.json()["choices"][0]["message"]
                return message

            if data.kind == "waits":
                await asyncio.sleep(600)
            if data.kind == "dies":
                import os

                os._exit(3)
            if data.kind == "parallel":
                await asyncio.gather(*(call(messages) for _ in range(3)))
            tools = {"tools": [TOOL]} if data.kind == "tool" else {}
            messages.append(await call(messages, temperature=0.5, **tools))
            if data.kind == "tool":
                (made,) = messages[-1]["tool_calls"]
                n = json.loads(made["function"]["arguments"])["n"]
                messages.append({"role": "tool", "tool_call_id": made["id"], "content": str(2 * n)})
                await call(messages, **tools)
            elif data.kind in ("turns", "parallel"):
                await call([*messages, {"role": "user", "content": "And?"}])
        return ProgramResult(0, "", "")
