"""The fake model server as a program; see `fake_server`."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import replace

import msgspec

from hermes_rl.testing.conditions import Conditions
from hermes_rl.testing.fake_server import FakeConfig, FakeServer
from hermes_rl.testing.faults import plan_from_json
from hermes_rl.testing.limits import RateLimits
from hermes_rl.testing.listening import program, say, serve

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
    parser = program("fake_server", _ABOUT)
    parser.add_argument("--script", default="echo", help="for models whose name is no script")
    parser.add_argument("--rate", default="null", help="rate limits of an account as JSON")
    parser.add_argument("--conditions", default="{}", help="clock, outages and prices as JSON")
    parser.add_argument("--key", help="the API key that clients must send")
    parser.add_argument("--model", action="append", default=[], help="serve only these")
    parser.add_argument("--hold-at", type=int, help="answer nothing from this request on")
    parser.add_argument("--notify-at", type=int, help="print a line at this request")
    return parser


def main() -> None:
    """Serve until told to stop."""
    arguments = _parser().parse_args()

    def notify(n: int) -> None:
        if n in (arguments.notify_at, arguments.hold_at):
            say({"request": n})

    server = FakeServer(_config_from(arguments), notify)
    asyncio.run(serve(server, until_eof=arguments.until_eof))
