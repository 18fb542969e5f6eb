"""`hermes-rl ctl`: commands to a running driver, through a socket in tmp/ of its run directory.

One connection carries one JSON line each way: `{"command": ..., "value": ...}`, then the state of
the run or `{"error": ...}`. Only the user who runs the driver, and root, can connect.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from hermes_rl.errors import CAUSES, HermesError, UserError

SOCKET = "tmp/ctl.sock"
CONTROL_COMMANDS = ("state", "pause", "resume", "drain", "concurrency", "budget", "requeue")
_ANSWER_S = 30.0
_LINE_MAX = 10_000

Handle = Callable[[str, str | None], dict[str, Any]]
"""Carries out a command with its value; returns the state. Raises: UserError."""


@asynccontextmanager
async def open_control(run_path: Path, handle: Handle) -> AsyncIterator[None]:
    """Accept commands until the end. Without sockets on the file system there are none."""
    listening = _listen(run_path)
    if listening is None:
        yield
        return

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ValueError, TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                line = await reader.readline()
                writer.write(json.dumps(_reply(line, handle)).encode() + b"\n")
                await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, sock=listening, limit=_LINE_MAX)
    try:
        yield
    finally:
        server.close()
        (run_path / SOCKET).unlink(missing_ok=True)


def _reply(line: bytes, handle: Handle) -> dict[str, Any]:
    try:
        request = json.loads(line)
        return handle(str(request["command"]), request.get("value"))
    except HermesError as error:
        return {"error": str(error)}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {"error": "a request is one JSON object with a command"}


def _listen(run_path: Path) -> socket.socket | None:
    (run_path / SOCKET).unlink(missing_ok=True)  # of a driver that was killed; LOCK is held
    listening = socket.socket(socket.AF_UNIX)
    try:
        os.fchmod(listening.fileno(), 0o600)  # of the name, from its first moment on
        with _short(run_path) as place:
            listening.bind(place)
    except OSError:
        listening.close()
        return None
    return listening


@contextmanager
def _short(run_path: Path) -> Iterator[str]:
    """The path of the socket in at most 107 bytes, the maximum of an address."""
    folder = os.open((run_path / SOCKET).parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{Path(SOCKET).name}"
    finally:
        os.close(folder)


def send_command(run_path: Path, command: str, value: str | None = None) -> dict[str, Any]:
    """Send one command to the driver of a run. Blocking.

    Returns the state: `state` (running, paused, draining), `concurrency`, `running`,
    `budget_usd`, and `requeued` after a requeue.
    Raises: UserError when no driver answers, or refuses the command.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_S)
        try:
            with _short(run_path) as place:
                connection.connect(place)
            connection.sendall(json.dumps({"command": command, "value": value}).encode() + b"\n")
            with connection.makefile("rb") as answers:
                reply: dict[str, Any] = json.loads(answers.readline())
        except PermissionError as error:
            raise UserError(f"{run_path}: its driver belongs to another user") from error
        except (OSError, ValueError) as error:
            raise UserError(
                f"{run_path}: no driver on this machine takes commands now. See hermes-rl status"
            ) from error
    if "error" in reply:
        raise UserError(f"{run_path}: {reply['error']}")
    return reply


def count_of(value: str | None, most: int) -> int:
    """The value of `concurrency`. Raises: UserError."""
    if value is None or not value.isdecimal() or not 1 <= int(value) <= most:
        raise UserError(
            f"concurrency needs a number from 1 to {most}, with which this start began (a higher "
            "one takes a new start: drain, then run with --concurrency)"
        )
    return int(value)


def dollars_of(value: str | None) -> float:
    """The value of `budget`. Raises: UserError."""
    try:
        amount = float(value or "")
    except ValueError:
        amount = -1.0
    if not 0 < amount < 1e9:
        raise UserError("budget needs an amount in US dollars, such as 25")
    return amount


def cause_named(value: str | None) -> str:
    """The value of `requeue`. Raises: UserError."""
    if value not in CAUSES:
        raise UserError(f"requeue needs a cause of failures: {', '.join(sorted(CAUSES))}")
    return value
