"""Errors of commands: one line on stderr with the place and the fix, and an exit code."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable

import typer

from hermes_rl.errors import ExitCode, HermesError, Outage
from hermes_rl.input_errors import did_you_mean

_CommandLineError: type[BaseException] = typer.BadParameter.__mro__[2]
"""Base class of typer's errors for wrong command lines, which has no public name."""


_PATH_ERRORS = (
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
)
"""Errors that concern a path from the command line."""

_MAX_PATH_CHARS = 80
"""Longer paths are cut in messages."""

_REWORDED = {
    "Input should be a valid integer, .*": "must be a whole number",
    "Input should be a valid number, .*": "must be a number",
    "Input should be greater than or equal to ": "must be at least ",
    "Value error, ": "",
}
"""Pattern of a message of typer -> our wording."""

_CHOICE = re.compile("'([^']*)' is not one of (.*)")


def run_guarded(command: Callable[[], int], program: str) -> int:
    """Run a command; user errors become one line and an exit code, bugs a traceback.

    Args:
        program: the command for the hint, such as `hermes-rl run`.
    """
    try:
        return command()
    except BrokenPipeError:
        # The reader (`| head`) has ended; avoid the error of the interpreter at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.DONE
    except Outage as error:
        fail(f"{error}, then run the same command. (exit {ExitCode.STOPPED})", "stopped")
        return ExitCode.STOPPED
    except HermesError as error:
        fail(str(error))
        return ExitCode.BAD_INPUT
    except _CommandLineError as error:
        fail(_usage_line(error, program))
        return ExitCode.BAD_INPUT
    except OSError as error:
        if error.errno not in _PATH_ERRORS or error.filename is None:
            raise
        name = str(error.filename)
        shown = name if len(name) <= _MAX_PATH_CHARS else f"{name[:_MAX_PATH_CHARS]}…"
        fail(f"{shown}: {(error.strerror or '').lower()}. Check the path")
        return ExitCode.BAD_INPUT
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED


def fail(message: str, what: str = "error") -> None:
    """Print an error on stderr; it may have several lines (a diff)."""
    from hermes_rl.cli.render import visible

    print(f"{what}: {visible(message)}", file=sys.stderr)


def _usage_line(error: BaseException, program: str) -> str:
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else program
    format_message: Callable[[], str] = getattr(error, "format_message", lambda: str(error))
    line = " ".join(format_message().split())
    for pattern, wording in _REWORDED.items():
        line = re.sub(pattern, wording, line)
    line = line.rstrip(".")
    if choice := _CHOICE.search(line):
        line += did_you_mean(choice[1], choice[2].split("'")[1::2])
    return f"{line}{'' if line.endswith('?') else '.'} See {where} --help"
