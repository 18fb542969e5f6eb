"""The environment: a guest, the bookings of a restaurant, and the rules for the agent."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from environments.dialogue_booking import guest, rules
from environments.dialogue_booking.tools import TOOLS
from environments.dialogue_booking.wishes import make_scene_task, scenes
from hermes_rl.errors import UserError
from hermes_rl.rl import EnvConfig, Environment, Rewards, Rollout, RolloutContext, Task, Tool, part

_NEW_CODES = 12
"""Codes for the bookings that a rollout makes."""
_MANNERS_QUESTION = (
    "Was the restaurant's side polite, brief and clear towards the guest throughout?"
)


class DialogueBookingConfig(EnvConfig):
    """Keys beside those of every environment."""

    sandboxed: bool = False
    """A conversation needs no sandbox."""
    manners: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Share of the reward that a judge gives for the tone. Above 0, the run must name a judge."""


class DialogueBooking(Environment[DialogueBookingConfig]):
    """The reward is the share of the fulfilled wishes, if no rule was broken."""

    name: ClassVar[str] = "dialogue_booking"
    Config = DialogueBookingConfig
    endless = True
    can_use = ("user",)

    def __init__(self, config: DialogueBookingConfig) -> None:
        super().__init__(config)
        self.uses = ("judge",) if config.manners else ()

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """See `Environment.tasks`."""
        return (make_scene_task(scene) for scene in scenes(split, seed))

    def tools(self, task: Task) -> Sequence[Tool]:
        """See `Environment.tools`."""
        return TOOLS

    async def start(self, task: Task, ctx: RolloutContext) -> None:
        """Copy the bookings, and draw the codes of new bookings and the guest's tone."""
        taken = {b["code"] for b in task.metadata["bookings"]}
        codes = [f"{letter}{n}" for letter in "ACFHKPRTWX" for n in range(10, 100)]
        ctx.state["bookings"] = copy.deepcopy(task.metadata["bookings"])
        ctx.state["codes"] = ctx.rng.sample([c for c in codes if c not in taken], _NEW_CODES)
        ctx.state["handed_over"] = []
        ctx.state["guest"] = {"wish": 0, "answers": 0, "tone": ctx.rng.randrange(3)}

    async def reply(self, task: Task, trajectory: Rollout, ctx: RolloutContext) -> str | None:
        """See `Environment.reply`: by a model if the run names one, otherwise by rules."""
        wishes = task.metadata["wishes"]
        try:
            user = ctx.user
        except UserError:  # the run names none
            return guest.reply(ctx.state["guest"], wishes, trajectory.final_response or "")
        if len(trajectory.answers) > guest.PATIENCE:
            return None
        text = await user.answer(guest.persona(task.metadata["guest"], wishes), trajectory)
        return None if guest.END in text or not text.strip() else text

    async def compute_reward(self, task: Task, trajectory: Rollout, ctx: RolloutContext) -> Rewards:
        """See `Environment.compute_reward`."""
        about = task.metadata
        met, spoilt = rules.check_wishes(about["wishes"], about["bookings"], ctx.state)
        broken = rules.violations(trajectory, about["bookings"], about["today"])
        share = 0.0 if broken or spoilt else sum(met) / len(met)
        detail = json.dumps({"met": met, "spoilt": spoilt, "broken": broken})
        weight = self.config.manners
        parts = [part("wishes", share, weight=1 - weight, detail=detail)]
        if weight and share:
            data = {"restaurant": "\n\n".join(trajectory.answers)}
            verdict = await ctx.judge.verdict(_MANNERS_QUESTION, data)
            parts.append(verdict.part("manners", {"yes": 1, "no": 0}, weight=weight * share))
        counts: dict[str, Any] = {"broken_rules": len(broken), "spoilt": spoilt}
        return Rewards(parts, metrics={k: float(v) for k, v in counts.items()})
