"""The environment: generated problems, or the GSM8K dataset if a hub is reachable."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import ClassVar, Literal

from environments.gsm8k_python.answers import MARK, is_correct, parse_answer, parse_number
from environments.gsm8k_python.problems import format_number, problems
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

Use the tool `python` to solve it. When you are sure, give the number on a separate line:
{MARK} NUMBER"""
HUB = "openai/gsm8k"
HUB_SPLITS = {"train": "train", "eval": "test"}


class Gsm8kPythonConfig(EnvConfig):
    """Keys beside those of every environment."""

    source: Literal["generated", "hub"] = "generated"
    """`hub` reads the real dataset from the Hugging Face hub; its `eval` is the test split."""
    toolsets: tuple[str, ...] | None = ()
    """Toolsets beside the tool `python`."""


class Gsm8kPython(Environment[Gsm8kPythonConfig]):
    """The reward is 1 for the right number, otherwise 0."""

    name: ClassVar[str] = "gsm8k_python"
    Config = Gsm8kPythonConfig

    def __init__(self, config: Gsm8kPythonConfig) -> None:
        super().__init__(config)
        self.endless = config.source == "generated"

    def tasks(self, split: str, seed: int) -> Iterable[Task]:
        """See `Environment.tasks`. The seed does not affect the dataset of the hub."""
        return from_hub(split) if self.config.source == "hub" else generated(split, seed)

    def tools(self, task: Task) -> Sequence[Tool]:
        """See `Environment.tools`."""
        return [python]

    async def compute_reward(self, task: Task, trajectory: Rollout, ctx: RolloutContext) -> Rewards:
        """See `Environment.compute_reward`. Only the last answer counts, not output of tools."""
        right = is_correct(
            parse_answer(trajectory.final_response), Fraction(task.metadata["answer"])
        )
        ran = sum(use.name == python.name and use.ok for use in trajectory.tool_calls)
        return Rewards([part("correct", float(right))], metrics={"programs": float(ran)})


def generated(split: str, seed: int) -> Iterator[Task]:
    """Yield generated problems endlessly."""
    for problem in problems(split, seed):
        answer = format_number(problem.answer)
        yield make_problem_task(problem.digest[:16], problem.text, answer, problem.family)


def from_hub(split: str) -> Iterator[Task]:
    """Yield the real dataset. Raises: UserError when the hub cannot be reached."""
    try:
        for index, row in enumerate(mapped_rows(f"{HUB}:main:{HUB_SPLITS[split]}")):
            answer = parse_number(str(row["answer"]).rpartition(MARK)[2])
            if answer is not None:
                yield make_problem_task(
                    f"{split}-{index}", str(row["question"]), format_number(answer), "gsm8k"
                )
    except UserError as error:
        raise UserError(f"{error}. Without a hub, leave env.config.source at generated") from error


def make_problem_task(task_id: str, question: str, answer: str, family: str) -> Task:
    """Make the task of a problem; its oracle runs Python and answers with the number."""
    ran = {"calls": [{"name": python.name, "arguments": {"code": f"print({answer})"}}]}
    return make_task(
        PROMPT.format(question=question),
        id=task_id,
        answer=answer,
        family=family,
        oracle=json.dumps([ran, f"{MARK} {answer}"]),
    )
