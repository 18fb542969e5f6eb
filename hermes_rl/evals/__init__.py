"""Statistics over runs: the task is the sampling unit, infrastructure is in no score."""

from hermes_rl.evals.compare import Comparison, compare
from hermes_rl.evals.statistics import Interval, bootstrap
from hermes_rl.evals.summary import Summary, summary

__all__ = ["Comparison", "Interval", "Summary", "bootstrap", "compare", "summary"]
