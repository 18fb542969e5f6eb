"""All commands by name. The module of a command is imported only when it is called.

Command NAME lives in `hermes_rl/cli/NAME_command.py` and offers either `command`, a typed function
that returns the exit code (None is 0), or `app`, a `typer.Typer` of subcommands.
"""

from __future__ import annotations

import codecs
import importlib
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

from hermes_rl import __version__
from hermes_rl.errors import ExitCode

if TYPE_CHECKING:
    import typer

PROGRAM = "hermes-rl"

COMMANDS = {
    "demo": "the whole product on the bundled smoke tasks",
    "run": "generate trajectories from a dataset; the same command resumes",
    "chat": "talk to the agent in a terminal; sessions resume",
    "play": "be the agent: same sandbox, files, limits and verifier",
    "show": "the table of a run, or one trajectory",
    "view": "the runs of a folder in a browser, also while they run",
    "diff": "what differs between two runs",
    "replay": "recorded answers again, through the real loop and sandbox",
    "status": "the state of a run, from any other terminal",
    "ctl": "steer a running run: pause, resume, drain, concurrency, budget, requeue",
    "check": "find bad rows before a token is spent; check the records of a run",
    "export": "a run in another format, with a loss report",
    "compact": "merge the small Parquet files of a run into large ones",
    "compress": "fit long trajectories into a token budget",
    "import": "another program's trajectories as a run",
    "eval": "models on a dataset or a known benchmark, with intervals and comparisons",
    "env": "RL environments: list, process, serve, evaluate, regrade, new",
    "api": "the trajectory API of Atropos 0.4.0, for its environments and trainers",
    "images": "images for sandboxes: list, pull, import, build, prune",
    "sandboxes": "sandboxes on this machine: list, and reap what dead workers left",
    "sessions": "kept conversations: list, show, search, export, import, prune",
    "tools": "tools, toolsets and distributions, and what is missing here",
    "doctor": "what works on this machine, and what to install",
}
"""Command -> its line in `hermes-rl --help`; commands without a module are not listed."""

_HELP = """\
Usage: hermes-rl COMMAND [OPTIONS]

Agent trajectories from a prompt dataset and a model endpoint.

Commands:
{commands}

Options:
  --version             print the version
  --install-completion  complete commands and options in this shell (--show-completion prints how)
  -h, --help            print this; each command has its own: hermes-rl run --help

Example: hermes-rl run tasks.jsonl --model gpt-5-mini --repeats 4
"""


_HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}

_COMPLETE = "_HERMES_RL_COMPLETE"
"""Set by a shell that completes a line."""

_COMPLETION_OPTIONS = ("--install-completion", "--show-completion")


def run_app(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if _COMPLETE in os.environ or (args and args[0] in _COMPLETION_OPTIONS):
        return _complete(args)
    if not args or args[0] in ("-h", "--help", "help"):
        print(_help(), end="")
        return ExitCode.DONE
    if args[0] == "--version":
        print(f"{PROGRAM} {__version__}")
        return ExitCode.DONE
    name, *rest = args
    if name not in available():
        print(f"error: {_unknown(name)}. See {PROGRAM} --help", file=sys.stderr)
        return ExitCode.BAD_INPUT
    from hermes_rl.cli.errors import run_guarded

    return run_guarded(_command(name, rest), f"{PROGRAM} {name}")


def _complete(args: list[str]) -> int:
    """Complete a line for the shell, or install completion."""
    import typer

    typed = os.environ.get("COMP_WORDS", os.environ.get("_TYPER_COMPLETE_ARGS", "")).split()
    app = typer.Typer(rich_markup_mode=None)
    for name in available():
        if name not in typed[1:2]:  # its options are not needed
            app.command(name, help=COMMANDS[name])(lambda: None)
            continue
        module = importlib.import_module(_module(name))
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            app.command(name)(module.command)
    try:
        typer.main.get_command(app).main(args, prog_name=PROGRAM)
    except SystemExit as end:
        return int(end.code or ExitCode.DONE)
    return ExitCode.DONE


def available() -> list[str]:
    """The commands of this installation, in the order of the help."""
    return [name for name in COMMANDS if find_spec(_module(name)) is not None]


def _module(name: str) -> str:
    return f"hermes_rl.cli.{name}_command"


def _command(name: str, args: list[str]) -> Callable[[], int]:
    def invoke() -> int:
        import typer

        module = importlib.import_module(_module(name))
        # A group alone prints its help; typer would raise it as an error.
        arguments = args or (["--help"] if hasattr(module, "app") else [])
        command = typer.main.get_command(_typer_app(module, name))
        code = command.main(arguments, prog_name=f"{PROGRAM} {name}", standalone_mode=False)
        return int(code or ExitCode.DONE)

    return invoke


def make_app(text: str | None = None) -> typer.Typer:
    """Create an app of subcommands, or without a help text of one command."""
    import typer

    return typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        help=text,
        context_settings=_HELP_OPTIONS,
    )


def _typer_app(module: Any, name: str) -> typer.Typer:
    if hasattr(module, "app"):
        return cast("typer.Typer", module.app)
    app = make_app()
    app.command(name, context_settings=_HELP_OPTIONS)(module.command)
    return app


def _help() -> str:
    names = available()
    width = max(map(len, names), default=0)
    return _HELP.format(commands="\n".join(f"  {n.ljust(width)}  {COMMANDS[n]}" for n in names))


def _unknown(name: str) -> str:
    from hermes_rl.input_errors import did_you_mean

    if name.startswith("-"):
        return f"no option {name!r}" + did_you_mean(name, ("--help", "--version"))
    return f"no command {name!r}" + did_you_mean(name, available())


_HANDLER = "hermes_rl.escape"


def escape_unprintable() -> None:
    """Let stdout and stderr escape characters that their encoding lacks, as in JSON."""
    codecs.register_error(_HANDLER, _escape)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)


def _escape(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end
