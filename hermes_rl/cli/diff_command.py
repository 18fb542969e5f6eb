"""`hermes-rl diff`: what differs between two runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hermes_rl.cli import render
from hermes_rl.errors import ExitCode, UserError
from hermes_rl.text import many

_TASKS = 20
"""Tasks that are listed, at most; all are in --json."""
_VALUE_CHARS = 60


def command(
    a: Annotated[Path, typer.Argument(help="run directory", metavar="A")],
    b: Annotated[Path, typer.Argument(help="run directory", metavar="B")],
    as_json: Annotated[bool, typer.Option("--json", help="everything, as JSON")] = False,
) -> int:
    """What differs between two runs: configuration, versions, tasks, prompt, tools and results.

    \b
    hermes-rl diff runs/before runs/after
    hermes-rl view                           the same in a browser, and attempts side by side
    """
    from hermes_rl.viewer import diff_runs

    found = diff_runs(a, b)
    found["comparisons"] = _comparisons(a, b, found["results"])
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
    else:
        print(*(render.visible(line) for line in _lines(found)), sep="\n")
    return ExitCode.DONE


def _lines(found: dict[str, Any]) -> list[str]:
    names = [Path(found[side]).name for side in "ab"]
    lines = ["settings:"] if found["settings"] else ["settings and versions are equal"]
    rows = [(one["name"], _shown(one["a"]), _shown(one["b"])) for one in found["settings"]]
    lines += _indented(render.columns(("", *names), rows)) if rows else []
    tasks = found["tasks"]
    for key, text in (("only_a", f"only in {names[0]}"), ("only_b", f"only in {names[1]}")):
        if tasks[key]:
            number = many(tasks["counts"][key], "task")
            lines.append(f"{number} {text}: {_listed(tasks[key])}")
    if tasks["edited"]:
        lines.append(
            f"{many(tasks['counts']['edited'], 'task')} with other content: "
            f"{_listed(tasks['edited'])}"
        )
    for name in ("prompt", "tools"):
        changed = [f"  {sign} {text}" for sign, text in found[name] if sign != " "]
        lines += [f"{name} of the first common task:", *changed] if changed else []
    lines += ["results:", *_indented(render.columns(("", *names), _results(found["results"])))]
    lines += found["comparisons"]
    lines.append(f"{found['changed_count']} of {tasks['common']} common tasks have another reward")
    changed_rows = [
        (one["task_id"], *(render.reward(one[side]["reward"]) for side in "ab"))
        for one in found["changed"][:_TASKS]
    ]
    lines += _indented(render.columns(("task", *names), changed_rows)) if changed_rows else []
    return lines


def _comparisons(a: Path, b: Path, results: list[dict[str, Any]]) -> list[str]:
    """Whether the differences of solved shares, and of partial rewards, are significant."""
    from hermes_rl.evals import compare, summary
    from hermes_rl.store import load_run

    if not all(one["graded"] for one in results):
        return []
    runs = [load_run(path) for path in (a, b)]
    try:
        pairs = [compare(*runs)]
        if any(summary(run).partial for run in runs):
            pairs.append(compare(*runs, score="reward"))
    except UserError as error:
        return [f"not compared: {error}"]
    return [str(replace(pair, unfinished=())) for pair in pairs]


def _results(sides: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    def row(name: str, *values: str) -> tuple[str, ...]:
        return (name, *values)

    open_units = any(one["unfinished"] for one in sides)
    solved = [f"{one['solved']} of {one['graded']}" for one in sides]
    return [
        row("units done", *(render.number(one["done"]) for one in sides)),
        *([row("unfinished", *(one["unfinished"] or "" for one in sides))] if open_units else []),
        row("solved", *solved),
        row("mean reward", *(render.reward(one["mean_reward"]) for one in sides)),
        row("failed attempts", *(render.number(one["failed_attempts"]) for one in sides)),
        row("mean turns", *(render.reward(one["mean_turns"]) for one in sides)),
        row("tokens", *(render.number(one["tokens"]) for one in sides)),
        row("cost", *(render.cost(one["cost_usd"] or 0.0, one["unpriced_calls"]) for one in sides)),
        row("mean time", *(render.seconds(one["mean_seconds"]) for one in sides)),
    ]


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    return render.clip(value if isinstance(value, str) else json.dumps(value), _VALUE_CHARS)


def _listed(tasks: list[str]) -> str:
    return ", ".join(tasks[:_TASKS]) + (", ..." if len(tasks) > _TASKS else "")


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in text.split("\n")]
