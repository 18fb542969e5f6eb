"""`hermes-rl run`: generate trajectories; the same command resumes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hermes_rl.errors import ExitCode, UserError

if TYPE_CHECKING:
    from batch_runner.progress import Progress
    from batch_runner.report import Report
    from hermes_rl.config import RunConfig

FLAGS = {
    "dataset": "dataset.path",
    "limit": "dataset.limit",
    "repeats": "dataset.repeats",
    "model": "model.name",
    "temperature": "model.temperature",
    "max_tokens": "model.max_tokens",
    "provider": "endpoint.provider",
    "base_url": "endpoint.base_url",
    "api_key_env": "endpoint.api_key_env",
    "api_mode": "endpoint.api_mode",
    "transport": "endpoint.transport",
    "model_path": "endpoint.model_path",
    "toolsets": "agent.toolsets",
    "distribution": "agent.distribution",
    "system_prompt": "agent.system_prompt",
    "preset": "agent.preset",
    "seed": "agent.seed",
    "max_turns": "agent.limits.max_turns",
    "max_seconds": "agent.limits.max_seconds",
    "sandbox": "sandbox.backend",
    "image": "sandbox.image",
    "network": "sandbox.network",
    "allow_unsandboxed": "run.allow_unsandboxed",
    "out": "run.out",
    "workers": "run.workers",
    "concurrency": "run.concurrency",
    "max_attempts": "run.max_attempts",
    "retry_failed": "run.retry_failed",
    "budget_usd": "run.budget_usd",
}
"""Option -> the key of the configuration that it sets; an option that is not given sets nothing."""

_EPILOG = (
    "Example: hermes-rl run tasks.jsonl --model gpt-5-mini --repeats 4 --concurrency 32. "
    "Kill it and run it again: what is finished is not run or paid twice."
)

_Text = str | None
_Whole = int | None
_Number = float | None


def option(*names: str, text: str, value: str | None = None) -> Any:
    """An option without a default of its own."""
    return typer.Option(*names, help=text, metavar=value, show_default=False)


Dataset = Annotated[
    _Text, typer.Argument(help="File, folder, Hugging Face name, or smoke", show_default=False)
]
Model = Annotated[_Text, option("--model", text="Model; also local, oracle or noop", value="NAME")]
Provider = Annotated[
    _Text, option("--provider", text="Known provider (see doctor models) [openai]", value="NAME")
]
BaseUrl = Annotated[_Text, option("--base-url", text="Endpoint", value="URL")]
ApiKeyEnv = Annotated[
    _Text,
    option("--api-key-env", text="Variable that holds the key; A,B take turns", value="NAME"),
]
ApiMode = Annotated[_Text, option("--api-mode", text="Dialect", value="MODE")]
Transport = Annotated[_Text, option("--transport", text="http or sdk", value="KIND")]
ModelPath = Annotated[_Text, option("--model-path", text="Weights for --model local", value="FILE")]
Out = Annotated[_Text, option("--out", text="Run directory [runs/DATASET-MODEL]", value="DIR")]
Repeats = Annotated[_Whole, option("--repeats", text="Rollouts per row [1]")]
Limit = Annotated[_Whole, option("--limit", text="Only the first rows")]
Toolsets = Annotated[_Text, option("--toolsets", text="Toolsets [terminal,file]", value="A,B")]
Distribution = Annotated[
    _Text, option("--distribution", text="Draw toolsets per unit from this", value="NAME")
]
SystemPrompt = Annotated[
    _Text, option("--system-prompt", text="In place of the preset's; @FILE reads a file")
]
Preset = Annotated[
    _Text, option("--preset", text="datagen, interactive or rl [datagen]", value="NAME")
]
MaxTurns = Annotated[_Whole, option("--max-turns", text="Model calls per unit [30]")]
Temperature = Annotated[_Number, option("--temperature", text="Sampling temperature")]
MaxTokens = Annotated[_Whole, option("--max-tokens", text="Output tokens per call")]
Seed = Annotated[
    _Whole,
    option("--seed", text="All units' seeds derive from it, and are sent to the model [not sent]"),
]
Workers = Annotated[
    _Text,
    option("--workers", text="Ray workers; 0: none [auto: 0 under 200 units]", value="N|auto"),
]
Concurrency = Annotated[
    _Whole, option("--concurrency", text="Rollouts in flight over all workers [64]")
]
MaxAttempts = Annotated[
    _Whole, option("--max-attempts", text="Failures until a unit is given up [3]")
]
RetryFailed = Annotated[bool | None, option("--retry-failed", text="Open again what was given up")]
Sandbox = Annotated[
    _Text, option("--sandbox", text="bubblewrap or none [bubblewrap]", value="KIND")
]
Image = Annotated[_Text, option("--image", text="Root of the sandbox", value="IMAGE")]
Network = Annotated[bool | None, option("--network", text="Give the sandbox the network")]
AllowUnsandboxed = Annotated[
    bool | None, option("--allow-unsandboxed", text="Permit --sandbox none")
]
BudgetUsd = Annotated[
    _Number, option("--budget-usd", text="US dollars for the whole run, resumed or not")
]
MaxSeconds = Annotated[
    _Number, option("--max-seconds", text="Active time per unit, in seconds [1800]")
]
Config = Annotated[Path | None, option("--config", text="YAML with all of this", value="FILE")]
Settings = Annotated[
    list[str] | None, option("--set", text="Any key of the configuration", value="A.B=C")
]
Columns = Annotated[
    list[str] | None, option("--map", text="Rename a column", value="prompt=COLUMN")
]
DryRun = Annotated[bool, option("--dry-run", text="Say what would run")]
PilotRun = Annotated[
    bool, option("--pilot", text="With --dry-run: run 1 % (5 units or more), forecast the cost")
]
AsJson = Annotated[bool, option("--json", text="One JSON event a line on stdout")]


def command(
    dataset: Dataset = None,
    model: Model = None,
    provider: Provider = None,
    base_url: BaseUrl = None,
    api_key_env: ApiKeyEnv = None,
    api_mode: ApiMode = None,
    transport: Transport = None,
    model_path: ModelPath = None,
    out: Out = None,
    repeats: Repeats = None,
    limit: Limit = None,
    toolsets: Toolsets = None,
    distribution: Distribution = None,
    system_prompt: SystemPrompt = None,
    preset: Preset = None,
    max_turns: MaxTurns = None,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
    seed: Seed = None,
    workers: Workers = None,
    concurrency: Concurrency = None,
    max_attempts: MaxAttempts = None,
    retry_failed: RetryFailed = None,
    sandbox: Sandbox = None,
    image: Image = None,
    network: Network = None,
    allow_unsandboxed: AllowUnsandboxed = None,
    budget_usd: BudgetUsd = None,
    max_seconds: MaxSeconds = None,
    config: Config = None,
    settings: Settings = None,
    columns: Columns = None,
    dry_run: DryRun = False,
    pilot: PilotRun = False,
    as_json: AsJson = False,
) -> int:
    """Generate trajectories from a dataset. The same command resumes."""
    given = dict(locals())
    parsed = _config(given, config, settings or (), columns or ())
    if pilot and not dry_run:
        raise UserError("--pilot belongs to --dry-run. Use both, or neither")
    if dry_run:
        return _pilot(parsed, as_json) if pilot else show_plan(parsed, as_json)
    return carry_out(parsed, as_json).exit_code


command.__doc__ = f"{command.__doc__}\n\n{_EPILOG}"


def _config(given: dict[str, Any], file: Path | None, settings: Any, columns: Any) -> RunConfig:
    """Flags before --set before --config before defaults. Raises: UserError."""
    from hermes_rl.config import check_keys, parse_config, set_key

    data, written = merged(given, FLAGS, file, settings)
    for ours, theirs in column_map(columns).items():
        set_key(data, f"dataset.map.{ours}", theirs)
    check_keys(data, "run", written)
    _require(data)
    return parse_config(data, str(file) if file is not None else "run", written)


def merged(
    given: dict[str, Any], flags: dict[str, str], file: Path | None, settings: Sequence[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Plain data of a configuration: flags before --set before --config.

    Args:
        given: option -> value; None was not given.
        flags: option -> the key that it sets.

    Returns: the data, and dotted key -> what was typed for it.

    Raises: UserError.
    """
    from hermes_rl.config import load_config, parse_assignment, set_key

    data: dict[str, Any] = load_config(file) if file is not None else {}
    written: dict[str, str] = {}
    for text in settings:
        key, value = parse_assignment(text)
        set_key(data, key, value)
        written[key] = f"--set {text}"
    for flag, key in flags.items():
        if given[flag] is not None:
            set_key(data, key, _value(flag, given[flag]))
            written[key] = f"--{flag.replace('_', '-')} {given[flag]}"
    return data, written


def _value(flag: str, value: Any) -> Any:
    if flag == "toolsets":
        names = [name.strip() for name in value.split(",") if name.strip()]
        if not names:
            raise UserError("--toolsets names no toolset. Use none for an agent without tools")
        return names
    return value


def _require(data: dict[str, Any]) -> None:
    example = "hermes-rl run tasks.jsonl --model gpt-5-mini"
    if not isinstance(data.get("dataset"), dict) or not data["dataset"].get("path"):
        raise UserError(f"no dataset. Name one: {example}")
    model = data.get("model")
    if not isinstance(model, dict) or not (model.get("name") or model.get("mix")):
        raise UserError(f"no model. Name one: {example} (local needs no endpoint)")


def carry_out(config: RunConfig, as_json: bool) -> Report:
    """Run a configuration to its end, with progress and its report on the terminal."""
    from batch_runner.runner import run_batch

    progress = progress_of(as_json)
    report = run_batch(config, progress=progress)
    tell(report, progress)
    return report


def progress_of(as_json: bool) -> Progress:
    """Where the progress of a run goes."""
    from batch_runner.progress import JsonEvents, default_progress

    return JsonEvents() if as_json else default_progress()


def tell(report: Report, progress: Progress) -> None:
    """How a run ended, where its progress went."""
    from batch_runner.progress import JsonEvents

    if isinstance(progress, JsonEvents):
        progress.report(report)
        return
    for line in report.lines():
        typer.echo(line)


def _pilot(config: RunConfig, as_json: bool) -> int:
    from batch_runner.dryrun import pilot_run
    from batch_runner.progress import JsonEvents, default_progress

    progress: Progress = JsonEvents() if as_json else default_progress()
    plan, report, forecast = pilot_run(config, progress)
    if isinstance(progress, JsonEvents):
        progress.event("forecast", **plan.as_dict(), costs=forecast.as_dict())
        progress.report(report)
    else:
        for line in (*plan.lines(), *report.lines(), *forecast.lines()):
            typer.echo(line)
    return report.exit_code


def show_plan(config: RunConfig, as_json: bool) -> int:
    """What a configuration would run, on the terminal."""
    import json

    from batch_runner.dryrun import dry_run
    from hermes_rl.aio import run_sync

    forecast = run_sync(dry_run(config))
    if as_json:
        typer.echo(json.dumps(forecast.as_dict()))
    else:
        for line in forecast.lines():
            typer.echo(line)
    return ExitCode.DONE


def column_map(given: Iterable[str] | None) -> dict[str, str]:
    """Our name -> the dataset's. Raises: UserError for what is no pair."""
    pairs = [(text, *text.partition("=")) for text in given or ()]
    for text, ours, _, theirs in pairs:
        if not ours or not theirs:
            raise UserError(f"--map {text}: write --map prompt=COLUMN")
    return {ours: theirs for _, ours, _, theirs in pairs}
