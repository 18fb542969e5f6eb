"""What a run would do, without doing it: nothing is written, locked or asked, but for a pilot."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batch_runner.pilot import CostForecast, Pilot, forecast_costs
from batch_runner.plan import Counts, PlanRules, open_reader, refuse_other_dataset, survey
from batch_runner.progress import Progress
from batch_runner.report import Report
from batch_runner.runner import run_batch
from batch_runner.settings import SMALL_UNITS, Settings, choose_workers, settle
from hermes_rl.aio import run_sync
from hermes_rl.config import RunConfig
from hermes_rl.store.commit import read_commits
from hermes_rl.store.driver import refuse_changes
from hermes_rl.store.ledger import Ledger
from hermes_rl.store.rundir import RunDir


@dataclass(frozen=True)
class Forecast:
    """What `--dry-run` says."""

    path: str
    exists: bool
    """The run directory is there: the run would be resumed."""
    workers: int
    concurrency: int
    rows: int
    bad_rows: int
    units: int
    done: int
    given_up: int
    open: int
    left: int
    """Units of the run that are no longer in the dataset."""
    journal: int
    """Writers whose journals would be recovered first; what they finished is not counted here."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        what = "resume" if self.exists else "new run"
        how = f"{self.workers} Ray workers" if self.workers else "this process"
        lines = [
            f"{self.path}: {what}, {how}, {self.concurrency} rollouts at once",
            f"{self.rows:,} rows ({self.bad_rows:,} bad), {self.units:,} units: "
            f"{self.done:,} done, {self.given_up:,} given up, {self.open:,} to run",
        ]
        if self.left:
            lines.append(f"{self.left:,} units of the run are no longer in the dataset")
        if self.journal:
            lines.append(
                f"{self.journal} interrupted writers would be recovered first; "
                "what they finished will not run again"
            )
        return lines


def pilot_run(
    config: RunConfig, progress: Progress | None = None
) -> tuple[Forecast, Report, CostForecast]:
    """Run a hundredth of a run's units (at least five), and say what the rest will cost. What was
    run counts: the run goes on from there.

    Raises: as `dry_run` and `run_batch`.
    """
    plan = run_sync(dry_run(config))
    pilot = Pilot.of(plan.units, plan.done + plan.given_up)
    report = run_batch(config, progress=progress, pilot=pilot)
    still = plan.units - report.done - report.given_up
    return plan, report, forecast_costs(Path(plan.path), max(0, still))


async def dry_run(config: RunConfig) -> Forecast:
    """Survey a run. Raises: UserError; StoreError when the run directory is of another kind."""
    settings = settle(config)
    reader = open_reader(settings)
    await asyncio.to_thread(reader.prime)
    run_dir = RunDir(settings.out)
    ledger = await asyncio.to_thread(_ledger, run_dir, settings)
    await asyncio.to_thread(refuse_other_dataset, settings, run_dir, ledger)
    rules = PlanRules(settings.config_hash, config.agent.base_seed, epoch=0)
    counts = await survey(reader, rules, ledger)
    return _forecast(settings, counts, run_dir, len(ledger))


def _ledger(run_dir: RunDir, settings: Settings) -> Ledger:
    ledger = Ledger(settings.config.run.max_attempts)
    epochs = run_dir.epochs()
    if epochs:
        run_dir.epoch(epochs[-1])
        refuse_changes(run_dir.path, run_dir.epoch(epochs[0]).identity, settings.identity)
        ledger.load(read_commits(run_dir))
        if settings.config.run.retry_failed:
            ledger.reopen_given_up()
    return ledger


def _forecast(settings: Settings, counts: Counts, run_dir: RunDir, known: int) -> Forecast:
    return Forecast(
        path=str(settings.out),
        exists=bool(run_dir.epochs()),
        workers=choose_workers(settings, counts.open < SMALL_UNITS),
        concurrency=settings.concurrency,
        rows=counts.rows,
        bad_rows=counts.bad_rows,
        units=counts.units,
        done=counts.done,
        given_up=counts.given_up,
        open=counts.open,
        left=known - counts.known,
        journal=len(run_dir.writers()),
    )
