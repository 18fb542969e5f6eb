"""The Berkeley Function Calling Leaderboard: its categories of one turn, as task rows.

The model calls functions in text (the leaderboard's `Prompt`) or as tools (its `FC`). Prompts and
schemas are those of the package bfcl-eval, which also has the data, in its version 2026.3.23.
"""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.evals.published import Package, Row

EXPERT = (
    "simple_python",
    "simple_java",
    "simple_javascript",
    "multiple",
    "parallel",
    "parallel_multiple",
    "irrelevance",
)
LIVE = (
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
    "live_irrelevance",
    "live_relevance",
)
_VERSION = "BFCL_v4"
_LANGUAGES = {"simple_java": ("Java", "Java 8 SDK"), "simple_javascript": ("JavaScript",) * 2}
"""Category -> language, and the name of its syntax; others are in Python."""


def package(categories: tuple[str, ...]) -> Package:
    """The categories in the package bfcl-eval, whose requirements exclude ours: without them."""
    return Package("bfcl-eval", "data", partial(_read, categories), install="--no-deps")


def _read(categories: tuple[str, ...], folder: Path) -> Iterator[Row]:
    """The questions of a data folder, with their answers and categories."""
    for category in categories:
        answers: dict[str, Any] = {}
        if "relevance" not in category:
            rows = _lines(folder / "possible_answer" / f"{_VERSION}_{category}.json")
            answers = {row["id"]: row["ground_truth"] for row in rows}
        for row in _lines(folder / f"{_VERSION}_{category}.json"):
            yield {**row, "category": category, "ground_truth": answers.get(row["id"], [])}


def _lines(path: Path) -> Iterator[Row]:
    """The rows of a file of JSON lines, whatever its name ends in. Raises: UserError."""
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.strip():
                yield json.loads(line)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(
            f"{path}: cannot be read ({why}). --data takes the folder 'data' of bfcl-eval"
        ) from None


def to_task(row: Mapping[str, Any]) -> Row:
    """A question as a task that is answered with calls as text (the leaderboard's `Prompt`)."""
    functions = [_documented(one, row["category"]) for one in row["function"]]
    system, messages = _system(functions), [dict(one) for one in row["question"][0]]
    if messages[0]["role"] == "system":
        system += "\n\n" + messages.pop(0)["content"]
    write = json.dumps if row["category"] in _LANGUAGES else repr
    calls = [
        f"{name}({', '.join(f'{key}={write(value)}' for key, value in arguments.items())})"
        for name, arguments in _right_calls(row)
    ]
    answer = f"[{', '.join(calls)}]" if calls else _NO_CALL
    return {**_task(row, "text", answer), "system": system, "prompt": messages}


def to_tool_task(row: Mapping[str, Any]) -> Row:
    """A question as a task that is answered with calls of tools (the leaderboard's `FC`)."""
    types = importlib.import_module("bfcl_eval.constants.type_mappings").GORILLA_TO_OPENAPI
    tools = [_documented(one, row["category"]) for one in row["function"]]
    for tool in tools:
        tool["name"] = _tool_name(tool["name"])
        tool["parameters"]["type"] = "object"
        _retype(tool["parameters"]["properties"], types)
    calls = [
        {"name": _tool_name(name), "arguments": arguments} for name, arguments in _right_calls(row)
    ]
    answer = {"calls": calls} if calls else _NO_CALL
    return {
        **_task(row, "tools", answer),
        "id": f"{row['id']}.tools",  # no answer of one form is scored as one of the other
        "prompt": row["question"][0],
        "answer_tools": [
            {key: tool[key] for key in ("name", "description", "parameters")} for tool in tools
        ],
    }


def _task(row: Mapping[str, Any], calls: str, answer: Any) -> Row:
    """What the tasks of both forms have in common."""
    options = {
        "calls": calls,
        "category": row["category"],
        "functions": row["function"],
        "ground_truth": row["ground_truth"],
    }
    return {
        "id": row["id"],
        "score": {"type": "python", "name": "bfcl", "function": "bfcl", "options": options},
        "oracle": json.dumps([answer]),
        "category": row["category"],
    }


def _tool_name(name: str) -> str:
    return name.replace(".", "_")


def _retype(properties: dict[str, Any], types: Mapping[str, str]) -> None:
    """Give properties the types of JSON schemas, as deep as the leaderboard does."""
    for schema in properties.values():
        kind = schema.get("type", "string")
        if kind == "float":
            schema["format"] = "float"
            schema["description"] += " This is a float type value."
        schema["type"] = types.get(kind, "string")
        if schema["type"] not in ("array", "object"):
            continue
        items = schema.get("items", {})
        if "properties" in schema:
            _retype(schema["properties"], types)
        elif items:
            items["type"] = types[items["type"]]
            if items["type"] == "array" and "items" in items:
                items["items"]["type"] = types[items["items"]["type"]]
            elif items["type"] == "object":
                _retype(items.get("properties", {}), types)


def _documented(function: Mapping[str, Any], category: str) -> dict[str, Any]:
    """A function as models are shown it. In Java and JavaScript all values are texts."""
    shown: dict[str, Any] = copy.deepcopy(dict(function))
    language, syntax = _LANGUAGES.get(category, ("", "Python 3"))
    shown["description"] += f" Note that the provided function is in {syntax} syntax."
    for schema in shown["parameters"]["properties"].values() if language else ():
        kind = schema["type"]
        if kind == "any":
            text = f" This parameter can be of any type of {language} object"
        else:
            text = f" This is {language} {kind} type parameter"
        text += " in string representation."
        inner = "they are not in string representation."
        if kind in ("Array", "ArrayList", "array"):
            text += f" The list elements are of type {schema.pop('items')['type']}; {inner}"
        if kind == "dict" and "properties" in schema:
            entries = json.dumps(schema.pop("properties"))
            text += f" The dictionary entries have the following schema; {inner} {entries}"
        schema["description"] += text
        schema["type"] = "string"
    return shown


def _system(functions: list[Any]) -> str:
    """The system prompt of the leaderboard, in its default form."""
    texts: Any = importlib.import_module("bfcl_eval.constants.default_prompts")
    style = texts.PROMPT_STYLE_TEMPLATES["classic"]
    form = style["tool_call_no_tag"].format(
        output_format=texts.OUTPUT_FORMAT_MAPPING["python"],
        param_types=texts.PARAM_TYPE_MAPPING["python"],
    )
    listed = style["available_tools"].format(
        format="json", functions=json.dumps(functions, indent=4)
    )
    made: str = texts.PROMPT_TEMPLATE_MAPPING["plaintext"].format(
        persona=style["persona"],
        task=style["task"],
        tool_call_format=form,
        multiturn_behavior=style["multiturn_behavior"],
        available_tools=listed,
    )
    return made


_NO_CALL = "None of the functions can be used."


def _right_calls(row: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments of right calls. Values of Java that JSON writes differently are wrong."""
    if row["category"] == "live_relevance":
        return [(row["function"][0]["name"], {})]
    calls = [(k, _accepted([v])) for truth in row["ground_truth"] for k, v in truth.items()]
    if row["category"] not in _LANGUAGES:
        return calls
    return [
        (name, {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()})
        for name, arguments in calls
    ]


def _accepted(values: Any) -> Any:
    """One of the accepted values; each value of an object is again a list of them, in which ""
    means that it may be left out."""
    if not isinstance(values, list):
        return values
    value: Any = next((one for one in values if one != ""), [])
    if isinstance(value, dict):
        return {k: _accepted(v) for k, v in value.items() if v != [""]}
    if isinstance(value, list):
        return [_accepted([one]) if isinstance(one, dict) else one for one in value]
    return value


def shares(frame: Any) -> dict[str, float]:
    """The share of right answers in each category; `simple` is the mean of the three languages.

    Args:
        frame: graded trajectories, with `metadata` and `reward`.
    """
    categories = frame["metadata"].map(lambda values: values["category"])
    found = {str(k): float(v) for k, v in frame["reward"].groupby(categories).mean().items()}
    simple = [found[name] for name in ("simple_python", *_LANGUAGES) if name in found]
    return {**found, "simple": sum(simple) / 3} if len(simple) == 3 else found
