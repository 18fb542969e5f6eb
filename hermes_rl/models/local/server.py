"""The embedded model's server process: `python -m hermes_rl.models.local.server SETTINGS`.

There is one per machine and model, shared by all workers. It detaches from the process that starts
it, runs llama.cpp's own HTTP server on loopback, and reports on standard output that it is ready or
why it is not.

A holder connects to its unix-domain socket, reads one line with the server's address and key, and
keeps the connection open. The kernel closes the connection with the holder's process, and the
server ends soon after the last one closes, however its holder died.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
import traceback
from typing import Any

import msgspec

from hermes_rl.errors import UserError
from hermes_rl.locks import try_lock
from hermes_rl.models.local.client import (
    READY,
    TAKEN,
    ServerSettings,
    missing_extra,
    read_peer_ids,
    short_path,
)

_GRACE_S = 2.0
_UNCLAIMED_S = 30.0
_HTTP_THREADS = 256
"""Each waiting request holds one. By default there are 8, and a health check waits behind them."""
_WARNINGS = 2
"""llama.cpp's verbosity: no line per request."""


def main() -> None:
    """Detach, lock, load the model, and serve until no holder is left."""
    settings = msgspec.json.decode(
        sys.argv[1], type=ServerSettings, dec_hook=lambda kind, value: kind(value)
    )
    if os.fork():
        os._exit(0)
    os.setsid()
    # Only the one server holds this lock, until its process ends.
    owner = os.open(
        settings.socket.with_suffix(".owner"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
    )
    if not try_lock(owner):
        _report(TAKEN)
        os._exit(1)
    try:
        asyncio.run(_serve(settings))
    except UserError as error:
        _report(str(error))
    except Exception:  # outermost boundary: the engine's threads would keep the process alive
        traceback.print_exc()
    os._exit(1)


def _start_engine(settings: ServerSettings, key: str) -> Any:
    """Load the weights (1.5 s on an idle machine) and listen on a free port of loopback. The engine
    lives as long as the result is referenced. Raises: UserError."""
    try:
        import xllamacpp
    except ImportError as error:
        raise missing_extra() from error
    p = xllamacpp.CommonParams()
    p.model.path, p.model_alias = str(settings.weights), {settings.model}
    p.hostnames, p.port = ["127.0.0.1"], 0
    p.api_keys = [key]
    p.cors_origins, p.cors_origins_explicit = "", True
    p.n_parallel = settings.slots
    p.n_ctx = settings.context * settings.slots
    p.n_threads_http = _HTTP_THREADS
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = settings.threads
    p.use_jinja, p.prefill_assistant = True, False
    p.ui = p.endpoint_slots = False
    p.cache_ram_mib = 0
    p.verbosity = _WARNINGS
    try:
        return xllamacpp.Server(p)
    except RuntimeError as error:
        raise UserError(
            f"the engine cannot load {settings.weights}: the file is damaged, or "
            "its kind of model is not supported"
        ) from error


async def _serve(settings: ServerSettings) -> None:
    key = secrets.token_urlsafe(32)
    engine = _start_engine(settings, key)
    greeting = {"base_url": f"{engine.listening_address}/v1", "api_key": key}
    holders = _Holders(msgspec.json.encode(greeting) + b"\n")
    settings.socket.unlink(missing_ok=True)  # of a dead server
    with short_path(settings.socket) as address:
        await asyncio.start_unix_server(holders.hold, address)
    _report(READY)
    await holders.gone.wait()
    settings.socket.unlink(missing_ok=True)  # ours as long as we hold the lock
    os._exit(0)  # no holders: no client waits for an answer


def _report(message: str) -> None:
    """Send one line to the process that started this one, then close standard output."""
    print(message, flush=True)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


class _Holders:
    """Greets holders and counts them; `gone` is set once there has been none for the grace
    period."""

    def __init__(self, greeting: bytes) -> None:
        self.gone = asyncio.Event()
        self._greeting, self._open = greeting, 0
        self._timer = asyncio.get_running_loop().call_later(_UNCLAIMED_S, self.gone.set)

    async def hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, whose holder reads the greeting and sends nothing."""
        if read_peer_ids(writer.get_extra_info("socket"))[1] in (os.getuid(), 0):
            self._open += 1
            self._timer.cancel()
            writer.write(self._greeting)
            with contextlib.suppress(ConnectionError):
                await reader.read()
            self._open -= 1
            if not self._open:
                self._timer = asyncio.get_running_loop().call_later(_GRACE_S, self.gone.set)
        writer.close()


if __name__ == "__main__":
    main()
