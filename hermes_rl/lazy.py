"""Public names of packages: listed once in an `__init__`, loaded on first use."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Any


def attach(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make what a package imports `if TYPE_CHECKING:` its public names at run time too.

    So one list serves the type checker, readers and Python, and importing the package loads
    nothing:

        if TYPE_CHECKING:
            from hermes_rl.store.reader import load_run
        else:
            __getattr__, __dir__ = attach(__name__)

    Args:
        package: `__name__` of the package whose `__init__` calls this.

    Returns:
        Its `__getattr__` and `__dir__` (PEP 562). `__all__` is the sorted list of the names.
    """

    @cache
    def homes() -> dict[str, str]:
        tree = ast.parse(inspect.getsource(sys.modules[package]))
        return {
            alias.name: str(node.module)
            for block in tree.body
            if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
            for node in block.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    def get(name: str) -> Any:
        if name == "__all__":
            return sorted(homes())
        if name.startswith("__") or name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes()[name] == package:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(homes()[name]), name)

    return get, lambda: sorted({*vars(sys.modules[package]), *homes()})
