"""The Berkeley Function Calling Leaderboard: its categories of one turn in Python, as task rows.

Prompts are made from the templates of the package bfcl-eval, which also has the data.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.evals.published import Package, Row

EXPERT = ("simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance")
LIVE = (
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
    "live_irrelevance",
    "live_relevance",
)
_VERSION = "BFCL_v4"
_HINT = " Note that the provided function is in Python 3 syntax."


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
        raise UserError(f"{path}: cannot be read ({error}). --data takes its folder") from None


def to_task(row: Mapping[str, Any]) -> Row:
    """A question as a task that is answered with calls as text (the leaderboard's `Prompt`)."""
    functions = [{**one, "description": one["description"] + _HINT} for one in row["function"]]
    system, messages = _system(functions), [dict(one) for one in row["question"][0]]
    if messages[0]["role"] == "system":
        system += "\n\n" + messages.pop(0)["content"]
    options = {
        "category": row["category"],
        "functions": functions,
        "ground_truth": row["ground_truth"],
    }
    return {
        "id": row["id"],
        "system": system,
        "prompt": messages,
        "score": {"type": "python", "name": "bfcl", "function": "bfcl", "options": options},
        "oracle": json.dumps([_oracle(row)]),
        "category": row["category"],
    }


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


def _oracle(row: Mapping[str, Any]) -> str:
    if "irrelevance" in row["category"]:
        return "None of the functions can be used."
    if "relevance" in row["category"]:
        return f"[{row['function'][0]['name']}()]"
    return f"[{', '.join(_call(one) for one in row['ground_truth'])}]"


def _call(truth: Mapping[str, Mapping[str, Any]]) -> str:
    name, parameters = next(iter(truth.items()))
    return f"{name}({', '.join(f'{k}={v!r}' for k, v in _accepted([parameters]).items())})"


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
    """The share of right answers in each category.

    Args:
        frame: graded trajectories, with `metadata` and `reward`.
    """
    categories = frame["metadata"].map(lambda values: values["category"])
    return {str(k): float(v) for k, v in frame["reward"].groupby(categories).mean().items()}
