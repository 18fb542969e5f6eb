"""Two parties and a judge: `hermes-rl env process docs/examples/haggling.py`."""

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
    ToolResult,
    make_task,
    part,
    tool,
)

THINGS = ("bicycle", "desk lamp", "kettle", "raincoat", "chess set")


class Config(EnvConfig):
    """What `--set env.config.KEY=VALUE` may say."""

    sandboxed: bool = False  # a conversation: no commands, no files
    rounds: int = 4  # answers of the buyer at most
    system_prompt: str | None = (
        "You sell one thing. Agree on a price with the buyer, the higher the better, and stay "
        "polite. Call sell with the price when you agree."
    )


@tool(
    name="sell",
    description="Close the deal.",
    parameters={
        "type": "object",
        "properties": {"price": {"type": "integer", "description": "Euros."}},
        "required": ["price"],
    },
    toolset="shop",
)
async def sell(ctx: ToolContext, args: dict[str, Any]) -> ToolResult:
    """Remembers the deal: `ctx.env` is the rollout's `ctx.state`."""
    if args["price"] not in ctx.env["offers"]:  # else one could try prices until one is taken
        return ToolResult(text="The buyer did not offer that.", ok=False)
    ctx.env["sold"] = args["price"]
    return ToolResult(text="Sold.")


class Haggling(Environment[Config]):
    """The policy sells, a model buys, another one judges the manners."""

    name = "haggling"
    Config = Config
    endless = True
    uses = ("user", "judge")

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """What is sold, and for how much."""
        rng = random.Random(f"{split} {seed}")
        while True:
            thing, price = rng.choice(THINGS), rng.randint(20, 200)
            yield make_task(f"Hello! How much is the {thing}?", thing=thing, price=price)

    def tools(self, task: Task) -> list[Tool]:
        """The one way to close a deal."""
        return [sell]

    async def start(self, task: Task, ctx: RolloutContext) -> None:
        """The buyer's limit differs between the rollouts of a group, and is always the same."""
        ctx.state["most"] = task.metadata["price"] + ctx.rng.randint(-10, 10)
        ctx.state["offers"] = []

    async def reply(self, task: Task, trajectory: Rollout, ctx: RolloutContext) -> str | None:
        """The buyer's next words; None ends the rollout."""
        if "sold" in ctx.state or len(trajectory.answers) > self.config.rounds:
            return None
        persona = f"You buy a {task.metadata['thing']} for at most {ctx.state['most']} euros. "
        persona += 'Only what you would really pay is an offer. Make it as "I offer N euros".'
        text = await ctx.user.answer(persona, trajectory)
        found = [int(number) for number in re.findall(r"\bI offer (\d{1,4})\b", text)]
        ctx.state["offers"] = [price for price in found if price <= ctx.state["most"]]
        return text

    async def compute_reward(self, task: Task, trajectory: Rollout, ctx: RolloutContext) -> Rewards:
        """Most of it is the price; a judge rates manners. If it fails, there is no reward."""
        price = part("price", ctx.state.get("sold", 0) / ctx.state["most"], weight=0.8)
        if "sold" not in ctx.state:
            return Rewards([price])  # manners without a deal are worth nothing
        data = {"seller": "\n\n".join(trajectory.answers)}
        verdict = await ctx.judge.verdict("Was the seller polite?", data, choices=("yes", "no"))
        return Rewards([price, verdict.part("polite", {"yes": 1.0, "no": 0.0}, weight=0.2)])
