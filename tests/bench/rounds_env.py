"""Conversations of three answers, graded by the last one: the work for the comparison with
Atropos."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from hermes_rl.rl import EnvConfig, Environment, Rollout, RolloutContext, Task, make_task

ROUNDS = 3


class RoundsConfig(EnvConfig):
    sandboxed: bool = False


class Rounds(Environment[RoundsConfig]):
    name = "rounds"
    Config = RoundsConfig
    endless = True

    def tasks(self, split: str, seed: int) -> Iterable[Task]:
        number = 0
        while True:
            script = json.dumps([f"answer {turn} of {number}" for turn in range(ROUNDS)])
            yield make_task(f"Number {number}.\nSCRIPT: {script}", id=f"n{number}", number=number)
            number += 1

    async def reply(self, task: Task, trajectory: Rollout, ctx: RolloutContext) -> str | None:
        return "Continue." if len(trajectory.answers) < ROUNDS else None

    async def compute_reward(self, task: Task, trajectory: Rollout, ctx: RolloutContext) -> float:
        answers: Sequence[str] = trajectory.answers
        return float(answers[-1] == f"answer {ROUNDS - 1} of {task.metadata['number']}")
