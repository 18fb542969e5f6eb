"""Arithmetic with a tool of our own: `hermes-rl env process docs/examples/math_tool.py`."""

import operator
import random
import re
from collections.abc import Iterator
from typing import Any

from hermes_rl.rl import (
    EnvConfig,
    Environment,
    Rewards,
    Rollout,
    RolloutContext,
    Task,
    Tool,
    ToolContext,
    ToolError,
    ToolResult,
    make_task,
    part,
    tool,
)

OPERATIONS = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul}
NUMBER = {"type": "integer", "minimum": -(10**12), "maximum": 10**12}


class Config(EnvConfig):
    """What `--set env.config.KEY=VALUE` may say."""

    sandboxed: bool = False  # no terminal and no files: only the calculator
    largest: int = 999
    system_prompt: str | None = "Solve the task with the calculator. End with: ANSWER <number>"


@tool(
    name="calculate",
    description="Calculate with two whole numbers.",
    parameters={
        "type": "object",
        "properties": {
            "operation": {"type": "string", "enum": list(OPERATIONS)},
            "a": NUMBER,
            "b": NUMBER,
        },
        "required": ["operation", "a", "b"],
    },
    toolset="math",
)
async def calculate(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    """The model sees the text; a ToolError is shown to it too, and ends nothing."""
    if args["operation"] not in OPERATIONS:
        raise ToolError(f"no operation {args['operation']!r}")
    ctx.env["used"] += 1  # the rollout's state: ctx.state below
    return ToolResult(text=str(OPERATIONS[args["operation"]](args["a"], args["b"])))


class MathTool(Environment[Config]):
    """Two operations in a row."""

    name = "math_tool"
    Config = Config
    endless = True

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Drawn by split and seed alone, so that a resumed run sees the same tasks."""
        rng = random.Random(f"{split} {seed}")
        while True:
            a, b, c = (rng.randint(100, self.config.largest) for _ in range(3))
            first = {"operation": "multiply", "a": a, "b": b}
            second = {"operation": "add", "a": a * b, "b": c}
            calls = [{"calls": [{"name": "calculate", "arguments": x}]} for x in (first, second)]
            yield make_task(
                f"What is {a} times {b}, plus {c}?",
                id=f"{a}*{b}+{c}",
                answer=a * b + c,
                oracle=repr([*calls, f"ANSWER {a * b + c}"]).replace("'", '"'),
            )

    def tools(self, task: Task) -> list[Tool]:
        """Beside the toolsets."""
        return [calculate]

    async def start(self, task: Task, ctx: RolloutContext) -> None:
        """Each rollout has a state of its own."""
        ctx.state["used"] = 0

    async def compute_reward(self, task: Task, trajectory: Rollout, ctx: RolloutContext) -> Rewards:
        """0.9 for the right number, 0.1 more for having used the calculator."""
        found = re.search(r"ANSWER\s+(-?\d+)\s*$", trajectory.final_response or "")
        correct = found is not None and found[1] == str(task.metadata["answer"])
        used = part("used_tool", correct and ctx.state["used"] > 0, weight=0.1)
        return Rewards([part("correct", correct, weight=0.9), used])
