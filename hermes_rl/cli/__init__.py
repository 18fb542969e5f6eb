"""The command `hermes-rl`: the one door above trunk and wings."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code (DESIGN 5.6).

    Args:
        argv: the arguments without the program's name; None takes the process's.
    """
    from hermes_rl.cli.app import run_app

    return run_app(argv)
