"""Questions about a file of numbers: one command in the sandbox, then an answer.

Which command answers which question is what has to be learned. `--model oracle` answers all.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator

from hermes_rl.rl import EnvConfig, Environment, Rollout, RolloutContext, Task, make_task

COMMANDS = {
    "the first number": "head -1 {}",
    "the last number": "tail -1 {}",
    "the smallest number": "sort -n {} | head -1",
    "the number of lines": "wc -l <{}",
}
QUESTIONS = (
    "What is {wanted} in {file}?",
    "Print {wanted} of {file}.",
    "In {file}, what is {wanted}?",
    "Read {file} and tell me {wanted}.",
)


def draw_file(split: str, rng: random.Random) -> tuple[str, list[int], dict[str, str]]:
    """Return the name of a file, its numbers and the answers to its questions, which all differ."""
    while True:
        number = rng.randint(100, 999)
        held_out = sum(map(int, str(number))) % 4 == 0
        numbers = rng.sample(range(10, 100), rng.randint(3, 6))
        found = [numbers[0], numbers[-1], min(numbers), len(numbers)]
        if held_out != (split == "train") and len(set(found)) == len(found):
            return (f"log{number}.txt", numbers, dict(zip(COMMANDS, map(str, found), strict=True)))


class Config(EnvConfig):
    """A short prompt, for a small model."""

    system_prompt: str | None = "Use the terminal once. Answer with a number."
    toolsets: tuple[str, ...] | None = ("terminal",)


class Numbers(Environment[Config]):
    """Four questions in turn, each about a new file. Held-out tasks have names of files, and mostly
    numbers, that training does not have."""

    name, Config = "numbers", Config
    endless = True

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """Draw tasks by split and seed. No file of one split has the name of one in the other."""
        rng = random.Random(f"{split} {seed}")
        for position in itertools.count():
            wanted = list(COMMANDS)[position % len(COMMANDS)]
            name, numbers, answers = draw_file(split, rng)
            call = {"name": "terminal", "arguments": {"command": COMMANDS[wanted].format(name)}}
            yield make_task(
                rng.choice(QUESTIONS).format(wanted=wanted, file=name),
                id=f"{split}-{seed}-{position}",
                files={name: "".join(f"{number}\n" for number in numbers)},
                answer=answers[wanted],
                limits={"max_turns": 3},
                oracle=json.dumps([{"calls": [call]}, answers[wanted]]),
            )

    async def compute_reward(self, task: Task, trajectory: Rollout, ctx: RolloutContext) -> float:
        """1 for the number alone, found with one command that ran."""
        called = [call.ok for call in trajectory.tool_calls] == [True]
        answer = (trajectory.final_response or "").strip()
        return float(called and answer == task.metadata["answer"])
