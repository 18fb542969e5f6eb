"""hermes_rl: from a prompt dataset and a model endpoint to training-ready agent trajectories.

Importing starts nothing and loads nothing heavy; the names below are loaded when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes_rl.lazy import attach

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hermes_rl import evals
    from hermes_rl.agent import Hooks, Limits
    from hermes_rl.aiagent import AIAgent
    from hermes_rl.config import ModelConfig, RunConfig
    from hermes_rl.config_agent import ContextConfig
    from hermes_rl.sandboxes import Bubblewrap
    from hermes_rl.sources import read_tasks
    from hermes_rl.store import load_run
else:
    __getattr__, __dir__ = attach(__name__)
