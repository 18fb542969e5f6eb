"""`hermes-rl show`: the table of a run, or one trajectory."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hermes_rl.cli import render
from hermes_rl.cli import web as pages
from hermes_rl.errors import UserError

if TYPE_CHECKING:
    from hermes_rl.store import Run

Row = dict[str, Any]

SORTS: dict[str, Callable[[Row], Any]] = {
    "row": lambda r: (r["row_index"], r["repeat"], r["attempt"]),
    "reward": lambda r: (r["reward"] is None, r["reward"] or 0.0),
    "turns": lambda r: -r["turns"],
    "tokens": lambda r: -(r["usage"]["total_tokens"] or 0),
    "time": lambda r: -(r["timing"]["total_s"] or 0.0),
}
"""`--sort` -> what rows are ordered by."""


COLUMNS = (
    "unit_id", "trajectory_id", "task_id", "task_hash", "row_index", "repeat", "attempt", "status",
    "reward", "end_reason", "cause", "error", "turns", "usage", "timing", "cost_usd",
    "unpriced_calls", "model", "served_models",
)  # fmt: skip
"""Columns of the table; only these are read from a large run."""
CHILDREN = "subagents"
CHILD_COLUMNS = (
    "unit_id", "trajectory_id", "parent_trajectory_id", "task_id", "repeat", "attempt", "status",
    "turns", "end_reason", "final_response", "error",
)  # fmt: skip


def command(
    run: Annotated[Path, typer.Argument(help="run directory", metavar="RUN")],
    unit: Annotated[
        str | None,
        typer.Argument(
            help="a unit or trajectory: the beginning of its id, or TASK, or TASK#REPEAT"
        ),
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="attempts without a verdict")] = False,
    sort: Annotated[str, typer.Option(help=f"order by: {', '.join(SORTS)}")] = "row",
    limit: Annotated[int, typer.Option(min=0, help="rows of the table; 0 is all")] = 200,
    web: Annotated[bool, typer.Option("--web", help="as a page in the browser")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="rows as JSON lines")] = False,
) -> int:
    """The table of a run, or one trajectory.

    \b
    hermes-rl show runs/smoke-local               the table of the run
    hermes-rl show runs/smoke-local 4f1c          the trajectory whose id begins with 4f1c
    hermes-rl show runs/smoke-local --failed      attempts that ended without a verdict
    hermes-rl show runs/smoke-local 4f1c --web    the same as a page, every message whole
    """
    from hermes_rl.store import find_driver, load_run, size_fault

    if sort not in SORTS:
        raise UserError(f"--sort {sort}: choose one of {', '.join(SORTS)}")
    if web and as_json:
        raise UserError("--web and --json: choose one")
    opened = load_run(run)
    if find_driver(opened.run_dir) is None and (fault := size_fault(opened.run_dir, {})):
        print(fault, file=sys.stderr)
    tables = ("failures",) if failed else ("trajectories", "failures")
    names = None if as_json and unit is None else COLUMNS
    if names is None:
        rows = [row for table in tables for row in opened.arrow(table).to_pylist()]
    else:
        rows = [row for table in tables for row in rows_of(opened, table, names)]
    rows.sort(key=SORTS[sort])
    if unit is not None:
        _show_one(opened, tables, rows, unit, web=web, as_json=as_json)
        return 0
    if as_json:
        _print_json(rows)
        return 0
    shown = rows[:limit] if limit else rows
    more = len(rows) - len(shown)
    notes = [
        f"... and {more} more (--limit 0 shows all)" if more else "",
        *(render.causes(rows), render.totals(rows), render.models(rows)),
    ]
    lines = [note for note in notes if note]
    if web:
        name = opened.path.absolute().name
        print(pages.open_page(name, pages.run_page(name, shown, lines)))
    else:
        print(render.run_table(shown), *lines, sep="\n")
    return 0


def _show_one(
    run: Run, tables: Sequence[str], rows: list[Row], wanted: str, *, web: bool, as_json: bool
) -> None:
    """Print one trajectory, or that of a sub-agent, with the sub-agents that it started."""
    children = run.arrow(CHILDREN, CHILD_COLUMNS).to_pylist()
    found = find(rows, wanted, run.path, children)["trajectory_id"]
    chosen = read_whole_row(run, (*tables, CHILDREN), found)
    if web:
        print(pages.open_page(chosen["unit_id"][:8], pages.trajectory_page(chosen)))
    elif as_json:
        _print_json([chosen])
    else:
        started = [child for child in children if child["parent_trajectory_id"] == found]
        print(render.trajectory(chosen), *map(render.child_line, started), sep="\n")


def read_whole_row(run: Run, tables: Iterable[str], trajectory_id: str) -> Row:
    """Read a row with all its columns."""
    import pyarrow.compute as pc

    for table in tables:
        found = run.arrow(table)
        rows: list[Row] = found.filter(pc.equal(found["trajectory_id"], trajectory_id)).to_pylist()
        if rows:
            return rows[0]
    raise UserError(f"{run.path}: the row {trajectory_id} is gone. Run the command again")


def find(rows: list[Row], wanted: str, run: Path, children: Sequence[Row] = ()) -> Row:
    """Find the row that `wanted` names. Raises: UserError for none or several units.

    Args:
        children: rows of sub-agents, which only the beginning of their own id names.
    """
    task, _, repeat = wanted.rpartition("#")
    matches = [
        row
        for row in rows
        if row["unit_id"].startswith(wanted)
        or row["trajectory_id"].startswith(wanted)
        or row["task_id"] == wanted
        or (task and row["task_id"] == task and str(row["repeat"]) == repeat)
    ]
    units = {row["unit_id"] for row in matches}
    if not matches:
        matches = [row for row in children if row["trajectory_id"].startswith(wanted)]
        units = {row["trajectory_id"] for row in matches}
    if not matches:
        raise UserError(f"{run}: nothing begins with {wanted!r}. `hermes-rl show {run}` lists ids")
    if len(units) > 1:
        ids = ", ".join(sorted(u[:12] for u in units)[:6])
        raise UserError(f"{wanted!r} names {len(units)} units. Give the id of one of them: {ids}")
    # Trajectories before failures, later attempts before earlier ones.
    return max(matches, key=lambda r: (r["status"] == "ok", r["attempt"]))


def _print_json(rows: list[Row]) -> None:
    for row in rows:
        print(json.dumps(_decode_json_columns(row), ensure_ascii=False, default=str))


def _decode_json_columns(row: Row) -> Row:
    """Decode JSON columns."""
    out = dict(row)
    out["messages"] = [json.loads(text) for text in row["messages"]]
    for column in ("tools", "metadata", "sampling"):
        out[column] = json.loads(row[column]) if row[column] is not None else None
    sandbox: Mapping[str, Any] | None = row["sandbox"]
    if sandbox:
        out["sandbox"] = {**sandbox, "limits": json.loads(sandbox["limits"])}
    out["image_data"] = [{"path": image["path"]} for image in row["image_data"] or []]
    return out


def read_attempts(run: Run) -> list[Row]:
    """The `COLUMNS` of all attempts."""
    tables = ("trajectories", "failures")
    return [row for table in tables for row in run.arrow(table, COLUMNS).to_pylist()]


def rows_of(run: Run, table: str, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Rows with some columns, which include `trajectory_id` and `unpriced_calls`. Rows with
    unpriced calls get `known_cost_usd`, the cost of their other calls."""
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
