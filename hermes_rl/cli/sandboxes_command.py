"""`hermes-rl sandboxes`: sandboxes on this machine, and those that dead workers left."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hermes_rl.cli.app import make_app
from hermes_rl.errors import ExitCode, SandboxError, UserError

if TYPE_CHECKING:
    from hermes_rl.sandboxes import Held, SshHost, Worker

app = make_app("Sandboxes of this user, on this machine or others: list, reap.")

_State = Annotated[
    Path | None, typer.Option("--state", help="state folder of the workers [the default one]")
]
_Hosts = Annotated[
    str | None,
    typer.Option(help="those of your account on these machines: USER@HOST:PORT,...", metavar="A,B"),
]
_Config = Annotated[
    Path | None, typer.Option("--config", help="those on the machines of its 'sandbox.hosts'")
]


@app.command("list")
def list_sandboxes(state: _State = None, hosts: _Hosts = None, config: _Config = None) -> int:
    """Print each worker, whether it lives, and its sandboxes.

    Containers of modal are included if you are logged in there.

    \b
    hermes-rl sandboxes list
    hermes-rl sandboxes list --hosts me@one.example,two.example
    """
    from hermes_rl.sandboxes import default_state_dir, workers

    if machines := _machines(hosts, config):
        return _on_each(machines, "listed", _list_remote)
    folder = state or default_state_dir()
    _print_workers(workers(folder), str(folder))
    return _list_modal() if state is None else ExitCode.DONE


def _list_modal() -> int:
    """Print the containers of all workers of the account, wherever those are."""
    from hermes_rl.aio import run_sync
    from hermes_rl.cli.render import visible
    from hermes_rl.sandboxes import modal_cloud

    if not modal_cloud.is_configured():
        return ExitCode.DONE
    try:
        found = run_sync(modal_cloud.running_containers())
    except SandboxError as error:
        print(error)
        return ExitCode.GIVEN_UP
    for name, lease in found.items():
        print(f"  {visible(lease) or '(no lease)'}  {name}")
    print(f"{len(found)} containers of modal")
    return ExitCode.DONE


def _print_workers(found: Sequence[Worker], where: str) -> None:
    from hermes_rl.cli.render import visible

    by_pid: dict[tuple[int, bool], list[Held]] = {}
    for worker in found:  # a process with several backends is one worker to its user
        by_pid.setdefault((worker.pid, worker.alive), []).extend(worker.sandboxes)
    for (pid, alive), sandboxes in by_pid.items():
        print(f"worker {pid}: {'running' if alive else 'dead, to be reaped'}")
        for held in sandboxes:
            age = max(0, int(time.time() - held.since))
            lease = visible(held.lease) or "(nothing runs in it)"
            print(f"  {lease}  {held.where}  {age:,} s")
    total = sum(map(len, by_pid.values()))
    dead = sum(not alive for _, alive in by_pid)
    print(f"{total} sandboxes, {len(by_pid)} workers, {dead} of them dead, in {where}")


@app.command("reap")
def reap_sandboxes(state: _State = None, hosts: _Hosts = None, config: _Config = None) -> int:
    """End and remove sandboxes of dead workers. Those of running workers are kept.

    Every run does this at its start.

    \b
    hermes-rl sandboxes reap
    """
    from hermes_rl.sandboxes import default_state_dir, reap_counted

    if machines := _machines(hosts, config):
        return _on_each(machines, "reap", _print_reaped)
    return _print_reaped(reap_counted(state or default_state_dir()), "")


def _print_reaped(found: Mapping[str, Any], where: str) -> int:
    at = f" on {where}" if where else ""
    print(f"{found['removed']} sandboxes of {found['dead']} dead workers removed{at}")
    if found["left"]:
        print(f"{found['left']} could not be removed{at}: start the engine of their containers")
    return ExitCode.GIVEN_UP if found["left"] else ExitCode.DONE


def _list_remote(found: Mapping[str, Any], where: str) -> int:
    from hermes_rl.sandboxes import Held, Worker

    _print_workers(
        [
            Worker(**{**w, "sandboxes": [Held(**h) for h in w["sandboxes"]]})
            for w in found["workers"]
        ],
        where,
    )
    return ExitCode.DONE


def _machines(hosts: str | None, config: Path | None) -> list[SshHost]:
    """The machines that are named. Raises: UserError."""
    from hermes_rl.config import SandboxSection, load_config
    from hermes_rl.sandboxes import SshHost

    named: Any = hosts
    if config is not None and hosts is None:
        named = (load_config(config).get("sandbox") or {}).get("hosts")
        if not named:
            raise UserError(f"{config}: 'sandbox.hosts' names no machine")
    if named is None:
        return []
    return [SshHost(**dict(host)) for host in SandboxSection(hosts=named).hosts]


def _on_each(
    machines: Sequence[SshHost], verb: str, show: Callable[[Mapping[str, Any], str], int]
) -> int:
    """Ask each machine, and show its answer. Returns the worst exit code."""
    from hermes_rl.aio import run_sync
    from hermes_rl.sandboxes import Link, SshHosts

    async def ask() -> int:
        worst: int = ExitCode.DONE
        pool = SshHosts(machines, only_look=True)
        try:
            for host, link in await pool.connect():
                try:
                    if not isinstance(link, Link):
                        raise link
                    worst = max(worst, show((await link.call(verb, {}))[0], str(host)))
                except SandboxError as error:  # the others are shown all the same
                    print(error)
                    worst = ExitCode.GIVEN_UP
        finally:
            await pool.aclose()
        return worst

    return run_sync(ask())
