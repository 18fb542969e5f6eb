"""`hermes-rl view`: the runs of a folder in a browser."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from hermes_rl.errors import ExitCode


def command(
    runs: Annotated[
        Path, typer.Argument(help="folder of runs, or one run", metavar="[RUNS_DIR]")
    ] = Path("runs"),
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="port [7470, or a free one]")
    ] = None,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="open a browser if there is a display")
    ] = True,
) -> int:
    """The runs of a folder in a browser, also while they run. Ctrl-C ends it.

    \b
    hermes-rl view                       the runs in runs/
    hermes-rl view runs/smoke-oracle     one run
    On a remote machine: ssh -L 7470:127.0.0.1:7470 HOST, then open the printed address here.
    Only this machine can connect, and only with the token in the address. --host 0.0.0.0 lets
    others connect, without encryption; they need the token too.
    """
    from hermes_rl.viewer import RunFolder, serve

    folder = RunFolder(runs)

    def opened(address: str) -> None:
        print(address, flush=True)
        print("Ctrl-C ends it", file=sys.stderr)
        # Without a display a text browser would use the terminal.
        if browser and any(os.environ.get(n) for n in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")):
            webbrowser.open(address)

    serve(folder, host, port, opened)
    return ExitCode.DONE
