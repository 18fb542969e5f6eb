"""`hermes-rl run`: generate trajectories; the same command resumes."""

from __future__ import annotations

import inspect
import os
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hermes_rl.errors import ExitCode, UserError

if TYPE_CHECKING:
    from batch_runner import Progress, Report
    from hermes_rl.config import RunConfig


@dataclass(frozen=True)
class Option:
    """One option of a command that runs a configuration; without a value it sets nothing. See
    options.toml for its fields."""

    key: str
    help: str
    value: str | None
    type: Any
    name: str

    def parameter(self, name: str) -> inspect.Parameter:
        """The parameter that typer reads from the signature of a function."""
        default = False if self.type is bool else None
        if self.name == ARGUMENT:
            info = typer.Argument(default, help=self.help, metavar=self.value, show_default=False)
        else:
            spelled = self.name or f"--{name.replace('_', '-')}"
            info = typer.Option(
                default, spelled, help=self.help, metavar=self.value, show_default=False
            )
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(name, kind, default=info, annotation=self.type)


ARGUMENT = "<argument>"
_TYPES: dict[str, Any] = {
    "text": str | None,
    "int": int | None,
    "float": float | None,
    "list": list[str] | None,
    "path": Path | None,
    "switch": bool | None,
    "flag": bool,
}


def load_options(command: str) -> dict[str, Option]:
    """The options of a command in options.toml by parameter, in the order of the help."""
    text = Path(__file__).with_name("options.toml").read_text(encoding="utf-8")
    tables: dict[str, dict[str, str]] = tomllib.loads(text)[command]
    return {
        name: Option(
            key=table.get("key", ""),
            help=table["help"],
            value=table.get("value"),
            type=_TYPES[table.get("type", "text")],
            name=table.get("option", ""),
        )
        for name, table in tables.items()
    }


OPTIONS = load_options("run")

AsJson = Annotated[bool, typer.Option("--json", help="One JSON event a line on stdout")]


def make_command(
    options: Mapping[str, Option], about: str, work: Callable[[dict[str, Any]], int]
) -> Callable[..., int]:
    """Make a command for typer, which reads options from a function's signature.

    Args:
        about: its help.
        work: takes parameter -> value.
    """

    def command(**values: Any) -> int:
        return work(values)

    parameters = [option.parameter(name) for name, option in options.items()]
    vars(command)["__signature__"] = inspect.Signature(parameters)
    command.__doc__ = about
    return command


def _run(values: dict[str, Any]) -> int:
    config, as_json = _config(values), values["as_json"]
    if values["pilot"] and not values["dry_run"]:
        raise UserError("--pilot belongs to --dry-run. Use both, or neither")
    if values["dry_run"]:
        return _pilot(config, as_json) if values["pilot"] else show_plan(config, as_json)
    return run_and_report(config, as_json).exit_code


command = make_command(
    OPTIONS,
    "Generate trajectories from a dataset. The same command resumes.\n\n"
    "Example: hermes-rl run tasks.jsonl --model gpt-5-mini --repeats 4 --concurrency 32. "
    "Kill it and run it again: what is finished is not run or paid twice.",
    _run,
)


def _config(values: dict[str, Any]) -> RunConfig:
    """The configuration of flags, --set, --config and defaults, in this order. Raises:
    UserError."""
    from hermes_rl.config import check_keys, parse_config, set_key

    data, written = merge_options(values, OPTIONS)
    for name, column in parse_column_map(values["columns"]).items():
        set_key(data, f"dataset.map.{name}", column)
    check_keys(data, "run", written)
    example = "hermes-rl run tasks.jsonl --model gpt-5-mini"
    if not isinstance(data.get("dataset"), dict) or not data["dataset"].get("path"):
        raise UserError(f"no dataset. Name one: {example}")
    require_model(data, f"{example} (local needs no endpoint)")
    return parse_config(data, str(values["config"] or "run"), written)


def require_model(data: dict[str, Any], example: str) -> None:
    """Raises: UserError without a model."""
    model = data.get("model")
    if not isinstance(model, dict) or not (model.get("name") or model.get("mix")):
        raise UserError(f"no model. Name one: {example}")


def merge_options(
    values: dict[str, Any], options: Mapping[str, Option]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Merge options into plain data of a configuration: flags override --set, which overrides
    --config.

    Args:
        values: parameter -> value; None when not set.

    Returns: the data, and dotted key -> the option that set it.

    Raises: UserError.
    """
    from hermes_rl.config import load_config, parse_assignment, set_key

    file: Path | None = values["config"]
    data: dict[str, Any] = load_config(file) if file is not None else {}
    written: dict[str, str] = {}
    for text in values["settings"] or ():
        key, value = parse_assignment(text)
        set_key(data, key, value)
        written[key] = f"--set {text}"
    for name, option in options.items():
        if option.key and values[name] is not None:
            set_key(data, option.key, _value(name, values[name]))
            written[option.key] = f"--{name.replace('_', '-')} {values[name]}"
    return data, written


def find_modules_here() -> None:
    """Make modules in the current folder importable, as with `python -m`."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)


def _value(flag: str, value: Any) -> Any:
    if flag == "toolsets":
        names = [name.strip() for name in value.split(",") if name.strip()]
        if not names:
            raise UserError("--toolsets names no toolset. Use none for an agent without tools")
        return names
    return value


def run_and_report(config: RunConfig, as_json: bool) -> Report:
    """Run a configuration, with progress and report on the terminal."""
    from batch_runner import run_batch

    progress = make_progress(as_json)
    report = run_batch(config, progress=progress)
    print_report(report, progress)
    return report


def make_progress(as_json: bool) -> Progress:
    """The progress display of a run."""
    from batch_runner import JsonEvents, default_progress

    return JsonEvents() if as_json else default_progress()


def print_report(report: Report, progress: Progress) -> None:
    """Print the report of a run like its progress."""
    from batch_runner import JsonEvents

    if isinstance(progress, JsonEvents):
        progress.report(report)
        return
    print_lines(report.lines())


def print_lines(lines: Iterable[str]) -> None:
    """Print lines for people."""
    for line in lines:
        typer.echo(line)


def _pilot(config: RunConfig, as_json: bool) -> int:
    from batch_runner import JsonEvents, pilot_run

    progress = make_progress(as_json)
    plan, report, forecast = pilot_run(config, progress)
    if isinstance(progress, JsonEvents):
        progress.event("forecast", **plan.as_dict(), costs=forecast.as_dict())
        progress.report(report)
    else:
        print_lines((*plan.lines(), *report.lines(), *forecast.lines()))
    return report.exit_code


def show_plan(config: RunConfig, as_json: bool) -> int:
    """Print the result of a dry run."""
    import json

    from batch_runner import dry_run
    from hermes_rl.aio import run_sync

    forecast = run_sync(dry_run(config))
    if as_json:
        typer.echo(json.dumps(forecast.as_dict()))
    else:
        print_lines(forecast.lines())
    return ExitCode.DONE


def parse_column_map(texts: Iterable[str] | None) -> dict[str, str]:
    """Parse `NAME=COLUMN` of `--map`. Raises: UserError for other text."""
    pairs = [(text, *text.partition("=")) for text in texts or ()]
    for text, name, _, column in pairs:
        if not name or not column:
            raise UserError(f"--map {text}: write --map prompt=COLUMN")
    return {name: column for _, name, _, column in pairs}
