"""`hermes-rl sessions`: the conversations that agents keep."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hermes_rl.cli.app import make_app
from hermes_rl.errors import ExitCode, UserError

if TYPE_CHECKING:
    from hermes_rl.sessions import Hit, SessionInfo, SessionStore

app = make_app("Stored conversations: list, show, search, export, import, rename, prune.")

_DAY = 86_400.0

_Store = Annotated[
    Path | None, typer.Option("--store", help="file of the store [that of this user]")
]
_Json = Annotated[bool, typer.Option("--json", help="as JSON, one object a line")]
_Wanted = Annotated[
    str, typer.Argument(metavar="SESSION", help="its name, or the beginning of its id")
]


@contextmanager
def _opened(path: Path | None) -> Iterator[SessionStore]:
    """The store, which is not made here. Raises: UserError when it does not exist."""
    from hermes_rl.sessions import SessionStore, default_store_path

    if not (path or default_store_path()).exists():
        raise UserError(
            f"there is no store {path or default_store_path()}. "
            'AIAgent(..., session="NAME") makes one; for another file use --store'
        )
    with SessionStore(path) as store:
        yield store


def _print(line: str) -> None:
    from hermes_rl.cli.render import visible

    print(visible(line))


def _print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False))


@app.command("list")
def list_sessions(
    limit: Annotated[int, typer.Option(min=0, help="the last used ones; 0 is all")] = 50,
    store: _Store = None,
    as_json: _Json = False,
) -> int:
    """Print the sessions, the last used first.

    \b
    hermes-rl sessions list --limit 10
    """
    with _opened(store) as opened:
        infos = opened.sessions(limit)
        if as_json:
            for info in infos:
                _print_json(_summary(info))
        else:
            _print(_table(infos))
            _print(f"{len(infos)} sessions in {opened.path}")
    return ExitCode.DONE


def _summary(info: SessionInfo) -> dict[str, Any]:
    """What programs read of a session; its system prompt is in `show`."""
    return {k: v for k, v in asdict(info).items() if k not in ("id", "system_prompt")}


def _table(infos: Sequence[SessionInfo]) -> str:
    from hermes_rl.cli import render

    header = ("session", "last used", "messages", "tokens", "ended", "model", "title")
    rows = [
        (
            info.name or info.session_id[:12],
            time.strftime("%Y-%m-%d %H:%M", time.localtime(info.updated_at)),
            render.number(info.messages),
            render.number(_tokens(info)),
            info.end_reason or "-",
            info.model or "-",
            ("↳ " if info.parent_id else "") + render.clip(info.title, 50),
        )
        for info in infos
    ]
    return render.columns(header, rows, right="messages tokens")


def _tokens(info: SessionInfo) -> int | None:
    known = [n for n in (info.input_tokens, info.output_tokens) if n is not None]
    return sum(known) if known else None


@app.command()
def show(session: _Wanted, store: _Store = None, as_json: _Json = False) -> int:
    """Print a conversation.

    \b
    hermes-rl sessions show work
    hermes-rl sessions show 4f1c --json    one object: messages, calls, system prompt
    """
    from hermes_rl.messages import to_openai

    with _opened(store) as opened:
        info = opened.find(session)
        messages = [to_openai(m, details=True) for m in opened.load(info.id)]
        if as_json:
            more = {"system_prompt": info.system_prompt, "messages": messages}
            _print_json({**_summary(info), **more, "calls": opened.calls(session)})
            return ExitCode.DONE
    _print(_headline(info))
    for line in _lines(info.system_prompt, messages):
        _print(line)
    return ExitCode.DONE


def _headline(info: SessionInfo) -> str:
    from hermes_rl.cli import render

    parts = [
        info.name or info.session_id,
        info.title,
        info.end_reason,
        f"{info.messages} messages",
        f"{render.number(info.input_tokens)} in, {render.number(info.output_tokens)} out",
    ]
    if info.parent_id:
        parts.append(f"{info.branched_by} of {info.parent_id[:12]}, {info.shared} shared messages")
    return "   ".join(part for part in parts if part)


def _lines(system: str | None, messages: Sequence[dict[str, Any]]) -> Iterator[str]:
    from hermes_rl.cli import render

    if system:
        yield f" system    {render.clip(system, render.WIDTH - 12)}"
    for number, message in enumerate(messages):
        content = message["content"]
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        if message["role"] == "tool":
            yield from render.indented(render.tool_output(text))
            continue
        first, *rest = text.strip().split("\n")
        if first or not message.get("tool_calls"):
            yield f" {number:<4}{message['role']:<10} {first}"
            yield from (f"                {line}" for line in rest)
        for call in message.get("tool_calls") or ():
            yield f" {number:<4}{'call':<10} {render.call_text(_with_object(call))}"


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as an object, where they are one."""
    from hermes_rl.messages import parse_arguments

    function = call["function"]
    arguments = parse_arguments(function["arguments"])
    return {"function": {**function, "arguments": arguments or function["arguments"]}}


@app.command()
def search(
    query: Annotated[list[str], typer.Argument(metavar="TERM...", help="all must be found")],
    limit: Annotated[int, typer.Option(min=1, help="messages at most")] = 20,
    store: _Store = None,
    as_json: _Json = False,
) -> int:
    """Find messages that have all terms, the newest first.

    A term in quotes is a phrase; a * at its end finds the beginnings of words. Chinese, Japanese
    and Korean text is found by any part of it.

    \b
    hermes-rl sessions search timeout 'read_file' pars*
    """
    with _opened(store) as opened:
        hits = opened.search(" ".join(query), limit)
    for hit in hits:
        _print_json(asdict(hit)) if as_json else _print(_hit(hit))
    if not hits and not as_json:
        print("no message has all of these terms")
    return ExitCode.DONE


def _hit(hit: Hit) -> str:
    place = f"{hit.name or hit.session_id[:12]} #{hit.position}"
    when = time.strftime("%Y-%m-%d", time.localtime(hit.added_at))
    replaced = " (replaced)" if hit.replaced else ""
    return f"{place:<20} {when}  {hit.role:<9} {hit.snippet}{replaced}"


@app.command()
def export(
    session: _Wanted,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="file to write [standard output]")
    ] = None,
    store: _Store = None,
) -> int:
    """Write a session to a file. `import` and AIAgent(session="FILE.jsonl") take it.

    \b
    hermes-rl sessions export work -o work.jsonl
    """
    from hermes_rl.sessions import export_session

    with _opened(store) as opened:
        data = b"".join(export_session(opened, session))
    if out is None:
        print(data.decode(), end="")
        return ExitCode.DONE
    try:
        if out.exists():
            raise UserError(f"{out} exists. Choose another file, or remove it")
        out.write_bytes(data)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}. Choose another file") from None
    print(f"{out}: {len(data):,} bytes", file=sys.stderr)
    return ExitCode.DONE


@app.command("import")
def import_session(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="session files (.jsonl)")],
    name: Annotated[str | None, typer.Option(help="name of the session, for one file")] = None,
    store: _Store = None,
    as_json: _Json = False,
) -> int:
    """Copy session files into the store.

    \b
    hermes-rl sessions import work.jsonl --name work
    """
    from hermes_rl.sessions import SessionStore, import_file

    if name is not None and len(files) > 1:
        raise UserError("--name names one session: import the files one after another")
    with SessionStore(store) as opened:
        for file in files:
            info = import_file(opened, file, name)
            if as_json:
                _print_json(_summary(info))
            else:
                _print(f"{file}: session {info.name or info.session_id}, {info.messages} messages")
    return ExitCode.DONE


@app.command()
def rename(session: _Wanted, title: str, store: _Store = None) -> int:
    """Give a session another title.

    \b
    hermes-rl sessions rename work 'the parser bug'
    """
    with _opened(store) as opened:
        opened.rename(session, title)
    return ExitCode.DONE


@app.command()
def prune(
    sessions: Annotated[
        list[str] | None, typer.Argument(metavar="[SESSION]...", help="these sessions")
    ] = None,
    older_than: Annotated[
        float | None, typer.Option(min=0, help="days since a session was last used")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only print what would go")] = False,
    store: _Store = None,
    as_json: _Json = False,
) -> int:
    """Remove sessions for good. What a session continues, or what continues it, goes with it; one
    that an agent has open stays.

    \b
    hermes-rl sessions prune --older-than 30 --dry-run
    hermes-rl sessions prune work
    """
    if (older_than is None) == (not sessions):
        raise UserError("name the sessions, or use --older-than DAYS")
    before = None if older_than is None else time.time() - older_than * _DAY
    with _opened(store) as opened:
        removed = opened.prune(before=before, wanted=sessions or (), dry_run=dry_run)
    if as_json:
        for info in removed:
            _print_json(_summary(info))
        return ExitCode.DONE
    _print(_table(removed))
    print(f"{len(removed)} sessions {'would be removed' if dry_run else 'removed'}")
    return ExitCode.DONE
