"""The command `hermes-rl`. It composes all other packages and imports them late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hermes_rl.lazy import attach

if TYPE_CHECKING:
    from hermes_rl.cli import doctor_command, run_command, status_command
    from hermes_rl.cli.check_command import command
    from hermes_rl.cli.check_dataset import find_script_errors
    from hermes_rl.cli.check_run import faults_of, row_faults
    from hermes_rl.cli.doctor_command import Query, models
    from hermes_rl.cli.errors import run_guarded
    from hermes_rl.cli.render import visible
    from hermes_rl.cli.status_command import read_status
else:
    __getattr__, __dir__ = attach(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code (DESIGN 5.6).

    Args:
        argv: the arguments without the program's name; None takes the process's.
    """
    try:
        from hermes_rl.cli.app import escape_unprintable, run_app

        escape_unprintable()
        return run_app(argv)
    except KeyboardInterrupt:  # during imports; commands handle it themselves
        return 130


def env_main(package: str | None) -> int:
    """`python -m PACKAGE process ...` is `hermes-rl env process PACKAGE ...`.

    Args:
        package: `__package__` of the `__main__` module of an environment.
    """
    import sys

    command, *rest = sys.argv[1:] or ["--help"]
    if command.startswith("-") or package is None:
        return main(["env", command, *rest])
    return main(["env", command, package, *rest])
