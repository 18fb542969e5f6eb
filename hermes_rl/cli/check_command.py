"""`hermes-rl check`: a dataset before a token is spent, or the usage records of a run."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hermes_rl.cli.run_command import parse_column_map
from hermes_rl.errors import ExitCode, HermesError, UserError
from hermes_rl.store import fetch_run, is_run, url_of
from hermes_rl.text import many

if TYPE_CHECKING:
    from hermes_rl.tasks import TaskRow

COUNTED_EVERY_S = 2.0
"""Interval of the progress lines of a long check."""

SHOWN = 50
"""Maximum number of faults that are printed."""


_Sandbox = Annotated[
    str | None,
    typer.Option(help="--run: bubblewrap, docker, podman, ssh, apptainer or modal [bubblewrap]"),
]
_Hosts = Annotated[str | None, typer.Option(help="--run --sandbox ssh: USER@HOST:PORT,...")]
_Image = Annotated[str | None, typer.Option(help="--run: image of tasks that name none")]


def command(
    target: Annotated[str, typer.Argument(help="dataset, run or its URL", metavar="DATASET|RUN")],
    run: Annotated[
        bool, typer.Option("--run", help="play oracle (1), no-op (0) and cheats (0) for real")
    ] = False,
    sandbox: _Sandbox = None,
    hosts: _Hosts = None,
    image: _Image = None,
    columns: Annotated[
        list[str] | None, typer.Option("--map", help="rename a column: prompt=COLUMN")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="only the first rows")] = None,
    repair: Annotated[bool, typer.Option("--repair", help="a run: repair its files")] = False,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="a run: exact ids, row by row, and why they forked")
    ] = False,
    masks: Annotated[
        bool, typer.Option("--masks", help="a run: which tokens of the model would be trained")
    ] = False,
    secrets: Annotated[bool, typer.Option("--secrets", help="a run: find API keys")] = False,
    tokenizer: Annotated[
        list[str] | None,
        typer.Option(help="folder or hub name, to decode and render again; may be repeated"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="findings as one JSON object")] = False,
) -> int:
    """Find errors before they cost money.

    \b
    hermes-rl check my.jsonl              every bad row with its line; scripts through bash -n
    hermes-rl check my.jsonl --run        oracle must give 1, doing nothing 0, cheating 0
    hermes-rl check runs/smoke-local      schema and usage of a run
    hermes-rl check runs/rl --tokens      each branch: identical, bridged, or forked here because
    hermes-rl check runs/smoke-local --secrets    keys and passwords in its texts
    hermes-rl check runs/rl --masks --tokenizer Qwen/Qwen3-8B
    """
    path, changed = _find(target, repair, as_json)
    if is_run(path):
        if run or columns or limit is not None:
            name = "--run" if run else "--map" if columns else "--limit"
            raise UserError(f"{target} is a run directory; {name} is for datasets")
        if tokens or masks:
            from hermes_rl.cli.check_exact import check_exact

            return check_exact(path, tokenizer or [], tokens=tokens, masks=masks, as_json=as_json)
        if secrets:
            return _check_secrets(path, as_json)
        return _check_run(path, target, changed, repair, as_json)
    for_runs = {"repair": repair, "tokens": tokens, "masks": masks, "secrets": secrets}
    if name := next((f"--{name}" for name, chosen in for_runs.items() if chosen), ""):
        raise UserError(f"{target} is not a run directory; {name} is for runs")
    where = (("backend", sandbox), ("image", image), ("hosts", hosts))
    section = {name: value for name, value in where if value}
    if section and not run:
        raise UserError("--sandbox, --hosts and --image are for --run")
    if sandbox == "none":
        raise UserError("--run plays cheats too, which --sandbox none would not hold. Use another")
    return _check_dataset(
        target, parse_column_map(columns), limit, section if run else None, as_json
    )


def _find(target: str, repair: bool, as_json: bool) -> tuple[Path, list[str]]:
    """The path of a dataset or run, and the faults of the objects of one at a URL, which is
    repaired before."""
    url = url_of(target)
    if url is None:
        return Path(target), []
    if repair:
        _repair(url, as_json)
    return fetch_run(url, whole=True)


def _check_dataset(
    dataset: str,
    columns: dict[str, str],
    limit: int | None,
    sandbox_section: Mapping[str, Any] | None,
    as_json: bool,
) -> int:
    from hermes_rl.cli import check_dataset
    from hermes_rl.sources import read_tasks
    from hermes_rl.task_folders import describe_network_requests

    found = check_dataset.inspect_rows(
        _print_progress(read_tasks(dataset, columns=columns, limit=limit))
    )
    if not found.rows:
        raise UserError(f"{dataset}: the dataset holds no rows. Check the file, or --limit")
    found.absent = asyncio.run(check_dataset.find_missing_programs(found.requires))
    result: dict[str, Any] = {
        "rows": found.rows,
        "bad": found.faults,
        "verified": found.verified,
        "oracles": found.oracles,
        "identical": found.repeated,
        "outside_workspace": found.unplaced,
        "requires": sorted(found.requires),
        "absent": found.absent,
        "network": describe_network_requests(Path(dataset).expanduser(), limit),
    }
    if not as_json:
        _print_faults(found.faults)
        print(_dataset_line(dataset, result))
    good = not found.faults
    if sandbox_section is not None:
        result["played"] = {}
        for played in check_dataset.play_all(dataset, columns, limit, sandbox_section):
            name = played.play.name
            result["played"][name] = {"tasks": played.tasks, "wrong": played.wrong}
            good = good and not played.wrong
            if not as_json:
                _print_play_result(name, played.play.wanted, played.tasks, played.wrong)
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
    return ExitCode.DONE if good else ExitCode.BAD_INPUT


def _print_progress(rows: Iterator[TaskRow]) -> Iterator[TaskRow]:
    """Yield the rows, and print their number at intervals."""
    due = time.monotonic() + COUNTED_EVERY_S
    for number, row in enumerate(rows, start=1):
        yield row
        if time.monotonic() > due:
            print(f"{number:,} rows checked", file=sys.stderr, flush=True)
            due = time.monotonic() + COUNTED_EVERY_S


def _print_faults(faults: list[str]) -> None:
    for fault in faults[:SHOWN]:
        print(f"error: {fault}", file=sys.stderr)
    if len(faults) > SHOWN:
        print(f"... and {len(faults) - SHOWN} more", file=sys.stderr)


def _dataset_line(dataset: str, result: dict[str, Any]) -> str:
    parts = [
        many(result["rows"], "row"),
        f"{len(result['bad']):,} bad",
        f"{result['verified']:,} with a verifier",
        f"{result['oracles']:,} with an oracle",
    ]
    if result["identical"]:
        parts.append(f"{result['identical']:,} identical to an earlier row (kept as repeats)")
    if result["requires"]:
        parts.append(f"requires {', '.join(result['requires'])}")
    line = f"{dataset}: {', '.join(parts)}"
    if result["absent"]:
        line += (
            f"\nabsent in the sandbox: {', '.join(result['absent'])}. Install them on this machine"
        )
    if result["outside_workspace"]:
        line += (
            f"\nnote: {len(result['outside_workspace']):,} verifiers never name the workspace "
            f"(first: {result['outside_workspace'][0]}). They start in an empty folder: "
            'begin them with cd "$WORKSPACE"'
        )
    if result["network"]:
        line += f"\nnote: {result['network']}. It is off unless you run them with --network"
    return line


def _print_play_result(name: str, wanted: float, tasks: int, wrong: list[str]) -> None:
    mark = "ok" if not wrong else f"{len(wrong)} wrong"
    print(f"{name:<20} {tasks:>5} tasks, reward must be {wanted:g}: {mark}", flush=True)
    for line in wrong[:SHOWN]:
        print(f"  {line}")


def _refuse_special_files(path: Path) -> None:
    """Raises: UserError for a file at which every reader would wait for ever."""
    from hermes_rl.store import special_files

    for place in special_files(path):
        raise UserError(f"{place} is a named pipe or a device. Remove it: a run has only files")


def _check_run(path: Path, target: str, changed: list[str], repair: bool, as_json: bool) -> int:
    """Check a run directory, or the copy of a run at a URL.

    Args:
        target: its name for people.
        changed: faults of the objects at the URL.
    """
    from hermes_rl.cli import check_run
    from hermes_rl.store import load_run

    _refuse_special_files(path)
    if repair and not url_of(target):
        _repair(path, as_json)
    faults = [*changed, *check_run.faults_of(path)]
    stats, why = None, ""
    try:
        stats = load_run(path).stats
    except (HermesError, OSError, ValueError) as error:  # damaged: see the faults
        why = f"{target}: cannot be added up ({error}); {_faults(len(faults))}"
        faults = faults or [why]
    if as_json:
        print(json.dumps({"faults": faults, "stats": stats}, ensure_ascii=False))
    else:
        _print_faults(faults)
        print(why if stats is None else _usage_line(target, stats, len(faults)))
    return ExitCode.DONE if not faults else ExitCode.BAD_INPUT


def _repair(run: str | Path, as_json: bool) -> None:
    from hermes_rl.store import changed_run, repair_run

    with changed_run(run, repair=True) as opened:
        done = repair_run(opened.path, first_epoch=opened.first_epoch)
    lines = [f"repaired; the damaged file is kept: {name}" for name in done.saved]
    lines += [
        f"lost: {name}; the units of its rows run again. If you find the file, put it back and "
        "repair again"
        for name in done.lost
    ]
    lines += [f"finished twice, the later row moved: {unit}" for unit in done.duplicates]
    for line in (*opened.notes, *lines):
        print(line, file=sys.stderr if as_json else sys.stdout)


def _check_secrets(path: Path, as_json: bool) -> int:
    from hermes_rl.cli.check_run import count_workspace_archives, secrets_in

    _refuse_special_files(path)
    found, archives = list(secrets_in(path)), count_workspace_archives(path)
    if as_json:
        result = {"secrets": found, "archives_not_searched": archives}
        print(json.dumps(result, ensure_ascii=False))
    else:
        _print_faults(found)
        note = f"; {archives:,} archives of workspaces were not searched" if archives else ""
        print(f"{path}: {many(len(found), 'secret') if found else 'no secrets'} found{note}")
    return ExitCode.DONE if not found else ExitCode.BAD_INPUT


def _faults(number: int) -> str:
    return many(number, "fault") if number else "no faults"


def _usage_line(path: str, stats: dict[str, Any], faults: int) -> str:
    tokens, calls = stats["tokens"], stats["calls"]
    unknown = calls["unknown"]
    bound = "" if not unknown else f"; {many(unknown, 'call')} of unknown usage"
    if unparsed := calls.get("suspected_unparsed"):
        bound += f"; {unparsed:,} answers look like tool calls that were not parsed"
    units = stats["units"]
    return (
        f"{path}: {many(units['done'], 'unit')} done, {units['given_up']:,} given up, "
        f"{many(calls['total'], 'call')}, {tokens['input_tokens'] or 0:,} in, "
        f"{tokens['output_tokens'] or 0:,} out{bound}; {_faults(faults)}"
    )
