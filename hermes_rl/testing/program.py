"""The fake model server as a program; see `fake_server`."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import msgspec

from hermes_rl.testing.conditions import Conditions
from hermes_rl.testing.fake_server import FakeConfig, FakeServer
from hermes_rl.testing.faults import plan_from_json
from hermes_rl.testing.limits import RateLimits

_ABOUT = "A fake model server over a real socket: deterministic, fast, with a log of its own."


def _config_from(arguments: argparse.Namespace) -> FakeConfig:
    config = FakeConfig(
        script=arguments.script,
        key=arguments.key,
        models=tuple(arguments.model),
        latency_s=arguments.latency,
        log=arguments.log,
        keep=False,
        hold_at=arguments.hold_at,
        port=arguments.port,
        rate=msgspec.json.decode(arguments.rate.encode(), type=RateLimits | None),
        conditions=msgspec.json.decode(arguments.conditions.encode(), type=Conditions),
    )
    return replace(config, faults=plan_from_json(arguments.faults))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fake_server", description=_ABOUT)
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--script", default="echo", help="for models whose name is no script")
    parser.add_argument("--faults", default="{}", help="a fault plan as JSON")
    parser.add_argument("--rate", default="null", help="rate limits of an account as JSON")
    parser.add_argument("--conditions", default="{}", help="clock, outages and prices as JSON")
    parser.add_argument("--log", type=Path, help="appended to, one JSON line per request")
    parser.add_argument("--key", help="the API key that clients must send")
    parser.add_argument("--model", action="append", default=[], help="serve only these")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each answer")
    parser.add_argument("--hold-at", type=int, help="answer nothing from this request on")
    parser.add_argument("--notify-at", type=int, help="print a line at this request")
    parser.add_argument("--until-eof", action="store_true", help="stop when stdin closes")
    return parser


async def _serve(arguments: argparse.Namespace) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def notify(n: int) -> None:
        if n in (arguments.notify_at, arguments.hold_at):
            _say({"request": n})

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if arguments.until_eof:
        loop.add_reader(0, lambda: None if os.read(0, 4096) else stop.set())
    async with FakeServer(_config_from(arguments), notify) as server:
        _say({"port": server.port, "base_url": server.base_url, "pid": os.getpid()})
        await stop.wait()


def _say(form: dict[str, object]) -> None:
    sys.stdout.write(msgspec.json.encode(form).decode() + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve until told to stop."""
    asyncio.run(_serve(_parser().parse_args()))
