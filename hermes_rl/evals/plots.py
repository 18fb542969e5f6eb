"""Plots of one run, and what all plots share. Each function returns a figure and its frame."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hermes_rl.errors import UserError
from hermes_rl.evals.stats import Interval, share_interval, wilson
from hermes_rl.evals.summaries import task_scores
from hermes_rl.text import many

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hermes_rl.evals.summaries import Comparison
    from hermes_rl.store import Run

MAX_TASKS = 40
"""Tasks that a plot shows by default."""

INK, FAINT, _GRID = "#222222", "#8a8a8a", "#e6e6e6"
BLUE, PALE, ORANGE = "#2f6fb0", "#a9c8e6", "#d9822b"
_WIDTH_IN, _ROW_IN, _MARGIN_IN = 8.0, 0.26, 1.5


class Plot(NamedTuple):
    """A picture and the data in it. As the value of a cell, a notebook shows the picture."""

    figure: Figure
    frame: pd.DataFrame

    def __repr__(self) -> str:
        return f"Plot of {many(len(self.frame), 'row')}: {', '.join(map(str, self.frame.columns))}"

    def _repr_png_(self) -> bytes:
        data = BytesIO()
        self.figure.savefig(data, format="png")
        return data.getvalue()


def _rewards_frame(run: Run) -> pd.DataFrame:
    scores = task_scores(run.trajectories)
    bounds = [
        wilson(round(share * units), units)
        for share, units in zip(scores["solved"], scores["units"], strict=True)
    ]
    scores["low"] = [interval.low for interval in bounds]
    scores["high"] = [interval.high for interval in bounds]
    columns = ["task_id", "units", "solved", "low", "high", "reward"]
    return scores[columns].sort_values(["solved", "task_id"], ignore_index=True)


def plot_rewards(run: Run, *, limit: int = MAX_TASKS) -> Plot:
    """Plot the solved share of each task and of the run, with intervals.

    Frame: task_id, units, solved with its 95 % Wilson interval low and high, reward (mean); the
    least solved first.

    Args:
        limit: tasks to draw, the least solved ones.

    Raises: UserError when nothing was graded, or matplotlib is not installed.
    """
    frame = _rewards_frame(run)
    if frame.empty:
        raise UserError(f"{run.path}: no graded trajectory to plot")
    units, shown = int(frame["units"].sum()), frame.head(limit)
    whole = share_interval(frame["solved"].tolist(), units=units)
    figure, (axes,) = make_canvas(len(shown))
    _band(axes, whole)
    rows = range(len(shown))
    axes.hlines(rows, shown["low"], shown["high"], color=PALE, linewidth=5, zorder=2)
    axes.plot(shown["solved"], rows, "o", color=BLUE, markersize=6, zorder=3, clip_on=False)
    name_rows(axes, [str(task) for task in shown["task_id"]])
    axes.tick_params(axis="y", pad=8)  # a mark at 0 is as wide as its half
    for row, (share, tried) in enumerate(zip(shown["solved"], shown["units"], strict=True)):
        count = f"{round(share * tried)} of {tried}"
        axes.annotate(
            count, (1, row), (14, 0), textcoords="offset points", va="center", fontsize=8.5,
            color=FAINT, annotation_clip=False,
        )  # fmt: skip
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("solved units of each task, with the 95 % interval of their share")
    title(
        axes,
        f"{short(run.path.name, 28)}: {whole.mean:.0%} solved" + _bounds(whole),
        f"{many(len(frame), 'task')}, {many(units, 'graded unit')}"
        + _only(len(shown), len(frame), "least solved"),
    )
    return Plot(figure, frame)


def _tokens_frame(run: Run) -> pd.DataFrame:
    calls = run.calls
    chosen = calls[(calls["status"] == "ok") & (calls["purpose"] == "agent")]
    columns = ["task_id", "unit_id", "turn", "input_tokens", "cache_read_tokens", "output_tokens"]
    return chosen[columns].reset_index(drop=True)


def plot_tokens(run: Run, *, limit: int = MAX_TASKS) -> Plot:
    """Plot the tokens per unit of each task, and per call by turn.

    Frame: task_id, unit_id, turn, and the input, cached and output tokens of each call of the agent
    in finished units. Unknown usage is NaN, never zero.

    Args:
        limit: tasks to draw, those with most tokens.

    Raises: UserError when no call's usage is known, or matplotlib is not installed.
    """
    frame = _tokens_frame(run)
    known = frame.dropna(subset=["input_tokens", "output_tokens"])
    if known.empty:
        raise UserError(f"{run.path}: no call of known usage to plot")
    per_task = _tokens_per_task(known)
    shown = per_task.tail(limit)
    figure, (left, right) = make_canvas(len(shown), plots=2)
    _stacked(left, shown)
    put_legend(figure, left)
    title(
        left,
        f"{short(run.path.name, 28)}: tokens per unit",
        f"mean over {many(known['unit_id'].nunique(), 'unit')}"
        + _only(len(shown), len(per_task), "largest")
        + _left_out(len(frame) - len(known)),
    )
    _by_turn(right, known)
    title(right, "tokens per call", "median over units, band from first to third quartile")
    return Plot(figure, frame)


def plot_difference(comparison: Comparison, *, limit: int = MAX_TASKS) -> Plot:
    """Plot the difference of each task (solved share or mean reward), and the mean with its
    interval.

    Frame: `comparison.per_task`.

    Args:
        limit: tasks to draw, those that differ most.

    Raises: UserError when matplotlib is not installed.
    """
    frame = comparison.per_task
    largest = frame["difference"].abs().sort_values(ascending=False, kind="stable").index[:limit]
    shown = frame.loc[largest].sort_values(["difference", "task_id"])
    figure, (axes,) = make_canvas(len(shown))
    _band(axes, comparison.difference)
    colours = [BLUE if value > 0 else ORANGE for value in shown["difference"]]
    axes.barh(range(len(shown)), shown["difference"], color=colours, height=0.6, zorder=2)
    zeros = [row for row, value in enumerate(shown["difference"]) if value == 0]
    axes.plot([0.0] * len(zeros), zeros, "o", color=FAINT, markersize=4, zorder=3)
    axes.axvline(0, color=INK, linewidth=0.8, zorder=3)
    name_rows(axes, [str(task) for task in shown["task_id"]])
    most = max(1.0, float(frame["difference"].abs().max()))
    axes.set_xlim(-1.02 * most, 1.02 * most)
    axes.xaxis.set_major_formatter(lambda value, _: comparison.shown(value) if value else "0")
    a, b = (short(name, 22) for name in (comparison.a, comparison.b))
    verb, what = (
        ("solved", "solved share") if comparison.score == "solved" else ("scored", "reward")
    )
    axes.set_xlabel(f"{a} {verb} more  |  {b} {verb} more")
    mean = comparison.difference
    title(
        axes,
        f"{b} less {a}: {comparison.shown(mean.mean)}" + _bounds(mean, comparison.shown),
        f"difference of the {what}, {many(comparison.tasks, 'common task')}"
        + _only(len(shown), len(frame), "most different"),
    )
    return Plot(figure, frame)


def _tokens_per_task(calls: pd.DataFrame) -> pd.DataFrame:
    """Return mean tokens per unit by task, smallest first: fresh and cached input, output."""
    tokens = calls[["task_id", "unit_id"]].assign(
        cached=calls["cache_read_tokens"].fillna(0).astype(float),
        output=calls["output_tokens"].astype(float),
    )
    tokens["fresh"] = calls["input_tokens"].astype(float) - tokens["cached"]
    units = tokens.groupby(["task_id", "unit_id"])[["fresh", "cached", "output"]].sum()
    means: pd.DataFrame = units.groupby("task_id").mean()
    return means.loc[means.sum(axis=1).sort_values(kind="stable").index]


def _stacked(axes: Axes, shown: pd.DataFrame) -> None:
    rows, start = range(len(shown)), shown["fresh"] * 0.0
    parts = (("fresh", "input, not cached", BLUE), ("cached", "input from cache", PALE))
    for column, label, colour in (*parts, ("output", "output", ORANGE)):
        if shown[column].any() or column != "cached":
            axes.barh(rows, shown[column], left=start, color=colour, label=label, height=0.7)
        start = start + shown[column]
    name_rows(axes, [str(task) for task in shown.index])
    count_axis(axes.xaxis)
    axes.set_xlabel("tokens")
    if start.max() == 0:
        axes.set_xlim(0, 1)
        axes.text(
            0.5, 0.5, "no tokens: oracle and noop use none", transform=axes.transAxes, ha="center",
            color=FAINT,
        )  # fmt: skip


def _by_turn(axes: Axes, calls: pd.DataFrame) -> None:
    axes.set_axisbelow(True)
    for column, label, colour in (
        ("input_tokens", "input", BLUE),
        ("output_tokens", "output", ORANGE),
    ):
        spread = calls.groupby("turn")[column].quantile(np.array([0.25, 0.5, 0.75])).unstack()
        axes.fill_between(spread.index, spread[0.25], spread[0.75], color=colour, alpha=0.18, lw=0)
        axes.plot(spread.index, spread[0.5], "o-", color=colour, label=label, markersize=4)
    count_axis(axes.xaxis)
    axes.yaxis.grid(True, color=_GRID)
    axes.set_ylim(bottom=0, top=None if calls["input_tokens"].any() else 1)
    count_axis(axes.yaxis)
    axes.set_xlabel("turn")
    axes.legend(loc="best", frameon=False, fontsize=8)


def _pyplot() -> Any:
    try:
        from matplotlib import pyplot
    except ImportError:
        command = "pip install 'hermes-rl[notebooks]'"
        raise UserError(f"plots need matplotlib, which is not installed. Run {command}") from None
    return pyplot


def make_canvas(rows: int, plots: int = 1, *, grid: bool = True) -> tuple[Figure, list[Axes]]:
    """Make a figure that a notebook shows once, as the value of its cell."""
    pyplot = _pyplot()
    height = _MARGIN_IN + _ROW_IN * rows
    size = (_WIDTH_IN, height) if plots == 1 else (1.35 * _WIDTH_IN, max(3.4, height))
    ratios = (3, 2) if plots == 2 else None
    figure, axes = pyplot.subplots(
        1, plots, figsize=size, layout="constrained", width_ratios=ratios, squeeze=False
    )
    pyplot.close(figure)
    for each in axes[0]:
        _style(each)
    if grid:
        axes[0][0].xaxis.grid(True, color=_GRID)
    return figure, list(axes[0])


def _style(axes: Axes) -> None:
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(length=0, labelsize=9, labelcolor=INK)


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Label the rows of a horizontal plot from the bottom."""
    axes.set_yticks(range(len(names)), [short(name) for name in names])
    axes.set_ylim(-0.7, len(names) - 0.3)


def short(name: str, most: int = 36) -> str:
    """A name of at most so many characters; its end often tells it from others."""
    half = most // 2
    return name if len(name) <= most else f"{name[: half - 1]}\u2026{name[-half:]}"


def put_legend(figure: Figure, axes: Axes) -> None:
    """Explain the colours below the plot, where no data are."""
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower left", ncols=3, frameon=False, fontsize=8,
    )  # fmt: skip


def count_axis(axis: Any) -> None:
    """Label whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value == int(value) else "")


def _band(axes: Axes, whole: Interval) -> None:
    """Draw the mean over tasks and its interval behind the rows."""
    axes.axvspan(whole.low, whole.high, color="#f1f1f1", zorder=0, lw=0)
    axes.axvline(whole.mean, color=FAINT, linewidth=1, linestyle="--", zorder=1)


def title(axes: Axes, text: str, note: str) -> None:
    """Write a title, and a note below it."""
    axes.set_title(text, loc="left", fontsize=11, color=INK, pad=22)
    axes.text(0, 1.0, note, transform=axes.transAxes, fontsize=8.5, color=FAINT, va="bottom")


def _bounds(whole: Interval, shown: Callable[[float], str] = "{:.0%}".format) -> str:
    if math.isnan(whole.low):
        return ""
    return f" ({shown(whole.low)} to {shown(whole.high)} over tasks)"


def note_of(shown: int, there: int, which: str) -> str:
    """How many tasks or attempts there are, and which of them are drawn."""
    return f"{there:,} in all" + _only(shown, there, which)


def _only(shown: int, there: int, which: str) -> str:
    return "" if shown == there else f"; the {shown} {which} are drawn"


def _left_out(unknown: int) -> str:
    return "" if not unknown else f"; {many(unknown, 'call')} of unknown usage left out"
