"""`hermes-rl import`: a file of another program as a run directory."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from hermes_rl.errors import ExitCode, UserError
from hermes_rl.text import many


def command(
    file: Annotated[str, typer.Argument(help="JSON lines", metavar="FILE")],
    origin: Annotated[str, typer.Option("--from", help="hermes or atropos")],
    out: Annotated[str | None, typer.Option(help="run directory; default runs/NAME")] = None,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="atropos: its ids and log-probabilities are those of the engine that sampled them",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="the report as one JSON object")] = False,
) -> int:
    """Convert a file to a run directory, which can be shown, evaluated and exported.

    \b
    hermes-rl import trajectories.jsonl --from hermes --out runs/old
    hermes-rl import groups.jsonl --from atropos --exact
    """
    from hermes_rl.export import ORIGINS, import_file

    known = next((o for o in ORIGINS if o == origin), None)
    if known is None:
        raise UserError(f"--from {origin!r}: choose one of {', '.join(ORIGINS)}")
    report = import_file(file, known, out, exact=exact)
    if as_json:
        print(msgspec.json.encode(report).decode())
    else:
        print(
            f"{report.run}: {many(report.rollouts, 'rollout')}. Look: hermes-rl show {report.run}"
        )
    return ExitCode.DONE
