"""`hermes-rl env`: an environment's rollouts as a run, its evaluation, a new environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hermes_rl.cli import run_command as run
from hermes_rl.cli.errors import fail
from hermes_rl.errors import ExitCode, UserError

if TYPE_CHECKING:
    from hermes_rl.config import RunConfig

Mode = Literal["process", "evaluate"]

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="RL environments: groups of rollouts as a run, an evaluation, a new environment.",
)

_OWN = {
    "env": "env.name",
    "split": "env.split",
    "env_seed": "env.seed",
    "judge": "env.judge.name",
    "user": "env.user.name",
}
FLAGS = {**{k: v for k, v in run.FLAGS.items() if k != "dataset"}, **_OWN}
"""Option -> the key of the configuration that it sets."""

Env = Annotated[
    str | None,
    typer.Argument(
        help="NAME, package.module:Class, a folder or file.py:Class",
        metavar="ENV",
        show_default=False,
    ),
]
Split = Annotated[str | None, run.option("--split", text="Of the task stream", value="NAME")]
EnvSeed = Annotated[int | None, run.option("--env-seed", text="Seed of the task stream [0]")]
Limit = Annotated[int | None, run.option("--limit", text="Only the first tasks")]
Repeats = Annotated[
    int | None, run.option("--repeats", text="Rollouts per task [the group size; 1 in evaluate]")
]
JudgeName = Annotated[str | None, run.option("--judge", text="Model that judges", value="NAME")]
UserName = Annotated[str | None, run.option("--user", text="Model that plays users", value="NAME")]
Out = Annotated[str | None, run.option("--out", text="Run directory [runs/ENV-MODEL]", value="DIR")]
Preset = Annotated[
    str | None, run.option("--preset", text="datagen, interactive or rl [rl]", value="NAME")
]


def _made(mode: Mode, about: str) -> Callable[..., int]:
    """The command of one mode; both take the same options."""

    def command(
        env: Env = None,
        model: run.Model = None,
        split: Split = None,
        env_seed: EnvSeed = None,
        limit: Limit = None,
        repeats: Repeats = None,
        judge: JudgeName = None,
        user: UserName = None,
        provider: run.Provider = None,
        base_url: run.BaseUrl = None,
        api_key_env: run.ApiKeyEnv = None,
        api_mode: run.ApiMode = None,
        transport: run.Transport = None,
        model_path: run.ModelPath = None,
        out: Out = None,
        toolsets: run.Toolsets = None,
        distribution: run.Distribution = None,
        system_prompt: run.SystemPrompt = None,
        preset: Preset = None,
        max_turns: run.MaxTurns = None,
        temperature: run.Temperature = None,
        max_tokens: run.MaxTokens = None,
        seed: run.Seed = None,
        workers: run.Workers = None,
        concurrency: run.Concurrency = None,
        max_attempts: run.MaxAttempts = None,
        retry_failed: run.RetryFailed = None,
        sandbox: run.Sandbox = None,
        image: run.Image = None,
        network: run.Network = None,
        allow_unsandboxed: run.AllowUnsandboxed = None,
        budget_usd: run.BudgetUsd = None,
        max_seconds: run.MaxSeconds = None,
        config: run.Config = None,
        settings: run.Settings = None,
        dry_run: run.DryRun = False,
        as_json: run.AsJson = False,
    ) -> int:
        parsed = _config(mode, dict(locals()), config, settings or [])
        if dry_run:
            return run.show_plan(parsed, as_json)
        return _carry_out(mode, parsed, as_json)

    command.__doc__ = about
    return command


app.command("process")(
    _made(
        "process",
        "Roll out groups of an environment's tasks as a run; the same command resumes.\n\n"
        "Example: hermes-rl env process my_env --model my-model --base-url "
        "http://127.0.0.1:8000/v1 --limit 100 --repeats 8",
    )
)
app.command("evaluate")(
    _made(
        "evaluate",
        "Evaluate a model on the split eval; also writes metrics.json and samples.jsonl.\n\n"
        "Example: hermes-rl env evaluate my_env --model my-model --limit 200",
    )
)


@app.command("list")
def list_environments(as_json: run.AsJson = False) -> int:
    """The environments that are installed. A package, folder or file needs no entry here.

    Example: hermes-rl env list
    """
    import json

    from hermes_rl.rl.loading import known_environments

    known = known_environments()
    if as_json:
        typer.echo(json.dumps(known))
    else:
        width = max(map(len, known), default=0)
        typer.echo("\n".join(f"{name.ljust(width)}  {about}" for name, about in known.items()))
    return ExitCode.DONE


@app.command("new")
def new(
    name: Annotated[str, typer.Argument(help="a Python name: letters, digits and _")],
    folder: Annotated[Path, typer.Option("--in", help="folder to make it in")] = Path(),
) -> int:
    """Write a working environment: a package with its README, configuration and test.

    Example: hermes-rl env new word_count
    """
    from importlib.util import find_spec

    from hermes_rl.rl.template import write_environment

    made = write_environment(name, folder)
    where = os.path.relpath(made)
    typer.echo(f"wrote {where}")
    typer.echo(f"try it:  hermes-rl env process {where} --model oracle --limit 4")
    first = "" if find_spec("pytest") else "pip install pytest && "
    typer.echo(f"test it: {first}python -m pytest {where}")
    return ExitCode.DONE


@app.command("regrade")
def regrade(
    path: Annotated[Path, typer.Argument(help="run directory", metavar="RUN")],
    settings: Annotated[
        list[str] | None,
        run.option("--set", text="A key of env, endpoint or a budget", value="A.B=C"),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="grading at once")] = 16,
    as_json: run.AsJson = False,
) -> int:
    """Grade the stored rollouts of a run again, without a call of the policy's.

    The run must have been made with --set run.keep_workspaces=true. The grades stand in the table
    grades, and the groups get new rows; the run's own rows stay. Calls of a judge are bound by the
    run's budgets (or --set run.budget_usd=2); the same command goes on where it stopped.

    Example: hermes-rl env regrade runs/my_env-my-model --set env.config.strict=true
    """
    import dataclasses
    import json

    from batch_runner.regrade import regrade as work
    from hermes_rl.aio import run_sync
    from hermes_rl.config import parse_assignment

    _find_modules_here()
    changes = [parse_assignment(text) for text in settings or ()]
    done = run_sync(work(path, changes, concurrency=concurrency))
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(done)))
    else:
        typer.echo("\n".join(done.lines()))
    if done.stopped is not None:
        fail(f"{done.why}. The same command goes on. (exit {ExitCode.STOPPED})", "stopped")
        return ExitCode.STOPPED
    if done.nothing:
        fail(f"{path}: nothing could be graded (exit {ExitCode.BAD_INPUT})")
        return ExitCode.BAD_INPUT
    return ExitCode.GIVEN_UP if done.failed or done.unscored else ExitCode.DONE


def _find_modules_here() -> None:
    """Modules beside the caller are found, as with `python -m`."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)


def _config(mode: Mode, given: dict[str, Any], file: Path | None, settings: list[str]) -> RunConfig:
    """Flags before --set before --config before what the environment says. Raises: UserError."""
    from hermes_rl.config import check_keys, parse_config

    _find_modules_here()
    data, written = run.merged(given, FLAGS, file, settings)
    check_keys(data, f"env {mode}", written)
    env = data.get("env")
    example = f"hermes-rl env {mode} my_env --model my-model"
    if not isinstance(env, dict) or not env.get("name"):
        raise UserError(f"no environment. Name one: {example}")
    model = data.get("model")
    if not isinstance(model, dict) or not (model.get("name") or model.get("mix")):
        raise UserError(f"no model. Name one: {example} (oracle and noop need no endpoint)")
    for other in ("judge", "user"):
        place = env.get(other)
        if isinstance(place, dict) and not place.get("name"):
            raise UserError(f"env.{other} has no name. Give it with --{other} MODEL")
    if env.setdefault("mode", mode) != mode:
        raise UserError(
            f"{file}: made by `hermes-rl env {env['mode']}`. Go on with that, or use another --out"
        )
    if mode == "evaluate":
        env.setdefault("split", "eval")
    return parse_config(data, str(file) if file is not None else f"env {mode}", written)


def _carry_out(mode: Mode, config: RunConfig, as_json: bool) -> int:
    if mode == "process":
        report = run.carry_out(config, as_json)
        _tell_groups(Path(report.path), as_json)
        return report.exit_code
    from hermes_rl.aio import run_sync

    return run_sync(_evaluate(config, as_json))


async def _evaluate(config: RunConfig, as_json: bool) -> int:
    from batch_runner.runner import arun_batch
    from batch_runner.settings import open_hosts
    from hermes_rl.rl.evaluation import write_evaluation

    progress = run.progress_of(as_json)
    async with open_hosts() as hosts:
        report = await arun_batch(config, progress=progress, hosts=hosts)
        run.tell(report, progress)
        if report.stopped is not None:
            return report.exit_code
        metrics = await write_evaluation(Path(report.path), hosts.open)
    if not as_json:
        shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        typer.echo(f"{report.path}/metrics.json: {shown}")
    return report.exit_code


def _tell_groups(path: Path, as_json: bool) -> None:
    """What a trainer gets of the groups, and what not."""
    import dataclasses
    import json

    from hermes_rl.rl.groups import group_report
    from hermes_rl.store.reader import load_run

    found = group_report(load_run(path))
    if not found.groups:
        return
    if as_json:
        typer.echo(json.dumps({"event": "groups", **dataclasses.asdict(found)}))
    else:
        typer.echo("\n".join(found.lines()))
