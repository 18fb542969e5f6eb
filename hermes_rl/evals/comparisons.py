"""Plots of several runs together. Each function returns a figure and its frame (`Plot`)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hermes_rl.errors import UserError
from hermes_rl.evals.plots import (
    BLUE,
    FAINT,
    INK,
    MAX_TASKS,
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
from hermes_rl.evals.stats import mean_interval, share_interval
from hermes_rl.evals.summaries import Score, pass_interval, task_scores
from hermes_rl.text import many

if TYPE_CHECKING:
    import pandas as pd

    from hermes_rl.store import Run

_MOST_BANDS = 3
"""Runs whose intervals a reader can distinguish in one plot."""
_LINE = 0.05
"""Height of a name in the plot of costs, as a share."""
_NAMES = {"solved": "Solved share", "reward": "Mean reward"}
_GRADED = ("task_id", "task_hash", "reward", "turns")


def plot_scores(*runs: Run, score: Score = "solved") -> Plot:
    """Plot the solved share, or the mean reward, of each run with its interval over tasks.

    Frame: run, tasks, units, solved (or reward), low, high.

    Raises: UserError when nothing was graded, or matplotlib is not installed.
    """
    import pandas as pd

    rows = []
    for run in runs:
        scores = _scores(run)
        rows.append({
            "run": run.path.name, "tasks": len(scores), "units": int(scores["units"].sum()),
            **_scored(scores, score),
        })  # fmt: skip
    frame = pd.DataFrame(rows)
    figure, (axes,) = make_canvas(len(frame))
    places = range(len(frame))
    axes.hlines(places, frame["low"], frame["high"], color=PALE, linewidth=5, zorder=2)
    axes.plot(frame[score], places, "o", color=BLUE, zorder=3, clip_on=False)
    name_rows(axes, [str(name) for name in frame["run"]])
    if score == "solved":
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel(f"{_NAMES[score].lower()}, with the 95 % interval over tasks")
    least, most = int(frame["tasks"].min()), int(frame["tasks"].max())
    title(axes, _NAMES[score], ("" if least == most else f"{least:,} to ") + many(most, "task"))
    return Plot(figure, frame)


def _scored(scores: pd.DataFrame, score: Score) -> dict[str, float]:
    """The mean over tasks, under the name of the score, and its interval."""
    values, units = scores[score].to_numpy(), int(scores["units"].sum())
    found = share_interval(values, units=units) if score == "solved" else mean_interval(values)
    return {score: found.mean, "low": found.low, "high": found.high}


def plot_task_map(*runs: Run, limit: int = MAX_TASKS) -> Plot:
    """Plot the solved share of each task in each run as colours.

    Frame: tasks as rows, runs as columns, the least solved first.

    Raises: as `plot_scores`.
    """
    import pandas as pd

    columns = {run.path.name: _scores(run).set_index("task_id")["solved"] for run in runs}
    frame = pd.DataFrame(columns)
    frame = frame.loc[frame.mean(axis=1).sort_values(kind="stable").index]
    shown = frame.head(limit)
    figure, (axes,) = make_canvas(len(shown), grid=False)
    image = axes.imshow(shown, cmap="Blues", vmin=0, vmax=1, aspect="auto", origin="lower")
    name_rows(axes, [str(task) for task in shown.index])
    axes.set_ylim(-0.5, len(shown) - 0.5)
    names = [short(name, 32) for name in columns]
    turned: dict[str, Any] = {"rotation": 25, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(len(names)), names, **turned if len("".join(names)) > 60 else {})
    for row, values in enumerate(shown.to_numpy()):
        for column, value in enumerate(values):
            text = "" if math.isnan(value) else f"{value:.0%}"
            ink = "white" if value > 0.6 else INK
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color=ink)
    figure.colorbar(image, ax=axes, format=lambda value, _: f"{value:.0%}", fraction=0.04)
    title(axes, "Solved share of each task", note_of(len(shown), len(frame), "least solved"))
    return Plot(figure, frame)


def plot_pass_at_k(*runs: Run) -> Plot:
    """Plot pass@k (one of k attempts solves the task) and pass^k (all k do), with intervals.

    Only tasks with at least k graded units count at k.
    Frame: run, k, kind, tasks, value, low, high.
    Source: Chen et al. 2021 (pass@k, unbiased); Yao et al. 2024 (pass^k).

    Raises: as `plot_scores`.
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for run in runs:
        scores = _scores(run)
        for k in range(1, int(scores["units"].max()) + 1):
            for kind in ("pass@k", "pass^k"):
                value, low, high = pass_interval(scores, k, every=kind == "pass^k")
                rows.append({
                    "run": run.path.name, "k": k, "kind": kind,
                    "tasks": int((scores["units"] >= k).sum()),
                    "value": value, "low": low, "high": high,
                })  # fmt: skip
    frame = pd.DataFrame(rows)
    figure, (axes,) = make_canvas(9)
    for number, ((name, which), part) in enumerate(frame.groupby(["run", "kind"], sort=False)):
        colour, line = f"C{number // 2}", "-" if which == "pass@k" else "--"
        label = short(str(name)) if which == "pass@k" else None
        axes.plot(part["k"], part["value"], line, marker="o", color=colour, label=label)
        if len(runs) <= _MOST_BANDS:
            axes.fill_between(part["k"], part["low"], part["high"], color=colour, alpha=0.12, lw=0)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xticks(sorted(set(frame["k"])))
    axes.set_xlabel("k")
    put_legend(figure, axes)
    bands = "; bands: 95 % interval over tasks" if len(runs) <= _MOST_BANDS else ""
    title(axes, "pass@k and pass^k", f"solid: pass@k; dashed: pass^k{bands}")
    return Plot(figure, frame)


def plot_cost(*runs: Run, score: Score = "solved") -> Plot:
    """Plot the solved share, or the mean reward, of each run against its cost per unit; tokens
    where prices are unknown.

    The line joins the runs that no other run beats at the same or a lower cost.
    Frame: run, units, solved (or reward), low, high, cost_usd, tokens (per unit), best.

    Raises: as `plot_scores`.
    """
    import pandas as pd

    rows = []
    for run in runs:
        scores, totals = _scores(run), run.runs.iloc[0]
        units, usd = int(totals["done"]), totals["cost_usd"]
        tokens = (totals["input_tokens"] or 0) + (totals["output_tokens"] or 0)
        known = usd is not None and not totals["unpriced_calls"]
        rows.append({
            "run": run.path.name, "units": units, **_scored(scores, score),
            "cost_usd": usd / units if known else None, "tokens": tokens / units,
        })  # fmt: skip
    frame = pd.DataFrame(rows)
    priced = bool(frame["cost_usd"].notna().all() and frame["cost_usd"].any())
    column = "cost_usd" if priced else "tokens"
    frame = frame.sort_values([column, score], ascending=[True, False], ignore_index=True)
    frame["best"] = frame[score] > frame[score].cummax().shift(fill_value=-math.inf)
    figure, (axes,) = make_canvas(9)
    spread = [frame[score] - frame["low"], frame["high"] - frame[score]]
    axes.errorbar(frame[column], frame[score], yerr=spread, fmt="o", color=BLUE, ecolor=PALE)
    best = frame[frame["best"]]
    axes.plot(best[column], best[score], "--", color=ORANGE, zorder=1)
    if score == "solved":
        axes.set_ylim(-0.02, 1.02)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    bottom, top = axes.get_ylim()
    lowest = -math.inf
    for name, x, y in frame.sort_values(score)[["run", column, score]].itertuples(index=False):
        height = (y - bottom) / (top - bottom)
        lowest = max(lowest + _LINE, height)  # no name is written over another one
        place = (7, 5 + 200 * (lowest - height))
        axes.annotate(short(name, 32), (x, y), place, textcoords="offset points", fontsize=8.5)
    axes.set_xlim(left=0)
    axes.margins(x=0.15)
    axes.set_ylim(bottom, top)
    axes.set_xlabel("US dollars per unit" if priced else "tokens per unit (no known price)")
    note = "dashed: not beaten at the same or a lower cost"
    title(axes, f"{_NAMES[score]} against cost", note)
    return Plot(figure, frame)


def plot_endings(*runs: Run) -> Plot:
    """Plot how the attempts of each run ended: the ending, or the cause of a failure.

    Frame: endings as rows, runs as columns (attempts).

    Raises: UserError when matplotlib is not installed.
    """
    import pandas as pd

    counts = {}
    for run in runs:
        tables = [run.frame(t, ["end_reason", "cause"]) for t in ("trajectories", "failures")]
        rows = pd.concat(tables)
        ends = ("failed: " + rows["cause"].astype(object)).fillna(rows["end_reason"])
        counts[run.path.name] = ends.value_counts()
    frame = pd.DataFrame(counts).fillna(0).astype(int)
    frame = frame.loc[frame.sum(axis=1).sort_values(kind="stable").index]
    figure, (axes,) = make_canvas(len(frame) * len(counts))
    height = 0.8 / len(counts)
    for number, name in enumerate(frame):
        places = [row + (number - (len(counts) - 1) / 2) * height for row in range(len(frame))]
        bars = axes.barh(
            places, frame[name], height * 0.92, color=f"C{number}", label=short(str(name))
        )
        axes.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=8, color=FAINT)
    name_rows(axes, [str(end) for end in frame.index])
    axes.set_xlabel("attempts")
    count_axis(axes.xaxis)
    put_legend(figure, axes)
    title(axes, "How attempts ended", many(int(frame.to_numpy().sum()), "attempt"))
    return Plot(figure, frame)


def _scores(run: Run) -> pd.DataFrame:
    scores = task_scores(run.frame("trajectories", list(_GRADED)))
    if scores.empty:
        raise UserError(f"{run.path}: no graded trajectory to plot")
    return scores
