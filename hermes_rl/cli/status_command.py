"""`hermes-rl status`: the state of a run, from any other terminal."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from hermes_rl.cli import render
from hermes_rl.errors import ExitCode, UserError

FOLLOW_EVERY_S = 2.0
STOP_WAIT_S = 600.0


@dataclass(frozen=True)
class Status:
    """A run at one moment."""

    path: str
    driver: int | None
    """Process id of the driver on this machine; None without one."""
    host: str | None
    """Where the driver runs, when it is another machine."""
    units: int | None
    """Planned units, and finished ones that left the dataset; None until it was read completely."""
    done: int
    graded: int
    solved: int
    given_up: int
    running: int
    """Attempts in flight."""
    failed_attempts: int
    input_tokens: int
    output_tokens: int
    cost: str
    trouble: tuple[str, ...] = ()
    """One line for each endpoint that does not answer, and for a missing or cut file."""

    def line(self) -> str:
        """The status line."""
        verdict = f"{self.solved:,} solved" if self.graded or not self.done else "not graded"
        total = "?" if self.units is None else f"{self.units:,}"
        state = f"driver {self.driver}" if self.driver else "no driver"
        state = f"driver on {self.host}" if self.host else state
        return (
            f"{self.done:,}/{total} units  {verdict}  {self.given_up:,} given up  "
            f"{self.running:,} running | {self.failed_attempts:,} failed attempts | "
            f"{self.input_tokens:,} in, {self.output_tokens:,} out  {self.cost} | {state}"
            + "".join(f"\n{line}" for line in self.trouble)
        )


def command(
    run: Annotated[Path, typer.Argument(help="run directory", metavar="RUN")],
    follow: Annotated[bool, typer.Option("--follow", help="print it every 2 s")] = False,
    stop: Annotated[
        bool, typer.Option("--stop", help="let running rollouts end, then stop the run")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> int:
    """Show the state of a run.

    \b
    hermes-rl status runs/my-run             once
    hermes-rl status runs/my-run --follow    until the driver ends
    hermes-rl status runs/my-run --stop      let running rollouts end, publish, stop
    """
    if stop:
        return _stop(run)
    while True:
        status = read_status(run)
        print(json.dumps(asdict(status)) if as_json else status.line(), flush=True)
        if not follow or (status.driver is None and status.host is None):
            return ExitCode.DONE
        time.sleep(FOLLOW_EVERY_S)


def read_status(path: Path) -> Status:
    """A run's state, from its files alone. Raises: UserError when there is no run."""
    from batch_runner import Trouble, read_manifest
    from hermes_rl.store import find_driver, in_flight, load_run, size_fault

    run = load_run(path)
    stats = run.stats
    holder = find_driver(run.run_dir)
    plan = stats["plan"]
    known = plan.get("units") is not None
    troubles = read_manifest(run.run_dir).get("trouble", ()) if holder is not None else ()
    fault = size_fault(run.run_dir, {}, run.ledger.covers) if holder is None else None
    local = holder is not None and holder.local
    return Status(
        path=str(path),
        driver=holder.pid if holder is not None and local else None,
        host=holder.host if holder is not None and not local else None,
        units=plan["units"] + plan.get("left", 0) if known else None,
        done=stats["units"]["done"],
        graded=stats["reward"]["graded"],
        solved=stats["reward"]["solved"],
        given_up=stats["units"]["given_up"],
        running=len(in_flight(run.run_dir)) if holder is not None else 0,
        failed_attempts=stats["attempts"]["failed"],
        input_tokens=stats["tokens"]["input_tokens"] or 0,
        output_tokens=stats["tokens"]["output_tokens"] or 0,
        cost=render.cost(stats["known_cost_usd"] or 0.0, stats["calls"]["unpriced"]),
        trouble=(
            *(Trouble(**one).line for one in troubles),
            *([fault] if fault else []),
        ),
    )


def _stop(path: Path) -> int:
    status = read_status(path)
    if status.host:
        raise UserError(f"{path}: its driver runs on {status.host}; stop it there")
    if status.driver is None:
        print(f"{path}: no driver runs")
        return ExitCode.DONE
    os.kill(status.driver, signal.SIGINT)
    print(f"asked process {status.driver} to stop; waiting for its rollouts", file=sys.stderr)
    deadline = time.monotonic() + STOP_WAIT_S
    while read_status(path).driver == status.driver:
        if time.monotonic() > deadline:
            raise UserError(f"{path}: process {status.driver} still runs after {STOP_WAIT_S:g} s")
        time.sleep(0.2)
    print(read_status(path).line())
    return ExitCode.DONE
