"""Rate limits and budgets of a run at the driver: prices, earlier spending, the coordinator and its
summary."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Any

from hermes_rl.config import PLAYED_MODELS, RunConfig
from hermes_rl.errors import UserError
from hermes_rl.models.providers import (
    PriceTable,
    calls_endpoint,
    resolve_env_targets,
    resolve_targets_by_model,
)
from hermes_rl.models.rate import (
    KINDS,
    NANO,
    OUTPUT_MAX,
    RUN_TOKENS,
    RUN_USD,
    Coordinator,
    JointLimits,
    Rates,
    Share,
    Summary,
    model_budget,
    model_of,
)
from hermes_rl.store import RunDir

Worst = Callable[[str, int, int], Decimal | None]
"""(model, input tokens, output tokens) -> the most that such calls can have cost, in US dollars;
None where there is no price."""

_TABLES = ("trajectories", "failures", "groups", "grades")
"""Rows include the calls of sub-agents; calls of `score_group` and of regrades are in `groups` and
`grades`."""

_UNKNOWN = ("unknown_input_tokens_max", "unknown_output_tokens_max")
"""Metrics of rows with calls of unknown usage: upper bounds."""


class Prices:
    """Prices of the models that a run calls.

    Args:
        config: its endpoint, fallbacks, providers and prices.
    """

    def __init__(self, config: RunConfig) -> None:
        self._tables: list[tuple[str, PriceTable]] = [
            (target.model or "", target.prices)
            for targets in resolve_env_targets(config).values()
            for target in targets
        ]
        if config.model.name in PLAYED_MODELS:
            return
        requested = calls_endpoint(config.model.name, config.endpoint)
        for model, targets in resolve_targets_by_model(config).items():
            for target in targets:
                table = target.prices if requested else target.prices.user_prices_only()
                self._tables.append((target.model or model, table))

    @property
    def models(self) -> tuple[str, ...]:
        """The model names that the run requests."""
        return tuple(model for model, _ in self._tables)

    def unpriced(self) -> list[str]:
        """Models of the run without a price."""
        return [model for model, table in self._tables if table.find(model) is None]

    def output_max(self, model: str) -> int:
        """The most output tokens of a call to a model that names no bound."""
        known = [table.output_max(model) for _, table in self._tables]
        return max(known, default=OUTPUT_MAX)

    def worst(self, model: str, max_input: int, max_output: int) -> Decimal | None:
        """Return the most that such calls can cost at any place that serves the model."""
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


def budgets_of(config: RunConfig) -> dict[str, int]:
    """Return the run's budgets by name."""
    run = config.run
    budgets = {model_budget(name): round(usd * NANO) for name, usd in run.model_budgets.items()}
    budgets |= {model_budget(name, "tokens"): n for name, n in run.model_token_budgets.items()}
    if run.budget_usd is not None:
        budgets[RUN_USD] = round(run.budget_usd * NANO)
    if run.budget_tokens is not None:
        budgets[RUN_TOKENS] = run.budget_tokens
    return budgets


def earlier_cost(config: RunConfig) -> float | None:
    """Return the most US dollars that the earlier starts of a run can have cost; None when a model
    has no price. Blocking."""
    prices, run_dir = Prices(config), RunDir(config.run.out or "")
    if prices.unpriced():
        return None
    known = (prices.worst, prices.models, prices.output_max)
    return sum_earlier_spending(run_dir, [RUN_USD], *known).get(RUN_USD, 0) / NANO


def make_coordinator(
    config: RunConfig, run_dir: RunDir, concurrency: int, joint: JointLimits | None = None
) -> Coordinator:
    """Make the coordinator of a run's limits and budgets. Blocking: reads what was spent before.

    Args:
        concurrency: of the whole run.
        joint: what other runs share with this one.
    """
    budgets, prices, spent = budgets_of(config), Prices(config), dict[str, int]()
    if budgets:
        spent = sum_earlier_spending(
            run_dir, budgets, prices.worst, prices.models, prices.output_max
        )
    rates = Rates(**{kind: getattr(config.endpoint.rates, kind) for kind in KINDS})
    return Coordinator(
        concurrency, budgets, spent, clock=time.monotonic, unix=time.time, rates=rates, joint=joint
    )


def summary_as_dict(summary: Summary, budgets: Mapping[str, int]) -> dict[str, Any]:
    """Convert a summary for manifest.json: how each limit came about, and what is spent.

    Dollars are dollars again; `limits` is a list of [seconds since the start, limit, reason],
    `paces` of [seconds since the start, requests per minute, reason].
    """
    lanes = [
        {
            "endpoint": lane.endpoint,
            "account": lane.account,
            "model": lane.model,
            "limit": lane.limit,
            "requests": {
                "clean": lane.clean,
                "throttled": lane.throttled,
                "server_trouble": lane.trouble,
            },
            "limits": [[c.at_s, c.value, c.reason] for c in lane.limits],
            "pace": _per_minute(lane.per_s),
            "paces": [[c.at_s, _per_minute(c.value), c.reason] for c in lane.paces],
        }
        for lane in summary.lanes
    ]
    spent = {
        name: {"budget": _amount(name, budgets[name]), "spent": _amount(name, amount)}
        for name, amount in summary.spent.items()
    }
    return {"rate_limits": lanes, "budgets": spent}


@asynccontextmanager
async def open_budget_share(
    config: RunConfig,
    run_dir: RunDir,
    concurrency: int,
    summary: dict[str, Any],
    joint: JointLimits | None = None,
) -> AsyncIterator[Share]:
    """Open the rest of the run's budgets, and limiters, for calls of the driver itself: scoring
    groups and grading again. No worker may be running.

    Args:
        concurrency: calls at once, at most.
        summary: updated at the end, see `summary_as_dict`; budgets include all earlier starts.
        joint: what other runs share with this one.
    """
    coordinator = await asyncio.to_thread(make_coordinator, config, run_dir, concurrency, joint)
    try:
        share = Share("driver", coordinator.budgets)
        async with share.coordinated(coordinator.handle):
            yield share
    finally:
        summary |= summary_as_dict(coordinator.summary(), budgets_of(config))


def _per_minute(per_s: float | None) -> float | None:
    return None if per_s is None else round(60 * per_s, 1)


def _amount(budget: str, amount: int) -> float | int:
    return amount / NANO if budget.endswith(":usd") else amount


def sum_earlier_spending(
    run_dir: RunDir,
    budgets: Collection[str],
    worst: Worst,
    models: Collection[str] = (),
    output_max: Callable[[str], int] = lambda model: OUTPUT_MAX,
) -> dict[str, int]:
    """Return budget -> the amount spent. Blocking. Calls of unknown usage count with their upper
    bound.

    Args:
        models: names that the run requests, beside those with budgets; the model of a call is
            matched with them.
        output_max: the most output tokens of a model's call that named no bound.
    """
    if not budgets:
        return {}
    import pyarrow as pa
    import pyarrow.parquet as pq

    from hermes_rl.store import schema_of

    found: Counter[str] = Counter()
    names = frozenset((*models, *filter(None, map(model_of, budgets))))
    for table in _TABLES:
        schema = schema_of(table)
        columns = [name for name in ("model", "calls", "metrics") if name in schema.names]
        for part in run_dir.parts(table):
            rows = pq.read_table(part, schema=schema, columns=columns)
            if "model" not in columns:
                rows = rows.append_column("model", pa.array([""] * len(rows), pa.string()))
            _add_known(found, rows, names, worst)
            _add_unknown(found, rows, names, worst, output_max)
    return {budget: found[budget] for budget in budgets}


def requested_name(served: str, row_model: str, models: Collection[str]) -> str:
    """Return the requested name of a model that a server reports under a longer name, such as
    `gpt-5-2025-08-07` or `openai/gpt-5`; the model of the row where none matches.

    Args:
        row_model: the model of the unit.
        models: all models that the run requests.
    """
    if served in models or served == row_model:
        return served
    bare = served.rpartition("/")[2]
    fitting = [name for name in {*models, row_model} if _is_longer(bare, name.rpartition("/")[2])]
    return max(fitting, key=lambda name: (len(name.rpartition("/")[2]), name), default=row_model)


def _is_longer(served: str, model: str) -> bool:
    return served == model or (served.startswith(model) and served[len(model)] in "-@:._")


def _add_known(found: Counter[str], rows: Any, models: Collection[str], worst: Worst) -> None:
    """Add calls of known usage. Where a price is known but not the cost, because the usage lacks
    details, the upper bound counts."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lists = rows["calls"].combine_chunks()
    calls = pc.list_flatten(lists)
    requested = rows["model"].combine_chunks().take(pc.list_parent_indices(lists))
    columns = {name: pc.struct_field(calls, name) for name in ("model", "cost_usd", *_COUNTS)}
    columns |= {"requested": requested, "costed": pc.is_valid(columns["cost_usd"])}
    sums = pa.table(columns).group_by(["model", "requested", "costed"])
    for row in sums.aggregate([(name, "sum") for name in ("cost_usd", *_COUNTS)]).to_pylist():
        read, made = (row[f"{name}_sum"] or 0 for name in _COUNTS)
        model, tokens = requested_name(row["model"], row["requested"], models), read + made
        cost = row["cost_usd_sum"] if row["costed"] else worst(model, read, made)
        usd = round((cost or 0) * NANO)
        found[RUN_TOKENS] += tokens
        found[model_budget(model, "tokens")] += tokens
        found[RUN_USD] += usd
        found[model_budget(model)] += usd


_COUNTS = ("input_tokens", "output_tokens")


def _add_unknown(
    found: Counter[str],
    rows: Any,
    models: Collection[str],
    worst: Worst,
    output_max: Callable[[str], int],
) -> None:
    for at, (model, metrics) in enumerate(
        zip(rows["model"].to_pylist(), rows["metrics"].to_pylist(), strict=True)
    ):
        bounds = {m["name"]: int(m["value"]) for m in metrics or () if m["name"] in _UNKNOWN}
        if not bounds:
            continue
        calls = rows["calls"][at].as_py()
        unknown = [
            call["model"]
            for call in calls
            if call["outcome"] != "refused" and call["input_tokens"] is None
        ] or [model]
        wanted = {requested_name(name, model, models) for name in unknown}
        read, made = (bounds.get(name) for name in _UNKNOWN)
        if made is None:  # a call named no bound
            made = len(unknown) * max(map(output_max, wanted))
        # The bounds cover all unknown calls together; a fallback may cost more than the model.
        costs = {name: math.ceil((worst(name, read or 0, made) or 0) * NANO) for name in wanted}
        found[RUN_TOKENS] += (read or 0) + made
        found[RUN_USD] += max(costs.values())
        for name, nano in costs.items():
            found[model_budget(name)] += nano
            found[model_budget(name, "tokens")] += (read or 0) + made
