"""Scores, comparisons and plots of runs. Infrastructure failures are in no score."""

from hermes_rl.evals import stats
from hermes_rl.evals.activity import (
    plot_progress,
    plot_solve_rates,
    plot_time,
    plot_timeline,
    plot_tools,
)
from hermes_rl.evals.benchmarks import BENCHMARKS, file_name, load_benchmark, shuffled
from hermes_rl.evals.comparisons import (
    plot_cost,
    plot_endings,
    plot_pass_at_k,
    plot_scores,
    plot_task_map,
)
from hermes_rl.evals.frames import Frames, Grain, answers, frames
from hermes_rl.evals.plots import Plot, plot_difference, plot_rewards, plot_tokens
from hermes_rl.evals.stats import Interval, VarianceSplit, bootstrap, wilson
from hermes_rl.evals.summaries import (
    SOLVED,
    Bounds,
    Comparison,
    NotCompared,
    Summary,
    compare,
    compare_all,
    grouped,
    pass_at,
    summary,
)

__all__ = [
    "BENCHMARKS",
    "SOLVED",
    "Bounds",
    "Comparison",
    "Frames",
    "Grain",
    "Interval",
    "NotCompared",
    "Plot",
    "Summary",
    "VarianceSplit",
    "answers",
    "bootstrap",
    "compare",
    "compare_all",
    "frames",
    "file_name",
    "grouped",
    "load_benchmark",
    "pass_at",
    "plot_cost",
    "plot_difference",
    "plot_endings",
    "plot_pass_at_k",
    "plot_progress",
    "plot_rewards",
    "plot_scores",
    "plot_solve_rates",
    "plot_task_map",
    "plot_time",
    "plot_timeline",
    "plot_tokens",
    "plot_tools",
    "shuffled",
    "stats",
    "summary",
    "wilson",
]
