"""`hermes-rl demo`: the whole product on the bundled smoke tasks.

First a rehearsal with oracles in real sandboxes while the weights download; then the tasks with the
embedded model, or with any endpoint.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hermes_rl.errors import ExitCode, UserError

if TYPE_CHECKING:
    from batch_runner import Report

REPEATS = 2
PROGRESS_EVERY_S = 2.0


def command(
    model: Annotated[str, typer.Option(help="model; local is the embedded one")] = "local",
    base_url: Annotated[str | None, typer.Option(help="endpoint of your model")] = None,
    api_key_env: Annotated[
        str | None, typer.Option(help="variable that holds its key; no key is used unasked")
    ] = None,
    model_path: Annotated[str | None, typer.Option(help="weights for --model local")] = None,
    out: Annotated[Path, typer.Option(help="folder for its run directories")] = Path("runs"),
    workers: Annotated[
        str, typer.Option(help="Ray workers; 0 runs without Ray", metavar="N|auto")
    ] = "auto",
) -> int:
    """The whole product on ten small tasks: a rehearsal with oracles, then a model.

    \b
    hermes-rl demo                                      the embedded model: tiny, no account, no key
    hermes-rl demo --model NAME --base-url http://127.0.0.1:8000/v1
    """
    endpoint = {"base_url": base_url, "api_key_env": api_key_env, "model_path": model_path}
    _refuse_unasked_key(model, base_url, api_key_env)
    named = {"model": None if model == "local" else model, **endpoint}
    options = [w for k, v in named.items() if v for w in (f"--{k.replace('_', '-')}", v)]
    options += [] if out == Path("runs") else ["--out", str(out)]
    options += [] if workers == "auto" else ["--workers", workers]
    again = shlex.join(["hermes-rl", "demo", *options])
    return asyncio.run(_demo(model, endpoint, out, workers, again))


def _refuse_unasked_key(model: str, base_url: str | None, api_key_env: str | None) -> None:
    from hermes_rl.config import LOCAL_MODELS, PLAYED_MODELS

    if model in (*LOCAL_MODELS, *PLAYED_MODELS) or base_url or api_key_env:
        return
    raise UserError(
        f"--model {model}: say where it is with --base-url URL, or name the variable that holds "
        "your key with --api-key-env OPENAI_API_KEY"
    )


async def _demo(model: str, endpoint: dict[str, Any], out: Path, workers: str, again: str) -> int:
    from hermes_rl.config import LOCAL_MODELS

    local = model in LOCAL_MODELS and not endpoint["base_url"]
    _print("1  rehearsal: each task's own solution, in a real sandbox, without a model")
    weights = asyncio.create_task(_fetch(model, endpoint["model_path"])) if local else None
    try:
        rehearsal = await _run(_config("oracle", {}, out / "demo-rehearsal", workers, repeats=1))
    except BaseException:
        if weights is not None:
            weights.cancel()
        raise
    _print(*rehearsal.lines()[:1])
    if rehearsal.exit_code != ExitCode.DONE:
        _print(*rehearsal.lines()[1:], "the rehearsal failed: run `hermes-rl doctor`")
        return rehearsal.exit_code
    if weights is not None:
        await weights
    _print("", f"2  the same tasks twice with {_describe(model)}")
    report = await _run(_config(model, endpoint, out / _folder(model), workers, REPEATS))
    _table(report, again)
    return report.exit_code


def _folder(model: str) -> str:
    name = "".join(c if c.isalnum() or c in "-_." else "-" for c in model)
    return "demo" if model == "local" else f"demo-{name}"


def _describe(model: str) -> str:
    from hermes_rl.config import LOCAL_MODELS

    if model not in LOCAL_MODELS:
        return model
    from hermes_rl.models.local import find_weights

    return f"the embedded model ({find_weights(model).description})"


def _config(
    model: str, endpoint: dict[str, Any], out: Path, workers: str, repeats: int
) -> dict[str, Any]:
    from hermes_rl.config import LOCAL_MODELS

    config: dict[str, Any] = {
        "dataset": {"path": "smoke", "repeats": repeats},
        "model": {"name": model},
        "agent": {"toolsets": ["terminal"], "limits": {"max_turns": 8}},
        "run": {"out": str(out), "workers": workers},
    }
    if model in LOCAL_MODELS:
        config["model"] |= {"temperature": 0.7}
    fields = {k: v for k, v in endpoint.items() if v is not None}
    return {**config, "endpoint": fields} if fields else config


async def _run(data: dict[str, Any]) -> Report:
    from batch_runner import arun_batch
    from hermes_rl.config import parse_config

    typed = {"run.workers": f"--workers {data['run']['workers']}"}
    return await arun_batch(parse_config(data, "demo", typed))


async def _fetch(model: str, model_path: str | None) -> None:
    """Fetch the weights, and print progress. Raises: WeightsUnavailable."""
    from hermes_rl.models.local import ensure_weights

    path = Path(model_path) if model_path else None
    await ensure_weights(model, model_path=path, progress=_download_line())


def _download_line() -> Callable[[int, int, str], None]:
    last, shown = 0.0, ""

    def progress(done: int, total: int, what: str) -> None:
        nonlocal last, shown
        now = time.monotonic()
        if now - last >= PROGRESS_EVERY_S or what != shown:
            last, shown = now, what
            _print(f"   weights: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB ({what})")

    return progress


def _table(report: Report, again: str) -> None:
    from hermes_rl.cli import render
    from hermes_rl.cli.show_command import read_attempts
    from hermes_rl.store import load_run

    run = load_run(report.path)
    rows = sorted(
        read_attempts(run), key=lambda row: (row["row_index"], row["repeat"], row["attempt"])
    )
    _print("", render.run_table(rows), render.totals(rows))
    first = rows[0]["unit_id"][:8] if rows else "UNIT"
    _print(
        f"Parquet: {report.path}/trajectories/*.parquet",
        "",
        "next:",
        f"  hermes-rl show {report.path} {first}    one trajectory, turn by turn",
        "  hermes-rl run my.jsonl --model NAME --base-url URL    your tasks, your model",
        f"  rm -r {report.path}; {again}    then kill it half-way and run it again: "
        "nothing is paid twice",
    )


def _print(*lines: str) -> None:
    for line in lines:
        print(line, file=sys.stdout, flush=True)
