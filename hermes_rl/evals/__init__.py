"""Statistics over runs: the task is the sampling unit, infrastructure is in no score."""

from hermes_rl.evals.compare import Comparison, compare
from hermes_rl.evals.plots import (
    plot_difference,
    plot_rewards,
    plot_tokens,
    rewards_frame,
    tokens_frame,
)
from hermes_rl.evals.statistics import Interval, bootstrap, wilson
from hermes_rl.evals.summary import SOLVED, Bounds, Summary, summary

__all__ = [
    "SOLVED",
    "Bounds",
    "Comparison",
    "Interval",
    "Summary",
    "bootstrap",
    "compare",
    "plot_difference",
    "plot_rewards",
    "plot_tokens",
    "rewards_frame",
    "summary",
    "tokens_frame",
    "wilson",
]
