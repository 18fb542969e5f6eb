"""`hermes-rl run`: generate trajectories; the same command resumes."""

from __future__ import annotations

import inspect
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
class Flag:
    """One option of a command that runs a configuration; without a value it sets nothing."""

    key: str
    """The key of the configuration that it sets; empty for an option of the command itself."""
    text: str
    """Its help."""
    value: str | None = None
    """The name of its value in the help."""
    kind: Any = str | None
    name: str = ""
    """Of the option, where it is not that of the parameter; `<argument>` for a positional one."""

    def parameter(self, name: str) -> inspect.Parameter:
        """The parameter that typer reads from the signature of a function."""
        default = False if self.kind is bool else None
        if self.name == ARGUMENT:
            info = typer.Argument(default, help=self.text, metavar=self.value, show_default=False)
        else:
            spelled = self.name or f"--{name.replace('_', '-')}"
            info = typer.Option(
                default, spelled, help=self.text, metavar=self.value, show_default=False
            )
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(name, kind, default=info, annotation=self.kind)


ARGUMENT = "<argument>"
_WHOLE, _NUMBER, _SWITCH, _MANY = int | None, float | None, bool | None, list[str] | None

FLAGS = {
    "dataset": Flag("dataset.path", "File, folder, Hugging Face name, or smoke", name=ARGUMENT),
    "model": Flag("model.name", "Model; also local, oracle or noop", "NAME"),
    "provider": Flag("endpoint.provider", "Known provider (see doctor models) [openai]", "NAME"),
    "base_url": Flag("endpoint.base_url", "Endpoint", "URL"),
    "api_key_env": Flag(
        "endpoint.api_key_env", "Variable that holds the key; A,B take turns", "NAME"
    ),
    "api_mode": Flag("endpoint.api_mode", "Dialect", "MODE"),
    "transport": Flag("endpoint.transport", "http or sdk", "KIND"),
    "model_path": Flag("endpoint.model_path", "Weights for --model local", "FILE"),
    "out": Flag("run.out", "Run directory [runs/DATASET-MODEL]", "DIR"),
    "repeats": Flag("dataset.repeats", "Rollouts per row [1]", kind=_WHOLE),
    "limit": Flag("dataset.limit", "Only the first rows", kind=_WHOLE),
    "toolsets": Flag("agent.toolsets", "Toolsets [terminal,file]", "A,B"),
    "distribution": Flag("agent.distribution", "Draw toolsets per unit from this", "NAME"),
    "system_prompt": Flag("agent.system_prompt", "In place of the preset's; @FILE reads a file"),
    "preset": Flag("agent.preset", "datagen, interactive or rl [datagen]", "NAME"),
    "max_turns": Flag("agent.limits.max_turns", "Model calls per unit [30]", kind=_WHOLE),
    "temperature": Flag("model.temperature", "Sampling temperature", kind=_NUMBER),
    "max_tokens": Flag("model.max_tokens", "Output tokens per call", kind=_WHOLE),
    "seed": Flag(
        "agent.seed",
        "All units' seeds derive from it, and are sent to the model [not sent]",
        kind=_WHOLE,
    ),
    "workers": Flag("run.workers", "Ray workers; 0: none [auto: 0 under 200 units]", "N|auto"),
    "concurrency": Flag("run.concurrency", "Rollouts in flight over all workers [64]", kind=_WHOLE),
    "max_attempts": Flag("run.max_attempts", "Failures until a unit is given up [3]", kind=_WHOLE),
    "retry_failed": Flag("run.retry_failed", "Open again what was given up", kind=_SWITCH),
    "sandbox": Flag(
        "sandbox.backend", "bubblewrap, docker, podman, ssh, apptainer, none [bubblewrap]", "KIND"
    ),
    "hosts": Flag("sandbox.hosts", "Machines of --sandbox ssh: USER@HOST:PORT", "A,B"),
    "image": Flag("sandbox.image", "Root of the sandbox", "IMAGE"),
    "network": Flag(
        "sandbox.network", "off, on, or hosts: pypi.example,*.example.org:8080 [off]", "HOSTS"
    ),
    "checkpoint_turns": Flag(
        "run.checkpoint_turns", "Keep a checkpoint of each rollout every N turns", kind=_WHOLE
    ),
    "allow_unsandboxed": Flag(
        "run.allow_unsandboxed",
        "Permit --sandbox none, and ssh to machines without bubblewrap",
        kind=_SWITCH,
    ),
    "budget_usd": Flag(
        "run.budget_usd", "US dollars for the whole run, resumed or not", kind=_NUMBER
    ),
    "max_seconds": Flag(
        "agent.limits.max_seconds", "Active time per unit, in seconds [1800]", kind=_NUMBER
    ),
    "config": Flag("", "YAML with all of this", "FILE", Path | None),
    "settings": Flag("", "Any key of the configuration", "A.B=C", _MANY, "--set"),
    "columns": Flag("", "Rename a column", "prompt=COLUMN", _MANY, "--map"),
    "dry_run": Flag("", "Say what would run", kind=bool),
    "pilot": Flag("", "With --dry-run: run 1 % (5 units or more), forecast the cost", kind=bool),
    "as_json": Flag("", "One JSON event a line on stdout", kind=bool, name="--json"),
}
"""Parameter -> its option, in the order of the help."""

AsJson = Annotated[bool, typer.Option("--json", help="One JSON event a line on stdout")]


def make_command(
    flags: Mapping[str, Flag], about: str, work: Callable[[dict[str, Any]], int]
) -> Callable[..., int]:
    """Make a command for typer, which reads options from a function's signature.

    Args:
        about: its help.
        work: takes parameter -> value.
    """

    def command(**values: Any) -> int:
        return work(values)

    parameters = [flag.parameter(name) for name, flag in flags.items()]
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
    FLAGS,
    "Generate trajectories from a dataset. The same command resumes.\n\n"
    "Example: hermes-rl run tasks.jsonl --model gpt-5-mini --repeats 4 --concurrency 32. "
    "Kill it and run it again: what is finished is not run or paid twice.",
    _run,
)


def _config(values: dict[str, Any]) -> RunConfig:
    """The configuration of flags, --set, --config and defaults, in this order. Raises:
    UserError."""
    from hermes_rl.config import check_keys, parse_config, set_key

    data, written = merge_options(values, FLAGS)
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
    values: dict[str, Any], flags: Mapping[str, Flag]
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
    for name, flag in flags.items():
        if flag.key and values[name] is not None:
            set_key(data, flag.key, _value(name, values[name]))
            written[flag.key] = f"--{name.replace('_', '-')} {values[name]}"
    return data, written


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

    progress = progress_of(as_json)
    report = run_batch(config, progress=progress)
    print_report(report, progress)
    return report


def progress_of(as_json: bool) -> Progress:
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

    progress = progress_of(as_json)
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
