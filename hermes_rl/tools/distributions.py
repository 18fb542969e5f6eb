"""Named distributions of toolsets: each unit draws its own, by its own seed."""

from __future__ import annotations

import random
from collections.abc import Mapping

from hermes_rl.errors import UserError
from hermes_rl.input_errors import unknown

Distribution = Mapping[str, float]
"""Toolset -> the percentage of units that have it."""

DISTRIBUTIONS: dict[str, Distribution] = {
    "default": {"terminal": 100, "file": 100},
    "terminal_only": {"terminal": 100},
    "file_only": {"file": 100},
    "development": {"terminal": 80, "file": 80},
    "balanced": {"terminal": 50, "file": 50},
    "terminal_tasks": {"terminal": 97, "file": 97},
    "mostly_terminal": {"terminal": 95, "file": 40},
    "mostly_file": {"file": 95, "terminal": 40},
}
"""Over the toolsets that exist."""


def get_distribution(name: str) -> Distribution:
    """The definition of a distribution. Raises: UserError that lists the known ones."""
    if name not in DISTRIBUTIONS:
        raise UserError(unknown("distribution", name, DISTRIBUTIONS))
    return DISTRIBUTIONS[name]


def draw_toolsets(name: str, seed: int) -> tuple[str, ...]:
    """The toolsets of one unit: each drawn by itself; if none is drawn, the most likely one.

    Args:
        seed: the unit's seed; equal seeds draw equal toolsets, on every machine.

    Raises: UserError.
    """
    distribution = get_distribution(name)
    rng = random.Random(f"toolsets:{name}:{seed}")
    drawn = tuple(t for t, percent in distribution.items() if rng.random() * 100 < percent)
    return drawn or (max(distribution, key=lambda t: distribution[t]),)
