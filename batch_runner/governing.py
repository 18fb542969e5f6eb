"""The driver's end of a run's governor: where it lives, and what it is told at its start."""

from __future__ import annotations

import time
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Protocol, Self

from hermes_rl.config import PLAYED_MODELS, RunConfig
from hermes_rl.errors import UserError
from hermes_rl.models.limits.budget import OUTPUT_MAX
from hermes_rl.models.limits.governor import Governor
from hermes_rl.models.limits.governor_wire import Charter, Summary
from hermes_rl.models.limits.quotas import KINDS
from hermes_rl.models.limits.rests import Rests
from hermes_rl.models.limits.share import DirectLine, Line
from hermes_rl.models.limits.spending import NANO, RUN_TOKENS, RUN_USD, model_pot
from hermes_rl.models.providers.others import other_targets
from hermes_rl.models.providers.prices import PriceTable
from hermes_rl.models.providers.targets import asks_endpoint, targets_by_model


class GovernorHost(Protocol):
    """Keeps a governor alive for a run; an async context manager."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *error: object) -> None: ...

    def forget(self, worker: str) -> None:
        """A worker is dead: what it held is free, and its leases count as spent."""
        ...

    async def summary(self) -> Summary:
        """For manifest and report; empty when the governor does not answer."""
        ...


class LocalGovernor:
    """A governor in the driver's process, for the worker that is there too."""

    def __init__(self, charter: Charter) -> None:
        self._governor = Governor(charter, time.monotonic, Rests())

    def line(self) -> Line:
        """The way to it."""
        return DirectLine(self._governor)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        """Nothing to end."""

    def forget(self, worker: str) -> None:
        """See `GovernorHost`."""
        self._governor.forget(worker)

    async def summary(self) -> Summary:
        """See `GovernorHost`."""
        return self._governor.summary()


class Prices:
    """What models cost where a run's calls go.

    Args:
        config: its endpoint, fallbacks, providers and prices.
    """

    def __init__(self, config: RunConfig) -> None:
        self._tables: list[tuple[str, PriceTable]] = [
            (target.model or "", target.prices)
            for targets in other_targets(config).values()
            for target in targets
        ]
        if config.model.name in PLAYED_MODELS:
            return
        asked = asks_endpoint(config.model.name, config.endpoint)
        for model, targets in targets_by_model(config).items():
            for target in targets:
                table = target.prices if asked else target.prices.own_alone()
                self._tables.append((target.model or model, table))

    @property
    def models(self) -> tuple[str, ...]:
        """The names that the run asks for."""
        return tuple(model for model, _ in self._tables)

    def unpriced(self) -> list[str]:
        """Models of the run without a price."""
        return [model for model, table in self._tables if table.find(model) is None]

    def output_max(self, model: str) -> int:
        """The most output tokens of a call to a model that names no bound."""
        known = [table.output_max(model) for _, table in self._tables]
        return max(known, default=OUTPUT_MAX)

    def worst(self, model: str, max_input: int, max_output: int) -> Decimal | None:
        """See `batch_runner.spent.Worst`: the dearest place that serves the model."""
        found = [table.worst(model, max_input, max_output) for _, table in self._tables]
        return max((cost for cost in found if cost is not None), default=None)


def refuse_unpriced(config: RunConfig) -> None:
    """Raises: UserError for a budget in dollars beside a model without a price."""
    run = config.run
    wanted = run.budget_usd is not None or run.unit_budget_usd is not None or run.model_budgets
    if not wanted or run.allow_unpriced:
        return
    for model in Prices(config).unpriced():
        raise UserError(
            f"a budget in dollars, and {model} has no price here. Say what it costs under "
            "endpoint.prices, use run.budget_tokens, or set run.allow_unpriced=true"
        )


def charter_of(config: RunConfig, concurrency: int, spent: dict[str, int]) -> Charter:
    """What the run's configuration says to its governor.

    Args:
        concurrency: of the whole run.
        spent: by earlier starts of the run, by pot.
    """
    pots = pots_of(config)
    section = config.endpoint.rates
    rates = {kind: rate for kind in KINDS if (rate := getattr(section, kind)) is not None}
    return Charter(
        maximum=concurrency,
        rates=rates,
        pots=pots,
        spent={pot: amount for pot, amount in spent.items() if pot in pots},
    )


def pots_of(config: RunConfig) -> dict[str, int]:
    """The run's budgets, by pot."""
    run = config.run
    pots = {model_pot(name): round(usd * NANO) for name, usd in run.model_budgets.items()}
    pots |= {model_pot(name, "tokens"): n for name, n in run.model_token_budgets.items()}
    if run.budget_usd is not None:
        pots[RUN_USD] = round(run.budget_usd * NANO)
    if run.budget_tokens is not None:
        pots[RUN_TOKENS] = run.budget_tokens
    return pots


def as_plain(summary: Summary, pots: Mapping[str, int]) -> dict[str, Any]:
    """A governor's summary for manifest.json: how each limit came about, and what is spent.

    Dollars are dollars again; `limits` is a list of [seconds since the start, limit, reason],
    `paces` of [seconds since the start, requests per minute, reason].
    """
    lanes = [
        {
            **dict(zip(("endpoint", "account", "model"), lane.lane.split("|", 2), strict=True)),
            "limit": lane.state.limit,
            "requests": {
                "clean": lane.clean,
                "throttled": lane.throttled,
                "server_trouble": lane.trouble,
            },
            "limits": [[c.at_s, c.limit, c.reason] for c in lane.state.history],
            "pace": _per_minute(lane.pace.per_s),
            "paces": [[c.at_s, _per_minute(c.per_s), c.reason] for c in lane.pace.history],
        }
        for lane in summary.lanes
    ]
    budgets = {
        pot: {"budget": _amount(pot, pots[pot]), "spent": _amount(pot, spent)}
        for pot, spent in summary.spent.items()
    }
    return {"rate_limits": lanes, "budgets": budgets}


def joined(first: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """What two governors of one start said, of which the later began with what the first had spent.

    Args:
        later: empty when there was none.
    """
    if not later:
        return first
    lanes = [*first.get("rate_limits", ()), *later["rate_limits"]]
    return {"rate_limits": lanes, "budgets": later["budgets"]}


def _per_minute(per_s: float | None) -> float | None:
    return None if per_s is None else round(60 * per_s, 1)


def _amount(pot: str, amount: int) -> float | int:
    return amount / NANO if pot.endswith(":usd") else amount
