"""hermes_rl: from a prompt dataset and a model endpoint to training-ready agent trajectories.

Importing starts nothing and loads nothing heavy; the names below are loaded when they are used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "AIAgent": "hermes_rl.aiagent",
    "Bubblewrap": "hermes_rl.sandboxes.bubblewrap",
    "Hooks": "hermes_rl.agent",
    "Limits": "hermes_rl.agent",
    "ModelConfig": "hermes_rl.config",
    "RunConfig": "hermes_rl.config",
    "evals": "hermes_rl.evals",
    "load_run": "hermes_rl.store.reader",
    "read_tasks": "hermes_rl.sources",
}
"""Public name -> the module that has it."""

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hermes_rl' has no attribute {name!r}")
    module = importlib.import_module(_HOMES[name])
    return module if _HOMES[name] == f"hermes_rl.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return __all__
