"""`hermes-rl play`: be the agent. Same sandbox, files, limits and verifier; graded on exit."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from hermes_rl.cli.run_command import parse_column_map
from hermes_rl.errors import ExitCode, SandboxKilled, UserError
from hermes_rl.input_errors import did_you_mean
from hermes_rl.network import Network, parse_network
from hermes_rl.sandboxes import Sandbox, SandboxSpec
from hermes_rl.tasks import Task, TaskRow

if TYPE_CHECKING:
    from hermes_rl.config import SandboxSection

COMMAND_TIMEOUT_S = 180.0
"""The default timeout of a terminal call of an agent."""


def command(
    dataset: Annotated[
        str, typer.Argument(help="dataset, or run directory", metavar="DATASET|RUN")
    ],
    task: Annotated[str, typer.Argument(help="task id, row number from 0, or a unit of the run")],
    columns: Annotated[
        list[str] | None, typer.Option("--map", help="rename a column: prompt=COLUMN")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="append the row, with what you typed as its oracle")
    ] = None,
    network: Annotated[
        str | None, typer.Option(help="off, on, or hosts: pypi.example,*.example.org [off]")
    ] = None,
) -> int:
    """Be the agent: the same sandbox, files and verifier, you at the prompt.

    \b
    hermes-rl play smoke count-txt                 type commands; `exit` or Ctrl-D ends and grades
    hermes-rl play my.jsonl 17 --save my-oracles.jsonl
    """
    if save is not None:
        _refuse_unwritable(save)
    rows, wanted, place = _source(dataset, task, parse_column_map(columns))
    row = find(rows, wanted, dataset)
    if row.task is None:
        raise UserError(f"{row.place}: {row.error}")
    from hermes_rl.definitions import sandbox_limits_of

    chosen = row.task
    spec = SandboxSpec(
        lease="play",
        image=chosen.image or place.image,
        cwd=chosen.cwd,
        env=chosen.env_vars,
        network=place.network if network is None else _network(network),
        limits=sandbox_limits_of(place.limits, chosen),
    )
    return asyncio.run(_play(chosen, spec, save))


def _network(text: str) -> Network:
    try:
        return parse_network(text)
    except ValueError as error:
        raise UserError(f"--network {text}: {error}") from None


class _Source(NamedTuple):
    """The rows with the task, and the sandbox settings."""

    rows: Iterator[TaskRow]
    wanted: str
    place: SandboxSection


def _source(dataset: str, wanted: str, columns: dict[str, str]) -> _Source:
    from hermes_rl.config import SandboxSection
    from hermes_rl.sources import read_tasks

    path = Path(dataset)
    if not (path / "epochs").is_dir():
        return _Source(read_tasks(dataset, columns=columns), wanted, SandboxSection())
    from hermes_rl.cli.show_command import find as find_unit
    from hermes_rl.cli.show_command import read_attempts
    from hermes_rl.config import load_config, parse_config
    from hermes_rl.store import load_run

    rows = read_attempts(load_run(path))
    config = parse_config(load_config(path / "run.yaml"), str(path / "run.yaml"))
    data = config.dataset
    found = read_tasks(data.path, columns=data.map, limit=data.limit)
    return _Source(found, find_unit(rows, wanted, path)["task_hash"], config.sandbox)


def find(rows: Iterator[TaskRow], wanted: str, dataset: str) -> TaskRow:
    """Find the row with an id or content hash, else with a number from 0.

    Raises: UserError with some ids, or with the rows that share the id.
    """
    ids: list[str] = []
    numbered: TaskRow | None = None
    found: dict[str, TaskRow] = {}
    for row in rows:
        if wanted == row.task_hash:
            return row
        if wanted == row.raw_id:
            found.setdefault(row.task_hash, row)  # identical rows are repeats of one task
        numbered = row if wanted == str(row.index) else numbered
        ids += [row.raw_id] if len(ids) <= 1000 else []
    if len(found) > 1:
        places = ", ".join(row.place for row in found.values())
        numbers = " or ".join(str(row.index) for row in found.values())
        raise UserError(
            f"{dataset}: {len(found)} tasks have the id {wanted!r} ({places}). "
            f"Give the row number instead: {numbers}"
        )
    if found:
        return next(iter(found.values()))
    if numbered is not None:
        return numbered
    some = ", ".join(ids[:10]) + (", ..." if len(ids) > 10 else "")
    instead = did_you_mean(wanted, ids, f" (there are: {some})")
    raise UserError(f"{dataset}: no task {wanted!r}{instead}")


async def _play(task: Task, spec: SandboxSpec, save: Path | None) -> int:
    from hermes_rl.rollout import prepare
    from hermes_rl.verify import verify
    from hermes_rl.wiring import make_backend

    backend = make_backend("bubblewrap")
    try:
        async with await backend.lease(spec) as sandbox:
            await prepare(sandbox, task)
            print(f"{task.id}\n\n{task.prompt_text}\n")
            print("You are in the workspace. `exit` or Ctrl-D ends and grades.", flush=True)
            typed = await _commands(sandbox)
            judged = await verify(sandbox, task.verify)
    finally:
        await backend.aclose()
    detail = judged.rewards[0].detail if judged.rewards else "this task has no verifier"
    print(f"\nreward {'-' if judged.reward is None else judged.reward}\n{detail}")
    if save is not None and typed:
        _save(task, typed, save)
    return ExitCode.DONE


async def _commands(sandbox: Sandbox) -> list[str]:
    typed: list[str] = []
    while True:
        line = await asyncio.to_thread(_ask)
        if line is None or line.strip() in ("exit", "logout"):
            return typed
        if not line.strip():
            continue
        try:
            result = await sandbox.run(line, timeout_s=COMMAND_TIMEOUT_S)
        except SandboxKilled as error:
            print(f"[the sandbox ended: {error}]")
            return typed
        typed.append(line)
        print(result.output, end="" if result.output.endswith("\n") or not result.output else "\n")
        if result.exit_code:
            print(f"[exit {result.exit_code}{', timed out' if result.timed_out else ''}]")


def _ask() -> str | None:
    prompt = "$ " if sys.stdin.isatty() else ""
    try:
        return input(prompt)
    except EOFError:
        return None


def _refuse_unwritable(path: Path) -> None:
    """Refuse a file that cannot be written before someone solves the task for it."""
    is_new = not path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}. Check --save") from None
    if is_new:
        path.unlink()


def _save(task: Task, typed: list[str], path: Path) -> None:
    """Append the task's row with what was typed as its oracle."""
    row = _row(task) | {"oracle": "\n".join(typed)}
    try:
        with path.open("a") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}. Check --save") from None
    print(f"saved with its oracle to {path}")


def _row(task: Task) -> dict[str, Any]:
    """A task as a row of a dataset."""
    import base64

    from hermes_rl.messages import to_openai

    def content(data: bytes) -> Any:
        try:
            return data.decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(data).decode()}

    def files(contents: dict[str, bytes]) -> dict[str, Any]:
        return {path: content(data) for path, data in contents.items()}

    verifier = task.verify
    row: dict[str, Any] = {
        "id": task.id,
        "prompt": task.prompt_text
        if len(task.prompt) == 1
        else [to_openai(message) for message in task.prompt],
        "system": task.system,
        "image": task.image,
        "cwd": task.cwd,
        "env_vars": task.env_vars or None,
        "files": files(task.files) or None,
        "setup": task.setup,
        "requires": list(task.requires) or None,
        "toolsets": None if task.toolsets is None else list(task.toolsets),
        "answer_tools": list(task.answer_tools) or None,
        "distribution": task.distribution,
        "limits": task.limits or None,
        "repeats": task.repeats,
    }
    if verifier is not None:
        row["verify"] = {
            "script": verifier.script,
            "files": files(verifier.files) or None,
            "timeout_s": verifier.timeout_s,
            "image": verifier.image,
            "score": verifier.score,
            "mounts": verifier.mounts or None,
        }
        row["verify"] = {k: v for k, v in row["verify"].items() if v is not None}
    return {k: v for k, v in row.items() if v is not None} | task.metadata
