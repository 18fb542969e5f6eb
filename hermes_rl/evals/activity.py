"""Plots of what happens within one run. Each function returns a figure and its frame (`Plot`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hermes_rl.errors import UserError
from hermes_rl.evals.plots import (
    BLUE,
    FAINT,
    ORANGE,
    PALE,
    Plot,
    count_axis,
    make_canvas,
    name_rows,
    note_of,
    put_legend,
    short,
    title,
)
from hermes_rl.evals.summaries import task_scores
from hermes_rl.text import many

if TYPE_CHECKING:
    import pandas as pd

    from hermes_rl.store import Run

_PHASES = ("queued_s", "sandbox_s", "model_s", "tool_s", "waiting_s", "verify_s")


def plot_solve_rates(run: Run) -> Plot:
    """Plot how many tasks have which solved share: never, sometimes or always solved.

    In RL, tasks at both ends give no gradient.
    Frame: task_id, units, solved, reward.

    Raises: UserError when nothing was graded, or matplotlib is not installed.
    """
    frame = task_scores(run.frame("trajectories", ["task_id", "task_hash", "reward", "turns"]))
    if frame.empty:
        raise UserError(f"{run.path}: no graded trajectory to plot")
    frame = frame[["task_id", "units", "solved", "reward"]]
    figure, (axes,) = make_canvas(8)
    counts = frame["solved"].round(3).value_counts()
    axes.bar(counts.index, counts, width=0.04, color=BLUE)
    axes.set_xlim(-0.05, 1.05)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    count_axis(axes.yaxis)
    axes.set_xlabel("solved units of a task")
    axes.set_ylabel("tasks")
    never, always = int((frame["solved"] == 0).sum()), int((frame["solved"] == 1).sum())
    title(
        axes,
        f"{short(run.path.name, 28)}: solved share of the tasks",
        f"{many(len(frame), 'task')}; {never} never and {always} always solved",
    )
    return Plot(figure, frame)


def plot_tools(run: Run) -> Plot:
    """Plot the calls of each tool: successful and failed.

    Frame: tool, calls, ok, errors, seconds.

    Raises: UserError when no tool was called, or matplotlib is not installed.
    """
    import pandas as pd

    rows = [row for table in ("trajectories", "failures") for row in _tool_rows(run, table)]
    if not rows:
        raise UserError(f"{run.path}: no tool was called")
    frame = pd.DataFrame(rows).groupby("tool", as_index=False).sum()
    frame = frame.sort_values("calls", kind="stable", ignore_index=True)
    figure, (axes,) = make_canvas(len(frame))
    places = range(len(frame))
    axes.barh(places, frame["ok"], color=BLUE, height=0.6, label="successful")
    axes.barh(places, frame["errors"], left=frame["ok"], color=ORANGE, height=0.6, label="failed")
    for place, (calls, seconds) in enumerate(zip(frame["calls"], frame["seconds"], strict=True)):
        text = f"{many(calls, 'call')}, {seconds / max(calls, 1):.2g} s each"
        axes.annotate(
            text, (calls, place), (5, 0), textcoords="offset points", va="center", fontsize=8,
            color=FAINT,
        )  # fmt: skip
    name_rows(axes, [str(tool) for tool in frame["tool"]])
    axes.margins(x=0.4)
    axes.set_xlabel("calls")
    count_axis(axes.xaxis)
    put_legend(figure, axes)
    title(axes, f"{short(run.path.name, 28)}: tool calls", many(int(frame["calls"].sum()), "call"))
    return Plot(figure, frame)


def _tool_rows(run: Run, table: str) -> list[dict[str, Any]]:
    columns = run.arrow(table, ["tool_stats"])["tool_stats"].to_pylist()
    return [stat for stats in columns for stat in stats or ()]


def plot_time(run: Run) -> Plot:
    """Plot the distributions of turns, tokens and seconds, and where the time goes.

    Frame: one row per finished unit: task_id, turns, tokens, total_s and the seconds of each phase.

    Raises: UserError without a finished unit, or when matplotlib is not installed.
    """
    import pandas as pd

    rows = run.arrow("trajectories", ["task_id", "turns", "usage", "timing"]).to_pylist()
    if not rows:
        raise UserError(f"{run.path}: no finished unit to plot")
    frame = pd.DataFrame(
        {
            "task_id": row["task_id"],
            "turns": row["turns"],
            "tokens": row["usage"]["total_tokens"],
            "total_s": row["timing"]["total_s"],
            **{phase: row["timing"][phase] for phase in _PHASES},
        }
        for row in rows
    )
    figure, axes = make_canvas(8, plots=4)
    for each, column in zip(axes, ("turns", "tokens", "total_s"), strict=False):
        each.hist(frame[column].dropna(), bins=20, color=BLUE)
        each.axvline(frame[column].median(), color=ORANGE, linewidth=1)
        each.set_xlabel({"total_s": "seconds"}.get(column, column))
        count_axis(each.yaxis)
        if column != "total_s":
            count_axis(each.xaxis)
    axes[0].set_ylabel("units")
    phases = frame[list(_PHASES)].mean().iloc[::-1]
    axes[3].barh(range(len(phases)), phases, color=PALE)
    name_rows(axes[3], [str(name).removesuffix("_s") for name in phases.index])
    axes[3].set_xlabel("mean seconds by phase")
    title(
        axes[0],
        f"{short(run.path.name, 28)}: turns, tokens, time",
        f"{many(len(frame), 'unit')}; median in orange",
    )
    return Plot(figure, frame)


def plot_progress(run: Run, *, window: int = 50) -> Plot:
    """Plot the moving mean of the reward in the order in which the units finished.

    Frame: task_id, finished_at, reward, mean, policy_version (of the last call; None if unknown).

    Args:
        window: units of the moving mean.

    Raises: UserError when nothing was graded, or matplotlib is not installed.
    """
    import pyarrow.compute as pc

    table = run.arrow("trajectories", ["task_id", "finished_at", "reward", "calls"])
    table = table.filter(pc.is_valid(table["reward"]))
    if not len(table):
        raise UserError(f"{run.path}: no graded trajectory to plot")
    versions = [
        calls[-1]["policy_version"] if calls else None for calls in table["calls"].to_pylist()
    ]
    frame: pd.DataFrame = table.drop_columns(["calls"]).to_pandas().assign(policy_version=versions)
    frame = frame.sort_values("finished_at", kind="stable", ignore_index=True)
    frame["mean"] = frame["reward"].rolling(window, min_periods=1).mean()
    figure, (axes,) = make_canvas(8)
    axes.plot(frame.index + 1, frame["reward"], ".", color=PALE, markersize=4)
    # A line through one point would not be visible.
    axes.plot(frame.index + 1, frame["mean"], marker="o" if len(frame) == 1 else "", color=BLUE)
    changed = frame["policy_version"].notna() & (
        frame["policy_version"] != frame["policy_version"].shift()
    )
    for place in frame.index[changed][1:]:
        axes.axvline(place + 1, color=FAINT, linewidth=0.5)
    low, high = min(0.0, frame["reward"].min()), max(1.0, frame["reward"].max())
    axes.set_ylim(low - 0.04 * (high - low), high + 0.04 * (high - low))
    axes.set_xlabel("finished units")
    count_axis(axes.xaxis)
    axes.set_ylabel("reward")
    versions_text = f"; {many(int(changed.sum()), 'policy version')}" if changed.any() else ""
    note = f"mean of the last {many(min(window, len(frame)), 'unit')}{versions_text}"
    title(axes, f"{short(run.path.name, 28)}: reward over the run", note)
    return Plot(figure, frame)


def plot_timeline(run: Run, *, limit: int = 40) -> Plot:
    """Plot when each attempt ran and when it waited for model calls.

    Frame: trajectory_id, task_id, repeat, kind (attempt or call), start_s, seconds; from the first
    start.

    Args:
        limit: attempts to draw, the first ones.

    Raises: UserError without an attempt, or when matplotlib is not installed.
    """
    import pandas as pd

    columns = ["trajectory_id", "task_id", "repeat", "started_at", "finished_at", "calls"]
    rows = [
        row
        for table in ("trajectories", "failures")
        for row in run.arrow(table, columns).to_pylist()
    ]
    rows = [row for row in rows if row["started_at"] is not None]
    if not rows:
        raise UserError(f"{run.path}: no attempt to plot")
    first = min(row["started_at"] for row in rows)
    spans = []
    for row in sorted(rows, key=lambda one: one["started_at"]):
        who = {name: row[name] for name in columns[:3]}
        whole = (row["finished_at"] - row["started_at"]).total_seconds()
        start = (row["started_at"] - first).total_seconds()
        spans.append({**who, "kind": "attempt", "start_s": start, "seconds": whole})
        for call in row["calls"] or ():
            at = (call["started_at"] - first).total_seconds()
            spans.append(
                {**who, "kind": "call", "start_s": at, "seconds": call["latency_s"] or 0.0}
            )
    frame = pd.DataFrame(spans)
    order = frame["trajectory_id"].drop_duplicates()
    shown = {name: place for place, name in enumerate(order.head(limit))}
    figure, (axes,) = make_canvas(len(shown))
    for kind, colour, height in (("attempt", PALE, 0.8), ("call", BLUE, 0.45)):
        part = frame[(frame["kind"] == kind) & frame["trajectory_id"].isin(list(shown))]
        places = [shown[name] for name in part["trajectory_id"]]
        axes.barh(places, part["seconds"], height, left=part["start_s"], color=colour, label=kind)
    names = frame[frame["kind"] == "attempt"].head(limit)
    name_rows(axes, [f"{t} #{r}" for t, r in zip(names["task_id"], names["repeat"], strict=True)])
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the first start")
    put_legend(figure, axes)
    title(axes, f"{short(run.path.name, 28)}: timeline", note_of(len(shown), len(order), "first"))
    return Plot(figure, frame)
