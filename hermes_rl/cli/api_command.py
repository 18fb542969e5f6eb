"""`hermes-rl api`: the trajectory API server of Atropos 0.4.0 (docs/atropos.md)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from hermes_rl.errors import ExitCode, UserError
from hermes_rl.network import is_loopback

_STATE = Path("runs/api.sqlite")


def command(
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")] = 8000,
    compat: Annotated[
        Literal["safe", "exact"],
        typer.Option(help="exact: also the surprises of Atropos 0.4.0's server"),
    ] = "safe",
    state: Annotated[
        Path | None,
        typer.Option(
            help=f"file of the queue, which survives kills [{_STATE}; with --compat exact: none]"
        ),
    ] = None,
    token_env: Annotated[
        str | None,
        typer.Option(help="variable with the token that clients must send", metavar="NAME"),
    ] = None,
    allow_anonymous: Annotated[
        bool, typer.Option("--allow-anonymous", help="no token, though others can connect")
    ] = False,
    max_batches: Annotated[
        int, typer.Option(min=1, help="queued batches; beyond them groups get 503")
    ] = 16,
    env_timeout: Annotated[
        float, typer.Option(min=1, help="seconds until a silent environment does not count")
    ] = 120,
    max_body_mb: Annotated[int, typer.Option(min=1, help="megabytes of a request")] = 256,
) -> int:
    """Serve the trajectory API of Atropos 0.4.0: environments send groups, a trainer takes batches.

    Example: hermes-rl api --port 8000
    """
    token = _token(token_env)
    if token is None and not allow_anonymous and not is_loopback(host):
        raise UserError(
            f"--host {host} lets other machines in. Name a variable with a token"
            " (--token-env NAME), or give --allow-anonymous"
        )
    try:
        from hermes_rl.rl import ApiLimits, ApiOptions, run_api
    except ImportError as error:
        raise UserError(str(error)) from error
    path = state or (_STATE if compat == "safe" else None)
    limits = ApiLimits(max_batches, env_timeout)
    options = ApiOptions(host, port, compat, path, token, max_body_mb * 2**20, limits)
    where = f"{compat}, queue in {path or 'memory'}"
    run_api(options, lambda url: print(f"serving on {url} ({where})", flush=True))
    return ExitCode.DONE


def _token(variable: str | None) -> str | None:
    """Raises: UserError."""
    if variable is None:
        return None
    token = os.environ.get(variable, "").strip()
    if not token:
        raise UserError(f"{variable} is not set. Set it to the token, or leave --token-env out")
    return token
