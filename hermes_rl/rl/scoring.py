"""Rewards of whole groups, where an environment compares its members (`score_group`)."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from hermes_rl import events as ev
from hermes_rl.config import RunConfig
from hermes_rl.episode import Stage, Tape
from hermes_rl.errors import HermesError, UserError, VerifierFault
from hermes_rl.identity import unit_seed
from hermes_rl.models.providers.routing import Common
from hermes_rl.ports import WorkItem
from hermes_rl.rl import faults
from hermes_rl.rl.environment import Environment
from hermes_rl.rl.episodes import Host, checked, open_host, theirs
from hermes_rl.rl.grader import Nowhere, begun, without_policy
from hermes_rl.rl.groups import Gathered, Scoring
from hermes_rl.rl.opening import Opened, env_rows
from hermes_rl.rl.view import Rollout
from hermes_rl.store.rundir import RunDir
from hermes_rl.tasks import Task
from hermes_rl.trajectory import fold
from hermes_rl.wiring import Workshop, open_workshop

CONCURRENCY = 16
"""Groups that are scored at once."""


def scores_groups(opened: Opened) -> bool:
    """Whether the environment has a `score_group` of its own."""
    return type(opened.env).score_group is not Environment.score_group


@dataclass(frozen=True)
class EnvScorer:
    """Asks an environment for the rewards of groups."""

    host: Host
    workshop: Workshop
    run_dir: RunDir

    async def score(self, batch: Sequence[Gathered]) -> list[Scoring | HermesError | None]:
        """The rewards of each group's members; None keeps their own, an error says why there are
        none now."""
        wanted = {m.trajectory_id for gathered in batch for m in gathered.members}
        rows = await asyncio.to_thread(_rows, self.run_dir, wanted)
        tasks = await asyncio.to_thread(self._tasks, {g.row_index for g in batch})
        return list(
            await asyncio.gather(*(self._score(g, tasks.get(g.row_index), rows) for g in batch))
        )

    def _tasks(self, wanted: set[int]) -> dict[int, Task]:
        stream = itertools.islice(env_rows(self.host.opened), max(wanted) + 1)
        parsed = ((row.index, row.parse().task) for row in stream if row.index in wanted)
        return {index: task for index, task in parsed if task is not None}

    async def _score(
        self, gathered: Gathered, task: Task | None, rows: Mapping[str, dict[str, Any]]
    ) -> Scoring | HermesError | None:
        valid = [m for m in gathered.members if m.why_invalid is None]
        if task is None or not valid:
            return None
        found = [rows[m.trajectory_id or ""] for m in valid]
        tape = Tape(Nowhere())
        tape.record(begun(found[0]))
        try:
            scores = await self._ask(gathered, task, [Rollout.of_row(r) for r in found], tape)
        except HermesError as error:
            return error
        if scores is None:
            return None
        books = fold([*tape.events, ev.Ended(finished_at=time.time(), end_reason="answered")])
        by_unit = dict(zip((m.unit_id for m in valid), scores, strict=True))
        return Scoring(
            by="score_group",
            rewards=[by_unit.get(m.unit_id) for m in gathered.members],
            calls=books.calls,
            usage=books.usage,
            cost_usd=books.cost_usd,
        )

    async def _ask(
        self, gathered: Gathered, task: Task, members: list[Rollout], tape: Tape
    ) -> list[float] | None:
        """Raises: VerifierFault, ModelError."""
        env = self.host.env
        item = _item(gathered, task, self.workshop.config.agent.seed)
        ctx = self.host.context(Stage(self.workshop, item, task, tape, self.workshop.budget()))
        given = await theirs(env, env.score_group, VerifierFault, task, members, ctx)
        if given is None:
            return None
        scores = list(given)
        if len(scores) != len(members):
            what = f"returned {len(scores)} rewards for {len(members)} members"
            raise VerifierFault(faults.wrong(env.name, env.score_group, what))
        pairs = zip(scores, members, strict=True)
        return [checked(env, env.score_group, one, member.turns).total for one, member in pairs]


def _item(gathered: Gathered, task: Task, seed: int) -> WorkItem:
    facts = gathered.facts
    return WorkItem(
        unit_id=facts["group_id"],
        group_id=facts["group_id"],
        epoch=0,
        attempt=0,
        repeat=0,
        row_index=gathered.row_index,
        task_id=facts["task_id"],
        task=task,
        task_hash=facts["task_hash"],
        seed=unit_seed(seed, facts["group_id"]),
    )


def _rows(run_dir: RunDir, wanted: set[str | None]) -> dict[str, dict[str, Any]]:
    """Rows of trajectories by their ids. Blocking."""
    import pyarrow.parquet as pq

    ids = [one for one in wanted if one is not None]
    found = {}
    for part in run_dir.parts("trajectories"):
        table = pq.read_table(part, filters=[("trajectory_id", "in", ids)])
        for row in table.to_pylist():
            metrics = {m["name"]: m["value"] for m in row["metrics"]}
            found[row["trajectory_id"]] = {**row, "metrics": metrics}
    return found


@asynccontextmanager
async def open_scorer(
    config: RunConfig, run_dir: RunDir, run_id: str, share: Common
) -> AsyncIterator[EnvScorer]:
    """The scorer of a run's environment; the policy itself is never asked.

    Args:
        share: limiters, and what is left of the run's budgets.

    Raises: UserError.
    """
    plain = without_policy(config)
    if plain.env is None:
        raise UserError("a run without an environment has no score_group")
    async with (
        open_workshop(plain, run_id=run_id, concurrency=CONCURRENCY, share=share) as workshop,
        open_host(plain.env) as host,
    ):
        yield EnvScorer(host, workshop, run_dir)
