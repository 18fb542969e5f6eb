"""An environment whose reward burns a processor; for rl_lag.py."""

import time
from collections.abc import Iterator

from hermes_rl.rl import EnvConfig, Environment, Rollout, RolloutContext, Task, make_task


def burn(seconds: float) -> float:
    """Count for so many seconds of processor time."""
    turns, end = 0, time.process_time() + seconds
    while time.process_time() < end:
        turns += 1
    return float(turns > 0)


class Config(EnvConfig):
    """How dear the reward is."""

    seconds: float = 0.1
    here: bool = False
    """Compute on the event loop, as one should not: what the row is compared with."""


class Burning(Environment[Config]):
    """Answers are worth nothing but the time of their reward."""

    name = "burning"
    Config = Config
    endless = True

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Numbered."""
        number = 0
        while True:
            yield make_task(f"Task {number}: run the steps.", toolsets=["terminal"])
            number += 1

    async def compute_reward(self, task: Task, trajectory: Rollout, ctx: RolloutContext) -> float:
        """1."""
        if self.config.here:
            return burn(self.config.seconds)
        return await ctx.cpu(burn, self.config.seconds)
