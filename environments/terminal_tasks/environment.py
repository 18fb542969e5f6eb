"""The environment: rows of the bundled dataset, graded by their verifiers."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from random import Random
from typing import ClassVar, Literal

from hermes_rl.errors import UserError
from hermes_rl.rl import EnvConfig, Environment, Rewards, Rollout, RolloutContext, Task, part
from hermes_rl.sources import read_tasks
from hermes_rl.tasks import TaskRow

DATASET = "terminal_tasks"
EVAL_OF = 4
"""One task in this many belongs to the split `eval`, by the hash of its id."""


class TerminalTasksConfig(EnvConfig):
    """Keys beside those of every environment."""

    categories: tuple[str, ...] = ()
    """Categories to use, such as `json` or `bugfix`; () is all of them."""
    difficulty: tuple[Literal["easy", "medium", "hard"], ...] = ("easy", "medium", "hard")


class TerminalTasks(Environment[TerminalTasksConfig]):
    """The reward is the result of the task's verifier, in the grading sandbox."""

    name: ClassVar[str] = "terminal_tasks"
    Config = TerminalTasksConfig

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """See `Environment.tasks`: each task of the split once, in the seed's order."""
        rows = [row for row in read_tasks(DATASET) if row.task is not None]
        known = sorted({row.task.metadata["category"] for row in rows if row.task})
        for name in self.config.categories:
            if name not in known:
                raise UserError(f"no category {name!r} (known: {', '.join(known)})")
        Random(f"{self.name}/{seed}").shuffle(rows)
        for row in rows:
            if row.task is not None and split_of(row) == split and self._wanted(row.task):
                yield row.task

    def _wanted(self, task: Task) -> bool:
        config, about = self.config, task.metadata
        fits = not config.categories or about["category"] in config.categories
        return fits and about["difficulty"] in config.difficulty

    async def compute_reward(self, task: Task, trajectory: Rollout, ctx: RolloutContext) -> Rewards:
        """See `Environment.compute_reward`. Some verifiers give partial rewards."""
        score = await ctx.grading.verify(task.verify)
        return Rewards([part("verify", score)], metrics={"commands": len(trajectory.tool_calls)})


def split_of(row: TaskRow) -> str:
    """Return `train` or `eval` by the id, so that a corrected task stays in its split."""
    return (
        "eval" if int(sha256(row.raw_id.encode()).hexdigest()[:8], 16) % EVAL_OF == 0 else "train"
    )
