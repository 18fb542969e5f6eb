"""RL environments: tasks, tools, conversation partners and rewards (DESIGN 5.13).

    from hermes_rl.rl import EnvConfig, Environment, make_task

Names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hermes_rl.errors import CannotJudge, ToolError
    from hermes_rl.events import RewardPart
    from hermes_rl.messages import AssistantMessage, Message, UserMessage
    from hermes_rl.rl.context import BoxResult, Grading, RolloutContext
    from hermes_rl.rl.environment import EnvConfig, Environment, make_task
    from hermes_rl.rl.judging import Judge, ModelHandle, Verdict
    from hermes_rl.rl.rewards import Rewards, part
    from hermes_rl.rl.view import Rollout, ToolUse
    from hermes_rl.tasks import Task, Verify
    from hermes_rl.tools.base import Tool, ToolContext, ToolResult, tool

_NAMES = {
    "hermes_rl.errors": ("CannotJudge", "ToolError"),
    "hermes_rl.events": ("RewardPart",),
    "hermes_rl.messages": ("AssistantMessage", "Message", "UserMessage"),
    "hermes_rl.rl.context": ("BoxResult", "Grading", "RolloutContext"),
    "hermes_rl.rl.environment": ("EnvConfig", "Environment", "make_task"),
    "hermes_rl.rl.judging": ("Judge", "ModelHandle", "Verdict"),
    "hermes_rl.rl.rewards": ("Rewards", "part"),
    "hermes_rl.rl.view": ("Rollout", "ToolUse"),
    "hermes_rl.tasks": ("Task", "Verify"),
    "hermes_rl.tools.base": ("Tool", "ToolContext", "ToolResult", "tool"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
"""Public name -> its module."""

__all__ = [
    "AssistantMessage", "BoxResult", "CannotJudge", "EnvConfig", "Environment", "Grading", "Judge",
    "Message", "ModelHandle", "RewardPart", "Rewards", "Rollout", "RolloutContext", "Task", "Tool",
    "ToolContext", "ToolError", "ToolResult", "ToolUse", "UserMessage", "Verdict", "Verify",
    "make_task", "part", "tool",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'hermes_rl.rl' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
