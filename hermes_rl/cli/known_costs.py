"""What is known of the cost of rows: one call of unknown usage makes a row's own cost null."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hermes_rl.store.reader import Run


def rows_of(run: Run, table: str, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Rows with some of their columns, `trajectory_id` and `unpriced_calls` among them. Those with
    unpriced calls get a `known_cost_usd`: the sum of their other calls."""
    rows: list[dict[str, Any]] = run.arrow(table, columns).to_pylist()
    if any(row["unpriced_calls"] for row in rows):
        known = _known_costs(run, table)
        for row in rows:
            if row["unpriced_calls"]:
                row["known_cost_usd"] = known.get(row["trajectory_id"])
    return rows


def _known_costs(run: Run, table: str) -> dict[str, float | None]:
    """Trajectory -> the sum of its calls' costs; absent without a call."""
    import pyarrow as pa
    import pyarrow.compute as pc

    found: dict[str, float | None] = {}
    for batch in run.arrow(table, ["trajectory_id", "calls"]).to_batches():
        costs = pc.struct_field(pc.list_flatten(batch["calls"]), "cost_usd")
        ids = batch["trajectory_id"].take(pc.list_parent_indices(batch["calls"]))
        sums = pa.table({"id": ids, "usd": costs}).group_by("id").aggregate([("usd", "sum")])
        found |= {row["id"]: row["usd_sum"] for row in sums.to_pylist()}
    return found
