"""`hermes-rl replay`: recorded answers again, through the real loop, sandbox and verifier."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from hermes_rl.cli import render
from hermes_rl.errors import ExitCode

_LINES = 40
"""Lines of the first difference, at most."""


def command(
    run: Annotated[Path, typer.Argument(help="run directory", metavar="RUN")],
    unit: Annotated[
        str, typer.Argument(help="the beginning of a unit's or trajectory's id, TASK or TASK#N")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="both and their differences")] = False,
    allow_unsandboxed: Annotated[
        bool, typer.Option("--allow-unsandboxed", help="play a run without sandboxes too")
    ] = False,
) -> int:
    """Play an attempt again: what the model answered, through the real loop, tools, sandbox and
    verifier. No model is called. It says where the replay departs from the record.

    \b
    hermes-rl replay runs/my-run 4f1c        the attempt whose id begins with 4f1c
    hermes-rl replay runs/my-run task-7#2    repeat 2 of a task
    Exit code 0: everything is as recorded, the reward included; 1: something differs.
    Replay only runs that you trust: their configuration names what is executed.
    """
    import msgspec

    from batch_runner import replay_attempt
    from hermes_rl.cli.show_command import find, read_attempts
    from hermes_rl.store import load_run
    from hermes_rl.viewer import RunIndex, diff_attempts

    chosen = find(read_attempts(load_run(run)), unit, run)
    recorded = RunIndex(run).row(chosen["trajectory_id"])
    made = asyncio.run(replay_attempt(run, recorded, allow_unsandboxed=allow_unsandboxed))
    replayed: dict[str, Any] = msgspec.to_builtins(made)
    found = diff_attempts(recorded, replayed)
    steps = [step for step in found["steps"] if step["op"] != "equal"]
    ends = [(row["reward"], row["end_reason"]) for row in (recorded, replayed)]
    same = not steps and ends[0] == ends[1]
    if as_json:
        print(json.dumps({**found, "same": same}, ensure_ascii=False))
    else:
        print(*_lines(recorded, replayed, steps), sep="\n")
    return ExitCode.DONE if same else 1


def _lines(recorded: Any, replayed: Any, steps: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"{name:9}{render.headline(row)}"
        for name, row in (("recorded", recorded), ("replayed", replayed))
    ]
    if replayed["error"]:
        lines.append(f"error: {replayed['error']}")
    if not steps:
        ends = [(row["reward"], row["end_reason"]) for row in (recorded, replayed)]
        other = "" if ends[0] == ends[1] else ", but not the reward or the ending"
        lines.append(f"all {len(recorded['messages'])} messages are equal{other}")
        return [render.visible(line) for line in lines]
    first, info = steps[0], recorded["message_info"]
    side = first.get("side")
    at = first["a"] if side is None else first["at"]
    turn = "" if side == "b" else f", turn {info[at]['turn']}"
    only = {"a": " is only in the record", "b": " is only in the replay"}.get(side or "", "")
    lines.append(
        f"departs at message {at} ({first['role']}{turn}){only}; different messages: {len(steps)}"
    )
    sign = "+" if side == "b" else "-"
    shown = first.get("lines") or [[sign, text] for text in first["text"].split("\n")]
    changed = [f"  {sign} {text}" for sign, text in shown if sign != " "]
    lines += changed[:_LINES]
    lines += [f"  … {len(changed) - _LINES} more lines"] if len(changed) > _LINES else []
    return [render.visible(line) for line in lines]
