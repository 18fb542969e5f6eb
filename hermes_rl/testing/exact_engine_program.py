"""The token-exact fake engine as a program; see `exact_engine`."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

import msgspec

from hermes_rl.testing.exact_engine import ExactConfig, ExactEngine
from hermes_rl.testing.exact_engine_chat import chat_of
from hermes_rl.testing.faults import plan_from_json

_ABOUT = "A fake inference engine that knows its tokens, with a log of every id."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="exact_engine", description=_ABOUT)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder of a model's files")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--log", type=Path, help="appended to, one JSON line per request")
    parser.add_argument("--seed", type=int, default=0, help="another one is another model")
    parser.add_argument("--logprobs", choices=("raw", "scaled", "processed"), default="raw")
    parser.add_argument("--split", choices=("canonical", "random"), default="canonical")
    parser.add_argument("--calls", choices=("hermes", "qwen3_coder"), default="hermes")
    parser.add_argument("--chat-ids", choices=("vllm", "sglang", "none"), default="vllm")
    parser.add_argument("--faults", default="{}", help="a fault plan as JSON")
    parser.add_argument("--window", type=int, help="tokens of prompt and answer together")
    parser.add_argument("--version", help="of the weights")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each answer")
    parser.add_argument("--until-eof", action="store_true", help="stop when stdin closes")
    return parser


def _config(given: argparse.Namespace) -> ExactConfig:
    return ExactConfig(
        tokenizer=given.tokenizer,
        seed=given.seed,
        logprobs=given.logprobs,
        split=given.split,
        calls=given.calls,
        chat_ids=given.chat_ids,
        window=given.window,
        version=given.version,
        faults=plan_from_json(given.faults),
        latency_s=given.latency,
        log=given.log,
        port=given.port,
    )


async def _serve(given: argparse.Namespace) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if given.until_eof:
        loop.add_reader(0, lambda: None if os.read(0, 4096) else stop.set())
    chat = chat_of(given.tokenizer, given.calls)
    async with ExactEngine(_config(given), chat=chat) as engine:
        told = {"port": engine.port, "base_url": engine.base_url, "pid": os.getpid()}
        sys.stdout.write(msgspec.json.encode(told).decode() + "\n")
        sys.stdout.flush()
        await stop.wait()


def main() -> None:
    """Serve until told to stop."""
    asyncio.run(_serve(_parser().parse_args()))
