"""Scores, comparisons and plots of runs. Infrastructure failures are in no score."""

from hermes_rl.evals.plots import (
    plot_difference,
    plot_rewards,
    plot_tokens,
    rewards_frame,
    tokens_frame,
)
from hermes_rl.evals.statistics import (
    SOLVED,
    Bounds,
    Comparison,
    Interval,
    Summary,
    bootstrap,
    compare,
    summary,
    wilson,
)

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
