"""Berkeley Function Calling Leaderboard: are these the right calls? A function of `python`.

The calls are compared by the checker of the package bfcl-eval, as on the leaderboard. Its reader of
calls in Python is not used: it evaluates parts of an answer, outside every sandbox. Those of Java
and JavaScript only parse. Source: the leaderboard's versions 1 and 2, categories of one turn.
"""

from __future__ import annotations

import ast
import functools
import importlib
import json
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from hermes_rl.messages import UNPARSED

_MODELS = "bfcl_eval.constants.model_config"
"""Where the checker looks up one flag of a model. It imports the clients of all providers."""

_READS = {"simple_java": ("java", "java"), "simple_javascript": ("javascript", "js")}
"""Category -> language, and the short name that its parser has; others are in Python."""

Calls = list[dict[str, dict[str, Any]]]


def calls(answer: str, row: Mapping[str, Any]) -> tuple[float, str]:
    """Judge the calls of an answer.

    Args:
        row: `category` of the leaderboard, `functions` (their schemas), `ground_truth`, and how the
            model makes `calls`: in its `text`, or as `tools` in the last of the `messages`.

    Returns: 1 if the calls are right, else 0, and why. In the category irrelevance a right answer
        makes no call.
    """
    category, form = row["category"], row["calls"]
    made = tool_calls(row["messages"]) if form == "tools" else read_calls(answer, category)
    if "irrelevance" in category:
        return float(not made), "it makes a call" if made else ""
    if not made:
        return 0.0, "no calls found"
    if "relevance" in category:
        return 1.0, ""
    check, languages = _checker()
    language = languages[_READS.get(category, ("python",))[0].upper()]
    try:
        found = check(row["functions"], made, row["ground_truth"], language, category, form)
    except Exception as error:  # a boundary: arguments of odd types, which the checker never meets
        return 0.0, f"{type(error).__name__}: {error}"
    return float(found["valid"]), "" if found["valid"] else str(found["error"])


@functools.cache
def _checker() -> tuple[Callable[..., dict[str, Any]], Any]:
    """The checker, and its languages."""
    models: Any = ModuleType(_MODELS)
    # The names of tools have no dots. The checker looks that up by the name of a model.
    models.MODEL_CONFIG_MAPPING = {
        form: SimpleNamespace(underscore_to_dot=form == "tools") for form in ("text", "tools")
    }
    sys.modules.setdefault(_MODELS, models)
    # Not a requirement of ours: what it requires excludes what we do.
    languages = importlib.import_module("bfcl_eval.constants.enums").Language
    checker: Any = importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker")
    return checker.ast_checker, languages


def tool_calls(messages: Sequence[Mapping[str, Any]]) -> Calls:
    """The calls of the last message; none if the arguments of one are not a JSON object."""
    made = []
    for call in messages[-1].get("tool_calls") or ():
        function = call["function"]
        arguments = function["arguments"]
        try:
            if arguments.keys() == {UNPARSED}:
                arguments = json.loads(arguments[UNPARSED])
        except (ValueError, TypeError, RecursionError):
            return []
        if not isinstance(arguments, dict):
            return []
        made.append({function["name"]: arguments})
    return made


def read_calls(answer: str, category: str = "") -> Calls:
    """The calls of a text such as `[f(x=1), g.h(y="a")]`; none if it is anything else."""
    text = answer.strip("`\n ")
    text = ("" if text.startswith("[") else "[") + text + ("" if text.endswith("]") else "]")
    if category in _READS:
        language, short = _READS[category]
        parser = importlib.import_module(f"bfcl_eval.model_handler.parser.{short}_parser")
        try:
            found = getattr(parser, f"parse_{language}_function_call")(text[1:-1])
        except Exception:  # as below
            return []
        return found if isinstance(found, list) else []
    try:
        tree: Any = ast.parse(text.strip().strip("'"), mode="eval").body
        nodes = [tree] if isinstance(tree, ast.Call) else tree.elts
        return [_call(node) for node in nodes]
    except Exception:  # a boundary: what cannot be read is not a call
        return []


def _call(node: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(node, ast.Call):
        raise ValueError("not a call")
    parts, function = [], node.func
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    if isinstance(function, ast.Name):
        parts.append(function.id)
    arguments = {str(one.arg): _value(one.value) for one in node.keywords}
    return {".".join(reversed(parts)): arguments}


_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def _value(node: Any) -> Any:
    """The value of an argument, as the leaderboard reads it."""
    read = _READERS.get(type(node))
    if read is None:
        raise ValueError(f"unsupported {type(node).__name__}")
    return read(node)


def _computed(node: ast.BinOp) -> Any:
    left, right = (
        ast.literal_eval(n) if not isinstance(n, ast.BinOp) else _computed(n)
        for n in (node.left, node.right)
    )
    return _OPERATORS[type(node.op)](left, right)


_READERS: dict[type, Callable[[Any], Any]] = {
    ast.Constant: lambda node: "..." if node.value is Ellipsis else node.value,
    ast.UnaryOp: lambda node: -node.operand.value,
    ast.List: lambda node: [_value(one) for one in node.elts],
    ast.Tuple: lambda node: tuple(_value(one) for one in node.elts),
    ast.Dict: lambda node: {
        _value(k): _value(v) for k, v in zip(node.keys, node.values, strict=True)
    },
    ast.BinOp: _computed,
    ast.Name: lambda node: node.id,
    ast.Call: lambda node: _call(node) if node.keywords else ast.unparse(node),
    ast.Subscript: lambda node: f"{ast.unparse(node.value)}[{ast.unparse(node.slice)}]",
}
