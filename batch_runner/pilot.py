"""A pilot: a few of a run's units, spread over the dataset, and what the rest will come to cost."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any

from batch_runner.plan import Plan, PlanRules
from batch_runner.units import UnitReader
from hermes_rl.ports import WorkItem
from hermes_rl.store.ledger import Ledger
from hermes_rl.usage import cost_text

SHARE = 0.01
LEAST = 5
"""So many units are tried: a hundredth, but not fewer than these."""

LEVEL = 0.95


@dataclass(frozen=True)
class Pilot:
    """Which of the open units are tried: one in so many, until there are enough."""

    every: int
    units: int

    @classmethod
    def of(cls, units: int, ended: int) -> Pilot:
        """The pilot of a run.

        Args:
            units: of the dataset.
            ended: done or given up before: they are known already, and count.
        """
        wanted = min(units, max(LEAST, math.ceil(SHARE * units)))
        missing = max(0, wanted - ended)
        still = units - ended
        return cls(every=max(1, still // missing) if missing else 1, units=missing)

    def picks(self, place: int) -> bool:
        """Whether the open unit at this place is tried: one of each `every` in a row, any of them,
        because a dataset may have a rhythm of its own."""
        block, within = divmod(place, self.every)
        drawn = hashlib.sha256(f"pilot,{block}".encode()).digest()
        return within == int.from_bytes(drawn[:8]) % self.every


class PilotPlan(Plan):
    """A plan that holds back all units but the pilot's."""

    def __init__(self, reader: UnitReader, rules: PlanRules, ledger: Ledger, pilot: Pilot) -> None:
        super().__init__(reader, rules, ledger)
        self._pilot = pilot
        self._went_by = self._taken = 0

    async def take(self) -> list[WorkItem]:
        """See `Plan.take`."""
        chosen = []
        for item in await super().take():
            due = self._pilot.picks(self._went_by)
            self._went_by += 1
            if due and self._taken < self._pilot.units:
                self._taken += 1
                chosen.append(item)
        return chosen


@dataclass(frozen=True)
class Range:
    """What is expected, with a 95 % prediction interval."""

    expected: float
    low: float
    high: float


@dataclass(frozen=True)
class CostForecast:
    """What a run will come to cost, from the units that ended."""

    ended: int
    """Units that the forecast rests on."""
    open: int
    """Units that are still to be run."""
    spent_usd: float | None
    """None where a call had no price."""
    spent_tokens: int
    usd: Range | None
    """Of the whole run, what is spent included."""
    tokens: Range | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        begin = f"forecast from {self.ended:,} units, {self.open:,} still to run: "
        if self.usd is None and self.tokens is None:
            return [f"{begin}too few have ended to say anything"]
        said = []
        if self.usd is not None:
            low, high = cost_text(self.usd.low, 0), cost_text(self.usd.high, 0)
            said.append(f"{cost_text(self.usd.expected, 0)} ({low} to {high})")
        else:
            said.append("cost unknown (calls without a price)")
        if self.tokens is not None:
            tokens = (self.tokens.expected, self.tokens.low, self.tokens.high)
            said.append("{:,.0f} tokens ({:,.0f} to {:,.0f})".format(*tokens))
        return [f"{begin}{', '.join(said)}, with 95 % confidence"]


def forecast_costs(run: Path, open_units: int) -> CostForecast:
    """Forecast from a run directory. Blocking."""
    from hermes_rl.store.reader import load_run

    usd: dict[str, float] = defaultdict(float)
    tokens: dict[str, int] = defaultdict(int)
    priced = True
    books = load_run(run)
    for table in ("trajectories", "failures"):
        columns = ["unit_id", "cost_usd", "unpriced_calls", "usage"]
        for row in books.arrow(table, columns).to_pylist():
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
    """The sum of known values and of so many more like them; None for fewer than two known.

    The interval is that of a sum of `more` new values from the same distribution: mean * more plus
    or minus t * s * sqrt(more + more^2 / n).
    """
    count = len(known)
    if count < 2:
        return None
    spent, mean = sum(known), fmean(known)
    half = student_t(count - 1) * stdev(known) * math.sqrt(more + more * more / count)
    expected = spent + mean * more
    return Range(expected, max(spent, expected - half), expected + half)


def student_t(freedom: int, level: float = LEVEL) -> float:
    """The two-sided quantile of Student's t; within half a percent from 4 degrees of freedom on.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 26.7.5; exact for 1
    and 2 degrees of freedom.
    """
    upper = 1 - (1 - level) / 2
    if freedom == 1:
        return math.tan(math.pi * (upper - 0.5))
    if freedom == 2:
        return (2 * upper - 1) * math.sqrt(2 / (4 * upper * (1 - upper)))
    z = NormalDist().inv_cdf(upper)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum((z, *(term / freedom**power for power, term in enumerate(terms, start=1))))
