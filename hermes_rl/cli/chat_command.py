"""`hermes-rl chat`: talk to the agent in a terminal."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from hermes_rl.errors import ExitCode, UserError

if TYPE_CHECKING:
    from hermes_rl.cli.chat import AgentOptions, Chat
    from hermes_rl.sessions import SessionInfo, SessionStore
    from hermes_rl.tools import Mode

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def command(
    model: Annotated[str | None, typer.Option(help="model; also local or noop")] = None,
    provider: Annotated[str | None, typer.Option(help="known provider [openai]")] = None,
    base_url: Annotated[str | None, typer.Option(help="endpoint")] = None,
    api_key_env: Annotated[str | None, typer.Option(help="variable that holds the key")] = None,
    api_mode: Annotated[str | None, typer.Option(help="dialect")] = None,
    toolsets: Annotated[str, typer.Option(help="toolsets, A,B; none: without tools")] = "",
    workspace: Annotated[
        Path | None, typer.Option(help="folder of yours to work in [an empty one that goes]")
    ] = None,
    sandbox: Annotated[str, typer.Option(help="backend; none runs as you")] = "bubblewrap",
    approval: Annotated[str, typer.Option(help="dangerous commands: ask, allow or deny")] = "ask",
    query: Annotated[
        str | None, typer.Option("--query", "-q", help="ask once, print the answer; - reads stdin")
    ] = None,
    image: Annotated[list[Path] | None, typer.Option(help="an image for the -q question")] = None,
    resume: Annotated[str | None, typer.Option(help="session to continue", metavar="ID")] = None,
    latest: Annotated[bool, typer.Option("--continue", help="continue the last session")] = False,
    store: Annotated[Path | None, typer.Option(help="file of sessions [that of you]")] = None,
) -> int:
    """Talk to the agent. The session is kept after each turn, whatever ends the chat.

    \b
    hermes-rl chat --model gpt-5-mini                  in an empty sandbox; /help lists commands
    hermes-rl chat --model local --workspace .         in this folder
    hermes-rl chat --model gpt-5-mini -q "What is 6*7?"
    hermes-rl chat --continue
    """
    from hermes_rl.sessions import SessionStore

    _refuse_contradictions(workspace, sandbox, approval, query, image, resume, latest)
    with SessionStore(store) as opened:
        info = _session(opened, resume, latest)
        name = model or (info.model if info else None)
        if not name:
            raise UserError("no model. Name one: hermes-rl chat --model gpt-5-mini")
        fields = {
            "provider": provider,
            "base_url": base_url,
            "api_key_env": api_key_env,
            "api_mode": api_mode,
        }
        options = _options(name, fields, toolsets, workspace, sandbox, approval)
        return _chat(options, opened, info, query, tuple(image or ()))


def _refuse_contradictions(
    workspace: Path | None,
    sandbox: str,
    approval: str,
    query: str | None,
    image: list[Path] | None,
    resume: str | None,
    latest: bool,
) -> None:
    from hermes_rl.input_errors import unknown
    from hermes_rl.tools import Mode

    if approval not in get_args(Mode):
        raise UserError(unknown("--approval", approval, get_args(Mode)))
    if workspace is not None and sandbox != "bubblewrap":
        raise UserError(f"--workspace belongs to --sandbox bubblewrap, not {sandbox}")
    if workspace is not None and not workspace.is_dir():
        raise UserError(f"--workspace {workspace}: not a folder. Create it, or name another one")
    if image and query is None:
        raise UserError("--image belongs to -q. In a chat write @PATH in a message")
    if resume is not None and latest:
        raise UserError("--resume and --continue contradict each other. Use one of them")


def _session(store: SessionStore, resume: str | None, latest: bool) -> SessionInfo | None:
    """The session to continue; None for a new one. Raises: UserError."""
    if resume is not None:
        return store.find(resume)
    if not latest:
        return None
    found = next((info for info in store.sessions() if info.messages), None)
    if found is None:
        raise UserError("there is no session to continue yet. Leave --continue out")
    return found


def _options(
    name: str,
    fields: dict[str, Any],
    toolsets: str,
    workspace: Path | None,
    sandbox: str,
    approval: str,
) -> AgentOptions:
    from hermes_rl.cli.chat import AgentOptions, make_model
    from hermes_rl.cli.render import visible
    from hermes_rl.tools import DEFAULT_TOOLSETS, resolve
    from hermes_rl.wiring import make_backend

    config = make_model({"name": name, **{k: v for k, v in fields.items() if v is not None}})

    def make() -> Any:
        if workspace is None:
            return make_backend(sandbox)
        from hermes_rl.sandboxes import Bubblewrap

        return Bubblewrap(workspace=workspace.resolve())

    chosen = tuple(t.strip() for t in toolsets.split(",") if t.strip()) or DEFAULT_TOOLSETS
    resolve(chosen)
    place = "an empty sandbox" if workspace is None else visible(str(workspace))
    place = "no sandbox: commands run as you" if sandbox == "none" else place
    return AgentOptions(
        model=config,
        toolsets=chosen,
        sandbox=make,
        approval=cast("Mode", approval),
        place=place,
        disposable=workspace is None and sandbox != "none",
    )


def _chat(
    options: AgentOptions,
    store: SessionStore,
    info: SessionInfo | None,
    query: str | None,
    images: tuple[Path, ...],
) -> int:
    from hermes_rl.cli.chat import COMMANDS, Chat
    from hermes_rl.cli.chat_input import LineReader, Reader, TerminalReader
    from hermes_rl.cli.chat_screen import Screen

    _fetch_weights(options.model)
    resumed = None if info is None else info.session_id
    chat = Chat(options, store, Screen(quiet=query is not None), resumed)
    try:
        for number in _SIGNALS:
            signal.signal(number, _leave)
        if query is not None:
            return _ask(chat, query, images)
        history = store.path.parent / "chat-history"
        reader: Reader = LineReader()
        if sys.stdin.isatty():
            reader = TerminalReader(history, (f"/{name}" for name in COMMANDS), chat.toolbar)
            _greet(chat, resumed=info is not None)
        return chat.run(reader)
    finally:
        chat.close()


def _greet(chat: Chat, *, resumed: bool) -> None:
    options = chat.options
    chat.screen.line(f"{options.model.name}, {options.place}; /help lists commands", "dim")
    if resumed:
        chat.show_tail()


def _leave(number: int, frame: object) -> None:
    """End the chat on a signal; the terminal may be closed, so nothing more is written to it."""
    for other in _SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    if number == signal.SIGHUP:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
    raise SystemExit(128 + number)


def _ask(chat: Chat, query: str, images: tuple[Path, ...]) -> int:
    """One question: the answer alone goes to standard output."""
    from hermes_rl.cli.render import visible

    text = sys.stdin.read() if query == "-" else query
    if not text.strip():
        raise UserError("-q: the question is empty")
    result = chat.say(text, images)
    answer = (result or {}).get("final_response") or ""
    if answer:
        print(visible(answer), flush=True)
    if result is None:
        return ExitCode.GIVEN_UP
    if result["end_reason"] == "interrupted":
        return ExitCode.INTERRUPTED
    return ExitCode.DONE if result["completed"] else ExitCode.GIVEN_UP


def _fetch_weights(model: Any) -> None:
    """Fetch the weights of the embedded model, and say how far that is. Raises: UserError."""
    from hermes_rl.config import LOCAL_MODELS

    if model.name not in LOCAL_MODELS or model.base_url:
        return
    from hermes_rl.aio import run_sync
    from hermes_rl.models.local import ensure_weights

    last = time.monotonic()

    def progress(done: int, total: int, what: str) -> None:
        nonlocal last
        if (now := time.monotonic()) - last > 2:
            last = now
            print(f"weights: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB ({what})", file=sys.stderr)

    run_sync(ensure_weights(model.name, progress=progress))
