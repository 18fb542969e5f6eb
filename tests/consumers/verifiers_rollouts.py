"""Roll out an environment of verifiers with the project's own Python; prints the rows as JSON.

Arguments: its configuration as JSON, and the number of tasks. The model is a fake server, which
plays the scripts in the prompts, or gives the text that `answers` has for a prompt. With
`cancel_after`, the rollouts are cancelled after so many seconds; `limits` are those of the run.
"""

import asyncio
import json
import sys
from typing import Any

from hermes_rl.rl import arun_trial
from hermes_rl.testing import FakeConfig, FakeServer

FIELDS = ("reward", "cause", "error", "end_reason", "turns", "metrics", "final_response")


async def main(config: dict[str, Any], tasks: int) -> None:
    limit, answers = config.pop("cancel_after", None), config.pop("answers", {})
    sections: dict[str, Any] = {"agent": {"limits": config.pop("limits", {})}}
    plays = {"echo": lambda request: answers[request.messages[-1].content]} if answers else {}
    async with FakeServer(FakeConfig(plays=plays)) as server:
        sections["endpoint"] = {"base_url": server.base_url, "tokens": "off"}
        name = "hermes_rl.rl.verifiers_env:Verifiers"
        trial = arun_trial(name, "echo", tasks=tasks, config=config, sections=sections)
        try:
            async with asyncio.timeout(limit):
                rows = await trial
        except TimeoutError:
            print(json.dumps({"cancelled": True}))
            return
        found = [
            {
                **{name: getattr(row, name) for name in FIELDS},
                "rewards": [[part.name, part.score, part.weight] for part in row.rewards],
                "messages": [json.loads(message) for message in row.messages],
                "turn_of": [info.turn for info in row.message_info],
                "contexts": [[context.start, context.kept] for context in row.contexts],
                "usage": row.usage.total_tokens,
                "served": len(row.calls),
                "tools": json.loads(row.tools),
            }
            for row in rows
        ]
        print(json.dumps({"rows": found, "requests": len(server.entries)}))


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1]), int(sys.argv[2])))
