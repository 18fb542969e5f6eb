"""The embedded model's process: `python -m hermes_rl.models.local.server`.

One per machine and model, shared by all workers. It detaches from whoever starts it, says on its
standard output that it is ready, or why it is not, and ends when nobody holds it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import sys
import traceback
from pathlib import Path

from hermes_rl.errors import UserError
from hermes_rl.models.local.engine import (
    EngineClient,
    RunningEngine,
    start_engine,
)
from hermes_rl.models.local.holders import Hello, Holders
from hermes_rl.models.local.settings import READY, TAKEN, ServerSettings, parse_arguments


def main() -> None:
    """Detaches, takes the place of the one server, loads the model and serves until unheld."""
    settings = parse_arguments(sys.argv[1:])
    if os.fork():
        os._exit(0)
    os.setsid()
    if not _take_place(settings.socket):
        _say(TAKEN)
        os._exit(1)
    try:
        asyncio.run(_serve(settings, start_engine(settings.engine)))
    except UserError as error:
        _say(str(error))
    except Exception:  # the process's rim: the engine's threads would keep it from ending
        traceback.print_exc()
    os._exit(1)


def _take_place(socket: Path) -> bool:
    """Takes the lock that only the one server holds, until its process ends."""
    descriptor = os.open(socket.with_suffix(".owner"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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
            _say(READY)
            await holders.wait_until_unheld()
            settings.socket.unlink(missing_ok=True)  # ours as long as we hold the place
            os._exit(0)  # holders are gone, and with them everybody who waits for an answer


def _say(word: str) -> None:
    """Tells whoever started this process and is reading its standard output; then closes that."""
    print(word, flush=True)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


if __name__ == "__main__":
    main()
