"""The token-exact fake engine as a program; see `exact_engine`."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from hermes_rl.testing.exact_engine import ExactConfig, ExactEngine
from hermes_rl.testing.exact_engine_chat import chat_of
from hermes_rl.testing.faults import plan_from_json
from hermes_rl.testing.listening import program, serve

_ABOUT = "A fake inference engine that knows its tokens, with a log of every id."


def _parser() -> argparse.ArgumentParser:
    parser = program("exact_engine", _ABOUT)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder of a model's files")
    parser.add_argument("--seed", type=int, default=0, help="another one is another model")
    parser.add_argument("--logprobs", choices=("raw", "scaled", "processed"), default="raw")
    parser.add_argument("--split", choices=("canonical", "random"), default="canonical")
    parser.add_argument("--calls", choices=("hermes", "qwen3_coder"), default="hermes")
    parser.add_argument("--chat-ids", choices=("vllm", "sglang", "none"), default="vllm")
    parser.add_argument("--window", type=int, help="tokens of prompt and answer together")
    parser.add_argument("--version", help="of the weights")
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


def main() -> None:
    """Serve until told to stop."""
    given = _parser().parse_args()
    engine = ExactEngine(_config(given), chat=chat_of(given.tokenizer, given.calls))
    asyncio.run(serve(engine, until_eof=given.until_eof))
