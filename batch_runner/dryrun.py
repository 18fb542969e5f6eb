"""A dry run writes nothing, locks nothing and makes no call. A pilot runs a few units and forecasts
the cost of the others."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from batch_runner.images import find_missing
from batch_runner.plan import Pilot, Plan, open_reader, refuse_other_dataset
from batch_runner.progress import Progress
from batch_runner.report import Report
from batch_runner.runner import run_batch
from batch_runner.settings import SMALL_UNITS, Settings, choose_workers, resolve_settings
from hermes_rl.aio import run_sync
from hermes_rl.config import RunConfig
from hermes_rl.definitions import missing_tools
from hermes_rl.evals import stats
from hermes_rl.store import Ledger, RunDir, fetch_run, load_ledger, refuse_changes
from hermes_rl.text import many
from hermes_rl.usage import cost_text

LEVEL = 0.95


@dataclass(frozen=True)
class Forecast:
    """The result of `--dry-run`."""

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
    images: int
    """Images of task folders that would be built."""
    missing: list[str]
    """What units are not offered, though a distribution names it."""
    journal: int
    """Writers whose journals would be recovered first; what they finished is not counted here."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        what = "resume" if self.exists else "new run"
        how = many(self.workers, "Ray worker") if self.workers else "this process"
        lines = [
            f"{self.path}: {what}, {how}, {many(self.concurrency, 'rollout')} at once",
            f"{many(self.rows, 'row')} ({self.bad_rows:,} bad), {many(self.units, 'unit')}: "
            f"{self.done:,} done, {self.given_up:,} given up, {self.open:,} to run",
        ]
        if self.left:
            lines.append(f"no longer in the dataset: {many(self.left, 'unit')} of the run")
        if self.images:
            lines.append(f"{self.images:,} images of task folders would be built")
        if self.journal:
            lines.append(
                f"{self.journal} interrupted writers would be recovered first; "
                "what they finished will not run again"
            )
        return [*lines, *self.missing]


@dataclass(frozen=True)
class Range:
    """An expected value with its 95 % prediction interval."""

    expected: float
    low: float
    high: float


@dataclass(frozen=True)
class CostForecast:
    """The forecast cost of a run, from the units that ended."""

    ended: int
    """Units that the forecast is based on."""
    open: int
    """Units that are still to be run."""
    spent_usd: float | None
    """None when a call had no price."""
    spent_tokens: int
    usd: Range | None
    """Of the whole run, including the amount spent."""
    tokens: Range | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        begin = f"forecast from {many(self.ended, 'unit')}, {self.open:,} still to run: "
        if self.usd is None and self.tokens is None:
            return [f"{begin}too few have ended to say anything"]
        parts = ["cost unknown (calls without a price)"]
        if self.usd is not None:
            low, high = cost_text(self.usd.low, 0), cost_text(self.usd.high, 0)
            parts = [f"{cost_text(self.usd.expected, 0)} ({low} to {high})"]
        if self.tokens is not None:
            tokens = (self.tokens.expected, self.tokens.low, self.tokens.high)
            parts.append("{:,.0f} tokens ({:,.0f} to {:,.0f})".format(*tokens))
        return [f"{begin}{', '.join(parts)}, with 95 % confidence"]


def pilot_run(
    config: RunConfig, progress: Progress | None = None
) -> tuple[Forecast, Report, CostForecast]:
    """Run 1 % of the units of a run (at least five) and forecast the cost of the others. The run
    continues from there.

    Raises: as `dry_run` and `run_batch`.
    """
    plan = run_sync(dry_run(config))
    pilot = Pilot.for_run(plan.units, plan.done + plan.given_up)
    report = run_batch(config, progress=progress, pilot=pilot)
    still = plan.units - report.done - report.given_up
    return plan, report, forecast_costs(Path(plan.path), max(0, still))


async def dry_run(config: RunConfig) -> Forecast:
    """Survey a run. Raises: UserError; StoreError when the run directory is of another kind."""
    settings = resolve_settings(config)
    if settings.url is not None:
        copy, _ = await asyncio.to_thread(fetch_run, settings.url, new=True)
        run = config.run.model_copy(update={"out": str(copy)})
        config = config.model_copy(update={"run": run})
        settings = replace(resolve_settings(config), url=settings.url)
    reader = open_reader(settings)
    await asyncio.to_thread(reader.check_first_row)
    run_dir = RunDir(settings.out)
    ledger = await asyncio.to_thread(_ledger, run_dir, settings)
    await asyncio.to_thread(refuse_other_dataset, settings, run_dir, ledger)
    plan = Plan(reader, ledger)
    while not plan.counts.complete:
        await plan.take()
    counts = plan.counts
    builds = await asyncio.to_thread(find_missing, settings)
    return Forecast(
        path=settings.place,
        exists=bool(run_dir.epochs()),
        workers=choose_workers(settings, counts.open < SMALL_UNITS),
        concurrency=settings.concurrency,
        rows=counts.rows,
        bad_rows=counts.bad_rows,
        units=counts.units,
        done=counts.done,
        given_up=counts.given_up,
        open=counts.open,
        left=len(ledger) - counts.known,
        images=len(builds.contexts) if builds is not None and counts.open else 0,
        missing=missing_tools(settings.config),
        journal=len(run_dir.writers()),
    )


def _ledger(run_dir: RunDir, settings: Settings) -> Ledger:
    epochs = run_dir.epochs()
    if epochs:
        run_dir.epoch(epochs[-1])
        refuse_changes(run_dir.path, run_dir.epoch(epochs[0]).identity, settings.identity)
    ledger = load_ledger(run_dir, settings.config.run.max_attempts)
    if settings.config.run.retry_failed:
        ledger.reopen_given_up()
    return ledger


def forecast_costs(run: Path, open_units: int) -> CostForecast:
    """Forecast from a run directory. Blocking."""
    from hermes_rl.store import load_run

    usd: dict[str, float] = defaultdict(float)
    tokens: dict[str, int] = defaultdict(int)
    priced = True
    opened = load_run(run)
    for table in ("trajectories", "failures"):
        columns = ["unit_id", "cost_usd", "unpriced_calls", "usage"]
        for row in opened.arrow(table, columns).to_pylist():
            usd[row["unit_id"]] += row["cost_usd"] or 0.0
            tokens[row["unit_id"]] += row["usage"]["total_tokens"] or 0
            priced = priced and not row["unpriced_calls"]
    return CostForecast(
        ended=len(tokens),
        open=open_units,
        spent_usd=sum(usd.values()) if priced else None,
        spent_tokens=sum(tokens.values()),
        usd=predict(list(usd.values()), open_units) if priced else None,
        tokens=predict(list(tokens.values()), open_units),
    )


def predict(known: Sequence[float], more: int) -> Range | None:
    """Forecast the sum of known values and of `more` values like them; None for fewer than two.

    The interval is that of a sum of `more` new values from the same distribution: mean * more plus
    or minus t * s * sqrt(more + more^2 / n).
    """
    count = len(known)
    if count < 2:
        return None
    spent, mean = sum(known), fmean(known)
    error = stdev(known) * math.sqrt(more + more * more / count)
    half = stats.t_quantile(1 - (1 - LEVEL) / 2, count - 1) * error
    expected = spent + mean * more
    return Range(expected, max(spent, expected - half), expected + half)
