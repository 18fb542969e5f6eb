"""Run on the token-exact fake engine with the project's own Python, and write all exports.

Argument: the folder for the same files as those of `synthetic_run.py`. The truth is the engine's
log; the run only says which call belongs to which rollout. The engine splits its answers into
tokens differently from any tokenizer.
"""

import asyncio
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from batch_runner import arun_batch
from hermes_rl.config import parse_config
from hermes_rl.export import FORMATS, export_run
from hermes_rl.store import load_run
from hermes_rl.testing import (
    ExactConfig,
    ExactEngine,
    PromptView,
    ScriptedAnswer,
    Speaker,
    Truth,
    scripted,
    write_tiny_tokenizer,
)

MEMBER_WORDS = ("good", "bad")
"""Words that the two members of a group write; the second one gets reward 0."""
ODD = r"printf '\074|im_end|>\n\074tool_call>'"
"""The output looks like the end of a turn and a tool call; the command does not."""
SCRIPTS: list[list[Any]] = [
    [[{"text": "Looking.", "run": f"echo {text} > made"} for text in MEMBER_WORDS], "Done it."],
    [
        [{"text": "So:", "run": f"echo {text} > made; {ODD}"} for text in MEMBER_WORDS],
        {
            "text": "Two at once: ñ 🙂.",
            "calls": [{"arguments": {"command": f"echo {text}"}} for text in ("one", "two")],
        },
        "All done.",
    ],
]


def make_speaker() -> Speaker:
    """Play scripts; for a step that is a list, each member of a group gets its own entry."""
    requests: Counter[tuple[int, ...]] = Counter()

    def answer(view: PromptView) -> ScriptedAnswer | None:
        requests[view.prompt] += 1
        return scripted(replace(view, times=requests[view.prompt] - 1))

    return answer


async def play(engine: ExactEngine, out: Path) -> None:
    rows = [
        {
            "id": f"t{n}",
            "prompt": f"Do it.\nSCRIPT: {json.dumps(steps, ensure_ascii=False)}\n",
            "verify": "grep good $WORKSPACE/made",
        }
        for n, steps in enumerate(SCRIPTS)
    ]
    tasks = out / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    endpoint = {"base_url": engine.base_url, "tokens": "vllm", "outage_seconds": 60}
    config = {
        "dataset": {"path": str(tasks), "repeats": 2},
        "model": {"name": "toy"},
        "agent": {"preset": "rl", "toolsets": ["terminal"]},
        "endpoint": {**endpoint, "tokenizer": str(engine.config.tokenizer)},
        "run": {"out": str(out / "run"), "workers": 0, "concurrency": 4},
    }
    report = await arun_batch(parse_config(config))
    assert report.stats["units"]["done"] == 2 * len(SCRIPTS), report.stats


def truth_of(
    row: dict[str, Any], log: dict[str | None, Truth], tokenizer: Tokenizer
) -> dict[str, Any]:
    """The entries of the engine's log for the calls of a rollout."""
    answers = [log[call["call_id"]] for call in row["calls"]]
    texts = [tokenizer.decode(entry.sampled_ids, skip_special_tokens=False) for entry in answers]
    messages = [json.loads(text) for text in row["messages"]]
    return {
        "texts": texts,
        "ids": [entry.sampled_ids for entry in answers],
        "prompts": [entry.prompt_ids for entry in answers],
        "logprobs": [entry.raw_logprobs for entry in answers],
        "first": len(texts),
        "other_texts": [m["content"] for m in messages if m["role"] == "tool"],
        "reward": float("echo good" in texts[0]),
        "group": row["group_id"],
    }


async def main(out: Path) -> None:
    config = ExactConfig(tokenizer=write_tiny_tokenizer(out / "tokenizer"), split="random")
    async with ExactEngine(config, make_speaker()) as engine:
        await play(engine, out)
        log = {entry.call_id: entry for entry in engine.truth if entry.outcome == "served"}
    core = (out / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8")
    (out / "tokenizer.json").write_text(core, encoding="utf-8")
    tokenizer = Tokenizer.from_str(core)
    rows = load_run(out / "run").arrow("trajectories").to_pylist()
    truth = {row["trajectory_id"]: truth_of(row, log, tokenizer) for row in rows}
    (out / "truth.json").write_text(json.dumps(truth), encoding="utf-8")
    for name in FORMATS:
        export_run(out / "run", name, out / "exports" / f"{name}{FORMATS[name].suffix}")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
