"""The token-exact engine with a qwen3 template, in the project's own Python, for trainers.

Argument: a folder. `model` in it gets the tokenizer, `truth.jsonl` the engine's log. The engine
has the version of the newest `weights/N.safetensors`. Prints its address; serves until EOF.
"""

import asyncio
import json
import sys
from pathlib import Path

from hermes_rl.testing import ExactConfig, ExactEngine, write_tiny_tokenizer


async def main(folder: Path) -> None:
    tokenizer = write_tiny_tokenizer(folder / "model", "qwen3")
    config = ExactConfig(tokenizer=tokenizer, split="random", log=folder / "truth.jsonl")
    async with ExactEngine(config) as engine:
        print(json.dumps({"base_url": engine.base_url}), flush=True)
        over = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
        while not over.done():
            versions = [int(path.stem) for path in (folder / "weights").glob("*.safetensors")]
            engine.running.set_version(str(max(versions, default=0)))
            await asyncio.sleep(0.02)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
