"""Arithmetic word problems, solved with Python in a sandbox and judged as numbers."""

from environments.gsm8k_python.environment import Gsm8kPython, Gsm8kPythonConfig

__all__ = ["Gsm8kPython", "Gsm8kPythonConfig"]
