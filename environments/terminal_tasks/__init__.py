"""The bundled terminal tasks as an environment."""

from environments.terminal_tasks.environment import TerminalTasks, TerminalTasksConfig

__all__ = ["TerminalTasks", "TerminalTasksConfig"]
