"""Scorers of task rows: what judges a final answer without a script (DESIGN 5.1)."""

from hermes_rl.scorers.answers import READERS, Score
from hermes_rl.scorers.code import code_tests, extract_code
from hermes_rl.scorers.isolated import CHILD, formula, function_place
from hermes_rl.scorers.process import ScorerPool
from hermes_rl.scorers.spec import OPTIONS, Scorer, parse_scores

__all__ = [
    "CHILD",
    "OPTIONS",
    "READERS",
    "Score",
    "Scorer",
    "ScorerPool",
    "code_tests",
    "extract_code",
    "formula",
    "function_place",
    "parse_scores",
]
