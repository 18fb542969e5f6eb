"""The environment: problems by seed, or the GSM8K data set itself where a hub is reachable."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import ClassVar, Literal

from environments.gsm8k_python.answers import MARK, number, same, stated
from environments.gsm8k_python.problems import problems, written
from environments.gsm8k_python.tools import python
from hermes_rl.errors import UserError
from hermes_rl.rl import (
    EnvConfig,
    Environment,
    Rewards,
    Rollout,
    RolloutContext,
    Task,
    Tool,
    make_task,
    part,
)
from hermes_rl.sources import mapped_rows

PROMPT = f"""{{question}}

Work it out with the tool `python`. When you are sure, answer with the number on a line of its own:
{MARK} NUMBER"""
HUB = "openai/gsm8k"
HUB_SPLITS = {"train": "train", "eval": "test"}


class Gsm8kPythonConfig(EnvConfig):
    """Beside the keys of every environment."""

    source: Literal["generated", "hub"] = "generated"
    """`hub` reads the real data set from the Hugging Face hub; its `eval` is the test split."""
    toolsets: tuple[str, ...] | None = ()
    """Beside the tool `python`."""


class Gsm8kPython(Environment[Gsm8kPythonConfig]):
    """The right number is 1, anything else 0."""

    name: ClassVar[str] = "gsm8k_python"
    Config = Gsm8kPythonConfig

    def __init__(self, config: Gsm8kPythonConfig) -> None:
        super().__init__(config)
        self.endless = config.source == "generated"

    def tasks(self, split: str, seed: int) -> Iterable[Task]:
        """See `Environment.tasks`. In the hub's data set the seed changes nothing."""
        return from_hub(split) if self.config.source == "hub" else generated(split, seed)

    def tools(self, task: Task) -> Sequence[Tool]:
        """See `Environment.tools`."""
        return [python]

    async def compute_reward(self, task: Task, trajectory: Rollout, ctx: RolloutContext) -> Rewards:
        """See `Environment.compute_reward`. Only the last answer counts: not what a tool printed,
        not what stands in the workspace."""
        right = same(stated(trajectory.final_response), Fraction(task.metadata["answer"]))
        ran = sum(use.name == python.name and use.ok for use in trajectory.tool_calls)
        return Rewards([part("correct", float(right))], metrics={"programs": float(ran)})


def generated(split: str, seed: int) -> Iterator[Task]:
    """Problems without end."""
    for problem in problems(split, seed):
        answer = written(problem.answer)
        yield as_task(problem.digest[:16], problem.text, answer, problem.family)


def from_hub(split: str) -> Iterator[Task]:
    """The real data set. Raises: UserError when the hub cannot be reached."""
    try:
        for index, row in enumerate(mapped_rows(f"{HUB}:main:{HUB_SPLITS[split]}")):
            answer = number(str(row["answer"]).rpartition(MARK)[2])
            if answer is not None:
                yield as_task(f"{split}-{index}", str(row["question"]), written(answer), "gsm8k")
    except UserError as error:
        raise UserError(f"{error}. Without a hub, leave env.config.source at generated") from error


def as_task(task_id: str, question: str, answer: str, family: str) -> Task:
    """One problem as a task; its oracle runs Python and states the number."""
    ran = {"calls": [{"name": python.name, "arguments": {"code": f"print({answer})"}}]}
    return make_task(
        PROMPT.format(question=question),
        id=task_id,
        answer=answer,
        family=family,
        oracle=json.dumps([ran, f"{MARK} {answer}"]),
    )
