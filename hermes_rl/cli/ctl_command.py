"""`hermes-rl ctl`: steer a running run from another terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hermes_rl.errors import ExitCode, UserError
from hermes_rl.text import many


def command(
    run: Annotated[Path, typer.Argument(help="run directory", metavar="RUN")],
    order: Annotated[
        str,
        typer.Argument(
            help="pause, resume, drain, concurrency, budget or requeue; state changes nothing",
            metavar="COMMAND",
        ),
    ] = "state",
    value: Annotated[str | None, typer.Argument(help="N, USD or CAUSE", metavar="VALUE")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> int:
    """Steer a running run: pause it, end it softly, change its limits.

    `pause` starts no further rollouts; those that run end as usual. `drain` lets them end, then
    stops the run. `requeue` runs the units again that this start gave up for a cause. Changes last
    until the end of this start.

    \b
    hermes-rl ctl runs/my-run
    hermes-rl ctl runs/my-run pause
    hermes-rl ctl runs/my-run resume
    hermes-rl ctl runs/my-run concurrency 8
    hermes-rl ctl runs/my-run budget 25
    hermes-rl ctl runs/my-run requeue model_timeout
    hermes-rl ctl runs/my-run drain
    """
    from batch_runner import CONTROL_COMMANDS, send_command
    from hermes_rl.store import load_run

    if order not in CONTROL_COMMANDS:
        raise UserError(f"no command {order!r}; choose one of {', '.join(CONTROL_COMMANDS)}")
    folder = load_run(run).path  # says what is wrong with the path
    state = send_command(folder, order, value)
    if as_json:
        print(json.dumps(state))
        return ExitCode.DONE
    budget = f", budget ${state['budget_usd']:g}" if state["budget_usd"] is not None else ""
    again = f", {many(state['requeued'], 'unit')} to run again" if "requeued" in state else ""
    print(
        f"{run}: {state['state']}, {many(state['running'], 'rollout')} in flight, "
        f"at most {state['concurrency']}{budget}{again}"
    )
    return ExitCode.DONE
