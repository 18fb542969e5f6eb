"""Rewards of whole groups, where an environment compares its members (`score_group`)."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from hermes_rl.config import RunConfig
from hermes_rl.episode import Stage, Tape
from hermes_rl.errors import CAUSES, HermesError, UserError, VerifierFault, cause_of
from hermes_rl.identity import unit_seed
from hermes_rl.models.errors.classify import scrub
from hermes_rl.models.providers.routing import Common
from hermes_rl.ports import Recorder
from hermes_rl.rl import faults
from hermes_rl.rl.aside import books_of, item_of, tape_of
from hermes_rl.rl.environment import Environment
from hermes_rl.rl.episodes import Host, OpensHost, checked, open_host, theirs
from hermes_rl.rl.grader import without_policy
from hermes_rl.rl.groups import SCORED_AT_ONCE, Gathered, Scoring
from hermes_rl.rl.opening import Opened, env_rows
from hermes_rl.rl.rewards import Rewards
from hermes_rl.rl.tasks_at import TasksAt
from hermes_rl.rl.view import Rollout
from hermes_rl.store.rundir import RunDir
from hermes_rl.tasks import Task
from hermes_rl.wiring import Workshop, open_workshop
from hermes_rl.workspaces import WORKSPACES, Workspaces

_ROLLED = ("trajectories", "failures")
READY = 64
"""Groups whose rollouts are in memory together."""


def scores_groups(opened: Opened) -> bool:
    """Whether the environment has a `score_group` of its own."""
    return type(opened.env).score_group is not Environment.score_group


@dataclass(frozen=True)
class Ready:
    """A group with what its environment is shown of it."""

    gathered: Gathered
    task: Task | None
    rows: tuple[dict[str, Any], ...]
    """Of its members with a reward, in their order."""


@dataclass
class Rows:
    """Finds rows of rollouts by their ids, one part in memory at a time. Blocking.

    Those that a regrade judged for the first time stand in `failures`. Memory: an entry for each
    row of the run.
    """

    run_dir: RunDir
    _part_of: dict[str, Path] = field(default_factory=dict)

    def of(self, wanted: Collection[str]) -> dict[str, dict[str, Any]]:
        """The rows that are published."""
        import pyarrow.parquet as pq

        if not self._part_of:
            for part in (p for t in _ROLLED for p in self.run_dir.parts(t)):
                ids = pq.read_table(part, columns=["trajectory_id"])["trajectory_id"].to_pylist()
                self._part_of |= dict.fromkeys(ids, part)
        found, kept = {}, Workspaces(self.run_dir.path / WORKSPACES)
        parts = {self._part_of[one] for one in wanted if one in self._part_of}
        for part in sorted(parts):
            table = pq.read_table(part, filters=[("trajectory_id", "in", list(wanted))])
            for row in table.to_pylist():
                metrics = {m["name"]: m["value"] for m in row["metrics"]}
                rolled = kept.as_rolled({**row, "metrics": metrics})
                found[row["trajectory_id"]] = rolled
        return found


@dataclass(frozen=True)
class EnvScorer:
    """Asks an environment for the rewards of groups."""

    host: Host
    workshop: Workshop
    rows: Rows
    tasks: TasksAt

    @classmethod
    def over(cls, host: Host, workshop: Workshop, run_dir: RunDir) -> EnvScorer:
        """A scorer of the groups of a run."""
        tasks = TasksAt(functools.partial(env_rows, host.opened))
        return cls(host, workshop, Rows(run_dir), tasks)

    async def stream(self, groups: Sequence[Gathered]) -> AsyncGenerator[Ready, None]:
        """What is needed to score these groups, some of them in memory at a time.

        Args:
            groups: in the order of the dataset.
        """
        for at in range(0, len(groups), READY):
            for ready in await asyncio.to_thread(self._ready, groups[at : at + READY]):
                yield ready

    def _ready(self, batch: Sequence[Gathered]) -> list[Ready]:
        valid = {
            g.facts["group_id"]: [m for m in g.members if m.why_invalid is None] for g in batch
        }
        rows = self.rows.of({m.trajectory_id or "" for found in valid.values() for m in found})
        tasks = self.tasks.of({gathered.row_index for gathered in batch})
        ready = []
        for gathered in batch:
            lazy = tasks.get(gathered.row_index)
            wanted = [m.trajectory_id or "" for m in valid[gathered.facts["group_id"]]]
            if all(one in rows for one in wanted):  # else it waits until they are published
                own = tuple(rows[one] for one in wanted)
                ready.append(Ready(gathered, lazy.parse().task if lazy else None, own))
        return ready

    async def score(self, ready: Ready, recorder: Recorder) -> Scoring:
        """The rewards of a group's members; `error` says why there are none now.

        Args:
            recorder: takes the events of its calls.

        Raises: DiskFull of the recorder.
        """
        if ready.task is None or not ready.rows:
            return Scoring()
        tape = tape_of(ready.rows[0], recorder)
        given, error, stop = None, None, None
        try:
            given = await self._ask(ready, ready.task, tape)
        except HermesError as fault:
            error = scrub(self.workshop.scrub(f"{type(fault).__name__}: {fault}"))
            stop = fault if CAUSES[cause_of(fault)].breaker else None
        books = books_of(tape)
        scored = None if given is None else _in_order(ready, given)
        return Scoring(
            by="compute_reward" if scored is None and error is None else "score_group",
            rewards=None if scored is None else [one.total if one else None for one in scored],
            given=scored,
            calls=books.calls,
            usage=books.usage,
            cost_usd=books.cost_usd,
            metrics=books.metrics,
            error=error,
            stop=stop,
        )

    async def _ask(self, ready: Ready, task: Task, tape: Tape) -> list[Rewards] | None:
        """Raises: VerifierFault, ModelError, CostLimit."""
        env = self.host.env
        members = [Rollout.of_row(row) for row in ready.rows]
        # The group stands in the place of a unit: it has a seed of its own.
        group_id = ready.gathered.facts["group_id"]
        seed = unit_seed(self.workshop.config.agent.base_seed, group_id)
        item = msgspec.structs.replace(
            item_of(ready.rows[0], task), unit_id=group_id, attempt=0, repeat=0, seed=seed
        )
        ctx = self.host.context(Stage(self.workshop, item, task, tape, self.workshop.budget()))
        given = await theirs(env, env.score_group, VerifierFault, task, members, ctx)
        if given is None:
            return None
        if not isinstance(given, Iterable):
            what = f"returned {type(given).__name__}; return a list of rewards, or None"
            raise VerifierFault(faults.wrong(env.name, env.score_group, what))
        scores = list(given)
        if len(scores) != len(members):
            what = f"returned {len(scores)} rewards for {len(members)} members"
            raise VerifierFault(faults.wrong(env.name, env.score_group, what))
        pairs = zip(scores, members, strict=True)
        return [checked(env, env.score_group, one, member.turns) for one, member in pairs]


def _in_order(ready: Ready, scores: Sequence[Rewards]) -> list[Rewards | None]:
    """The scores in the order of all members, None for those that were not scored."""
    by_unit = dict(zip((row["unit_id"] for row in ready.rows), scores, strict=True))
    return [by_unit.get(member.unit_id) for member in ready.gathered.members]


@asynccontextmanager
async def open_scorer(
    config: RunConfig,
    run_dir: RunDir,
    run_id: str,
    share: Common,
    opens: OpensHost = open_host,
    keys: Mapping[str, str] | None = None,
) -> AsyncIterator[EnvScorer]:
    """The scorer of a run's environment; the policy itself is never asked.

    Args:
        share: limiters, and what is left of the run's budgets.
        opens: the environment.
        keys: API keys by variable, as the run began with them; None finds them. A command that
            prints keys is then only run when one is refused.

    Raises: UserError.
    """
    plain = without_policy(config)
    if plain.env is None:
        raise UserError("a run without an environment has no score_group")
    async with (
        open_workshop(
            plain, run_id=run_id, concurrency=SCORED_AT_ONCE, share=share, keys=keys
        ) as workshop,
        opens(plain.env) as host,
    ):
        yield EnvScorer.over(host, workshop, run_dir)
