"""`hermes-rl env`: an environment's rollouts as a run, its evaluation, a new environment."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hermes_rl.cli import run_command as run
from hermes_rl.cli.app import make_app
from hermes_rl.cli.errors import fail
from hermes_rl.errors import ExitCode, UserError

if TYPE_CHECKING:
    from hermes_rl.config import RunConfig

Mode = Literal["process", "evaluate", "serve"]

app = make_app(
    "RL environments: groups as a run or for a trainer, an evaluation, a new environment."
)

_ABSENT = ("dataset", "columns", "pilot", "checkpoint_turns", "judges")
_FIRST = ("env", "model", "split", "env_seed", "limit", "repeats", "judge", "user")
_ALL = run.OPTIONS | run.load_options("env")
OPTIONS = {name: _ALL[name] for name in dict.fromkeys((*_FIRST, *_ALL)) if name not in _ABSENT}
"""Parameter -> its option, in the order of the help."""
_API = run.load_options("serve")
SERVE = {name: option for name, option in {**_API, **OPTIONS}.items() if name != "dry_run"}
"""The options of `env serve`."""


def _work(mode: Mode) -> Callable[[dict[str, Any]], int]:
    def work(values: dict[str, Any]) -> int:
        config = _config(mode, values)
        if mode == "serve":
            return _serve(config, values)
        if values["dry_run"]:
            return run.show_plan(config, values["as_json"])
        return _run_mode(mode, config, values["as_json"])

    return work


app.command("process")(
    run.make_command(
        OPTIONS,
        "Roll out groups of tasks as a run. The same command resumes.\n\n"
        "Example: hermes-rl env process my_env --model my-model --base-url "
        "http://127.0.0.1:8000/v1 --limit 100 --repeats 8",
        _work("process"),
    )
)
app.command("evaluate")(
    run.make_command(
        OPTIONS,
        "Evaluate a model on the split eval. Also writes metrics.json and samples.jsonl.\n\n"
        "Example: hermes-rl env evaluate my_env --model my-model --limit 200",
        _work("evaluate"),
    )
)

app.command("serve")(
    run.make_command(
        SERVE,
        "Send groups to a trajectory API while a trainer learns. The same command continues.\n\n"
        "Example: hermes-rl env serve my_env --model my-model --base-url "
        "http://127.0.0.1:8001/v1 --api http://127.0.0.1:8000",
        _work("serve"),
    )
)


@app.command("list")
def list_environments(as_json: run.AsJson = False) -> int:
    """Print the installed environments. A package, folder or file needs no entry here.

    Example: hermes-rl env list
    """
    import json

    from hermes_rl.rl import known_environments

    known = known_environments()
    if as_json:
        typer.echo(json.dumps(known))
    else:
        width = max(map(len, known), default=0)
        run.print_lines(f"{name.ljust(width)}  {about}" for name, about in known.items())
    return ExitCode.DONE


@app.command("new")
def new(
    name: Annotated[str, typer.Argument(help="a Python name: letters, digits and _")],
    folder: Annotated[Path, typer.Option("--in", help="folder to make it in")] = Path(),
) -> int:
    """Write a working environment. It is a package with a README, configuration and test.

    Example: hermes-rl env new word_count
    """
    from importlib.util import find_spec

    from hermes_rl.rl import write_environment

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
        typer.Option("--set", help="A key of env, endpoint or a budget", metavar="A.B=C"),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="grading at once")] = 16,
    as_json: run.AsJson = False,
) -> int:
    """Grade the stored rollouts of a run again. The policy is not called.

    The run must have been made with --set run.keep_workspaces=true. The grades are in the table
    grades, and the groups get new rows; the run's own rows stay. Calls of a judge are bound by the
    run's budgets (or --set run.budget_usd=2); the same command continues where it stopped.

    Example: hermes-rl env regrade runs/my_env-my-model
    """
    import dataclasses
    import json

    from batch_runner import regrade_run as work
    from hermes_rl.aio import run_sync
    from hermes_rl.config import parse_assignment

    run.find_modules_here()
    changes = [parse_assignment(text) for text in settings or ()]
    done = run_sync(work(path, changes, concurrency=concurrency))
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(done)))
    else:
        run.print_lines(done.lines())
    if done.stopped is not None:
        fail(f"{done.why}. Run the same command to continue. (exit {ExitCode.STOPPED})", "stopped")
        return ExitCode.STOPPED
    if done.nothing:
        fail(f"{path}: nothing could be graded (exit {ExitCode.BAD_INPUT})")
        return ExitCode.BAD_INPUT
    return ExitCode.GIVEN_UP if done.failed or done.unscored else ExitCode.DONE


def _config(mode: Mode, values: dict[str, Any]) -> RunConfig:
    """The configuration of flags, --set, --config and the environment, in this order. Raises:
    UserError."""
    from hermes_rl.config import check_keys, parse_config

    run.find_modules_here()
    file: Path | None = values["config"]
    options = SERVE if mode == "serve" else OPTIONS
    data, written = run.merge_options(values, options)
    check_keys(data, f"env {mode}", written)
    env = data.get("env")
    example = f"hermes-rl env {mode} my_env --model my-model"
    if not isinstance(env, dict) or not env.get("name"):
        raise UserError(f"no environment. Name one: {example}")
    run.require_model(data, f"{example} (oracle and noop need no endpoint)")
    for other in ("judge", "user"):
        place = env.get(other)
        if isinstance(place, dict) and not place.get("name"):
            raise UserError(f"env.{other} has no name. Give it with --{other} MODEL")
    wanted = "live" if mode == "serve" else mode
    if env.get("mode") == "live" != wanted:
        raise UserError(
            f"{file}: made by `hermes-rl env serve` or hermes_rl.rl.rollouts. Continue it so"
        )
    if env.setdefault("mode", wanted) != wanted:
        raise UserError(
            f"{file}: made by `hermes-rl env {env['mode']}`. Resume it so, or choose another --out"
        )
    if mode == "evaluate":
        env.setdefault("split", "eval")
    if mode == "serve":  # as `rollouts`: in this process
        data.setdefault("run", {}).setdefault("workers", 0)
    return parse_config(data, str(file or f"env {mode}"), written)


def _run_mode(mode: Mode, config: RunConfig, as_json: bool) -> int:
    if mode == "process":
        report = run.run_and_report(config, as_json)
        _print_groups(Path(report.path), as_json)
        return report.exit_code
    from hermes_rl.aio import run_sync

    return run_sync(_evaluate(config, as_json))


async def _evaluate(config: RunConfig, as_json: bool) -> int:
    from batch_runner import arun_batch, open_hosts
    from hermes_rl.rl import write_evaluation

    progress, metrics = run.make_progress(as_json), None
    async with open_hosts() as hosts:
        report = await arun_batch(config, progress=progress, hosts=hosts)
        try:
            if report.stopped is None:
                metrics = await write_evaluation(Path(report.path), hosts.open)
        finally:  # last: the report waits for its reader
            run.print_report(report, progress)
    if metrics is not None and not as_json:
        shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        typer.echo(f"{report.path}/metrics.json: {shown}")
    return report.exit_code


def _serve(config: RunConfig, values: dict[str, Any]) -> int:
    import json

    from hermes_rl.aio import run_sync
    from hermes_rl.rl import ServeOptions, Staleness, serve_groups

    def notify(text: str) -> None:
        print(json.dumps({"event": "note", "text": text}) if as_json else text, flush=True)

    as_json, variable = values["as_json"], values["api_token_env"]
    if variable is not None and not os.environ.get(variable):
        raise UserError(f"{variable} is not set. Set it to the token of the API")
    names = ["forks", "weight", "min_batch_allocation", "max_batches_ahead"]
    lag = values["max_lag"]
    options = ServeOptions(
        staleness=Staleness(values["staleness"] or "none", 1 if lag is None else lag),
        url=values["api"] or "http://127.0.0.1:8000",
        token=None if variable is None else os.environ[variable].strip(),
        messages=values["api_messages"],
        keep_equal=values["keep_equal"],
        **{name: values[name] for name in names if values[name] is not None},
    )
    counts = run_sync(serve_groups(config, options, notify))
    if as_json:
        print(json.dumps({"event": "report", **counts}))
    else:
        share = counts["not_sent"] / max(1, counts["tokens"])
        reasons = [f"{n} {why[9:]}" for why, n in counts.items() if why.startswith("rejected ")]
        refused = f" ({', '.join(reasons)})" if reasons else ""
        print(
            f"{counts['sent']} of {counts['groups']} groups sent, {counts['rejected']} rejected"
            f"{refused};"
            f" {share:.1%} of the tokens to train were not sent"
        )
    return ExitCode.DONE


def _print_groups(path: Path, as_json: bool) -> None:
    """Print which groups a trainer gets."""
    import dataclasses
    import json

    from hermes_rl.rl import group_report
    from hermes_rl.store import load_run

    found = group_report(load_run(path))
    if not found.groups:
        return
    if as_json:
        typer.echo(json.dumps({"event": "groups", **dataclasses.asdict(found)}))
    else:
        run.print_lines(found.lines())
