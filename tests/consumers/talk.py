"""An environment whose conversations fork under Qwen 3's template, played from scripts.

Of each four rollouts, the first and the third get a second question, before which the template
drops the reasoning of the earlier answers. The first two get reward 1.
"""

import json
from collections.abc import Iterator
from typing import Any

from hermes_rl.rl import (
    EnvConfig,
    Environment,
    Message,
    Rollout,
    RolloutContext,
    Task,
    Tool,
    ToolContext,
    ToolResult,
    UserMessage,
    make_task,
    tool,
)


class Config(EnvConfig):
    sandboxed: bool = False
    toolsets: tuple[str, ...] | None = ()


PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@tool(name="double", description="Double it.", parameters=PARAMETERS, toolset="talk")
async def double(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    return ToolResult(text=str(2 * args["n"]))


class Talk(Environment[Config]):
    name = "talk"
    Config = Config
    endless = True

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        n = 0
        while True:
            call = {"name": "double", "arguments": {"n": n}}
            steps = [
                {"reasoning": f"A tool: {n}.", "calls": [call]},
                {"reasoning": "It is ñ 🙂.", "text": f"It is {2 * n}."},
                {"reasoning": "Again.", "text": "Yes."},
            ]
            script = json.dumps(steps, ensure_ascii=False)
            yield make_task(f"Double {n}.\nSCRIPT: {script}\n", id=f"n{n}")
            n += 1

    def tools(self, task: Task) -> list[Tool]:
        return [double]

    async def reply(self, task: Task, trajectory: Rollout, ctx: RolloutContext) -> Message | None:
        over = trajectory.turns > 2 or ctx.member % 2
        return None if over else UserMessage(content="Are you sure?")

    async def compute_reward(self, task: Task, trajectory: Rollout, ctx: RolloutContext) -> float:
        return float(ctx.member < 2)
