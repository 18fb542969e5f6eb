"""`hermes-rl sandboxes`: what runs on this machine, and what dead workers left."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from hermes_rl.errors import ExitCode

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Sandboxes of this user on this machine: list, reap.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_State = Annotated[
    Path | None, typer.Option("--state", help="state folder of the workers [the default one]")
]


@app.command("list")
def list_sandboxes(state: _State = None) -> int:
    """Print each worker, whether it lives, and its sandboxes.

    \b
    hermes-rl sandboxes list
    """
    from hermes_rl.cli.render import visible
    from hermes_rl.sandboxes import default_state_dir, workers

    folder = state or default_state_dir()
    found = workers(folder)
    for worker in found:
        print(f"worker {worker.pid}: {'running' if worker.alive else 'dead, to be reaped'}")
        for held in worker.sandboxes:
            age = max(0, int(time.time() - held.since))
            lease = visible(held.lease) or "(nothing runs in it)"
            print(f"  {lease}  {held.where}  {age:,} s")
    total = sum(len(worker.sandboxes) for worker in found)
    dead = sum(not worker.alive for worker in found)
    print(f"{total} sandboxes, {len(found)} workers, {dead} of them dead, in {folder}")
    return ExitCode.DONE


@app.command("reap")
def reap_sandboxes(state: _State = None) -> int:
    """End and remove what dead workers left; sandboxes of living workers stay.

    Every run does this at its start.

    \b
    hermes-rl sandboxes reap
    """
    from hermes_rl.sandboxes import default_state_dir, limits, reap, workers

    folder = state or default_state_dir()
    left = {w.name: len(w.sandboxes) for w in workers(folder) if not w.alive}
    gone = reap(folder, limits.detect().bases) if left else []
    after = {w.name for w in workers(folder) if not w.alive}
    removed = sum(left.get(name, 0) for name in gone if name not in after)
    print(f"{removed} sandboxes of {len(left)} dead workers removed")
    if after:
        print(f"{len(after)} could not be removed: start the engine of their containers")
    return ExitCode.GIVEN_UP if after else ExitCode.DONE
