"""Run by the project's own Python: a whole run against the token-exact fake engine, exported.

Arguments: the folder to fill, as `told_run.py` fills it. What was said, and in which tokens, is
taken from the engine's own log: nothing of the exports, and nothing of the run but whose call was
whose. The engine cuts its answers into tokens as no tokenizer would.
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

GRADED = ("good", "bad")
"""What the two members of a group write; the second of them is graded 0."""
ODD = r"printf '\074|im_end|>\n\074tool_call>'"
"""Its result looks like the end of a turn and a call, itself does not."""
SCRIPTS: list[list[Any]] = [
    [[{"text": "Looking.", "run": f"echo {word} > made"} for word in GRADED], "Done it."],
    [
        [{"text": "So:", "run": f"echo {word} > made; {ODD}"} for word in GRADED],
        {
            "text": "Two at once: ñ 🙂.",
            "calls": [{"arguments": {"command": f"echo {word}"}} for word in ("one", "two")],
        },
        "All done.",
    ],
]


def speaker() -> Speaker:
    """Plays scripts; of a step that is a list each member of a group gets another entry."""
    asked: Counter[tuple[int, ...]] = Counter()

    def say(heard: PromptView) -> ScriptedAnswer | None:
        asked[heard.prompt] += 1
        return scripted(replace(heard, times=asked[heard.prompt] - 1))

    return say


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


def truth_of(row: dict[str, Any], log: dict[str | None, Truth], words: Tokenizer) -> dict[str, Any]:
    """What the engine says of the calls of a rollout."""
    answers = [log[call["call_id"]] for call in row["calls"]]
    said = [words.decode(entry.sampled_ids, skip_special_tokens=False) for entry in answers]
    messages = [json.loads(text) for text in row["messages"]]
    return {
        "said": said,
        "ids": [entry.sampled_ids for entry in answers],
        "prompts": [entry.prompt_ids for entry in answers],
        "logprobs": [entry.raw_logprobs for entry in answers],
        "first": len(said),
        "not_said": [m["content"] for m in messages if m["role"] == "tool"],
        "reward": float("echo good" in said[0]),
        "group": row["group_id"],
    }


async def main(out: Path) -> None:
    config = ExactConfig(tokenizer=write_tiny_tokenizer(out / "tokenizer"), split="random")
    async with ExactEngine(config, speaker()) as engine:
        await play(engine, out)
        log = {entry.call_id: entry for entry in engine.truth if entry.outcome == "served"}
    core = (out / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8")
    (out / "tokenizer.json").write_text(core, encoding="utf-8")
    words = Tokenizer.from_str(core)
    rows = load_run(out / "run").arrow("trajectories").to_pylist()
    truth = {row["trajectory_id"]: truth_of(row, log, words) for row in rows}
    (out / "truth.json").write_text(json.dumps(truth), encoding="utf-8")
    for name in FORMATS:
        export_run(out / "run", name, out / "exports" / f"{name}{FORMATS[name].suffix}")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
