"""The environment: repositories with bugs, graded by the results of calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from typing import ClassVar

from environments.swe_bugs.catalogue import CALLS, right_digests
from environments.swe_bugs.repository import Repository, repositories
from hermes_rl.rl import (
    EnvConfig,
    Environment,
    Rewards,
    Rollout,
    RolloutContext,
    Task,
    make_task,
    part,
)

PROMPT = """\
This repository contains a small Python library, toolbox. Users report:

{reports}

The docstrings say what the functions are meant to do. Find the cause of each report in toolbox/ and
fix it there. A report is only one example: other calls give wrong results too. Everything else must
keep working. Run the visible tests with

    python3 -m unittest discover -s tests -t .

Hidden tests will be run as well."""

MODULE_S = 20.0
"""Time limit for the calls of one module, in the grading sandbox."""


class SweBugs(Environment[EnvConfig]):
    """The reward is the share of the fixed bugs, if no other module is broken."""

    name: ClassVar[str] = "swe_bugs"
    endless = True

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        """See `Environment.tasks`."""
        return (as_task(repository) for repository in repositories(split, seed))

    async def compute_reward(self, task: Task, trajectory: Rollout, ctx: RolloutContext) -> Rewards:
        """See `Environment.compute_reward`. The sandbox gets the calls, never the right results."""
        modules, fixed = task.metadata["modules"], [b["module"] for b in task.metadata["bugs"]]
        calls = {m: [[c.function, c.arguments] for c in CALLS[m]] for m in modules}
        program = resources.files(__package__).joinpath("answers.py").read_bytes()
        runs = [f'timeout {MODULE_S:g} python3 -I "$VERIFY/answers.py" {m}' for m in modules]
        result = await ctx.grading.run(
            "\n".join([*runs, "true"]),
            files={"answers.py": program, "calls.json": json.dumps(calls)},
            timeout_s=MODULE_S * (len(modules) + 1),
        )
        reported = [line.split(" ") for line in result.report.splitlines()]
        # Several lines for a module would be guesses.
        right = {
            m: [line for line in reported if line[0] == m] == [[m, *right_digests(m)]]
            for m in modules
        }
        broken = [m for m in modules if m not in fixed and not right[m]]
        parts = [
            part(f"fixed {m}", float(right[m] and not broken), weight=1 / len(fixed)) for m in fixed
        ]
        return Rewards(parts, metrics={"bugs": len(fixed), "broken": len(broken)})


def as_task(repository: Repository) -> Task:
    """Make the task of a repository; its oracle writes the correct modules."""
    reports = "\n".join(f"{n}. {line}" for n, line in enumerate(repository.reports, 1))
    return make_task(
        PROMPT.format(reports=reports),
        id=repository.name,
        files=repository.files,
        setup=repository.setup,
        oracle=repository.patched([b.module for b in repository.bugs]),
        requires=["git", "python3"],
        modules=list(repository.modules),
        bugs=[
            {"module": b.module, "kind": b.mutant.kind, "line": b.mutant.line, "bug": b.name}
            for b in repository.bugs
        ],
    )
