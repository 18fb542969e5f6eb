"""The embedded model's server process: `python -m hermes_rl.models.local.server`.

There is one per machine and model, shared by all workers. It detaches from the process that
starts it, reports on standard output that it is ready or why it is not, and ends when no holder is
left.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import traceback
from pathlib import Path

from hermes_rl.errors import UserError
from hermes_rl.locks import try_lock
from hermes_rl.models.local.engine import (
    EngineClient,
    RunningEngine,
    start_engine,
)
from hermes_rl.models.local.holders import (
    READY,
    TAKEN,
    Hello,
    Holders,
    ServerSettings,
    parse_arguments,
)


def main() -> None:
    """Detach, take the lock of the one server, load the model, and serve until nobody holds it."""
    settings = parse_arguments(sys.argv[1:])
    if os.fork():
        os._exit(0)
    os.setsid()
    if not _take_server_lock(settings.socket):
        _report(TAKEN)
        os._exit(1)
    try:
        asyncio.run(_serve(settings, start_engine(settings.engine)))
    except UserError as error:
        _report(str(error))
    except Exception:  # outermost boundary: the engine's threads would keep the process alive
        traceback.print_exc()
    os._exit(1)


def _take_server_lock(socket: Path) -> bool:
    """Take the lock that only the one server holds, until its process ends."""
    descriptor = os.open(socket.with_suffix(".owner"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    return try_lock(descriptor)


async def _serve(settings: ServerSettings, engine: RunningEngine) -> None:
    from aiohttp import web

    from hermes_rl.models.local.app import Served, make_app

    key = secrets.token_urlsafe(32)
    served = Served(model=settings.model, description=settings.description, key=key)
    async with EngineClient(engine) as client:
        runner = web.AppRunner(make_app(client, served), access_log=None, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        hello = Hello(
            base_url=f"http://127.0.0.1:{port}/v1",
            api_key=key,
            model=settings.model,
            description=settings.description,
        )
        holders = Holders(hello)
        async with holders.listening(settings.socket):
            _report(READY)
            await holders.wait_until_unheld()
            settings.socket.unlink(missing_ok=True)  # ours as long as we hold the lock
            os._exit(0)  # no holders: no client waits for an answer


def _report(message: str) -> None:
    """Send one line to the process that started this one, then close standard output."""
    print(message, flush=True)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


if __name__ == "__main__":
    main()
