"""What earlier starts of a run have spent: read from its books, so that budgets bind them all."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection
from decimal import Decimal
from typing import Any

from hermes_rl.models.limits.budget import OUTPUT_MAX
from hermes_rl.models.limits.spending import NANO, RUN_TOKENS, RUN_USD, model_of, model_pot
from hermes_rl.store.rundir import RunDir

Worst = Callable[[str, int, int], Decimal | None]
"""(model, input tokens, output tokens) -> the most that such calls can have cost, in US dollars;
None where there is no price."""

_TABLES = ("trajectories", "failures")
"""Calls of sub-agents stand in their root's row too."""

_DERIVED = ("groups", "grades")
"""Calls of `score_group` and of regrades: no row of a unit has them."""

_UNKNOWN = ("unknown_input_tokens_max", "unknown_output_tokens_max")
"""Metrics of rows with calls whose usage nobody knows: upper bounds."""


def spent_before(
    run_dir: RunDir,
    pots: Collection[str],
    worst: Worst,
    models: Collection[str] = (),
    output_max: Callable[[str], int] = lambda model: OUTPUT_MAX,
) -> dict[str, int]:
    """Pot -> what is gone from it. Calls of unknown usage count with their worst case. Blocking.

    Args:
        models: names that the run asks for, beside those that have pots: what a call's model is
            taken for.
        output_max: the most output tokens of a model's call that named no bound.
    """
    found: Counter[str] = Counter()
    with_pots = (name for pot in pots if (name := model_of(pot)) is not None)
    asks = frozenset((*models, *with_pots))
    if not pots:
        return {}
    import pyarrow as pa
    import pyarrow.parquet as pq

    from hermes_rl.store.schema import schema_of

    for table in _TABLES:
        for part in run_dir.parts(table):
            rows = pq.read_table(part, columns=["model", "calls", "metrics"])
            _add_known(found, rows, asks, worst)
            _add_unknown(found, rows, asks, worst, output_max)
    for table in _DERIVED:
        for part in run_dir.parts(table):
            schema = schema_of(table)
            rows = pq.read_table(part, schema=schema, columns=["calls", "metrics"])
            rows = rows.append_column("model", pa.array([""] * len(rows), pa.string()))
            _add_known(found, rows, asks, worst)
            _add_unknown(found, rows, asks, worst, output_max)
    return {pot: found[pot] for pot in pots}


def asked_name(served: str, row_model: str, models: Collection[str]) -> str:
    """The name under which a model was asked for, from the name in a call: a server may call it by
    a longer one (`gpt-5-2025-08-07`, `openai/gpt-5`). The row's own model where none fits.

    Args:
        row_model: what the unit was to ask.
        models: all that the run asks for.
    """
    if served in models or served == row_model:
        return served
    bare = served.rpartition("/")[2]
    fitting = [name for name in {*models, row_model} if _is_longer(bare, name.rpartition("/")[2])]
    return max(fitting, key=lambda name: (len(name.rpartition("/")[2]), name), default=row_model)


def _is_longer(served: str, asked: str) -> bool:
    return served == asked or (served.startswith(asked) and served[len(asked)] in "-@:._")


def _add_known(found: Counter[str], rows: Any, models: Collection[str], worst: Worst) -> None:
    """Calls of known usage. Where their price is known and what they cost is not, as the answers
    did not say all that the price needs, it is the most that it can have been."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lists = rows["calls"].combine_chunks()
    calls = pc.list_flatten(lists)
    asked = rows["model"].combine_chunks().take(pc.list_parent_indices(lists))
    columns = {name: pc.struct_field(calls, name) for name in ("model", "cost_usd", *_COUNTS)}
    columns |= {"asked": asked, "costed": pc.is_valid(columns["cost_usd"])}
    sums = pa.table(columns).group_by(["model", "asked", "costed"])
    for row in sums.aggregate([(name, "sum") for name in ("cost_usd", *_COUNTS)]).to_pylist():
        given, made = (row[f"{name}_sum"] or 0 for name in _COUNTS)
        model, tokens = asked_name(row["model"], row["asked"], models), given + made
        cost = row["cost_usd_sum"] if row["costed"] else worst(model, given, made)
        usd = round((cost or 0) * NANO)
        found[RUN_TOKENS] += tokens
        found[model_pot(model, "tokens")] += tokens
        found[RUN_USD] += usd
        found[model_pot(model)] += usd


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
        unknown = _unknown_models(rows["calls"][at].as_py()) or [model]
        asked_for = {asked_name(name, model, models) for name in unknown}
        given, made = (bounds.get(name) for name in _UNKNOWN)
        if made is None:  # a call named no bound
            made = len(unknown) * max(map(output_max, asked_for))
        found[RUN_TOKENS] += (given or 0) + made
        # The bounds are of all unknown calls together; a fallback may be dearer than the model.
        costs = {
            asked: math.ceil((worst(asked, given or 0, made) or 0) * NANO) for asked in asked_for
        }
        found[RUN_USD] += max(costs.values())
        for asked, nano in costs.items():
            found[model_pot(asked)] += nano
            found[model_pot(asked, "tokens")] += (given or 0) + made


def _unknown_models(calls: list[dict[str, Any]]) -> list[str]:
    return [c["model"] for c in calls if c["outcome"] != "refused" and c["input_tokens"] is None]
