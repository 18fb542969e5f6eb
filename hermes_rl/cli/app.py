"""All commands by name. A command's module is imported only when that command is asked for.

Command NAME lives in `hermes_rl/cli/NAME_command.py` and offers either `command`, a typed function
that returns the exit code (None is 0), or `app`, a `typer.Typer` of subcommands.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from hermes_rl import __version__
from hermes_rl.errors import ExitCode

PROGRAM = "hermes-rl"

COMMANDS = {
    "demo": "the whole product on the bundled smoke tasks",
    "run": "generate trajectories from a dataset; the same command resumes",
    "play": "be the agent: same sandbox, files, limits and verifier",
    "show": "the table of a run, or one trajectory",
    "status": "what is going on, from any other terminal",
    "check": "find bad rows before a token is spent; check a run's books",
    "export": "a run in another format, with a loss report",
    "import": "another program's trajectories as a run",
    "env": "RL environments: process, evaluate, regrade, new",
    "doctor": "what is there, what works on this machine, what to install",
}
"""Command -> its line in `hermes-rl --help`; a command without a module is not offered."""

_HELP = """\
Usage: hermes-rl COMMAND [OPTIONS]

Agent trajectories from a prompt dataset and a model endpoint.

Commands:
{commands}

Each command explains itself: hermes-rl run --help
Example: hermes-rl run tasks.jsonl --model gpt-5-mini --repeats 4
"""


def run_app(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help(), end="")
        return ExitCode.DONE
    if words[0] == "--version":
        print(f"{PROGRAM} {__version__}")
        return ExitCode.DONE
    name, *rest = words
    if name not in available():
        print(f"error: {_unknown(name)}. See {PROGRAM} --help", file=sys.stderr)
        return ExitCode.BAD_INPUT
    from hermes_rl.cli.errors import guarded

    return guarded(_command(name, rest), f"{PROGRAM} {name}")


def available() -> list[str]:
    """The commands of this installation, in the order of the help."""
    return [name for name in COMMANDS if find_spec(_module(name)) is not None]


def _module(name: str) -> str:
    return f"hermes_rl.cli.{name}_command"


def _command(name: str, words: list[str]) -> Callable[[], int]:
    def invoke() -> int:
        import typer

        app = _typer_app(importlib.import_module(_module(name)), name)
        program = f"{PROGRAM} {name}"
        code = typer.main.get_command(app).main(words, prog_name=program, standalone_mode=False)
        return int(code or ExitCode.DONE)

    return invoke


def _typer_app(module: Any, name: str) -> Any:
    import typer

    if hasattr(module, "app"):
        return module.app
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name, context_settings={"help_option_names": ["-h", "--help"]})(module.command)
    return app


def _help() -> str:
    names = available()
    width = max(map(len, names), default=0)
    return _HELP.format(commands="\n".join(f"  {n.ljust(width)}  {COMMANDS[n]}" for n in names))


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, available(), n=1)
    hint = f" (did you mean '{close[0]}'?)" if close else ""
    kind = "option" if name.startswith("-") else "command"
    return f"no {kind} {name!r}{hint}"
